"""Images as people have them: file names, PIL, arrays of bytes; turned into what a model takes, or into pixels."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor, nn

from tcnn_probe.models import unwrap

__all__ = ["as_images"]

_CONVENTION = (
    "a floating-point tensor (B, C, H, W), normalised as the model takes it; or pictures: PIL images, file names, bytes"
)
_LARGEST = 20  # normalised pixels reach 3 or so; bytes that were not divided by 255 reach 255


def _is_picture(image: Any) -> bool:
    """Whether this is one picture as people have them: PIL, a file name, or bytes (H, W), (H, W, C) or (C, H, W)."""
    if isinstance(image, (str, os.PathLike, Image.Image)):
        return True
    return isinstance(image, (np.ndarray, Tensor)) and image.dtype in (np.uint8, torch.uint8) and image.ndim in (2, 3)


def as_pictures(images: Any) -> list[Image.Image] | None:
    """One picture or several as RGB images of PIL; None if these are no pictures; OSError for a file that is none."""
    if _is_picture(images):
        images = [images]
    elif isinstance(images, (np.ndarray, Tensor)):
        images = list(images) if images.ndim == 4 and images.dtype in (np.uint8, torch.uint8) else []
    if not isinstance(images, Sequence) or not images or not all(map(_is_picture, images)):
        return None
    return [_as_pil(image) for image in images]


def as_images(images: Any, model: nn.Module) -> Tensor:
    """Give images as a model takes them; pictures pass through timm's evaluation transform for it.

    ::

        images = as_images(["cat.jpg", "dog.jpg"], model)
        maps = tcnn_probe.saliency(model, images, method="gradcam")
        tcnn_probe.plot.saliency_overlay(maps, images)

    Args:
        images: a floating-point tensor or array (B, C, H, W) or (C, H, W), normalised as the model takes it, which is
            not copied; or one picture or several: PIL images, names of files, uint8 of shape (H, W), (H, W, C) or
            (C, H, W); or what an image processor of transformers gives.
        model: whose they are to be; of timm, if pictures are given.

    Returns:
        shape (B, C, H, W), floating point.

    Raises:
        TypeError: these are no images; or pictures for a model of which timm knows no transform.
        ValueError: another shape, or values that are not finite or as large as those of bytes.
        OSError: a file that is not there, or no picture.
    """
    if isinstance(images, Mapping):
        images = images.get("pixel_values", images)
    if (pictures := as_pictures(images)) is not None:
        transform = _transform(model)
        return torch.stack([transform(picture) for picture in pictures])
    images = as_batch(images, _CONVENTION)
    largest = float(images.detach().abs().amax())
    if not math.isfinite(largest):
        raise ValueError(f"expected {_CONVENTION}; got values that are no finite numbers")
    if largest > _LARGEST and min(_config(unwrap(model)).get("std", (1,))) > 0.02:
        raise ValueError(f"expected {_CONVENTION}; got values up to {largest:.4g}: divide by 255, then normalise")
    return images


def as_batch(images: Any, expected: str) -> Tensor:
    """Images as a tensor (B, C, H, W), floating point; not copied if they are one.

    TypeError or ValueError if they are none; the message says what is expected.
    """
    if isinstance(images, Sequence) and images and all(isinstance(x, (Tensor, np.ndarray)) for x in images):
        shapes = {tuple(x.shape) for x in images}
        if len(shapes) > 1:
            raise ValueError(f"expected images, {expected}; got tensors of different shapes: {sorted(shapes)}")
        images = torch.stack([torch.as_tensor(x) for x in images])
    if not isinstance(images, Tensor):
        array = np.array(images)  # a copy: torch takes no array that is read-only or mirrored
        if array.dtype.kind not in "fiub":
            raise TypeError(f"expected images, {expected}; got {type(images).__name__}")
        images = torch.from_numpy(array)
    images = images[None] if images.ndim == 3 else images
    if images.ndim != 4 or images.numel() == 0:
        raise ValueError(f"expected images, {expected}; got shape {tuple(images.shape)}")
    if images.shape[-1] in (1, 3, 4) and images.shape[1] > 4 and images.shape[2] > 4:
        raise ValueError(f"expected images, {expected}; got channels last, shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"expected images, {expected}; got {images.dtype}")
    return images


def _as_pil(image: Any) -> Image.Image:
    if isinstance(image, (str, os.PathLike)):
        with Image.open(image) as opened:
            return opened.convert("RGB")
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # (C, H, W)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"expected bytes of shape (H, W), (H, W, C) or (C, H, W), C of 1, 3 or 4; got {image.shape}")
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array).convert("RGB")


def _config(model: nn.Module) -> dict[str, Any]:
    """Input size, mean and std of timm's models; empty for others."""
    return timm.data.resolve_model_data_config(model) if getattr(model, "pretrained_cfg", None) else {}


def _transform(model: nn.Module) -> Any:
    model = unwrap(model)
    config = _config(model)
    if not config:
        hint = ""
        if hasattr(model, "config"):
            hint = ": AutoImageProcessor.from_pretrained(...)(picture, return_tensors='pt')"
        raise TypeError(
            f"how to prepare pictures for a {type(model).__name__} is unknown, as it is no model of timm: give a "
            f"floating-point tensor (B, C, H, W), normalised as the model takes it{hint}"
        )
    if (size := getattr(getattr(model, "patch_embed", None), "img_size", None)) is not None:
        config["input_size"] = (config["input_size"][0], *size)  # of the model, not of its pretrained weights
    return timm.data.create_transform(**config, is_training=False)
