"""Arrays of the image size: maps of cells interpolated to pixels,
and backgrounds that replace pixels.
"""

from typing import Any

import torch
from torch import Tensor

from tcnn_probe.attention.receptive_fields import ReceptiveFields

__all__ = ["background", "is_constant", "to_pixels"]

_BLUR = 11, 5.0  # kernel and standard deviation in pixels, as in RISE's published code


def to_pixels(
    maps: Tensor, size: tuple[int, int], interpolation: str, fields: ReceptiveFields
) -> Tensor:
    """Interpolate maps of cells, shape (B, h, w),
    to the images' resolution: (B, H, W), float32 at least.

    A cell lies at the centre of its receptive field. Beyond the outermost cells, their values are
    continued.
    """
    if interpolation not in ("bilinear", "nearest"):
        raise ValueError(f"expected interpolation='bilinear' or 'nearest', got {interpolation!r}")
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    if tuple(maps.shape[1:]) == size:
        return maps
    places = fields.places((maps.shape[1], maps.shape[2]))
    for dim, (length, (first, spacing)) in enumerate(zip(size, places, strict=True), 1):
        last = maps.shape[dim] - 1
        # In float64, rounding does not move a pixel that is midway between two cells from one cell
        # to the other.
        at = ((torch.arange(length, dtype=torch.float64) - first) / spacing).clamp(0, last)
        if interpolation == "nearest":
            at = (at + 0.5).floor().clamp(max=last)
        before = at.long()
        # (length,) to (length, 1) for rows; columns are last already.
        share = (at - before).to(maps).view(-1, *[1] * (2 - dim))
        after = (before + 1).clamp(max=last)
        low = maps.index_select(dim, before.to(maps.device))
        high = maps.index_select(dim, after.to(maps.device))
        maps = torch.lerp(low, high, share)
    return maps


def is_constant(maps: Tensor) -> Tensor:
    """Return whether each map (B, H, W) has the same value everywhere, up to rounding: (B,)."""
    values = maps.flatten(1)
    spread = values.amax(1) - values.amin(1)
    # A weighted mean of equal values, as of an interpolation, is off by a few roundings.
    return spread <= 4 * torch.finfo(maps.dtype).eps * values.abs().amax(1)


def background(value: Any, images: Tensor) -> Tensor:
    """Return the background for each of the images (B, C, H, W),
    from a number, an image, or "blur".
    """
    if isinstance(value, str):
        if value != "blur":
            raise ValueError(f"expected 'blur', a number or an image, got {value!r}")
        return _blurred(images)
    image = torch.as_tensor(value, dtype=images.dtype, device=images.device).detach()
    try:
        return image.expand(images.shape[1:]).expand_as(images)
    except RuntimeError as error:
        shapes = f"{tuple(images.shape[1:])}, got shape {tuple(image.shape)}"
        raise ValueError(
            f"expected a number, or a baseline image that broadcasts to {shapes}"
        ) from error


def _blurred(images: Tensor) -> Tensor:
    """Blur images (B, C, H, W), mirrored at the border;
    the kernel is no wider than the image allows.
    """
    from torchvision.transforms.functional import gaussian_blur

    width, sigma = _BLUR
    # torchvision's kernel sizes are odd and have x first. Its padding reflects, so kernels cannot
    # be wider than the image.
    kernel = [min(width, 2 * ((side - 1) // 2) + 1) for side in (images.shape[3], images.shape[2])]
    return gaussian_blur(images, kernel, [sigma, sigma])
