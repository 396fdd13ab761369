"""Class attention as a map: the weights themselves, of the class token over the patches."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import PatchAttention
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import attention_stream
from tcnn_probe.attribution.layer_choice import find_layer
from tcnn_probe.attribution.pixels import to_pixels
from tcnn_probe.attribution.unsupported import WITHOUT_CLASS_TOKEN, UnsupportedMethodError

__all__ = ["class_attention"]


@dataclass
class _Seen:
    """A layer with class tokens."""

    alone: bool  # they are its only queries
    maps: Tensor | None = None  # (B, h, w)
    reason: str = ""  # why there are none


@torch.no_grad()
def class_attention(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: str | nn.Module | None = None,
    interpolation: str = "bilinear",
) -> tuple[Tensor, str]:
    """Attention of the class token to the patches, mean over heads, with no post-processing but the interpolation.

    If each class has a token of its own (:class:`tcnn_model.AttentionPool2d`, ``per_class``), the map is that of the
    target's token; otherwise it does not depend on the target. (PatchConvNet paper, §4; thesis, 3.7.2.5.)

    Args:
        model: with class attention, or an attention pool, or class tokens.
        images, target: images (B, C, H, W) and their classes (B,).
        layer: which attention, or its name; None for the first layer in which class tokens alone ask (CaiT's first
            block of class attention, an attention pool), else the last one with a class token.
        interpolation: from patches to pixels, "bilinear" or "nearest".

    Returns:
        shape (B, H, W): the weight of the patch at each pixel, so that it is the patches' weights that sum to 1, less
        what class and register tokens get; and the layer's name.

    Raises:
        ValueError: no class token, an unknown layer, or one whose patches lie on no known grid.
    """
    layer = find_layer(model, layer)[0] if isinstance(layer, nn.Module) else layer
    found: dict[str, _Seen] = {}

    def look(call: AttentionCall) -> None:
        per_class = isinstance(call.module, PatchAttention)
        has_token = per_class or call.class_query is not None
        rows = call.images * call.windows  # windows of an image, or more images than were given
        if has_token and rows == len(images):
            found[call.name] = _of_class_tokens(call, target, per_class)
        elif rows != len(images) and (has_token or call.queries == 1):
            counts = f"{rows} times, where {len(images)} images were given"
            found[call.name] = _Seen(False, reason=f"it attends {counts}: its maps are not those of the images")

    size = images.shape[2], images.shape[3]
    with ReceptiveFields(size) as fields, attention_stream(model, look) as stream:
        model(images)
    name = _choose({name: seen for name, seen in found.items() if name in stream.layers}, layer)
    maps = found[name].maps
    if maps is None:
        raise UnsupportedMethodError(f"{name!r} has no map: {found[name].reason}")
    return to_pixels(maps, size, interpolation, fields), name


def _of_class_tokens(call: AttentionCall, target: Tensor, per_class: bool) -> _Seen:
    alone, keys = per_class or call.layout.queries is None, call.layout.keys
    if keys is None:
        return _Seen(alone, reason=f"its patches lie on no known grid: {call.layout.reason}")
    if per_class:
        weights = torch.cat([call.weights(slice(at, at + 1), image) for image, at in enumerate(target.tolist())])
    else:
        assert call.class_query is not None
        weights = call.weights(slice(call.class_query, call.class_query + 1))
    of_patches = weights[:, 0, :, 0, keys.prefix :].mean(1)  # (B, windows, heads, queries, keys) before
    return _Seen(alone, of_patches.unflatten(-1, (keys.height, keys.width)))


def _choose(found: dict[str, _Seen], layer: str | None) -> str:
    if layer is not None and layer not in found:
        raise ValueError(f"expected a layer with class tokens: one of {list(found)}, got {layer!r}")
    if not found:
        raise UnsupportedMethodError(
            f"no class token attends in this model, so that there is no class attention; {WITHOUT_CLASS_TOKEN}"
        )
    with_map = {name: seen for name, seen in found.items() if seen.maps is not None} or found
    usual = next((name for name, seen in with_map.items() if seen.alone), list(with_map)[-1])
    return usual if layer is None else layer
