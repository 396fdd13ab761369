"""``head_kernels()``: the convolution inside each head, fitted on all queries of patches."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from torch import nn

from tcnn_probe.heads.static_pattern import offsets_of_pairs
from tcnn_probe.interventions.ablation import ablate
from tcnn_probe.interventions.ablation_kinds import Convolutional
from tcnn_probe.interventions.head_selection import HeadSelection
from tcnn_probe.interventions.references import GivenImages
from tcnn_probe.provenance import provenance

__all__ = ["head_kernels"]

Array = NDArray[np.float64]

_ATTRS = {
    "offset_kernel": "exp theta(offset from query to key in patches) of the convolution T inside "
    "the head; sums to one with prefix_kernel. 0 at offsets without attention, "
    "NaN for heads that were not asked for.",
    "prefix_kernel": "exp theta of each class and register token, see offset_kernel.",
    "offset_mass": "Share of attention at each offset, on average over queries of patches, in T "
    "and in the mean attention alike.",
    "prefix_mass": "Share of attention to each class and register token, see offset_mass.",
}
_FRACTIONS = "offsets between queries and keys are no whole numbers of patches"


def head_kernels(model: nn.Module, images: GivenImages, heads: HeadSelection = None) -> xr.Dataset:
    """Fit the kernels of the convolutions inside heads,
    for :func:`tcnn_model.convolve` and to look at.

    ::

        import timm, torch, tcnn_probe

        vit = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
        kernels = tcnn_probe.head_kernels(vit, torch.randn(8, 3, 64, 64))
        # 7 x 7 offsets of 4 x 4 patches
        kernels.offset_kernel.sel(layer="blocks.0.attn", head=2).plot()

    The convolution T_i(j) = kernel(j - i) / Z_i is nearest to the mean M of a head's attention over
    the images: it minimises the mean over queries of KL(M_i || T_i), and so has M's share of
    attention at each offset. Unlike ``probes=["offset-kernel"]``, which keeps a crop of the kernels
    of 64 queries at each mark, this uses all queries of patches, and keeps all offsets. Class and
    register tokens are keys with weights of their own; as queries they do not count.

    Args:
        model: Any module that can be recorded, not compiled. It runs once on the images, in eval
            mode.
        images: Images as for ``images=`` of :func:`ablate`. Eight are enough for heads that
            convolve.
        heads: Heads as for :func:`ablate`; None for all heads whose queries and keys have a grid.

    Returns:
        Dataset over (layer, head) with ``offset_kernel`` and ``offset_mass``, dims (layer, head,
        offset_y, offset_x), and, for models with class or register tokens, ``prefix_kernel`` and
        ``prefix_mass``, dims (layer, head, prefix_token). ``attrs["missing"]`` names layers without
        kernels, with the reason.

    Raises:
        ValueError, TypeError: As in :func:`ablate` with ``mode="convolutional"``; also if no layer
            has a kernel.
    """
    fits: dict[str, _Kernels] = {}
    missing: dict[str, str] = {}
    with ablate(model, heads, "convolutional", images=images) as ablation:
        for entry in ablation.entries:
            assert isinstance(entry, Convolutional)
            if not entry.reference.convolutions:
                missing[entry.layer] = entry.reason
            for number in entry.reference.convolutions:
                name = f"{entry.layer}#{number}" if number else entry.layer
                kernels = _kernels_of(entry, number)
                if (kernels.offsets % 1).any():
                    missing[name] = _FRACTIONS
                else:
                    fits[name] = kernels
    if not fits:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in missing.items())
        raise ValueError(f"no layer of this {type(model).__name__} has heads with kernels{reasons}")
    attrs = provenance(model) | {"missing": json.dumps(missing)}
    return _dataset(fits).assign_attrs(attrs)


@dataclass(frozen=True)
class _Kernels:
    """Kernels of some heads of a layer.

    Args:
        count: Number of heads of the layer.
        heads: Indices of the heads.
        offsets: Offsets from query to key, shape (offsets, 2).
        kernel, masses: Weight and attention of each offset, and after these of each token off the
            grid, shape (heads, offsets + tokens).
    """

    count: int
    heads: list[int]
    offsets: Array
    kernel: Array
    masses: Array


def _kernels_of(entry: Convolutional, number: int) -> _Kernels:
    """Return the kernels that were fitted for an ablation of heads."""
    places, reference = entry.reference.places[number], entry.reference
    patches = np.isfinite(places.queries[:, 0])
    _, offsets = offsets_of_pairs(places.queries[patches], places.keys)
    # A key off the grid is an offset of its own, numbered by its place among the keys.
    off_grid = len(offsets) + np.flatnonzero(np.isnan(places.keys[:, 0]))
    columns = np.concatenate([np.arange(len(offsets)), off_grid])
    kernel, masses = (
        weights[:, columns] / weights.sum(1, keepdims=True)
        for weights in (
            reference.convolutions[number].kernel,
            reference.masses[number],
        )
    )
    assert entry.count is not None
    return _Kernels(entry.count, [*entry.indices], offsets, kernel, masses)


def _dataset(fits: dict[str, _Kernels]) -> xr.Dataset:
    """Return the kernels of all layers on a common range of offsets."""
    reach = np.max([abs(fit.offsets).max(0) for fit in fits.values()], 0).astype(int)
    heads = max(fit.count for fit in fits.values())
    tokens = max(fit.kernel.shape[1] - len(fit.offsets) for fit in fits.values())
    shape = len(fits), heads
    variables: dict[str, Any] = {}
    for noun, field in (("kernel", "kernel"), ("mass", "masses")):
        on_grid = np.full((*shape, *(2 * reach + 1)), np.nan)
        off_grid = np.full((*shape, tokens), np.nan)
        for place, fit in enumerate(fits.values()):
            values, rows = getattr(fit, field), fit.heads
            y, x = (fit.offsets + reach).astype(int).T
            maps = np.zeros((len(rows), *on_grid.shape[2:]))
            maps[:, y, x] = values[:, : len(fit.offsets)]
            on_grid[place, rows] = maps
            prefix = values[:, len(fit.offsets) :]
            off_grid[place, rows, : prefix.shape[1]] = prefix
        variables[f"offset_{noun}"] = (
            ("layer", "head", "offset_y", "offset_x"),
            on_grid,
        )
        if tokens:
            variables[f"prefix_{noun}"] = (("layer", "head", "prefix_token"), off_grid)
    coords = {
        "layer": [*fits],
        "head": range(heads),
        "offset_y": np.arange(-reach[0], reach[0] + 1),
        "offset_x": np.arange(-reach[1], reach[1] + 1),
    }
    ds = xr.Dataset(variables, coords)
    for name in ds.data_vars:
        ds[name].attrs = {"units": "1", "description": _ATTRS[str(name)]}
    return ds
