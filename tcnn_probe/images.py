"""Images in any form, such as file names, PIL images or bytes, as a model's input or as pixels."""

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tcnn_model.pictures import as_rgb, read_picture
from tcnn_probe.models import unwrap

__all__ = ["as_images", "beside_images", "calls_given"]

_CONVENTION = (
    "a floating-point tensor (B, C, H, W), normalised as the model takes it; or pictures: PIL "
    "images, file names, bytes"
)
# What processors of transformers call images and videos; the first that is there is meant.
_PIXELS = ("pixel_values", "pixel_values_videos")
# Normalised pixels reach about 3; bytes that were not divided by 255 reach 255.
_LARGEST = 20


def _is_picture(image: Any) -> bool:
    """Return whether this is a picture: PIL,
    name or bytes of a file, or uint8 (H, W), (H, W, C) or (C, H, W).
    """
    if isinstance(image, (str, bytes, os.PathLike, Image.Image)):
        return True
    return (
        isinstance(image, (np.ndarray, Tensor))
        and image.dtype in (np.uint8, torch.uint8)
        and image.ndim in (2, 3)
    )


def as_pictures(images: Any) -> list[Image.Image] | None:
    """Return pictures as upright RGB images of PIL, or None for other images.

    Raise OSError for unreadable files, and ValueError for values whose range is unknown.
    """
    if _is_picture(images):
        images = [images]
    elif isinstance(images, (np.ndarray, Tensor)):
        images = (
            list(images) if images.ndim == 4 and images.dtype in (np.uint8, torch.uint8) else []
        )
    if not isinstance(images, Sequence) or not images or not all(map(_is_picture, images)):
        return None
    return [_as_pil(image) for image in images]


def as_images(images: Any, model: nn.Module, *, videos: bool = False) -> Tensor:
    """Return images as a model takes them; pictures pass through timm's evaluation transform
    for it.

    ::

        images = as_images(["cat.jpg", "dog.jpg"], model)
        maps = tcnn_probe.saliency(model, images, method="gradcam")
        tcnn_probe.plot.saliency_overlay(maps, images)

    Args:
        images: A floating-point tensor or array (B, C, H, W) or (C, H, W), normalised as the model
            takes it, which is not copied; or one or several pictures: PIL images, names or contents
            of files, uint8 of shape (H, W), (H, W, C) or (C, H, W); or the output of a processor of
            transformers.
        model: Model that takes the images; pictures need a model of timm.
        videos: Whether to accept videos, which have five axes, too.

    Returns:
        Images, shape (B, C, H, W), floating point. Pictures are turned as their EXIF data say, and
        scaled by their depth.

    Raises:
        TypeError: ``images`` are not images, or are pictures for a model without a transform of
            timm.
        ValueError: The shape is wrong; values are not finite or as large as bytes; or it is unknown
            which value of a picture is white.
        OSError: A file does not exist or is not a picture.
    """
    pictures = as_pictures(images)
    if pictures is not None:
        return prepare(pictures, preparation(model))
    images = as_batch(images, _CONVENTION, videos=videos)
    largest = float(images.detach().abs().amax())
    if not math.isfinite(largest):
        raise ValueError(f"expected {_CONVENTION}; got values that are not finite")
    # A smaller deviation, such as 1 / 255, belongs to a model that takes values as large as bytes.
    if largest > _LARGEST and min(_config(unwrap(model)).get("std", (1,))) > 0.02:
        raise ValueError(
            f"expected {_CONVENTION}; got values up to {largest:.4g}: divide by 255, then normalise"
        )
    return images


