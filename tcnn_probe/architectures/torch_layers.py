"""Records of torch's own layers."""

from collections.abc import Mapping

from tcnn_probe.architectures.record import HeadParameters, LayerRecord

__all__ = ["TORCH_LAYERS"]

# Queries, keys and values are in one matrix if their widths agree, and in three matrices otherwise.
_TOGETHER = ("in_proj_weight", "in_proj_bias")
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")

TORCH_LAYERS: Mapping[str, LayerRecord] = {
    "torch.nn.modules.activation.MultiheadAttention": LayerRecord(
        head_parameters=HeadParameters(
            dict.fromkeys(_TOGETHER, 3) | dict.fromkeys(_APART, 1), output="out_proj"
        ),
    ),
}
