"""Our own GPSA layers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_model.gpsa.statistics import apply_and_measure
from tcnn_probe.probes.gated import VARIABLES, maps_of, numbers_of
from tcnn_probe.probes.probe import ForwardCall, Probe

__all__ = ["GPSA"]


def _facts(layer: GPSALayer) -> dict[str, Any]:
    return {"heads": layer.heads}


def _state(layer: GPSALayer) -> dict[str, Tensor]:
    alpha = layer.locality_strength
    return {
        "gate": layer.gate,
        "locality_strength": alpha,
        "attention_span": 1 / alpha,
        "center_y": layer.center[:, 0],
        "center_x": layer.center[:, 1],
    }


def _measure(call: ForwardCall) -> dict[str, Tensor]:
    return numbers_of(call.module.gated_attention(call.inputs[0]))


def _maps(call: ForwardCall, which: Sequence[int]) -> dict[str, Tensor]:
    return maps_of(call.module.gated_attention(call.inputs[0]), which)


def _rebuild(call: ForwardCall) -> Tensor:
    layer, x = call.module, call.inputs[0][:1]
    attention = layer.gated_attention(x)
    gathered, _ = apply_and_measure(attention, layer.values(x))
    return layer.combine(gathered, attention)


GPSA = Probe(
    "gpsa",
    VARIABLES,
    GPSALayer,
    group="",
    facts=_facts,
    state=_state,
    measure=_measure,
    maps=_maps,
    rebuild=_rebuild,
)
