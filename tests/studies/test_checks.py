"""The check that ends each study, on made numbers: it passes, and it fails where it has to."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xarray as xr

import attention_maps
import class_attention_saliency
import gating_evolution
import head_entropy

HEADS = {"layer": ["first", "last"], "head": [0, 1]}


def gates(first: float, last: float) -> xr.DataArray:
    """Of two layers of two heads, at two epochs; all 0.73 at first."""
    values = np.full((2, 2, 2), 0.73)
    values[1] = np.array([[first] * 2, [last] * 2])
    return xr.DataArray(values, {"epoch": [0, 6], **HEADS}, ("epoch", "layer", "head"))


def gating(first: float = 0.9, last: float = 0.2, top1: float = 0.5) -> tuple[xr.Dataset, int]:
    return xr.Dataset({"gate": gates(first, last), "top1": ("epoch", [0.3, top1])}), 10


def maps(first: float = 0.9, last: float = 0.2, tap: int = 0, peaks: tuple[float, float] = (0.5, 0.1)) -> tuple[Any]:
    attention = np.zeros((2, 2, 2, 2, 3, 5))
    attention[..., 1, 2] = np.array(peaks)[:, None]
    place = xr.zeros_like(gates(0, 0))
    peak = (place.expand_dims(image=2) + tap).transpose("epoch", "image", ...)
    ds = xr.Dataset({"gate": gates(first, last), "center_y": place, "center_x": place, "peak_y": peak, "peak_x": peak})
    return (ds.assign(attention=(("epoch", "image", "layer", "head", "y", "x"), attention)),)


def entropies(kinds: str = "convolutional content", first: str = "convolutional", low: float = 0.1) -> tuple[Any]:
    types = np.array([[[first] * 2] * 2, [[kind] * 2 for kind in kinds.split()]], dtype=object)
    values = np.array([[[low] * 2, [1.0] * 2]] * 2)
    dims = ("epoch", "layer", "head")
    measured = dict.fromkeys(("entropy", "attention_distance"), (dims, values))
    return (xr.Dataset({"gate": gates(0.9, 0.2), "head_type": (dims, types), **measured}),)


def saliency(hits: float = 1.0, top1: float = 0.9) -> tuple[xr.DataTree]:
    pointing = np.stack([np.full((1, 7), hits), np.full((1, 7), 0.2)], 1)
    coords = {"epoch": [3], "attribution": ["class_attention", "chance"], "class": range(10)}
    ds = xr.Dataset({"pointing_game": (("epoch", "attribution", "image"), pointing), "top1": ("epoch", [top1])}, coords)
    return (xr.DataTree.from_dict({"PatchConvNet": ds}),)


@pytest.mark.parametrize(
    ("study", "made", "changed", "message"),
    [
        (gating_evolution, gating, {"first": 0.73, "last": 0.73}, "did NOT move apart"),
        (gating_evolution, gating, {"top1": 0.2}, "did NOT learn"),
        (attention_maps, maps, {"tap": 1}, "4 of 4 heads do NOT look at their tap"),
        (attention_maps, maps, {"peaks": (0.1, 0.5)}, "do NOT have fainter peaks"),
        (head_entropy, entropies, {"first": "mixed"}, "0 of 4 heads start convolutional, NOT all"),
        (head_entropy, entropies, {"kinds": "mixed content"}, "0 are convolutional and 2 low-gate: NOT both kinds"),
        (head_entropy, entropies, {"kinds": "convolutional mixed"}, "2 are convolutional and 0 low-gate: NOT both"),
        (head_entropy, entropies, {"low": 2.0}, "entropy of low-gate heads NOT larger"),
        (class_attention_saliency, saliency, {"hits": 0.2}, "NOT above chance"),
        (class_attention_saliency, saliency, {"top1": 0.1}, "PatchConvNet did NOT learn"),
    ],
)
def test_the_check_can_fail(
    study: ModuleType,
    made: Callable[..., tuple[Any, ...]],
    changed: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert study.check(*made()) == 0
    assert "NOT" not in capsys.readouterr().out
    assert study.check(*made(**changed)) == 1
    assert message in capsys.readouterr().out
