"""Records of this project's own layers."""

from collections.abc import Mapping

from tcnn_probe.architectures.record import HeadParameters, LayerRecord

__all__ = ["OWN_LAYERS"]

_OF_GPSA = ("query", "key", "raw_locality", "center", "gating")

OWN_LAYERS: Mapping[str, LayerRecord] = {
    # A tap of the weight stands where other layers have columns of the output projection: each head is a tap.
    "tcnn_model.gpsa.layer.GPSA": LayerRecord(
        head_parameters=HeadParameters(dict.fromkeys(_OF_GPSA, 1), taps="weight"),
    ),
}
