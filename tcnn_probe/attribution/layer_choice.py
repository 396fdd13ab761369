"""Choice of the layer to explain: the named layer,
or the last layer that returns a map of the image.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.outputs import class_scores
from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import Tokens
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.hooks.forwards import ModuleCall
from tcnn_probe.models import check_model, layer_names, plain_name

__all__ = [
    "WITHOUT_CLASS_TOKEN",
    "WITHOUT_GRADIENTS",
    "MapLayer",
    "UnsupportedMethodError",
    "find_layer",
    "map_layer",
]

WITHOUT_GRADIENTS = (
    "no gradient of the score reaches the images, because the model runs under torch.no_grad or "
    "computes in integers: 'class_attention', 'rollout' and 'occlusion' need none"
)
WITHOUT_CLASS_TOKEN = (
    "'gradcam', 'integrated_gradients', 'input_x_gradient' and 'occlusion' need no class token"
)


class UnsupportedMethodError(ValueError):
    """The model does not support the method; another method may work."""


@dataclass(frozen=True)
class MapLayer:
    """A layer whose output is a map of the image.

    Args:
        name: Name of the layer.
        module: The layer.
        fields: Receptive fields of the cells of maps.
        tokens: Grid of its tokens; None if it returns feature maps (B, C, H, W), or something else.
        matters: Whether the score has a gradient in the cells of the map.
    """

    name: str
    module: nn.Module
    fields: ReceptiveFields
    tokens: Tokens | None = None
    matters: bool = True

    @contextmanager
    def as_feature_map(self) -> Iterator[nn.Module]:
        """Provide a module through which the map (B, C, h, w) passes:
        a stand-in, if the layer returns tokens.

        Tokens before and after the grid bypass the stand-in.
        """
        if self.tokens is None:
            yield self.module
            return
        tokens, stand_in = self.tokens, nn.Identity()

        def pass_through(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            # (B, N, C) is split in three. The cells become (B, C, rows, columns), pass through the
            # stand-in, and are reshaped back.
            before, cells, after = output.flatten(1, -2).tensor_split(
                (tokens.prefix, tokens.count), 1
            )
            feature_map = stand_in(
                cells.transpose(1, 2).unflatten(2, (tokens.height, tokens.width))
            )
            return torch.cat([before, feature_map.flatten(2).transpose(1, 2), after], 1).view_as(
                output
            )

        handle = self.module.register_forward_hook(pass_through)
        try:
            yield stand_in
        finally:
            handle.remove()


@dataclass
class _Output:
    """Tensor that a module returned.

    Args:
        name: Name of the module.
        module: The module.
        value: The tensor.
        is_map: Whether it is a feature map (B, C, H, W).
    """

    name: str
    module: nn.Module
    value: Tensor
    is_map: bool


def find_layer(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    """Return the name and the module of a layer, given one of them."""
    if isinstance(layer, str):
        layer = plain_name(model, layer)
    for module, name in layer_names(model).items():
        if module is layer or name == layer:
            return name, module
    label = repr(layer) if isinstance(layer, str) else f"this {type(layer).__name__}"
    raise ValueError(f"the model has no layer {label}; model.named_modules() has their names")


def map_layer(model: nn.Module, image: Tensor, layer: str | nn.Module | None = None) -> MapLayer:
    """Find the named layer, or the last one with a map
    of more than one pixel on which the score depends.

    Such maps are feature maps (B, C, H, W), and tokens, (B, N, C) or (B, H, W, C), if their grid is
    known. After the last block of most vision transformers the score depends only on the class
    token, so the block before is chosen. The model runs once on the image, shape (1, C, H, W). A
    ValueError is raised if there is no such layer.
    """
    check_model(model)
    name, module = (None, None) if layer is None else find_layer(model, layer)
    fields = ReceptiveFields((image.shape[2], image.shape[3]))
    outputs = _Outputs(model, module)
    with torch.enable_grad():
        # Gradients have to reach every layer, even if all parameters are frozen.
        image = image.detach().clone().requires_grad_()
        # The stream's hooks are used because an interruption could leave torch's own hooks on
        # modules.
        stream = AttentionStream(model, outputs, watched=outputs.names, fields=fields)
        outputs.maps = stream.maps
        with stream.following():
            # Any score will do, because it only matters on which outputs it depends.
            score = class_scores(model, image).amax()
        outputs.place_prefixes()
        if name is not None and module is not None:
            of_layer = [output for output in outputs.kept if output.module is module]
            tensors = [output.value for output in of_layer if not output.is_map]
            tokens = outputs.tokens(tensors[0]) if tensors else None
        else:
            last = outputs.last(score)
            name, module, of_layer = last.name, last.module, [last]
            tokens = None if last.is_map else outputs.tokens(last.value)
        matters = any(
            gradient is not None and bool(_on_map(gradient, tokens).any())
            for gradient in _gradients(score, [output.value for output in of_layer])
        )
    return MapLayer(name, module, fields, tokens, matters)


def _gradients(score: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of a score in tensors of its forward,
    None for those on which it does not depend.
    """
    if not score.requires_grad:
        return [None] * len(values)
    # Tensors from under torch.no_grad have no gradient, and torch refuses to compute it.
    places = [place for place, value in enumerate(values) if value.requires_grad]
    # backward() would add to the gradients of parameters, but grad() does not.
    gradients = (
        torch.autograd.grad(
            score, [values[place] for place in places], retain_graph=True, allow_unused=True
        )
        if places
        else ()
    )
    by_place = dict(zip(places, gradients, strict=True))
    return [by_place.get(place) for place in range(len(values))]


