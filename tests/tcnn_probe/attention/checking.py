"""Comparison of recordings with brute force, all in float64.

The model and its copy compute the same function in float64, where rounding leaves errors of 1e-13
after a dozen random layers: a tolerance of 1e-9 holds on any processor. test_softmax_statistics.py
bounds the rounding of the statistics in float32, for given queries and keys.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from unittest import mock

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import (
    Layout,
    Place,
    ReferenceAttention,
    attention_of,
    entropy,
)
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts import helpers

TOLERANCE = 1e-9  # nats and cells
NUMBERS = (
    "entropy",
    "attention_distance",
    "frame_distance",
    "prefix_attention",
    "class_entropy",
    "class_prefix_attention",
)
NUMBERS += (
    "uniform_entropy",
    "uniform_distance",
    "content_information",
    "class_content_information",
    "max_logit",
    "sink",
    "query_diversity",
    "head_similarity",
    "entropy_histogram",
)


@dataclass
class Family:
    """Small model of a family, with the positions of its tokens.

    Args:
        name: Name of the family.
        make: Function that returns the model.
        size: Height and width of its images.
        layouts: Positions of a layer's tokens by glob; the first glob that matches counts.
        gain: Factor on the weights of queries and keys.
        flattest: Upper limit of entropies, as a share of log N.
        unsupported: Names of layers that are expected to be listed as unsupported, each with a part
            of the reason.
    """

    name: str
    make: Callable[[], nn.Module]
    size: tuple[int, int]
    layouts: Mapping[str, Layout]
    gain: float = 1.7
    flattest: float = 0.9
    unsupported: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def layout(self, layer: str) -> Layout:
        return next(layout for glob, layout in self.layouts.items() if fnmatchcase(layer, glob))

    def images(self, count: int = 4) -> Tensor:
        return torch.randn(count, 3, *self.size, generator=torch.Generator().manual_seed(1))


def layouts_of(model: nn.Module, *inputs: Any) -> list[Any]:
    """Return the layouts of the attentions of a forward, in their order."""
    shown = []
    with (
        tcnn_probe.attention_stream(model, lambda attention: shown.append(attention.layout)),
        torch.no_grad(),
    ):
        model(*inputs)
    return shown


def same(tokens: list[Place], **options: Any) -> Layout:
    """Return a layout in which every token attends to every token."""
    return Layout(tokens, tokens, class_query=tokens[0] is None, **options)


def as_it_is(weights: Tensor, images: int) -> Tensor:
    """Return weights that the model forms as (B, windows, heads, N_query, N_key)."""
    return weights


def windows_last(weights: Tensor, images: int) -> Tensor:
    """Rearrange weights from (B, heads, windows, N_query, N_key), or the same without windows."""
    return weights.transpose(1, 2) if weights.ndim == 5 else weights[:, None]


def without_heads(weights: Tensor, images: int) -> Tensor:
    """Rearrange weights from (B * windows, N_query, N_key)."""
    return weights.unflatten(0, (images, -1)).unsqueeze(2)


def merged(heads: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that rearranges weights from (B * windows * heads, N_query, N_key)."""
    return lambda weights, images: weights.unflatten(0, (images, -1, heads))


def recorded(
    model: nn.Module, batches: Sequence[Any], **options: Any
) -> tuple[xr.Dataset, tuple[str, ...], dict[str, str]]:
    """Return the epoch recorded from batches,
    the layers, and the reasons for unsupported layers.
    """
    # The recorder must use all queries like the brute force, instead of 64 of them.
    with mock.patch("tcnn_probe.attention.patterns.QUERIES", 1 << 20):
        probes = [*tcnn_probe.DEFAULT, "health"]
        recorder = helpers.recorded(model, *batches, probes=probes, **options)
    return recorder.dataset.isel(epoch=0).load(), recorder.layers, recorder.unsupported


def expect(
    ds: xr.Dataset,
    references: Sequence[ReferenceAttention],
    layouts: Mapping[str, Layout],
    images: int,
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that every statistic of every layer is as expected, and that no other is recorded."""
    assert set(ds.layer.values) == {reference.layer for reference in references}
    for reference in references:
        row = ds.sel(layer=reference.layer)
        expected = layouts[reference.layer].expected(reference, images)
        got = {name: row[name].values[row[name].notnull().values] for name in NUMBERS if name in ds}
        assert {name for name, value in got.items() if value.size} == expected.keys(), (
            reference.layer
        )
        for name, value in expected.items():
            value = np.ravel(value)
            assert got[name].shape == value.shape, (reference.layer, name)
            error = np.abs(got[name] - value).max()
            assert error < tolerance, (
                f"{name} of {reference.layer}: off by {error}: {got[name]}, expected {value}"
            )
        assert row.images == images


def check(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    layouts: Mapping[str, Layout],
    *,
    images: int | None = None,
    **options: Any,
) -> None:
    """Check one batch of a user's own model against its copy;
    ``options`` are those of ``record``.
    """
    batch = inputs if isinstance(inputs, tuple) else (inputs,)
    model = model.double()
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    references = attention_of(model, *batch)
    ds, layers, unsupported = recorded(model, [batch], **options)
    assert not unsupported
    assert set(layers) == {reference.layer for reference in references}
    expect(ds, references, layouts, len(batch[0]) if images is None else images)


def check_family(family: Family) -> None:
    """Check fused attention in two batches against an unfused copy."""
    model = sharpen(family.make(), family.gain)
    images = family.images()
    references = attention_of(model, images)
    layouts = {reference.layer: family.layout(reference.layer) for reference in references}
    assert references
    for reference in references:
        check_sharp(
            family,
            layouts[reference.layer].weights(reference, len(images)),
            reference.layer,
        )
    ds, layers, unsupported = recorded(model.double(), images.double().split([1, 3]))
    assert sorted(layers) == sorted(layouts)
    assert unsupported.keys() == family.unsupported.keys()
    for layer, part in family.unsupported.items():
        assert part in unsupported[layer]
    expect(ds, references, layouts, len(images))


def check_sharp(family: Family, weights: np.ndarray, layer: str) -> None:
    """Check that the attention is sharp enough for errors to show."""
    if weights.shape[-1] < 3:
        return
    heads = entropy(weights).mean((0, 1, 3))
    assert heads.mean() < family.flattest * np.log(weights.shape[-1]), (
        layer,
        heads,
        np.log(weights.shape[-1]),
    )
    # If heads were equal, exchanged heads would not show.
    assert len(heads) == 1 or np.ptp(heads) > 1e-3, (layer, heads)
