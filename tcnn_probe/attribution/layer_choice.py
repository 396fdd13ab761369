"""Which layer's map is explained: the one that was named, or the last one that gives a map of the image."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import SpecialTokens, Tokens
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import attention_stream
from tcnn_probe.attention.token_grid import FeatureMaps
from tcnn_probe.attribution.unsupported import UnsupportedMethodError
from tcnn_probe.models import class_scores, layer_names

__all__ = ["MapLayer", "find_layer", "map_layer"]


@dataclass(frozen=True)
class MapLayer:
    """A layer whose output is a map of the image."""

    name: str
    module: nn.Module
    fields: ReceptiveFields  # where the cells of maps lie
    tokens: Tokens | None = None  # its grid; None if it gives feature maps (B, C, H, W), or something else

    @contextmanager
    def as_feature_map(self) -> Iterator[nn.Module]:
        """A module through which the map (B, C, h, w) passes: a stand-in, if the layer gives tokens.

        Tokens before and after the grid pass beside it.
        """
        if self.tokens is None:
            yield self.module
            return
        tokens, stand_in = self.tokens, nn.Identity()

        def through(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            before, cells, after = output.flatten(1, -2).tensor_split((tokens.prefix, tokens.count), 1)
            passed = stand_in(cells.transpose(1, 2).unflatten(2, (tokens.height, tokens.width)))
            return torch.cat([before, passed.flatten(2).transpose(1, 2), after], 1).view_as(output)

        handle = self.module.register_forward_hook(through)
        try:
            yield stand_in
        finally:
            handle.remove()


@dataclass
class _Output:
    """What a module has returned."""

    name: str
    module: nn.Module
    value: Tensor
    is_map: bool  # (B, C, H, W)
    among_tokens: bool  # tokens made of tokens, by a module that has parts


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """A layer's name and itself, from either."""
    for module, name in layer_names(model).items():
        if module is layer or name == layer:
            return name, module
    what = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
    raise ValueError(f"the model has no layer {what}; model.named_modules() has their names")


def map_layer(model: nn.Module, image: Tensor, layer: str | nn.Module | None = None) -> MapLayer:
    """The layer that was named, or the last one with a map of more than one pixel on which the score depends.

    Feature maps (B, C, H, W) are such maps, and tokens, (B, N, C) or (B, H, W, C), whose grid is known. After the last
    block of most vision transformers the score depends on the class token alone: theirs is the block before. The model
    is run once on the image, shape (1, C, H, W). ValueError if there is no such layer, or none gives such a map.
    """
    name, module = (None, None) if layer is None else find_layer(model, layer)
    fields, maps = ReceptiveFields((image.shape[2], image.shape[3])), FeatureMaps(SpecialTokens())
    grids: dict[int, Tokens] = {}
    outputs: list[_Output] = []
    with torch.enable_grad():
        image = image.detach().clone().requires_grad_()
        maps.enter([image], whole_model=True)
        with ExitStack() as stack:
            for handle in _watch(model, maps, outputs, module):
                stack.callback(handle.remove)
            stream = stack.enter_context(attention_stream(model, lambda attention: grids.update(_grids(attention))))
            with fields:
                score = class_scores(model, image).amax()
        for count, tokens in grids.items():
            if (around := stream.around(count)) and around[1]:
                grids[count] = replace(tokens, prefix=around[0])  # and not before all others, as attention has them
        if name is not None and module is not None:
            value = next((one.value for one in outputs if one.module is module and not one.is_map), None)
            return MapLayer(name, module, fields, None if value is None else _tokens(value, maps, grids))
        last = _last(outputs, score, maps, grids)
    return MapLayer(last.name, last.module, fields, None if last.is_map else _tokens(last.value, maps, grids))


def _watch(
    model: nn.Module, maps: FeatureMaps, outputs: list[_Output], wanted: nn.Module | None
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Keep the feature maps and tokens that the modules return, in this order."""
    names = layer_names(model)
    pools = {part for module in names if isinstance(module, AttentionPool2d) for part in module.modules()}
    parted = {module for module in names if [*module.children()]} - pools

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        maps.passes([*inputs, output])
        is_map, among_tokens = _is_map(output, maps), False
        if module in parted and inputs and not is_map:
            among_tokens = _are_tokens(inputs[0], maps) and _are_tokens(output, maps)
        if is_map or among_tokens or (module is wanted and isinstance(output, Tensor)):
            outputs.append(_Output(names[module], module, output, is_map, among_tokens))

    for module in names:
        yield module.register_forward_hook(note)


def _last(outputs: list[_Output], score: Tensor, maps: FeatureMaps, grids: dict[int, Tokens]) -> _Output:
    """The last feature map, or the last tokens after it on which the score depends."""
    place = max((place for place, one in enumerate(outputs) if one.is_map), default=-1)
    afterwards = outputs[place + 1 :]
    gradients = torch.autograd.grad(score, [one.value for one in afterwards], allow_unused=True) if afterwards else ()
    for one, gradient in reversed([*zip(afterwards, gradients, strict=True)]):
        if gradient is None or not gradient.any():
            continue
        tokens = _tokens(one.value, maps, grids)
        if tokens is None:
            raise UnsupportedMethodError(
                f"this model works on tokens ({one.name!r}), whose grid is not known: name a layer that gives a "
                "feature map (B, C, H, W) with layer=, or use 'integrated_gradients' or 'occlusion'"
            )
        if gradient.flatten(1, -2)[:, tokens.prefix : tokens.count].any():
            return one
    if place < 0:
        raise UnsupportedMethodError(
            "no layer gives a feature map (B, C, H, W), or tokens, of more than one pixel: name one with layer="
        )
    return outputs[place]


def _grids(attention: Attention) -> Iterator[tuple[int, Tokens]]:
    """Yield the grids of an attention in the image, by their numbers of tokens."""
    if attention.cut is not None:
        rows, columns = attention.cut.grid
        yield rows * columns, Tokens(0, rows, columns)
    elif attention.gate is not None and attention.map_size is not None:
        rows, columns = attention.map_size  # the layout's grid of keys has the padding, which is no token
        yield rows * columns, Tokens(0, rows, columns)
    elif attention.windows == 1:
        layout = attention.layout
        yield from ((tokens.count, tokens) for tokens in (layout.queries, layout.keys) if tokens)


def _tokens(value: Tensor, maps: FeatureMaps, grids: dict[int, Tokens]) -> Tokens | None:
    """The grid of tokens (B, N, C) or (B, H, W, C); None if it is not known, or if these are none."""
    if not _are_tokens(value, maps):
        return None
    if value.ndim == 4:
        return Tokens(0, value.shape[1], value.shape[2])
    count = value.shape[1]
    return grids.get(count) or next((Tokens(0, *grid) for grid in maps.grids() if grid[0] * grid[1] == count), None)


def _is_map(x: Any, maps: FeatureMaps) -> bool:
    """Whether this is a feature map (B, C, H, W) of more than one pixel."""
    return isinstance(x, Tensor) and x.ndim == 4 and _shown(maps, x.shape[2], x.shape[3])


def _are_tokens(x: Any, maps: FeatureMaps) -> bool:
    """Whether these are tokens: (B, N, C), or (B, H, W, C) as Swin has them."""
    if not isinstance(x, Tensor):
        return False
    if x.ndim == 4:
        return not _is_map(x, maps) and _shown(maps, x.shape[1], x.shape[2])
    return x.ndim == 3 and x.shape[1] > 1


def _shown(maps: FeatureMaps, height: int, width: int) -> bool:
    return height * width > 1 and maps.shows((height, width))