def as_batch(images: Any, expected: str, *, videos: bool = False) -> Tensor:
    """Return images (or ``videos``) as a floating-point tensor (B, C, H, W),
    which is copied only if necessary.

    Raise TypeError or ValueError, with ``expected`` in the message, if they are not images.
    """
    if isinstance(images, Mapping):  # the output of a processor of transformers
        inputs, images = images, images.get(_pixels_name(images))
        if images is None:
            raise TypeError(
                f"expected images, {expected}; got a mapping of {', '.join(inputs)} without "
                "pixel_values"
            )
        if getattr(images, "ndim", 4) < 4:
            raise ValueError(
                f"expected images, {expected}; got pixel_values of shape {tuple(images.shape)}, "
                "patches of images of several sizes, as processors of Siglip2 and Qwen cut them: "
                "there are no maps of these; call the model yourself under tcnn_probe.record for "
                "the numbers of its heads"
            )
    if (
        isinstance(images, Sequence)
        and images
        and all(isinstance(x, (Tensor, np.ndarray)) for x in images)
    ):
        shapes = {tuple(x.shape) for x in images}
        if len(shapes) > 1:
            raise ValueError(
                f"expected images, {expected}; got tensors of different shapes: {sorted(shapes)}"
            )
        images = torch.stack([torch.as_tensor(x) for x in images])
    if not isinstance(images, Tensor):
        # The array is copied because torch.from_numpy does not accept read-only arrays or negative
        # strides.
        try:
            array = np.array(images)
        except ValueError as error:
            kinds = ", ".join(dict.fromkeys(type(image).__name__ for image in images))
            raise ValueError(f"expected images, {expected}; got {kinds} in one list") from error
        if array.dtype.kind not in "fiub":
            raise TypeError(f"expected images, {expected}; got {type(images).__name__}")
        images = torch.from_numpy(array)
    images = images[None] if images.ndim == 3 else images
    if images.ndim == 5 and not videos:
        raise ValueError(
            f"expected images, {expected}; got videos, volumes or tiles, shape "
            f"{tuple(images.shape)}: there are no maps of these; call the model yourself under "
            "tcnn_probe.record for the numbers of its heads"
        )
    if images.ndim not in (4, 5) or images.numel() == 0:
        raise ValueError(f"expected images, {expected}; got shape {tuple(images.shape)}")
    if images.shape[-1] in (1, 3, 4) and images.shape[1] > 4 and images.shape[2] > 4:
        raise ValueError(
            f"expected images, {expected}; got channels last, shape {tuple(images.shape)}"
        )
    if not images.is_floating_point():
        raise TypeError(f"expected images, {expected}; got {images.dtype}")
    return images


def channel_axis(images: Tensor) -> int:
    """Return the axis of the channels of images or videos.

    Images are (B, C, H, W) or (B, H, W, C), videos (B, T, C, H, W) or (B, C, T, H, W).
    """
    if images.ndim == 5:
        return 2 if images.shape[2] in (1, 3) else 1
    is_last = images.shape[-1] in (1, 3, 4) and min(images.shape[1:3]) > 4
    return 3 if images.ndim == 4 and is_last else 1


def input_tensors(inputs: Any, depth: int = 4) -> list[Tensor]:
    """Return the tensors in the inputs of a model,
    also in lists, mappings and objects such as dataclasses.
    """
    if isinstance(inputs, Tensor):
        return [inputs]
    if isinstance(inputs, Mapping):
        members = list(inputs.values())
    elif isinstance(inputs, (tuple, list)):
        members = list(inputs)
    elif isinstance(inputs, (nn.Module, type)) or not hasattr(inputs, "__dict__"):
        return []
    else:
        members = list(vars(inputs).values())
    # The depth is bounded because objects can refer to each other.
    if depth == 0:
        return []
    return [x for member in members for x in input_tensors(member, depth - 1)]


def batch_of(inputs: Sequence[Any]) -> Tensor | list[Tensor] | None:
    """Return the images of a batch, (B, ...),
    or as a list of (C, H, W); None if no input is a batch of images.
    """
    # Images have more than two axes, unlike the masks and labels that come with them.
    tensors = [x for x in input_tensors(inputs) if x.ndim > 2]
    listed = [x for x in tensors if x.ndim == 3 and x.shape[0] in (1, 3, 4)]
    is_list = bool(listed) and not any(isinstance(x, Tensor) and x.ndim > 2 for x in inputs)
    if is_list and len(listed) == len(tensors):
        return listed
    return next(iter(tensors), None)


def beside_images(images: Any) -> dict[str, Any]:
    """Return the entries of a processor's output other than its images:
    texts of CLIP, masks, the ids of a prompt.
    """
    if not isinstance(images, Mapping):
        return {}
    # With labels, which a data set of transformers adds, the model would also compute a loss.
    left_out = (_pixels_name(images), "labels")
    return {name: value for name, value in images.items() if name not in left_out}


def _pixels_name(inputs: Mapping[str, Any]) -> str:
    return next((name for name in _PIXELS if name in inputs), _PIXELS[0])


