"""Maps that are given to be judged, beside methods to compute now."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tcnn_probe.attribution.methods import Attribution, find_methods, name_of

__all__ = ["as_masks", "find_attributions", "targets_of"]


def find_attributions(saliency: Any, images: Tensor, options: Mapping[str, Mapping[str, Any]]) -> list[Attribution]:
    """What :func:`tcnn_probe.faithfulness` is asked to judge: maps that are given, and methods to compute now."""
    if isinstance(saliency, xr.DataArray):
        saliency = {saliency.attrs.get("method", "saliency"): saliency}
    if isinstance(saliency, (Tensor, np.ndarray)):
        raise TypeError("maps without a name: give them as {'name': maps}")
    if not isinstance(saliency, Mapping):
        return find_methods(saliency, options)
    if not saliency:
        raise ValueError("expected at least one method, got none")
    found = []
    for name, one in saliency.items():
        if isinstance(one, str) or (callable(one) and not isinstance(one, (Tensor, xr.DataArray))):
            of_one = {name_of(one): options[name]} if name in options else {}
            found.append(replace(find_methods(one, of_one)[0], name=str(name)))
        else:
            found.append(_given(one, images, str(name)))
    computed = [one.name for one in found if one.explain]
    if strange := [name for name in options if name not in computed]:
        raise ValueError(f"options for {strange[0]!r}, which is none of the methods to compute: {computed}")
    return found


def targets_of(attributions: Sequence[Attribution]) -> Tensor | None:
    """Which classes the given maps are of, shape (B,); None if none of them says."""
    known = [(one.name, one.targets) for one in attributions if one.targets is not None]
    for name, targets in known[1:]:
        if not torch.equal(targets, known[0][1]):
            raise ValueError(f"the maps {known[0][0]!r} and {name!r} are of different targets: say which with target=")
    return known[0][1] if known else None


def as_masks(masks: Any, images: Tensor) -> Tensor:
    """Masks as a bool tensor, shape (B, H, W), on the CPU."""
    given = _of_images(masks, images, "masks")
    if given.dtype != torch.bool:
        raise TypeError(f"expected masks of dtype bool, True on the object, got {given.dtype}")
    return given


def _given(maps: Any, images: Tensor, name: str) -> Attribution:
    targets = None
    if isinstance(maps, xr.DataArray):
        if {*maps.dims} != {"image", "y", "x"}:
            raise ValueError(f"expected maps of {name!r} with the dims (image, y, x), got {maps.dims}")
        targets = torch.from_numpy(np.array(maps.target)) if "target" in maps.coords else None
        maps = maps.transpose("image", "y", "x")
    given = _of_images(maps, images, f"maps of {name!r}")
    given = given.to(torch.promote_types(given.dtype, torch.float32))
    return Attribution(name, {"definition": "given as maps"}, maps=given, targets=targets)


def _of_images(values: Any, images: Tensor, what: str) -> Tensor:
    """A tensor on the CPU, shape (B, H, W) as the images."""
    try:
        given = values.detach().cpu() if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected {what}, an array (B, H, W), got {values!r}") from error
    expected = (len(images), *images.shape[2:])
    if tuple(given.shape) != expected:
        raise ValueError(f"expected {what} of shape {expected}, got {tuple(given.shape)}")
    return given
