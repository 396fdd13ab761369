"""Saliency over images."""

from typing import Any

import numpy as np
import xarray as xr

from tcnn_probe.plot.style import as_array, as_images, draw_image, draw_map, empty_figure, select_others

__all__ = ["saliency_overlay"]


def saliency_overlay(maps: Any, images: Any, axes: Any = None, *, masks: Any = None, alpha: float = 0.6) -> np.ndarray:
    """Draw saliency over images, a row an image and a column a method.

    ::

        maps = tcnn_probe.saliency(model, images, method=["class_attention", "gradcam"])
        tcnn_probe.plot.saliency_overlay(maps, images)

    Each map lies over the whole image, whatever its resolution is, with a scale of its own from its least to its
    largest value.

    Args:
        maps: dims (image, y, x), as :func:`tcnn_probe.saliency` gives, or (y, x) of one image; of several methods a
            Dataset of these, by name.
        images: of the maps, in their order, shape (B, C, H, W), a tensor or an array; 1 or 3 channels of any range.
        axes: where to draw, one for each image and method, images first; None: pyplot's current figure
            if it is empty, or a new one, with the images themselves at the left.
        masks: of objects, shape (B, H, W), bool: outlined in white.
        alpha: how far a map covers its image; 1 wholly, 0 not at all.

    Returns:
        the axes, shape (images, methods), with a further column for the images where they are new.

    Raises:
        TypeError: maps that are no DataArray and no Dataset.
        ValueError: other dimensions; not as many maps, images, masks or axes as there have to be.
    """
    by_method = _by_method(maps)
    pictures = as_images(images)
    count = len(pictures)
    for name, some in by_method.items():
        if len(some) != count:
            raise ValueError(f"expected a map for each of the {count} images, got {len(some)} of {name or 'the maps'}")
    outlines = None if masks is None else np.asarray(masks, dtype=float)
    if outlines is not None and outlines.shape != (count, *pictures.shape[2:]):
        raise ValueError(f"expected masks of shape {(count, *pictures.shape[2:])}, got {outlines.shape}")
    panels = _new_axes(pictures, list(by_method)) if axes is None else _as_grid(axes, count, len(by_method))
    for column, some in enumerate(by_method.values(), panels.shape[1] - len(by_method)):
        for row, image in enumerate(pictures):
            panel = panels[row, column]
            if alpha < 1:
                draw_image(panel, image)
            draw_map(panel, some[row], *image.shape[1:], alpha=alpha)
            if outlines is not None and np.ptp(outlines[row]):
                middles = [np.arange(length) + 0.5 for length in image.shape[1:]]
                panel.contour(middles[1], middles[0], outlines[row], [0.5], colors="w", linewidths=0.8)
    return panels


def _by_method(maps: Any) -> dict[str, np.ndarray]:
    """Maps (image, y, x) by name."""
    if isinstance(maps, xr.Dataset):
        if not maps.data_vars:
            raise ValueError("expected a map or more, got a Dataset without variables")
        return {str(name): _maps(values) for name, values in maps.data_vars.items()}
    maps = as_array(maps, "maps")
    return {str(maps.attrs.get("method", maps.name or "")): _maps(maps)}


def _maps(values: xr.DataArray) -> np.ndarray:
    values = values if "image" in values.dims else values.expand_dims("image")
    return np.asarray(select_others(values, "maps", ("image", "y", "x")).transpose("image", "y", "x").values)


def _as_grid(axes: Any, rows: int, columns: int) -> np.ndarray:
    given = np.asarray(axes, dtype=object)
    if given.size != rows * columns:
        raise ValueError(f"expected axes for {rows} images and {columns} methods, {rows * columns}, got {given.size}")
    return given.reshape(rows, columns)


def _new_axes(images: np.ndarray, methods: list[str]) -> np.ndarray:
    """With the images in the first column."""
    shape = len(images), 1 + len(methods)
    figure = empty_figure(1.75 * shape[1], 1.75 * shape[0] * images.shape[2] / images.shape[3] + 0.4)
    panels = figure.subplots(*shape, squeeze=False)
    for panel, image in zip(panels[:, 0], images, strict=True):
        draw_image(panel, image)
    for panel, name in zip(panels[0], ["image", *methods], strict=True):
        panel.set_title(name.replace("_", " "), fontsize=9)
    return np.asarray(panels)
