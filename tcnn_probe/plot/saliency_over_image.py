"""Saliency over images."""

import json
from typing import Any

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import (
    check_array,
    draw_image,
    draw_map,
    empty_figure,
    finish_grid,
    image_array,
    select_dims,
)

__all__ = ["saliency_overlay"]


def saliency_overlay(
    maps: Any, images: Any, axes: Any = None, *, masks: Any = None, alpha: float = 0.8
) -> np.ndarray:
    """Draw saliency over images: a row for each image, a column for each method.

    ::

        maps = tcnn_probe.saliency(model, images, method=["class_attention", "gradcam"])
        tcnn_probe.plot.saliency_overlay(maps, images)

    Each map covers the whole image, whatever its resolution, with a scale of its own from its
    smallest value, or from 0 if it has values on both sides, which is transparent, to its largest.

    Args:
        maps: Maps with the dims (image, y, x), as :func:`tcnn_probe.saliency` returns, or (y, x)
            for a single image; for several methods a Dataset of such maps, by name.
        images: Images of the maps, in their order, shape (B, C, H, W), a tensor or an array; 1 or 3
            channels of any range; or the pictures that were given to :func:`tcnn_probe.saliency`.
        axes: Axes to draw on, for each image and method, images first; None for pyplot's current
            figure if it is empty, or a new one, with the images themselves at the left.
        masks: Masks of objects, shape (B, H, W), bool, to be outlined in white.
        alpha: Opacity of each map's largest value, from 0 to 1.

    Returns:
        The axes, shape (images, methods), with a further column for the images where they are new.

    Raises:
        TypeError: The maps are neither a DataArray nor a Dataset.
        ValueError: The maps have other dimensions, or the numbers of maps, images, masks and axes
            do not fit.
    """
    by_method = _by_method(maps)
    pictures = image_array(images, _preparation(maps))
    count = len(pictures)
    for name, values in by_method.items():
        if len(values) != count:
            got = f"got {len(values)} of {name or 'the maps'}"
            raise ValueError(f"expected a map for each of the {count} images, {got}")
    outlines = None if masks is None else np.asarray(masks, dtype=float)
    if outlines is not None and outlines.shape != (count, *pictures.shape[2:]):
        raise ValueError(
            f"expected masks of shape {(count, *pictures.shape[2:])}, got {outlines.shape}"
        )
    panels = (
        _new_axes(pictures, list(by_method))
        if axes is None
        else np.asarray(axes, dtype=object).reshape(count, len(by_method))
    )
    for column, values in enumerate(by_method.values(), panels.shape[1] - len(by_method)):
        for row, image in enumerate(pictures):
            panel = panels[row, column]
            draw_image(panel, image)
            shown = values[row]
            # Evidence against the class is as transparent as what has no effect.
            if (shown > 0).any():
                shown = shown.clip(0)
            draw_map(panel, shown, *image.shape[1:], alpha=alpha * _shares(shown))
            # matplotlib warns of a contour of a constant.
            if outlines is not None and np.ptp(outlines[row]):
                # Centres of pixels.
                y, x = (np.arange(length) + 0.5 for length in image.shape[1:])
                panel.contour(x, y, outlines[row], [0.5], colors="w", linewidths=0.8)
    return panels


def _shares(values: np.ndarray) -> np.ndarray:
    """Scale values from 0, the smallest, to 1, the largest; 0 for NaN."""
    low, high = np.nanmin(values), np.nanmax(values)
    # A constant map is all smallest, and transparent.
    return np.nan_to_num((values - low) / max(high - low, 1e-30))


def _preparation(maps: Any) -> dict[str, Any] | None:
    """Return how pictures were prepared for the model, of maps of pictures; else None."""
    arrays = maps.data_vars.values() if isinstance(maps, xr.Dataset) else [maps]
    saved = [getattr(array, "attrs", {}).get("pictures") for array in arrays]
    return json.loads(saved[0]) if saved and saved[0] else None


def _by_method(maps: Any) -> dict[str, np.ndarray]:
    """Return maps (image, y, x) by the name of their method."""
    if isinstance(maps, xr.Dataset):
        return {str(name): _by_image(values) for name, values in maps.data_vars.items()}
    maps = check_array(maps, "maps")
    return {str(maps.attrs.get("method", maps.name or "")): _by_image(maps)}


def _by_image(values: xr.DataArray) -> np.ndarray:
    values = values if "image" in values.dims else values.expand_dims("image")
    return np.asarray(
        select_dims(values, "maps", ("image", "y", "x")).transpose("image", "y", "x").values
    )


def _new_axes(images: np.ndarray, methods: list[str]) -> np.ndarray:
    """Make axes for images and methods, and draw the images in their first column."""
    shape = len(images), 1 + len(methods)
    figure = empty_figure(
        1.75 * shape[1], 1.75 * shape[0] * images.shape[2] / images.shape[3] + 0.4
    )
    panels = figure.subplots(*shape, squeeze=False)
    for panel, image in zip(panels[:, 0], images, strict=True):
        draw_image(panel, image)
    finish_grid(figure, panels[0, 0])
    for panel, name in zip(panels[0], ["image", *methods], strict=True):
        panel.set_title(name.replace("_", " "), fontsize="small")
    return np.asarray(panels)
