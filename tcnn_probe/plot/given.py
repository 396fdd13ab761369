"""What plots need to be given, and how it is called on their axes."""

import re
from collections.abc import Collection
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["as_array", "as_image", "as_images", "axis_label", "select_others", "wrapped"]


def as_array(values: Any, what: str) -> xr.DataArray:
    """Raise unless it is a DataArray."""
    if not isinstance(values, xr.DataArray):
        hint = f", for example dataset[{next(iter(values), 'gate')!r}]" if isinstance(values, xr.Dataset) else ""
        raise TypeError(f"expected {what} as an xarray.DataArray{hint}; got {type(values).__name__}")
    return values


def select_others(values: xr.DataArray, what: str, needed: Collection[str], optional: Collection[str] = ()) -> Any:
    """``values`` with just these dimensions: others are dropped where they have length 1.

    Raises:
        ValueError: a needed dimension is missing, or there are others.
    """
    missing = [dim for dim in needed if dim not in values.dims]
    if missing:
        raise ValueError(f"expected {what} with the dimensions {tuple(needed)}, got {values.dims}: no {missing[0]!r}")
    others = [dim for dim in values.dims if dim not in (*needed, *optional)]
    several = [dim for dim in others if values.sizes[dim] != 1]
    if several:
        chosen = ", ".join(f"{dim}=..." for dim in several)
        raise ValueError(f"{what} have further dimensions {tuple(several)}: choose one of each, with .sel({chosen})")
    return values.squeeze(others, drop=True)


def as_images(images: Any) -> np.ndarray:
    """Images (B, C, H, W) of 1 or 3 channels, a tensor or an array, as an array of floats.

    Raises:
        ValueError: another shape.
    """
    found = _floats(images)
    if found.ndim != 4 or found.shape[1] not in (1, 3) or 0 in found.shape:
        raise ValueError(f"expected images of shape (B, 1 or 3, H, W), got {found.shape}")
    return found


def as_image(image: Any) -> np.ndarray:
    """Likewise one image (C, H, W)."""
    found = _floats(image)
    if found.ndim != 3 or found.shape[0] not in (1, 3) or 0 in found.shape:
        raise ValueError(f"expected an image of shape (1 or 3, H, W), got {found.shape}")
    return found


def _floats(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu().float() if hasattr(values, "detach") else values, dtype=float)


def axis_label(values: xr.DataArray) -> str:
    """The array's long name, or name, with its unit, unless that is 1."""
    name = str(values.attrs.get("long_name", values.name or "")).replace("_", " ")
    units = re.sub(r"(?<=[a-z])(-?\d+)", r"$^{\1}$", str(values.attrs.get("units", "1")))
    return name if units in ("1", "") else f"{name} ({units})"


def wrapped(name: Any, width: int = 15) -> str:
    """A module's name in lines of about ``width``, broken at its dots."""
    lines = [""]
    for part in re.split(r"(?<=\.)", str(name)):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