@contextmanager
def calls_given(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Add inputs by name to all calls of a model that have images only."""
    if not inputs:
        yield
        return

    def add(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        # All inputs are passed by name, because the first argument of models of images and text is
        # the text's ids.
        images = args[0] if args else kwargs["pixel_values"]
        placed = {
            name: value.to(images.device) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        return (), {"pixel_values": images, **placed}

    handle = model.register_forward_pre_hook(add, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _as_pil(image: Any) -> Image.Image:
    if isinstance(image, (str, os.PathLike)):
        return read_picture(image)
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image))
    if isinstance(image, Image.Image):
        return as_rgb(image)
    array = np.asarray(image)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # (C, H, W)
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            "expected bytes of shape (H, W), (H, W, C) or (C, H, W), C of 1, 3 or 4; got "
            f"{image.shape}"
        )
    # PIL takes grey images without a channel axis.
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    return Image.fromarray(array).convert("RGB")


def _config(model: nn.Module) -> dict[str, Any]:
    """Return input size, mean and std of a model of timm; an empty dictionary for other models."""
    if not getattr(model, "pretrained_cfg", None):
        return {}
    from timm.data import resolve_model_data_config  # recording needs no timm

    config: dict[str, Any] = resolve_model_data_config(model)
    return config


def preparation(model: nn.Module) -> dict[str, Any]:
    """Return the options of timm's evaluation transform for a model;
    raise TypeError if it is not a model of timm.
    """
    model = unwrap(model)
    config = _config(model)
    if not config:
        hint = ""
        if hasattr(model, "config"):
            hint = ": AutoImageProcessor.from_pretrained(...)(picture, return_tensors='pt')"
        raise TypeError(
            f"how to prepare pictures for a {type(model).__name__} is unknown, as it is not a timm "
            "model: give a floating-point tensor (B, C, H, W), normalised as the model takes "
            f"it{hint}"
        )
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    # create_model(..., img_size=...) does not change the size in pretrained_cfg.
    if size is not None:
        config["input_size"] = (config["input_size"][0], *size)
    channels = _channels(model)
    if channels not in (1, 3):
        raise TypeError(
            f"expected images of {channels} channels, as this model takes, and pictures have 3: "
            "give a floating-point tensor (B, C, H, W), normalised as the model takes it"
        )
    if channels == 1:
        config["input_size"] = (1, *config["input_size"][1:])
        # timm does not change these, either, with in_chans=1; the weights of its colours are added
        # up.
        for name in ("mean", "std"):
            config[name] = (sum(config[name]) / len(config[name]),)
    return config


def _channels(model: nn.Module) -> int:
    """Return the number of channels that a model of timm takes:
    that of its first convolution, or else 3.
    """
    first = getattr(model, "pretrained_cfg", {}).get("first_conv")
    name = first if isinstance(first, str) or not first else first[0]
    layer = dict(model.named_modules()).get(name) if name else None
    return getattr(layer, "in_channels", 3)


def prepare(pictures: Sequence[Image.Image], config: Mapping[str, Any]) -> Tensor:
    """Return pictures as a model takes them,
    (B, C, H, W), with the options of :func:`preparation`.
    """
    from timm.data import create_transform

    transform = create_transform(**config, is_training=False)
    if config["input_size"][0] == 1:
        pictures = [picture.convert("L") for picture in pictures]
    return torch.stack([transform(picture) for picture in pictures])


def prepare_pixels(
    pictures: Sequence[Image.Image], models: Iterable[Any] | Mapping[str, Any]
) -> Tensor:
    """Return pictures as models take them but before normalisation: (B, 3 or 1, H, W), in [0, 1].

    Args:
        pictures: Pictures, RGB.
        models: Models, whose transforms of timm have to agree; or the options of one transform. For
            models that timm does not know, the pictures keep their size.

    Raises:
        ValueError: The transforms differ, or pictures that keep their size have several sizes.
    """
    configs = [models] if isinstance(models, Mapping) else _known_preparations(models)
    plain = [
        {
            **config,
            "mean": (0.0,) * len(config["mean"]),
            "std": (1.0,) * len(config["mean"]),
        }
        for config in configs
    ]
    if any(config != plain[0] for config in plain):
        raise ValueError(
            "the models cut pictures in different ways (size, crop or interpolation): give images "
            "as a tensor (B, C, H, W) in [0, 1]"
        )
    if plain:
        return prepare(pictures, plain[0])
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise ValueError(
            f"expected pictures of one size, got {sorted(sizes)} (width, height): resize or crop "
            "them"
        )
    arrays = [np.asarray(picture, np.float32) / 255 for picture in pictures]
    return torch.from_numpy(np.stack(arrays).transpose(0, 3, 1, 2))


def _known_preparations(models: Iterable[Any]) -> list[dict[str, Any]]:
    modules = [model for model in models if isinstance(model, nn.Module)]
    return [preparation(model) for model in modules if _config(unwrap(model))]
