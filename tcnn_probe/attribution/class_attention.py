"""Class attention as a map: the weights of the class token over the patches."""

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tcnn_probe.attention.map_keeper import (
    NO_CLASS_TOKEN,
    LayerMaps,
    MapKeeper,
    MapSelection,
)
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.attribution.layer_choice import (
    WITHOUT_CLASS_TOKEN,
    UnsupportedMethodError,
    find_layer,
)
from tcnn_probe.attribution.pixels import to_pixels
from tcnn_probe.models import check_model

__all__ = ["class_attention"]


@torch.no_grad()
def class_attention(
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    *,
    layer: str | nn.Module | None = None,
    interpolation: str = "bilinear",
) -> tuple[Tensor, str]:
    """Average the class token's attention to the patches over heads,
    without post-processing except interpolation.

    If each class has its own token (:class:`tcnn_model.AttentionPool2d`, ``per_class``), the map is
    that of the target's token; otherwise it does not depend on the target. (PatchConvNet paper, §4;
    thesis, 3.7.2.5.)

    Args:
        model: Model with class attention, an attention pool, or class tokens.
        images: Images, shape (B, C, H, W).
        target: Classes, shape (B,).
        layer: Attention layer, or its name; None for the first layer in which only class tokens are
            queries (CaiT's first block of class attention, an attention pool), else the last layer
            with a class token.
        interpolation: Interpolation between patches, "bilinear" or "nearest".

    Returns:
        Map of shape (B, H, W) and the layer's name. Each pixel has the weight of its patch, so that
        weights sum over patches, not over pixels, to 1 minus the attention to class and register
        tokens.

    Raises:
        ValueError: The model has no class token, the layer is unknown, or the grid of its patches
            is unknown.
    """
    check_model(model)
    layer = find_layer(model, layer)[0] if isinstance(layer, nn.Module) else layer
    size = images.shape[2], images.shape[3]
    # Only class tokens are selected, with all heads.
    selection = MapSelection((), None, ReceptiveFields(size))
    # The maps of this single forward are returned, so no limit of memory applies.
    keeper = MapKeeper(selection, images=len(images), copies=1, max_bytes=sys.maxsize)
    stream = AttentionStream(model, keeper, fields=selection.fields)
    with stream.following():
        model(images)
    maps_by_layer = {maps.layer: maps for maps in keeper.maps}
    missing = stream.unsupported | keeper.missing
    name = _choose(maps_by_layer, layer, missing, list(stream.layers))
    maps = maps_by_layer[name].arrays.get("class_attention")
    if maps is None:
        maps = maps_by_layer[name].arrays["attention_by_class"][range(len(images)), :, target.cpu()]
    return to_pixels(maps.mean(1), size, interpolation, selection.fields), name


def _choose(
    maps_by_layer: dict[str, LayerMaps],
    layer: str | None,
    missing: dict[str, str],
    order: Sequence[str],
) -> str:
    """Return the name of the layer to show,
    with a warning if later layers should be shown but have no maps.
    """
    if layer is not None:
        if layer not in maps_by_layer:
            reason = f": {missing[layer]}" if layer in missing else ""
            names = list(maps_by_layer)
            raise ValueError(
                f"expected a layer with maps of class tokens: one of {names}, got {layer!r}{reason}"
            )
        return layer
    if not maps_by_layer:
        reasons = "; ".join(dict.fromkeys(missing.values())) or "no softmax attention was seen"
        raise UnsupportedMethodError(
            f"no layer has a map of class attention ({reasons}); {WITHOUT_CLASS_TOKEN}"
        )
    for name, maps in maps_by_layer.items():
        # Only class tokens are queries, so the layer was designed for such maps.
        if maps.queries is None:
            return name
    name = list(maps_by_layer)[-1]
    # In a model whose layers lose their grid, by pruning tokens for example, an early layer is not
    # what is asked for.
    later = [layer for layer in order[order.index(name) :] if layer in missing]
    lost = [layer for layer in later if missing[layer] != NO_CLASS_TOKEN]
    if lost:
        warnings.warn(
            f"the class attention shown is that of {name!r}: {len(lost)} later layers, up to "
            f"{lost[-1]!r}, have no map ({missing[lost[-1]]})",
            RuntimeWarning,
            stacklevel=2,
        )
    return name
