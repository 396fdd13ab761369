"""Which layer's map is explained: the one that was named, or the last one that gives a feature map."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import SpecialTokens
from tcnn_probe.models import layer_names

__all__ = ["find_layer", "last_spatial_layer"]


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """A layer's name and itself, from either."""
    for module, name in layer_names(model).items():
        if module is layer or name == layer:
            return name, module
    what = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
    raise ValueError(f"the model has no layer {what}; model.named_modules() has their names")


@torch.no_grad()
def last_spatial_layer(model: nn.Module, images: Tensor) -> tuple[str, nn.Module]:
    """The last module that gives a feature map of more than one pixel, found by running the model on the images.

    Raises:
        ValueError: there is none, or tokens are worked on afterwards: then it is not what the classifier sees.
    """
    maps = FeatureMaps(SpecialTokens())
    maps.enter([images], whole_model=True)
    names = layer_names(model)
    pools = {part for module in names if isinstance(module, AttentionPool2d) for part in module.modules()}
    parted = {module for module in names if [*module.children()]} - pools
    last: tuple[str, nn.Module] | None = None
    afterwards: list[str] = []  # modules with parts that go from tokens to tokens, since that one

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal last
        if _is_map(output, maps):
            last = names[module], module
            afterwards.clear()
        elif module in parted and inputs and _are_tokens(inputs[0], maps) and _are_tokens(output, maps):
            afterwards.append(names[module])

    with ExitStack() as hooks:
        for module in names:
            hooks.callback(module.register_forward_hook(note).remove)
        model(images)
    if last is None:
        raise ValueError("no layer gives a feature map (B, C, H, W) of more than one pixel: name one with layer=")
    if afterwards:
        raise ValueError(
            f"this model works on tokens ({afterwards[0]!r}, after the last feature map, that of {last[0]!r}), and "
            "GradCAM knows no map of these: name a layer that gives a feature map (B, C, H, W) with layer=, or use "
            "'class_attention' or 'rollout', if there is a class token, or 'integrated_gradients' or 'occlusion'"
        )
    return last


def _is_map(x: Any, maps: FeatureMaps) -> bool:
    """Whether this is a feature map (B, C, H, W) of more than one pixel."""
    return isinstance(x, Tensor) and x.ndim == 4 and _shown(maps, x.shape[2], x.shape[3])


def _are_tokens(x: Any, maps: FeatureMaps) -> bool:
    """Whether these are tokens: (B, N, d), or (B, H, W, d) as Swin has them."""
    if not isinstance(x, Tensor):
        return False
    if x.ndim == 4:
        return not _is_map(x, maps) and _shown(maps, x.shape[1], x.shape[2])
    return x.ndim == 3 and x.shape[1] > 1


def _shown(maps: FeatureMaps, height: int, width: int) -> bool:
    return height * width > 1 and maps.shows((height, width))
