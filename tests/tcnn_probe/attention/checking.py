"""Record a model batch by batch and compare with brute force."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, Whole, attention_of, entropy

TOLERANCE = 1e-4
"""Nats and cells. In float32 a logit of size 10 is known to 1e-6, and attention after a few layers to 1e-5."""

NUMBERS = ("entropy", "attention_distance", "prefix_attention", "class_entropy", "class_prefix_attention")


@dataclass
class Family:
    """A small model of a family, and where its tokens lie.

    Args:
        name: of the family.
        build: makes the model, in eval mode, with sharp attention.
        size: height and width of its images.
        layout: from a layer's name and module to where its tokens lie; None for what is no attention between tokens.
        unsupported: layers expected there, by name, with a part of the reason.
        flattest: entropies are below this share of log N.
    """

    name: str
    build: Callable[[], nn.Module]
    size: tuple[int, int]
    layout: Callable[[str, nn.Module], Layout | None]
    unsupported: dict[str, str] = field(default_factory=dict)
    flattest: float = 0.9
    images: int = 5

    def pictures(self) -> Tensor:
        return torch.randn(self.images, 3, *self.size, generator=torch.Generator().manual_seed(1))


def recorded(
    model: nn.Module, batches: Sequence[Any], **options: Any
) -> tuple[xr.Dataset, tuple[str, ...], dict[str, str]]:
    """The epoch that these batches make, the layers, and what was not recorded."""
    with tcnn_probe.record(model, **options) as recorder:
        with torch.no_grad():
            for batch in batches:
                model(*batch) if isinstance(batch, tuple) else model(batch)
        recorder.mark(epoch=0)
        return recorder.dataset.isel(epoch=0).load(), recorder.layers, recorder.unsupported


def numbers(ds: xr.Dataset, layer: str) -> dict[str, np.ndarray]:
    """What is recorded of a layer's heads, without the NaN of heads it has not."""
    row = ds.sel(layer=layer)
    heads = int(np.isfinite(row.entropy).sum())
    values = {name: row[name].values[:heads] for name in NUMBERS if name in ds}
    return {name: value for name, value in values.items() if not np.isnan(value).all()}


def expect(ds: xr.Dataset, wholes: Sequence[Whole], layouts: dict[str, Layout], images: int) -> None:
    """Every number of every layer, and none that should not be there."""
    assert set(ds.layer.values) == {whole.layer for whole in wholes}
    for whole in wholes:
        expected = layouts[whole.layer].expected(whole, images)
        got = numbers(ds, whole.layer)
        assert got.keys() == expected.keys(), (whole.layer, got.keys() ^ expected.keys())
        for name, value in expected.items():
            assert got[name].shape == value.shape, (whole.layer, name)
            error = np.abs(got[name] - value).max()
            assert error < TOLERANCE, f"{name} of {whole.layer}: off by {error}: {got[name]}, expected {value}"
        assert ds.images.sel(layer=whole.layer) == images


def check_family(family: Family) -> None:
    """The model in float32 with fused attention, in several batches, against its copy in float64 without."""
    model, pictures = family.build(), family.pictures()
    wholes, layouts = [], {}
    for whole in attention_of(model, pictures):
        if (layout := family.layout(whole.layer, whole.module)) is not None:
            wholes.append(whole)
            layouts[whole.layer] = layout
            check_sharp(family, layout.weights(whole, family.images), whole.layer)
    assert wholes
    n = family.images
    with torch.no_grad():
        alone = model(pictures)
        with tcnn_probe.record(model):
            assert _same(model(pictures), alone), "the output is not the same to the last bit"
    splits = ([n], [1, n - 1], [2, n - 2]) if n > 3 else ([n],)
    before = None
    for split in splits:
        ds, layers, unsupported = recorded(model, pictures.split(split))
        assert sorted(layers) == sorted(layouts)
        assert unsupported.keys() == family.unsupported.keys()
        for layer, part in family.unsupported.items():
            assert part in unsupported[layer]
        expect(ds, wholes, layouts, n)
        if before is not None:
            xr.testing.assert_allclose(ds, before, rtol=1e-5, atol=1e-5)
        before = ds


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return all(_same(one, other) for one, other in zip(first, second, strict=True))


def check_sharp(family: Family, weights: np.ndarray, layer: str) -> None:
    """That the attention could tell a wrong number from a right one."""
    if weights.shape[-1] < 3:
        return
    heads = entropy(weights).mean((0, 1, 3))
    assert heads.mean() < family.flattest * np.log(weights.shape[-1]), (layer, heads, np.log(weights.shape[-1]))
    assert len(heads) == 1 or np.ptp(heads) > 1e-3, (layer, heads)
