"""``head_kernels()``: the convolution inside each head, fitted on all queries of patches."""

import json
from collections.abc import Mapping

import numpy as np
import xarray as xr
from torch import nn

from tcnn_probe.heads.static_pattern import offsets_of_pairs
from tcnn_probe.interventions.ablation import ablate
from tcnn_probe.interventions.ablation_kinds import Convolutional
from tcnn_probe.interventions.head_selection import HeadSelection
from tcnn_probe.interventions.references import GivenImages
from tcnn_probe.provenance import provenance

__all__ = ["head_kernels"]

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
    fits: dict[str, xr.Dataset] = {}
    missing: dict[str, str] = {}
    count = 0
    with ablate(model, heads, "convolutional", images=images) as ablation:
        for entry in ablation.entries:
            assert isinstance(entry, Convolutional)
            if not entry.reference.convolutions:
                missing[entry.layer] = entry.reason
            for number in entry.reference.convolutions:
                name = f"{entry.layer}#{number}" if number else entry.layer
                kernels = _kernels_of(entry, number)
                if kernels is None:
                    missing[name] = _FRACTIONS
                else:
                    fits[name] = kernels
                    count = max(count, entry.count or 0)
    if not fits:
        reasons = "".join(f"\n  {layer}: {reason}" for layer, reason in missing.items())
        raise ValueError(f"no layer of this {type(model).__name__} has heads with kernels{reasons}")
    attrs = provenance(model) | {"missing": json.dumps(missing)}
    return _together(fits, count).assign_attrs(attrs)


def _kernels_of(entry: Convolutional, number: int) -> xr.Dataset | None:
    """Return the kernels that were fitted for an ablation of heads;
    None if offsets are fractions of patches.
    """
    places, reference = entry.reference.places[number], entry.reference
    patches = np.isfinite(places.queries[:, 0])
    _, offsets = offsets_of_pairs(places.queries[patches], places.keys)
    if (offsets % 1).any():
        return None
    count = len(offsets)
    # A key off the grid is an offset of its own, numbered by its place among the keys.
    off_grid = count + np.flatnonzero(np.isnan(places.keys[:, 0]))
    columns = np.concatenate([np.arange(count), off_grid])
    y, x = offsets.astype(int).T
    height, width = abs(y).max(), abs(x).max()
    ds = xr.Dataset(
        coords={
            "head": [*entry.indices],
            "offset_y": np.arange(-height, height + 1),
            "offset_x": np.arange(-width, width + 1),
            "prefix_token": np.arange(len(off_grid)),
        }
    )
    weights = {"kernel": reference.convolutions[number].kernel, "mass": reference.masses[number]}
    for noun, rows in weights.items():
        shares = rows[:, columns] / rows.sum(1, keepdims=True)
        maps = np.zeros((len(shares), 2 * height + 1, 2 * width + 1))
        maps[:, y + height, x + width] = shares[:, :count]
        ds[f"offset_{noun}"] = ("head", "offset_y", "offset_x"), maps
        ds[f"prefix_{noun}"] = ("head", "prefix_token"), shares[:, count:]
    return ds


def _together(fits: Mapping[str, xr.Dataset], heads: int) -> xr.Dataset:
    """Return the kernels of all layers on a common range of offsets."""
    # Offsets that only other layers have get no attention, and heads that they have are NaN.
    labels = {
        dim: np.unique(np.concatenate([fit[dim] for fit in fits.values()]))
        for dim in ("offset_y", "offset_x")
    }
    layers = [fit.reindex(labels, fill_value=0).reindex(head=range(heads)) for fit in fits.values()]
    ds = xr.concat(layers, xr.Variable("layer", [*fits]), join="outer").drop_vars("prefix_token")
    if not ds.sizes["prefix_token"]:
        ds = ds.drop_dims("prefix_token")
    for name in ds.data_vars:
        ds[name].attrs = {"units": "1", "description": _ATTRS[str(name)]}
    return ds
