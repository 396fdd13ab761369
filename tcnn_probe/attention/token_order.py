"""Follows the pixels of images through a forward, to see in which order the tokens of each attention lie.

Numbers of tokens do not show their order: a masked autoencoder shuffles its tokens, Hiera orders them by mask unit, and
DETR can have as many object queries as there are cells. So tensors of a forward get places, of the same shape: the
number of the pixel, row by row, that each element is made of, or the mean of several; NaN if it is made of parameters
alone. Functions that move elements move their places, convolutions take means, and a token keeps its place in attention
and beside a residual. Places are computed beside the forward, from shapes and indices: the model runs once, as ever.
Words that a model is given beside images have places too, the numbers -1, -2, and so on.

A tensor without places is unknown: it comes from elsewhere, or from a function that is not followed here. There is no
objection to what is unknown. Where it is joined to a tensor with places, its elements have the number infinity.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.attention.layout import Arrangement, Tokens
from tcnn_probe.hooks.kernel_calls import is_kernel
from tcnn_probe.hooks.modes import is_transformed, never_compiled_alone, unseen
from tcnn_probe.images import channel_axis

__all__ = ["PlaceTracker", "are_words", "arrangement_of", "objection_to_order"]

Places = Tensor | None

# Neighbours are at least a pixel apart, and means of places are exact to far less than half of one.
_LEAST_STEP = -0.5

_ATTENTION = (
    "flex_attention",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_FILLED = ("zeros", "ones", "full", "empty", "rand", "randn")
# What these return is made of no image, whatever shape or device it takes from a tensor.
_CONSTANTS = (
    *("arange", "linspace"),
    *_FILLED,
    *(f"{name}_like" for name in _FILLED),
    *(f"new_{name}" for name in _FILLED),
)
# Parts of the names of functions of feature maps, (B, C, H, W) or (B, C, T, H, W).
_KERNELS = ("conv", "pool", "interpolate")
# Functions that write into their first argument, or into a copy of it.
_WRITES = (
    *("__setitem__", "copy_", "masked_scatter", "masked_scatter_"),
    *("scatter", "scatter_", "index_copy", "index_copy_", "index_put", "index_put_"),
)
_ADDITIONS = ("scatter_add", "scatter_add_", "index_add", "index_add_")


def objection_to_order(places: Places, tokens: Tokens, behind: int) -> str:
    """Say why tokens do not lie on a grid row by row; "" if they do, or if it is unknown.

    Args:
        places: Places of the tokens, shape (N,), in the model's order; None if these are unknown.
        tokens: The grid on which they are taken to lie.
        behind: Number of tokens after the grid, which ``tokens`` counts as before it.
    """
    if places is None or len(places) != tokens.count:
        return ""
    first, end = tokens.prefix - behind, tokens.count - behind
    grid, beside = places[first:end], torch.cat([places[:first], places[end:]])
    on_image = grid[grid.isfinite()]  # without padding
    if grid.isnan().all():
        return "the tokens are made of parameters, not of the image"
    # Prompts of unknown origin beside learnt tokens, as in SAM's decoder, can be as many as the cells of some map.
    if grid.isnan().any() and grid.isinf().any():
        return "some of the tokens are made of parameters, not of the image"
    if bool((on_image < 0).any()):
        return "some of the tokens are words, not patches"
    if bool((on_image.diff() < _LEAST_STEP).any()):
        return "the tokens are not in the order of the image's rows"
    # The mean of all patches can stand in for a class token.
    if (beside[beside.isfinite()] >= 0).sum() > 1:
        return "some of the tokens beside the grid are patches"
    return ""


def arrangement_of(places: Places) -> Arrangement | None:
    """Return where words and patches stand; None if either are missing, or if the patches are not contiguous."""
    if places is None or not bool((places < 0).any()) or bool(places.isinf().any()):
        return None
    patches = (places >= 0).nonzero()[:, 0].tolist()
    # As many patches as indices from the first to the last: no other token stands among them.
    if not patches or len(patches) <= patches[-1] - patches[0]:
        return None
    words = (places < 0).nonzero()[:, 0].tolist()
    specials = places.isnan().nonzero()[:, 0].tolist()
    return Arrangement(tuple(specials), tuple(words), tuple(patches))


def are_words(places: Places) -> bool:
    """Return whether all tokens are known to be words."""
    return places is not None and bool((places < 0).all())


class PlaceTracker(TorchFunctionMode):
    """Mode that follows the pixels of images, while entered.

    Attributes:
        queries, keys: Places of the queries and keys of the attention that torch is being asked for, shapes (N_query,)
            and (N_key,), of the first image and head; None if these are unknown.

    Args:
        inputs: Inputs of the model, of which those of shape (B, C, H, W) are images, and those with five axes videos.
        patches: Number of patches, if the model is given these, (B, patches, C), in the place of an image.
    """

    def __init__(self, inputs: Iterable[Any], patches: int | None = None) -> None:
        super().__init__()
        self.queries: Places = None
        self.keys: Places = None
        # Keys are weak: no tensor lives longer than the model keeps it.
        self._places: Any = WeakTensorKeyDictionary()
        # A product of queries and keys has the places of the queries in _places, and those of the keys, shape (N_key,),
        # here.
        self._keys: Any = WeakTensorKeyDictionary()
        tensors = _tensors(inputs)
        for image in tensors:
            if image.ndim == 4:
                pixels = _numbers(image[0, 0].numel())
                # Expanded, not repeated: images and channels have equal places, and so a stride of 0, by which _slim
                # finds them.
                self._places[image] = pixels.view(image.shape[2:]).expand(image.shape)
            elif image.ndim == 5:
                pixels = image[:1].narrow(channel_axis(image), 0, 1)
                self._places[image] = (
                    _numbers(pixels.numel()).view(pixels.shape).expand(image.shape)
                )
            elif image.ndim == 3 and image.shape[1] == patches:
                places = _numbers(image.shape[1])[:, None]
                self._places[image] = places.expand(image.shape)
        # Numbers and vectors that a model is given alone can be an image's, as the codes of its patches.
        if len(self._places):
            self._follow_words(tensors)

    def _follow_words(self, inputs: Sequence[Tensor]) -> None:
        """Give places to words, (B, N), and to their vectors, (B, N, C)."""
        for tensor in inputs:
            if tensor in self._places:
                continue
            # A mask that hides words is made of zeros and ones.
            is_ids = tensor.ndim == 2 and tensor.dtype in (torch.int32, torch.int64)
            if is_ids and bool((tensor > 1).any()):
                self._places[tensor] = (-1 - _numbers(tensor.shape[1])).expand(
                    tensor.shape
                )
            elif tensor.ndim == 3 and tensor.is_floating_point():
                places = -1 - _numbers(tensor.shape[1])
                self._places[tensor] = places[:, None].expand(tensor.shape)

    @never_compiled_alone
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        self._look(func, args, kwargs)
        output = func(*args, **kwargs)
        self._hear(func, output, args, kwargs)
        return output

    # Not compiled, as the functions that places are computed with would be. And whatever a function does with its
    # arguments, places must not end the user's forward.

    @torch.compiler.disable
    def _look(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Read off the places of queries and keys before torch attends."""
        self.queries = self.keys = None
        with unseen(), suppress(Exception):
            inputs = _tensors((*args, *kwargs.values()))
            self.queries, self.keys = self._sides(func, inputs)

    @torch.compiler.disable
    def _hear(
        self,
        func: Callable[..., Any],
        output: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Follow a function that has run."""
        with unseen(), suppress(Exception):
            inputs = _tensors((*args, *kwargs.values()))
            if not is_transformed(inputs):
                places = [self._of(tensor) for tensor in inputs]
                outputs = _tensors((output,))
                self._follow(_Call(func, args, kwargs, inputs, places, outputs))

    def _sides(
        self, func: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[Places, Places]:
        """Return the places of queries and keys, if this is a function of attention."""
        name = _name(func)
        # Logits have the places of their queries; those of the keys were kept apart when the product was formed.
        if name == "softmax":
            return _of_tokens(self._of(inputs[0])), self._keys.get(inputs[0])
        if name not in _ATTENTION and not is_kernel(func):
            return None, None
        queries, keys = (self._of(tokens) for tokens in inputs[:2])
        if is_kernel(func) and "scaled_dot_product" not in name:
            # (B, N, heads, d); of (N, heads, d) it is not known which tokens are an image's.
            queries, keys = (
                None if x is None or x.ndim < 4 else x.transpose(1, 2)
                for x in (queries, keys)
            )
        if name == "multi_head_attention_forward":  # tokens first, (N, B, d) or (N, d)
            queries, keys = (
                None if x is None else x.movedim(0, -2) for x in (queries, keys)
            )
        return _of_tokens(queries), _of_tokens(keys)

    def _of(self, tensor: Tensor) -> Places:
        if isinstance(tensor, nn.Parameter):
            return _nowhere(tensor.shape)
        return self._places.get(tensor)

    def _follow(self, call: "_Call") -> None:
        """Give the outputs of a function their places."""
        name = _name(call.func)
        # Sizes of maps, say; arrays of NumPy may hold the image itself.
        is_list = name in ("tensor", "as_tensor") and isinstance(call.args[0], list)
        if name in _CONSTANTS or (is_list and not call.inputs):
            for output in call.outputs:
                self._places[output] = _nowhere(output.shape)
            return
        if name in _WRITES or name in _ADDITIONS:
            self._follow_writing(name, call)
            return
        logits = [x in self._keys for x in call.inputs]
        if any(logits[:1]) and _is_transpose(call.outputs[0], call.inputs[0]):
            self._exchange_sides(call.inputs[0], call.outputs[0])
            return
        if any(logits) and name not in _PRODUCTS:
            # A mask that is added to logits moves no queries, wherever its own elements are from.
            call = replace(
                call,
                inputs=[*compress(call.inputs, logits)],
                places=[*compress(call.places, logits)],
            )
        for output in call.outputs:
            self._follow_keys(name, call, output)
            # What works in place returns its input, whose places hold no more.
            self._places.pop(output, None)
        if not call.outputs:
            return
        for output, places in zip(
            call.outputs, _places_after(name, call), strict=False
        ):
            if places is not None and places.shape == output.shape:
                self._places[output] = places

    def _follow_writing(self, name: str, call: "_Call") -> None:
        """Follow tokens that are written into another tensor."""
        target, places = call.inputs[0], call.places[0]
        written = [target] if name.endswith("_") else call.outputs
        # Overwriting parts of a map, as MViT does to add positional biases, moves none of its tokens; a canvas is
        # filled with tokens in whatever order.
        if places is not None and not bool(_slim(places).isnan().any()):
            for output in written:
                self._places[output] = places
            return
        for tensor in (*written, *self._sharing(target)):
            self._places.pop(tensor, None)
        if places is not None and name in _WRITES:
            for output in written:
                self._places[output] = _write(call)

    def _sharing(self, target: Tensor) -> list[Tensor]:
        """Return the tensors with places of which this one is a view, or which are views of it."""
        memory = target.untyped_storage().data_ptr()
        return [x for x in self._places if x.untyped_storage().data_ptr() == memory]

    def _exchange_sides(self, logits: Tensor, transpose: Tensor) -> None:
        """Follow logits that are used in both directions, as those of image and text in Grounding DINO."""
        queries = _of_tokens(self._of(logits))
        self._places[transpose] = self._keys[logits][:, None].expand(transpose.shape)
        if queries is not None:
            self._keys[transpose] = queries

    def _follow_keys(self, name: str, call: "_Call", output: Tensor) -> None:
        """Remember the keys of a product, also after scaling, masking and reshaping."""
        if name in _PRODUCTS and len(call.inputs) == 2:
            # The second operand is (..., d, N_key), or in an equation perhaps (..., N_key, d).
            operand = call.places[1]
            if operand is not None and name != "einsum":
                operand = operand.mT
            keys = _of_tokens(operand)
            if keys is not None and len(keys) == output.shape[-1]:
                self._keys[output] = keys
            return
        for source in call.inputs:
            keys = self._keys.get(source)
            # Scaling, masking and merging of axes before the last two leave queries and keys where they are.
            if keys is not None and source.shape[-2:] == output.shape[-2:]:
                self._keys[output] = keys


@dataclass(frozen=True)
class _Call:
    """A call of a torch function.

    Args:
        func: Function.
        args, kwargs: Its arguments.
        inputs: Tensors among them.
        places: Places of these.
        outputs: Tensors that it returned.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Sequence[Tensor]
    places: Sequence[Places]
    outputs: Sequence[Tensor]

    @property
    def shape(self) -> torch.Size:
        """Shape of the first output."""
        return self.outputs[0].shape

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument, by position or by name."""
        if len(self.args) > index:
            return self.args[index]
        return self.kwargs.get(name, default)


def _places_after(name: str, call: _Call) -> Sequence[Places]:
    """Return the places of a function's outputs, as far as they are known."""
    of_parameters = all(x is not None and _is_nowhere(x) for x in call.places)
    if of_parameters and call.inputs:
        return [_nowhere(x.shape) for x in call.outputs]
    is_map = call.outputs[0].ndim in (4, 5)
    is_resampled = is_map and any(word in name for word in _KERNELS)
    rule = _resample if is_resampled else _RULES.get(name, _beside)
    if rule not in (_join, _beside, _sample) and call.places[0] is None:
        return []
    return rule(call)


def _reshape(call: _Call) -> Sequence[Places]:
    places, shape = call.places[0], list(call.shape)
    assert places is not None
    # Without images and channels of equal places, which would be copied.
    for axis in (0, -1):
        if places.stride(axis) == 0 and places.shape[axis] == shape[axis]:
            places, shape[axis] = places.narrow(axis, 0, 1), 1
    return [places.reshape(shape).expand(call.shape)]


def _move(call: _Call) -> Sequence[Places]:
    arguments, options = _on_cpu(call.args[1:]), _on_cpu(call.kwargs)
    moved = call.func(call.places[0], *arguments, **options)
    return list(moved) if isinstance(moved, (tuple, list)) else [moved]


def _turn(call: _Call) -> Sequence[Places]:
    """Move what stays within an axis, which needs no copies along axes of equal places."""
    assert call.places[0] is not None
    turned = call.func(_slim(call.places[0]), *call.args[1:], **call.kwargs)
    return [turned.expand(call.shape)]


def _cut_patches(call: _Call) -> Sequence[Places]:
    """Follow F.unfold, which pads with zeros; Tensor.unfold has the same name."""
    if call.func is not F.unfold:
        return _move(call)
    assert call.places[0] is not None
    # Counted from 1, no pixel has the number 0, with which F.unfold pads.
    patches = F.unfold(call.places[0] + 1, *call.args[1:], **call.kwargs)
    return [patches.masked_fill(patches == 0, torch.nan) - 1]


def _pad(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [F.pad(call.places[0], call.argument(1, "pad"), value=torch.nan)]


def _join(call: _Call) -> Sequence[Places]:
    if all(places is None for places in call.places):
        return []
    # A cache of keys is joined to the first keys while it is empty; it has fewer axes.
    parts = [
        _unknown(tensor.shape) if places is None else places
        for tensor, places in zip(call.inputs, call.places, strict=True)
        if tensor.numel()
    ]
    joined = call.argument(1, "dim", 0) % len(call.shape)
    # Parts that are expanded along an axis are joined as one entry, or a batch would be copied.
    if _name(call.func) != "stack":  # along an axis that is there
        for axis in range(len(call.shape)):
            if axis != joined and all(part.stride(axis) == 0 for part in parts):
                parts = [part.narrow(axis, 0, 1) for part in parts]
    places = call.func(parts, *call.args[1:], **call.kwargs)
    return [places.expand(call.shape)]


def _sample(call: _Call) -> Sequence[Places]:
    """Give samples of a map the places of what says where they are taken, as the queries of deformable attention."""
    grid = call.places[1]
    if grid is None:
        return []
    return [_slim(grid).nanmean(-1)[:, None].expand(call.shape)]


def _write(call: _Call) -> Tensor:
    """Write the places of tokens where these are written."""
    assert call.places[0] is not None
    canvas = call.places[0].clone()
    *indices, value = call.args[1:]
    if isinstance(value, Tensor):
        places = next(
            place
            for tensor, place in zip(call.inputs, call.places, strict=True)
            if tensor is value
        )
        value = _unknown(value.shape) if places is None else places
    else:
        value = torch.nan
    filled = call.func(canvas, *_on_cpu(indices), value)
    return canvas if filled is None else filled


def _reduce(call: _Call) -> Sequence[Places]:
    places, reduced = call.places[0], call.argument(1, "dim")
    assert places is not None
    axes = (reduced,) if isinstance(reduced, int) else reduced
    # Also of sums and maxima, which have no place of their own: the mean keeps the order of tokens all the same.
    mean = _slim(places).nanmean(axes, keepdim=True)
    shape = list(places.shape)
    for axis in axes:
        shape[axis] = 1
    return [mean.expand(shape).reshape(call.shape)]


def _multiply(call: _Call) -> Sequence[Places]:
    """Keep the rows of the first operand: queries, or the queries that weigh values."""
    first, second = call.inputs[:2]
    assert call.places[0] is not None
    # Tokens that are mixed by weights of a layer lie nowhere.
    if _is_nowhere(call.places[0]) and first.ndim < second.ndim:
        return []
    return [_mean_of_channels(call.places[0], call.shape)]


def _attend(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [_mean_of_channels(call.places[0], call.shape)]


def _resample(call: _Call) -> Sequence[Places]:
    """Follow a convolution, pooling or interpolation of (B, C, H, W) or (B, C, T, H, W), whatever its kernel."""
    places, size = call.places[0], call.shape[2:]
    assert places is not None
    if places.isinf().any():
        return []
    is_video = len(size) == 3
    pixels = _slim(places).nanmean(1, keepdim=True)
    pixels = pixels.expand(-1, -1, *places.shape[2:])
    if any(new > old for new, old in zip(size, places.shape[2:], strict=True)):
        # No two rows or columns are to have the same places.
        mode = "trilinear" if is_video else "bilinear"
        pixels = F.interpolate(pixels, size, mode=mode, align_corners=True)
    elif size != places.shape[2:]:
        pool: Any = F.adaptive_avg_pool3d if is_video else F.adaptive_avg_pool2d
        # Pooling spreads the NaN of padding: sums and numbers of the pixels that are there are pooled apart.
        shares = pool((~pixels.isnan()).double(), size)
        pixels = pool(pixels.nan_to_num(), size) / shares
    return [pixels.expand(call.shape)]


def _embed(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [call.places[0][..., None].expand(call.shape)]


def _beside(call: _Call) -> Sequence[Places]:
    """Follow a function of elements, or of the channels of each token: to the first input that is made of the image."""
    shape = call.shape
    for tensor, places in zip(call.inputs, call.places, strict=True):
        if places is None or _is_nowhere(places):
            continue
        # Words that are added to all tokens alike, such as their mean, do not make words of them.
        is_spread = tensor.shape[:-1] != shape[:-1] and bool((_slim(places) < 0).any())
        if is_spread:
            continue
        if _broadcasts(tensor.shape, shape):
            return [places.expand(shape)]
        # A linear layer, or a norm with other channels: a token stays itself.
        if tensor.ndim > 1 and tensor.shape[:-1] == shape[:-1]:
            return [_mean_of_channels(places, shape)]
    return []


def _mean_of_channels(places: Tensor, shape: torch.Size) -> Places:
    """Return the places of tokens with other channels; None where tokens are what is on the last axis."""
    slim = _slim(places)
    if slim.shape[-1] > 1 and slim.shape[-2] == 1:
        return None
    return slim.nanmean(-1, keepdim=True).expand(shape)


def _of_tokens(places: Places) -> Places:
    """Return the places of the tokens of the first image and head, shape (N,), of (..., N, d)."""
    while places is not None and places.ndim > 2:
        places = places[0]
    return None if places is None else _slim(places).nanmean(-1).expand(len(places))


def _numbers(count: int) -> Tensor:
    # On the CPU, so that a GPU is neither filled nor waited for; in float64, which counts any image's pixels exactly.
    return torch.arange(count, dtype=torch.float64, device="cpu")


def _nowhere(shape: torch.Size) -> Tensor:
    return torch.tensor(torch.nan, dtype=torch.float64, device="cpu").expand(shape)


def _unknown(shape: torch.Size) -> Tensor:
    return torch.tensor(torch.inf, dtype=torch.float64, device="cpu").expand(shape)


def _is_nowhere(places: Tensor) -> bool:
    slim = _slim(places)
    return slim.numel() == 1 and bool(slim.isnan())


def _slim(places: Tensor) -> Tensor:
    """Return places with a single entry along axes of equal places, as far as they are stored once."""
    for axis, stride in enumerate(places.stride()):
        if stride == 0 and places.shape[axis] > 1:
            places = places.narrow(axis, 0, 1)
    return places


def _is_transpose(view: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is a view of another with the last two axes exchanged."""
    is_view = view.ndim == x.ndim and view.data_ptr() == x.data_ptr()
    exchanged = x.mT
    return (
        is_view
        and view.shape == exchanged.shape
        and view.stride() == exchanged.stride()
    )


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    sides = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(side in (1, size) for side, size in sides)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    tensors = []
    for value in values:
        members = value if isinstance(value, (tuple, list)) else (value,)
        tensors += [member for member in members if isinstance(member, Tensor)]
    return tensors


def _on_cpu(value: Any) -> Any:
    """Return arguments with their tensors on the CPU, where places are."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, (tuple, list)):
        return type(value)(_on_cpu(member) for member in value)
    if isinstance(value, dict):
        return {name: _on_cpu(member) for name, member in value.items()}
    return value


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "")


# Rules by the names of functions, which methods of tensors share.
_RULES: Mapping[str, Callable[[_Call], Sequence[Places]]] = {
    **dict.fromkeys(
        ("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"), _reshape
    ),
    **dict.fromkeys(("squeeze", "unsqueeze", "ravel"), _reshape),
    # Properties such as mT are read by __get__.
    **dict.fromkeys(("__get__", "__getitem__", "narrow", "select", "unbind"), _move),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "t"), _move),
    **dict.fromkeys(("movedim", "moveaxis", "adjoint", "rot90"), _move),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split"), _move),
    **dict.fromkeys(("gather", "index_select", "take_along_dim"), _move),
    **dict.fromkeys(("repeat", "tile", "repeat_interleave"), _move),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _move),
    **dict.fromkeys(("roll", "flip"), _turn),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), _join),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max"), _reduce),
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _multiply),
    **dict.fromkeys(_ATTENTION, _attend),
    "embedding": _embed,
    "grid_sample": _sample,
    "unfold": _cut_patches,
    "pad": _pad,
}
