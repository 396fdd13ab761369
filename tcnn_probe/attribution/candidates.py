"""What is to be judged: maps that were given, and methods to compute now."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tcnn_probe.attribution.methods import Explainer, find_explainers, name_of

__all__ = ["Candidate", "as_masks", "find_candidates", "targets_of"]


@dataclass(frozen=True)
class Candidate:
    """A method's maps, or the method.

    Args:
        name: of the method.
        maps: shape (B, H, W); None if they are to be computed.
        explainer: the method; None if maps were given.
        targets: of the maps, shape (B,), if they say so.
    """

    name: str
    maps: Tensor | None = None
    explainer: Explainer | None = None
    targets: Tensor | None = None

    @property
    def reason(self) -> str:
        """Why it cannot be computed again, if so."""
        return "" if self.explainer else "given as maps, which cannot be computed for a changed image"

    @property
    def about(self) -> Mapping[str, str]:
        """What it is."""
        return self.explainer.about if self.explainer else {"definition": "given as maps"}

    @property
    def packages(self) -> tuple[str, ...]:
        """That took part in it."""
        return self.explainer.packages if self.explainer else ()


def find_candidates(saliency: Any, images: Tensor, options: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """What ``saliency`` stands for, in :func:`tcnn_probe.faithfulness`.

    Raises:
        ValueError, TypeError: nothing that can be judged, or maps of another shape than the images.
    """
    if isinstance(saliency, xr.DataArray):
        return _labelled(saliency, images)
    if not isinstance(saliency, Mapping):
        if isinstance(saliency, (Tensor, np.ndarray)):
            raise TypeError("maps without a name: give them as {'name': maps}")
        return [Candidate(one.name, explainer=one) for one in find_explainers(saliency, options)]
    if not saliency:
        raise ValueError("expected at least one method, got none")
    found = []
    for name, one in saliency.items():
        if isinstance(one, str) or (callable(one) and not isinstance(one, (Tensor, xr.DataArray))):
            of_one = {name_of(one): options[name]} if name in options else {}
            explainer = find_explainers(one, of_one)[0]
            found.append(Candidate(str(name), explainer=replace(explainer, name=str(name))))
        elif isinstance(one, xr.DataArray):
            if one.ndim != 3:
                raise ValueError(f"expected maps of one method for {name!r}, dims (image, y, x), got {one.dims}")
            found.append(replace(_labelled(one, images)[0], name=str(name)))
        else:
            found.append(Candidate(str(name), _maps(one, images, str(name))))
    computed = {one.name for one in found if one.explainer}
    if strange := next((name for name in options if name not in computed), None):
        raise ValueError(f"options for {strange!r}, which is none of the methods to compute: {sorted(computed)}")
    return found


def targets_of(candidates: Sequence[Candidate]) -> Tensor | None:
    """Which classes the given maps are of, shape (B,); None if none of them says.

    Raises:
        ValueError: they are of different ones.
    """
    known = [one for one in candidates if one.targets is not None]
    for one in known[1:]:
        assert one.targets is not None
        assert known[0].targets is not None
        if not torch.equal(one.targets, known[0].targets):
            raise ValueError(
                f"the maps {known[0].name!r} and {one.name!r} are of different targets: say which with target="
            )
    return known[0].targets if known else None


def as_masks(masks: Any, images: Tensor) -> Tensor:
    """Masks as a bool tensor, shape (B, H, W), on the CPU.

    Raises:
        TypeError, ValueError: they are none, or of another shape than the images.
    """
    given = masks.cpu() if isinstance(masks, Tensor) else torch.from_numpy(np.array(masks))
    expected = (len(images), *images.shape[2:])
    if tuple(given.shape) != expected:
        raise ValueError(f"expected masks of shape {expected}, got {tuple(given.shape)}")
    if given.dtype != torch.bool:
        raise TypeError(f"expected masks of dtype bool, True on the object, got {given.dtype}")
    return given


def _labelled(saliency: xr.DataArray, images: Tensor) -> list[Candidate]:
    if {"image", "y", "x"} - {*saliency.dims} or {*saliency.dims} - {"method", "image", "y", "x"}:
        raise ValueError(f"expected saliency with the dims ([method,] image, y, x), got {saliency.dims}")
    if "method" not in saliency.dims:
        name = str(saliency.coords["method"].item()) if "method" in saliency.coords else saliency.attrs.get("method")
        saliency = saliency.drop_vars("method", errors="ignore").expand_dims(method=[name or "saliency"])
    targets = torch.from_numpy(np.array(saliency.coords["target"])) if "target" in saliency.coords else None
    maps = saliency.transpose("method", "image", "y", "x")
    names = [str(name) for name in maps.coords["method"].values] if "method" in maps.coords else None
    if names is None:
        raise ValueError("expected the names of the methods as the coordinate 'method'")
    return [
        Candidate(name, _maps(values, images, name), targets=targets)
        for name, values in zip(names, maps.values, strict=True)
    ]


def _maps(maps: Any, images: Tensor, name: str) -> Tensor:
    try:
        given = maps.detach().cpu() if isinstance(maps, Tensor) else torch.from_numpy(np.array(maps))
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected maps, a method's name or a function for {name!r}, got {maps!r}") from error
    expected = (len(images), *images.shape[2:])
    if tuple(given.shape) != expected:
        raise ValueError(f"expected maps of shape {expected} for {name!r}, got {tuple(given.shape)}")
    return given.to(torch.promote_types(given.dtype, torch.float32))
