"""Images as people have them: file names, PIL, arrays of bytes; turned into what a model takes, or into pixels."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import Tensor, nn

__all__ = ["CONVENTION", "as_images", "as_pictures", "is_picture"]

CONVENTION = (
    "a floating-point tensor (B, C, H, W), normalised as the model takes it; or pictures: PIL images, file names, bytes"
)
_LARGEST = 20  # normalised pixels reach 3 or so; bytes that were not divided by 255 reach 255


def is_picture(image: Any) -> bool:
    """Whether this is one picture as people have them: PIL, a file name, or bytes (H, W), (H, W, C) or (C, H, W)."""
    if isinstance(image, (str, os.PathLike, Image.Image)):
        return True
    return isinstance(image, (np.ndarray, Tensor)) and image.dtype in (np.uint8, torch.uint8) and image.ndim in (2, 3)


def as_pictures(images: Any) -> list[Image.Image] | None:
    """One picture or several as RGB images of PIL; None if these are no pictures.

    Raises:
        FileNotFoundError, PIL.UnidentifiedImageError: a file that is not there, or no image.
        ValueError: bytes of another shape.
    """
    if is_picture(images):
        images = [images]
    elif isinstance(images, (np.ndarray, Tensor)):
        images = list(images) if images.ndim == 4 and images.dtype in (np.uint8, torch.uint8) else []
    if not isinstance(images, Sequence) or not images or not all(map(is_picture, images)):
        return None
    return [_as_pil(image) for image in images]


def as_images(images: Any, model: nn.Module) -> Tensor:
    """Images as a model takes them, shape (B, C, H, W), floating point; not copied if they are that.

    Pictures pass through timm's evaluation transform for the model: resized, cropped, normalised.

    Args:
        images: one or several, see ``CONVENTION``; of one image, (C, H, W) will do.
        model: whose they are to be.

    Raises:
        TypeError, ValueError: they are none, pixels from 0 to 255, or pictures for a model of which timm knows no
            transform.
    """
    if (pictures := as_pictures(images)) is not None:
        transform = _transform(model)
        return torch.stack([transform(picture) for picture in pictures])
    if isinstance(images, Sequence) and images and all(isinstance(x, (Tensor, np.ndarray)) for x in images):
        images = torch.stack([torch.as_tensor(x) for x in images])
    if not isinstance(images, Tensor):
        array = np.array(images)  # a copy: torch takes no array that is read-only or mirrored
        if array.dtype.kind not in "fiub":
            raise TypeError(f"expected images, {CONVENTION}; got {type(images).__name__}")
        images = torch.from_numpy(array)
    images = images[None] if images.ndim == 3 else images
    if images.ndim != 4 or images.numel() == 0:
        raise ValueError(f"expected images, {CONVENTION}; got shape {tuple(images.shape)}")
    if images.shape[-1] in (1, 3, 4) and images.shape[1] > 4:
        raise ValueError(f"expected channels first, {CONVENTION}; got shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise TypeError(f"expected {CONVENTION}; got {images.dtype}")
    if images.abs().amax() > _LARGEST and min(_config(model).get("std", (1,))) > 0.02:
        largest = float(images.abs().amax())
        raise ValueError(f"expected {CONVENTION}; got values up to {largest:.4g}: divide by 255, then normalise")
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
    """Of timm's models: input size, mean and std; empty for others."""
    return timm.data.resolve_model_data_config(model) if getattr(model, "pretrained_cfg", None) else {}


def _transform(model: nn.Module) -> Any:
    config = _config(model)
    if not config:
        hint = ""
        if hasattr(model, "config"):
            hint = ": AutoImageProcessor.from_pretrained(...)(picture, return_tensors='pt').pixel_values"
        raise TypeError(
            f"how to prepare pictures for a {type(model).__name__} is unknown, as it is no model of timm: give a "
            f"floating-point tensor (B, C, H, W), normalised as the model takes it{hint}"
        )
    if (size := getattr(getattr(model, "patch_embed", None), "img_size", None)) is not None:
        config["input_size"] = (config["input_size"][0], *size)  # of the model, not of its pretrained weights
    return timm.data.create_transform(**config, is_training=False)
