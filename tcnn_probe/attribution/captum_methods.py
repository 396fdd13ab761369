"""Attributions of pixels, by captum: integrated gradients, input x gradient, occlusion."""

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.given import as_baseline, captum

__all__ = ["input_x_gradient", "integrated_gradients", "occlusion"]


def input_x_gradient(model: nn.Module, images: Tensor, target: Tensor, *, absolute: bool = False) -> tuple[Tensor, str]:
    """sum_c x_c ∂s/∂x_c, of the target's score s. Computed by captum's ``InputXGradient``.

    (Shrikumar et al. 2016, Not Just a Black Box, §2; Ancona et al. 2018, Table 1.)

    Args:
        model: with a gradient.
        images: shape (B, C, H, W).
        target: of each image, shape (B,).
        absolute: whether to give the magnitude of the sum; else its sign says whether the pixel speaks for the target.

    Returns:
        shape (B, H, W), and "".
    """
    method = captum("attr").InputXGradient(model)
    with torch.enable_grad():
        attributions = method.attribute(images.detach().requires_grad_(), target)
    return _signed(attributions.detach().sum(1), absolute), ""


def integrated_gradients(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    baseline: float | Tensor = 0.0,
    n_steps: int = 32,
    absolute: bool = False,
    batch_size: int = 32,
) -> tuple[Tensor, str]:
    """sum_c (x_c - x'_c) times the mean of ∂s/∂x_c on the straight line from the baseline x' to x.

    Its sum over pixels is s(x) - s(x'), to the error of the n_steps points of a Gauss-Legendre quadrature. Computed by
    captum's ``IntegratedGradients``. (Sundararajan et al. 2017, Axiomatic Attribution for Deep Networks, Eq. 1.)

    Args:
        model: with a gradient.
        images: shape (B, C, H, W).
        target: of each image, shape (B,).
        baseline: x': a number, 0 being the grey of images normalised by their mean; or an image, (C, H, W) or what
            broadcasts to it.
        n_steps: points on the line.
        absolute: whether to give the magnitude of the sum over channels.
        batch_size: points at a time.

    Returns:
        shape (B, H, W), and "".

    Raises:
        ValueError: no steps.
    """
    if not isinstance(n_steps, int) or n_steps < 1:
        raise ValueError(f"expected a positive number of steps, got n_steps={n_steps!r}")
    method = captum("attr").IntegratedGradients(model)
    with torch.enable_grad():
        attributions = method.attribute(
            images.detach().requires_grad_(),
            baselines=as_baseline(baseline, images),
            target=target,
            n_steps=n_steps,
            internal_batch_size=max(batch_size, len(images)),
        )
    return _signed(attributions.detach().sum(1), absolute), ""


@torch.no_grad()
def occlusion(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    window: int | tuple[int, int] | None = None,
    stride: int | tuple[int, int] | None = None,
    baseline: float | Tensor = 0.0,
    absolute: bool = False,
    batch_size: int = 32,
) -> tuple[Tensor, str]:
    """By how much the target's score falls when a window is covered: mean over the windows that cover the pixel.

    All channels are covered together. Computed by captum's ``Occlusion``. (Zeiler & Fergus 2014, Visualizing and
    Understanding Convolutional Networks, §4.2.)

    Args:
        model: of any kind.
        images: shape (B, C, H, W).
        target: of each image, shape (B,).
        window: its height and width in pixels; None for an eighth of the image's, rounded.
        stride: from one window to the next; None for half a window.
        baseline: what covers: a number, 0 being the grey of images normalised by their mean; or an image, (C, H, W) or
            what broadcasts to it.
        absolute: whether to give the magnitude.
        batch_size: covered images at a time.

    Returns:
        shape (B, H, W), and "".

    Raises:
        ValueError: a window larger than the image, or a stride that leaves pixels out.
    """
    size = images.shape[2], images.shape[3]
    side = _pair((max(1, round(size[0] / 8)), max(1, round(size[1] / 8))) if window is None else window)
    step = _pair((max(1, side[0] // 2), max(1, side[1] // 2)) if stride is None else stride)
    if any(not 0 < part <= whole for part, whole in zip(side, size, strict=True)):
        raise ValueError(f"expected a window within the image's {size} pixels, got {window}")
    if any(not 0 < part <= whole for part, whole in zip(step, side, strict=True)):
        raise ValueError(f"expected a stride from 1 to the window's {side} pixels, got {stride}")
    channels = images.shape[1]
    attributions = (
        captum("attr")
        .Occlusion(model)
        .attribute(
            images,
            sliding_window_shapes=(channels, *side),
            strides=(channels, *step),
            baselines=as_baseline(baseline, images),
            target=target,
            perturbations_per_eval=max(1, batch_size // len(images)),
        )
    )
    maps = attributions[:, 0].to(images.dtype)  # the same for all channels, and float32 whatever the images are
    return _signed(maps, absolute), ""


def _signed(maps: Tensor, absolute: bool) -> Tensor:
    maps = maps.to(torch.promote_types(maps.dtype, torch.float32))
    return maps.abs() if absolute else maps


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
