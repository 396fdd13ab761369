"""GradCAM, by captum, and the layer that it is computed for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import Prefix
from tcnn_probe.attribution.class_attention import interpolation_mode
from tcnn_probe.attribution.given import captum, find_layer
from tcnn_probe.models import layer_names

__all__ = ["gradcam", "last_spatial_layer"]


def gradcam(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: str | nn.Module | None = None,
    interpolation: str = "bilinear",
    relu_attributions: bool = True,
) -> tuple[Tensor, str]:
    """Feature maps of a layer, each weighted by the mean gradient of the target's score, and their sum.

    Computed by captum's ``LayerGradCam``. (Selvaraju et al. 2017, Grad-CAM, Eq. 1 and 2.)

    Args:
        model: whose layer gives a feature map.
        images: shape (B, C, H, W).
        target: of each image, shape (B,).
        layer: the layer or its name; None for the last one that gives a feature map of more than one pixel.
        interpolation: from the layer's pixels to the image's, "bilinear" or "nearest".
        relu_attributions: whether negative values become 0, as published.

    Returns:
        shape (B, H, W), and the layer's name.

    Raises:
        ValueError: an unknown layer, or one without a feature map.
    """
    attr, mode = captum("attr"), interpolation_mode(interpolation)
    name, module = last_spatial_layer(model, images[:1]) if layer is None else find_layer(model, layer)
    with torch.enable_grad():
        maps = attr.LayerGradCam(model, module).attribute(images, target, relu_attributions=relu_attributions)
    if not isinstance(maps, Tensor) or maps.ndim != 4:
        got = f"shape {tuple(maps.shape)}" if isinstance(maps, Tensor) else "several tensors"
        raise ValueError(f"expected a layer that gives one feature map (B, C, H, W); the map of {name!r} has {got}")
    maps = maps.detach().to(torch.promote_types(maps.dtype, torch.float32))
    return attr.LayerAttribution.interpolate(maps, tuple(images.shape[2:]), interpolate_mode=mode)[:, 0], name


@dataclass
class _Ran:
    name: str
    module: nn.Module
    grid: tuple[int, int] | None  # of a feature map (B, C, H, W)
    mixes_tokens: bool  # a part with parts of its own, from tokens to tokens


@torch.no_grad()
def last_spatial_layer(model: nn.Module, images: Tensor) -> tuple[str, nn.Module]:
    """The last module that gives a feature map of more than one pixel, found by running the model on the images.

    Raises:
        ValueError: there is none, or tokens are worked on afterwards: then it is not what the classifier sees.
    """
    scene = FeatureMaps(Prefix())
    scene.enter([images], whole_model=True)
    ran: list[_Ran] = []
    with _watching(model, scene, ran):
        model(images)
    last = next((i for i in reversed(range(len(ran))) if ran[i].grid is not None), None)
    if last is None:
        raise ValueError("no layer gives a feature map (B, C, H, W) of more than one pixel: name one with layer=")
    if after := next((one.name for one in ran[last + 1 :] if one.mixes_tokens), None):
        raise ValueError(
            f"this model works on tokens ({after!r}, after the last feature map, that of {ran[last].name!r}), of which "
            "GradCAM knows no map: name a layer that gives a feature map (B, C, H, W) with layer=, or use "
            "'class_attention' or 'rollout', if there is a class token, or 'integrated_gradients' or 'occlusion'"
        )
    return ran[last].name, ran[last].module


@contextmanager
def _watching(model: nn.Module, scene: FeatureMaps, ran: list[_Ran]) -> Iterator[None]:
    names = layer_names(model)
    pools = {part for module in names if isinstance(module, AttentionPool2d) for part in module.modules()}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        given = inputs[0] if inputs else None
        has_parts = next(module.children(), None) is not None
        mixes = has_parts and module not in pools and _tokens(given, scene) and _tokens(output, scene)
        ran.append(_Ran(names[module], module, _grid(output, scene), mixes))

    handles = []
    try:
        for module in names:
            handles.append(module.register_forward_hook(note))  # noqa: PERF401 (all that are made are removed)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _grid(x: Any, scene: FeatureMaps) -> tuple[int, int] | None:
    """Height and width of a feature map (B, C, H, W) of more than one pixel."""
    if not isinstance(x, Tensor) or x.ndim != 4:
        return None
    grid = x.shape[2], x.shape[3]
    return grid if grid[0] * grid[1] > 1 and scene.shows(grid) else None


def _tokens(x: Any, scene: FeatureMaps) -> bool:
    """Whether these are tokens: (B, N, d), or (B, H, W, d) as Swin has them."""
    if not isinstance(x, Tensor) or x.ndim not in (3, 4):
        return False
    if x.ndim == 3:
        return x.shape[1] > 1
    return _grid(x, scene) is None and x.shape[1] * x.shape[2] > 1 and scene.shows((x.shape[1], x.shape[2]))
