"""Sparsity of the layers between patches in ResMLP and MLP-Mixer (Touvron's thesis, Fig. 4.3)."""

from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32
from tcnn_probe.architectures.timm_classes import MixerBlock, ResBlock
from tcnn_probe.heads.cross_patch_weights import NEAR_ZERO
from tcnn_probe.probes.probe import Probe
from tcnn_probe.schema import Variable

__all__ = ["CROSS_PATCH"]


def _state(block: Any) -> dict[str, Tensor]:
    modules = {
        "cross_patch_sparsity": block.linear_tokens
        if isinstance(block, ResBlock)
        else block.mlp_tokens,
        "fc1_sparsity": block.mlp_channels.fc1,
        "fc2_sparsity": block.mlp_channels.fc2,
    }
    shares = {name: _share_of_small(module) for name, module in modules.items()}
    return {name: share for name, share in shares.items() if share is not None}


def _share_of_small(module: nn.Module) -> Tensor | None:
    """Return the share of weights below 5 % of the largest
    in their linear layer; None without linear layers.
    """
    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    # In bfloat16 the limit itself would be rounded, by up to 0.2 %.
    sizes = [weight.to(at_least_float32(weight.dtype)).abs() for weight in weights]
    small = [(size < NEAR_ZERO * size.amax()).flatten() for size in sizes]
    # In float32 a count above 2^24 would be inexact.
    return torch.cat(small).double().mean() if small else None


def _variable(layers: str) -> Variable:
    return Variable(
        ("layer",),
        "1",
        f"share of small weights, {layers}",
        f"Share of the weights of {layers} that are smaller than {NEAR_ZERO:.0%} of the largest, "
        "in absolute value (Touvron's thesis, Fig. 4.3), at the time of the mark.",
    )


CROSS_PATCH = Probe(
    "cross-patch",
    {
        "cross_patch_sparsity": _variable(
            "the layer between patches (MLP-Mixer: of both, each by its own largest)"
        ),
        "fc1_sparsity": _variable("the first layer of the MLP on channels"),
        "fc2_sparsity": _variable("the second layer of the MLP on channels"),
    },
    (ResBlock, MixerBlock),
    state=_state,
)
