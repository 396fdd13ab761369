"""Our own GPSA layers."""

from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_probe.probes.probe import Probe
from tcnn_probe.statistics import gated_attention_statistics

__all__ = ["GPSA"]


def _state(layer: GPSALayer) -> dict[str, Tensor]:
    alpha = layer.locality_strength
    return {
        "gate": layer.gate,
        "locality_strength": alpha,
        "attention_span": 1 / alpha,
        "center_y": layer.center[:, 0],
        "center_x": layer.center[:, 1],
    }


def _measure(layer: GPSALayer, x: Tensor) -> dict[str, Tensor]:
    return gated_attention_statistics(layer.gated_attention(x))


GPSA = Probe("gpsa", GPSALayer, lambda layer: layer.heads, _state, _measure)
