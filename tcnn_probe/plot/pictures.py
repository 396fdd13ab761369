"""One image or one map on axes of its own."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tcnn_probe.plot.style import RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_box", "draw_image", "draw_map"]


def draw_image(axes: "Axes", image: np.ndarray) -> None:
    """An image (C, H, W) of 1 or 3 channels, from its least value (black) to its largest, without ticks."""
    low, high = np.nanmin(image), np.nanmax(image)
    pixels = (image - low) / max(high - low, 1e-12)
    height, width = image.shape[1:]
    shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=1, extent=(0, width, height, 0))
    axes.set(xticks=[], yticks=[])


def draw_map(axes: "Axes", values: np.ndarray, height: float, width: float, **options: Any) -> None:
    """A map (h, w), of any resolution, over height x width pixels."""
    axes.imshow(values, extent=(0, width, height, 0), interpolation="nearest", **options)
    axes.set(xticks=[], yticks=[], xlim=(0, width), ylim=(height, 0))


def draw_box(axes: "Axes", y: float, x: float, height: float, width: float) -> None:
    """A red box, y and x its upper left corner."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=RED, lw=1.5, clip_on=False))