def _on_map(values: Tensor, tokens: Tokens | None) -> Tensor:
    """Return the part of a feature map or of tokens that lies on the grid."""
    if tokens is None:
        return values
    return values.flatten(1, -2)[:, tokens.prefix : tokens.count]


class _Outputs(AttentionListener):
    """Feature maps and tokens that modules returned in a forward,
    in their order, and the grids of attention.

    Args:
        model: Model to listen to.
        layer: Module whose output is kept, even if it is neither a map nor tokens.
    """

    def __init__(self, model: nn.Module, layer: nn.Module | None) -> None:
        self.names = layer_names(model)
        self.maps: FeatureMaps
        self.kept: list[_Output] = []
        self._layer = layer
        self._grids: dict[int, Tokens] = {}
        # The patches inside an attention pool are projected for its queries, so the map is the
        # input of the pool.
        pools = {
            part
            for module in self.names
            if isinstance(module, AttentionPool2d)
            for part in module.modules()
        }
        # Layers inside a block (norms, projections) return tokens, too, but part of the score
        # bypasses them. They have no parts, except those of peft or of a parametrization.
        innermost = {name: module for module, name in self.names.items()}
        self._composite = {
            module
            for module, name in self.names.items()
            if {part for part, _ in innermost[name].named_children()} - {"parametrizations"}
        } - pools

    def attends(self, attention: Attention) -> None:
        """Keep the grids that an attention has in the image, by their numbers of tokens."""
        grids: list[tuple[int, int]] = []
        if attention.cut is not None:
            grids.append(attention.cut.grid)
        elif attention.gate is not None and attention.map_size is not None:
            # The layout's grid of keys includes the padding, which has no tokens.
            grids.append(attention.map_size)
        elif attention.windows == 1:
            layout = attention.layout
            self._grids |= {
                tokens.count: tokens for tokens in (layout.queries, layout.keys) if tokens
            }
        self._grids |= {rows * columns: Tokens(0, rows, columns) for rows, columns in grids}

    def returned(self, call: ModuleCall, output: Any) -> None:
        """Keep feature maps, tokens that a composite module computes from tokens,
        and the given layer's output.
        """
        module, inputs = call
        is_map = self._is_map(output)
        is_kept = is_map or (module is self._layer and isinstance(output, Tensor))
        if not is_kept and module in self._composite and inputs:
            is_kept = self._are_tokens(inputs[0]) and self._are_tokens(output)
        if is_kept:
            self.kept.append(_Output(self.names[module], module, output, is_map))

    def place_prefixes(self) -> None:
        """Place special tokens after the grid if the model has them there;
        attention places all before the grid.
        """
        for count, tokens in self._grids.items():
            arrangement = self.maps.arrange(count)
            if arrangement.after:
                self._grids[count] = replace(tokens, prefix=arrangement.before)

    def last(self, score: Tensor) -> _Output:
        """Return the last feature map, or the last tokens after it on which the score depends."""
        place = max(
            (place for place, output in enumerate(self.kept) if output.is_map),
            default=-1,
        )
        candidates = self.kept[place + 1 :]
        if self.kept and not any(x.value.requires_grad for x in self.kept):
            raise UnsupportedMethodError(WITHOUT_GRADIENTS)
        gradients = _gradients(score, [output.value for output in candidates])
        for output, gradient in reversed([*zip(candidates, gradients, strict=True)]):
            if gradient is None or not gradient.any():
                continue
            tokens = self.tokens(output.value)
            if tokens is None:
                raise UnsupportedMethodError(
                    f"this model works on tokens ({output.name!r}), whose grid is not known: name "
                    "a layer that gives a feature map (B, C, H, W) with layer=, or use "
                    "'integrated_gradients' or 'occlusion'"
                )
            # After the last block of a ViT only the class token has a gradient, so its patches show
            # nothing.
            if _on_map(gradient, tokens).any():
                return output
        if place < 0:
            raise UnsupportedMethodError(
                "no layer gives a feature map (B, C, H, W), or tokens, of more than one pixel: "
                "name one with layer="
            )
        return self.kept[place]

    def tokens(self, value: Tensor) -> Tokens | None:
        """Return the grid of tokens (B, N, C) or (B, H, W, C);
        None if it is unknown, or for other tensors.
        """
        if not self._are_tokens(value):
            return None
        if value.ndim == 4:
            return Tokens(0, value.shape[1], value.shape[2])
        count = value.shape[1]
        if count in self._grids:
            return self._grids[count]
        return next(
            (Tokens(0, *grid) for grid in self.maps.grids() if grid[0] * grid[1] == count),
            None,
        )

    def _is_map(self, x: Any) -> bool:
        """Return whether ``x`` is a feature map (B, C, H, W) of more than one pixel."""
        return isinstance(x, Tensor) and x.ndim == 4 and self._is_grid(x.shape[2], x.shape[3])

    def _are_tokens(self, x: Any) -> bool:
        """Return whether ``x`` has tokens: (B, N, C), or (B, H, W, C) as in Swin."""
        if not isinstance(x, Tensor):
            return False
        if x.ndim == 4:
            return not self._is_map(x) and self._is_grid(x.shape[1], x.shape[2])
        return x.ndim == 3 and x.shape[1] > 1

    def _is_grid(self, height: int, width: int) -> bool:
        return height * width > 1 and self.maps.shows((height, width))
