"""Tracking of pixels through a forward, which shows the order of the tokens of each attention.

The number of tokens does not show their order: a masked autoencoder shuffles its tokens, Hiera orders them by mask
unit, and DETR can have as many object queries as there are cells. So each tensor of a forward gets a tensor of places
of the same shape. The place of an element is the row-major number of the pixel from which it was computed, the mean of
the numbers if there are several pixels, or NaN if it was computed from parameters only. Functions that move elements
move their places, convolutions average them, and a token keeps its place in attention and residual connections. Places
are computed from shapes and indices; the model itself runs only once. Words that a model gets beside images have the
places -1, -2, and so on.

A tensor without places is unknown: it comes from elsewhere, or from a function that is not tracked. Unknown places
never raise an objection. If such a tensor is concatenated with a tensor that has places, its elements get infinity.
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

# A wrong order gives a step of -1 pixel or less; rounding errors of places are far below half a pixel.
_LEAST_STEP = -0.5

_ATTENTION = (
    "flex_attention",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_FILLED = ("zeros", "ones", "full", "empty", "rand", "randn")
# The outputs of these functions do not depend on the image, even if a tensor argument gives their shape or device.
_CONSTANTS = (
    *("arange", "linspace"),
    *_FILLED,
    *(f"{name}_like" for name in _FILLED),
    *(f"new_{name}" for name in _FILLED),
)
# Parts of the names of functions that resample feature maps, (B, C, H, W) or (B, C, T, H, W).
_KERNELS = ("conv", "pool", "interpolate")
# Functions that write into their first argument, or into a copy of it.
_WRITES = (
    *("__setitem__", "copy_", "masked_scatter", "masked_scatter_"),
    *("scatter", "scatter_", "index_copy", "index_copy_", "index_put", "index_put_"),
)
_ADDITIONS = ("scatter_add", "scatter_add_", "index_add", "index_add_")


def objection_to_order(places: Places, tokens: Tokens, behind: int) -> str:
    """Return the reason why tokens are not in row-by-row order on a grid; "" if they are, or if it is unknown.

    Args:
        places: Places of the tokens, shape (N,), in the model's order; None if these are unknown.
        tokens: Grid on which the tokens are assumed to lie.
        behind: Number of tokens after the grid, which ``tokens`` counts as before it.
    """
    if places is None or len(places) != tokens.count:
        return ""
    first, end = tokens.prefix - behind, tokens.count - behind
    grid, beside = places[first:end], torch.cat([places[:first], places[end:]])
    on_image = grid[grid.isfinite()]  # without padding
    if grid.isnan().all():
        return "the tokens come from parameters, not from the image"
    # As in SAM's decoder, prompts of unknown origin and learnt tokens can together be as many as the cells of a map.
    if grid.isnan().any() and grid.isinf().any():
        return "some of the tokens come from parameters, not from the image"
    if bool((on_image < 0).any()):
        return "some of the tokens are words, not patches"
    if bool((on_image.diff() < _LEAST_STEP).any()):
        return "the tokens are not in the order of the image's rows"
    # One such token is allowed, because the mean of all patches can replace a class token.
    if (beside[beside.isfinite()] >= 0).sum() > 1:
        return "some of the tokens beside the grid are patches"
    return ""


def arrangement_of(places: Places) -> Arrangement | None:
    """Return the positions of words and patches; None if one kind is missing, or if the patches are not contiguous."""
    if places is None or not bool((places < 0).any()) or bool(places.isinf().any()):
        return None
    patches = (places >= 0).nonzero()[:, 0].tolist()
    # If there are other tokens between the patches, they are fewer than the indices from the first to the last one.
    if not patches or len(patches) <= patches[-1] - patches[0]:
        return None
    words = (places < 0).nonzero()[:, 0].tolist()
    specials = places.isnan().nonzero()[:, 0].tolist()
    return Arrangement(tuple(specials), tuple(words), tuple(patches))


def are_words(places: Places) -> bool:
    """Return whether all tokens are known to be words."""
    return places is not None and bool((places < 0).all())


class PlaceTracker(TorchFunctionMode):
    """Mode that tracks the pixels of images through torch functions.

    Attributes:
        queries, keys: Places of the queries and keys of the attention that torch is computing, shapes (N_query,) and
            (N_key,), for the first image and head; None if these are unknown.

    Args:
        inputs: Inputs of the model. Tensors (B, C, H, W) are images, and tensors with five axes videos.
        patches: Number of patches if the model gets patches, (B, patches, C), in place of an image.
    """

    def __init__(self, inputs: Iterable[Any], patches: int | None = None) -> None:
        super().__init__()
        self.queries: Places = None
        self.keys: Places = None
        # Tensors are weak keys of this table, so that none lives longer than in the model.
        self._places: Any = WeakTensorKeyDictionary()
        # For a product of queries and keys, _places has the places of the queries, and this table those of the keys,
        # shape (N_key,).
        self._keys: Any = WeakTensorKeyDictionary()
        tensors = _tensors(inputs)
        for image in tensors:
            if image.ndim == 4:
                pixels = _numbers(image[0, 0].numel())
                # Places are equal for all images and channels, so they are expanded: _slim recognises the stride 0.
                self._places[image] = pixels.view(image.shape[2:]).expand(image.shape)
            elif image.ndim == 5:
                pixels = image[:1].narrow(channel_axis(image), 0, 1)
                self._places[image] = (
                    _numbers(pixels.numel()).view(pixels.shape).expand(image.shape)
                )
            elif image.ndim == 3 and image.shape[1] == patches:
                places = _numbers(image.shape[1])[:, None]
                self._places[image] = places.expand(image.shape)
        # If there is no image, integers and vectors can represent one, for example as codes of its patches.
        if len(self._places):
            self._follow_words(tensors)

    def _follow_words(self, inputs: Sequence[Tensor]) -> None:
        """Assign places to words, (B, N), and to vectors of words, (B, N, C)."""
        for tensor in inputs:
            if tensor in self._places:
                continue
            # Integers that are only 0 and 1 are a mask of words.
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

    # The following methods are not compiled, because torch.compile would also compile the functions on places. They
    # suppress exceptions, because tracking must never end the user's forward.

    @torch.compiler.disable
    def _look(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Find the places of queries and keys before torch computes attention."""
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
        """Track a function that has run."""
        with unseen(), suppress(Exception):
            inputs = _tensors((*args, *kwargs.values()))
            if not is_transformed(inputs):
                places = [self._of(tensor) for tensor in inputs]
                outputs = _tensors((output,))
                self._follow(_Call(func, args, kwargs, inputs, places, outputs))

    def _sides(
        self, func: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[Places, Places]:
        """Return the places of queries and keys if the function computes attention."""
        name = _name(func)
        # Logits have the places of their queries; those of the keys were stored when the product was computed.
        if name == "softmax":
            return _of_tokens(self._of(inputs[0])), self._keys.get(inputs[0])
        if name not in _ATTENTION and not is_kernel(func):
            return None, None
        queries, keys = (self._of(tokens) for tokens in inputs[:2])
        if is_kernel(func) and "scaled_dot_product" not in name:
            # Tensors are (B, N, heads, d). In packed tensors (N, heads, d), the tokens of each image are unknown.
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
        """Assign places to the outputs of a function."""
        name = _name(call.func)
        # A list holds constants, such as sizes of maps; an array of NumPy may hold the image itself.
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
            # A mask that is added to logits does not change the places of queries.
            call = replace(
                call,
                inputs=[*compress(call.inputs, logits)],
                places=[*compress(call.places, logits)],
            )
        for output in call.outputs:
            self._follow_keys(name, call, output)
            # An in-place function returns its input, whose places are no longer valid.
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
        # Overwriting parts of a map, as MViT does to add positional biases, moves no tokens. But an empty tensor may be
        # filled with tokens in any order.
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
        """Return the tensors with places that share memory with this one, as views do."""
        memory = target.untyped_storage().data_ptr()
        return [x for x in self._places if x.untyped_storage().data_ptr() == memory]

    def _exchange_sides(self, logits: Tensor, transpose: Tensor) -> None:
        """Follow a transpose of logits, as Grounding DINO uses them in both directions between image and text."""
        queries = _of_tokens(self._of(logits))
        self._places[transpose] = self._keys[logits][:, None].expand(transpose.shape)
        if queries is not None:
            self._keys[transpose] = queries

    def _follow_keys(self, name: str, call: "_Call", output: Tensor) -> None:
        """Store the places of a product's keys, also after scaling, masking and reshaping."""
        if name in _PRODUCTS and len(call.inputs) == 2:
            # The second operand is (..., d, N_key), except in einsum, where it may be (..., N_key, d).
            operand = call.places[1]
            if operand is not None and name != "einsum":
                operand = operand.mT
            keys = _of_tokens(operand)
            if keys is not None and len(keys) == output.shape[-1]:
                self._keys[output] = keys
            return
        for source in call.inputs:
            keys = self._keys.get(source)
            # Scaling, masking and merging of leading axes do not move queries and keys.
            if keys is not None and source.shape[-2:] == output.shape[-2:]:
                self._keys[output] = keys


@dataclass(frozen=True)
class _Call:
    """A call of a torch function.

    Args:
        func: Function.
        args, kwargs: Arguments of the function.
        inputs: Tensors among the arguments.
        places: Places of the inputs.
        outputs: Tensors that the function returned.
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
    # Images and channels with equal places are reduced to one, as the reshaping would copy them.
    for axis in (0, -1):
        if places.stride(axis) == 0 and places.shape[axis] == shape[axis]:
            places, shape[axis] = places.narrow(axis, 0, 1), 1
    return [places.reshape(shape).expand(call.shape)]


def _move(call: _Call) -> Sequence[Places]:
    arguments, options = _on_cpu(call.args[1:]), _on_cpu(call.kwargs)
    moved = call.func(call.places[0], *arguments, **options)
    return list(moved) if isinstance(moved, (tuple, list)) else [moved]


def _turn(call: _Call) -> Sequence[Places]:
    """Track roll and flip, which keep axes, so that equal places along an axis need not be copied."""
    assert call.places[0] is not None
    turned = call.func(_slim(call.places[0]), *call.args[1:], **call.kwargs)
    return [turned.expand(call.shape)]


def _cut_patches(call: _Call) -> Sequence[Places]:
    """Follow F.unfold, which pads with zeros; Tensor.unfold has the same name."""
    if call.func is not F.unfold:
        return _move(call)
    assert call.places[0] is not None
    # Pixels are numbered from 1 here, because F.unfold pads with 0.
    patches = F.unfold(call.places[0] + 1, *call.args[1:], **call.kwargs)
    return [patches.masked_fill(patches == 0, torch.nan) - 1]


def _pad(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [F.pad(call.places[0], call.argument(1, "pad"), value=torch.nan)]


def _join(call: _Call) -> Sequence[Places]:
    if all(places is None for places in call.places):
        return []
    # Empty parts are left out: an empty cache of keys may have fewer axes.
    parts = [
        _unknown(tensor.shape) if places is None else places
        for tensor, places in zip(call.inputs, call.places, strict=True)
        if tensor.numel()
    ]
    joined = call.argument(1, "dim", 0) % len(call.shape)
    # Expanded axes are reduced to one entry, because concatenation would copy the whole batch.
    if _name(call.func) != "stack":  # stack joins along a new axis
        for axis in range(len(call.shape)):
            if axis != joined and all(part.stride(axis) == 0 for part in parts):
                parts = [part.narrow(axis, 0, 1) for part in parts]
    places = call.func(parts, *call.args[1:], **call.kwargs)
    return [places.expand(call.shape)]


def _sample(call: _Call) -> Sequence[Places]:
    """Assign to samples the places of the queries that determine where deformable attention takes them."""
    grid = call.places[1]
    if grid is None:
        return []
    return [_slim(grid).nanmean(-1)[:, None].expand(call.shape)]


def _write(call: _Call) -> Tensor:
    """Write the places of tokens to the positions to which the tokens are written."""
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
    # The mean of places is used for sums and maxima, too, as it keeps the order of tokens.
    mean = _slim(places).nanmean(axes, keepdim=True)
    shape = list(places.shape)
    for axis in axes:
        shape[axis] = 1
    return [mean.expand(shape).reshape(call.shape)]


def _multiply(call: _Call) -> Sequence[Places]:
    """Keep the rows of the first operand, which are queries in both products of attention."""
    first, second = call.inputs[:2]
    assert call.places[0] is not None
    # If a layer's weights mix tokens, the results have no known places.
    if _is_nowhere(call.places[0]) and first.ndim < second.ndim:
        return []
    return [_mean_of_channels(call.places[0], call.shape)]


def _attend(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [_mean_of_channels(call.places[0], call.shape)]


def _resample(call: _Call) -> Sequence[Places]:
    """Track a convolution, pooling or interpolation of (B, C, H, W) or (B, C, T, H, W), with any kernel."""
    places, size = call.places[0], call.shape[2:]
    assert places is not None
    if places.isinf().any():
        return []
    is_video = len(size) == 3
    pixels = _slim(places).nanmean(1, keepdim=True)
    pixels = pixels.expand(-1, -1, *places.shape[2:])
    if any(new > old for new, old in zip(size, places.shape[2:], strict=True)):
        # Linear interpolation gives all rows and columns different places.
        mode = "trilinear" if is_video else "bilinear"
        pixels = F.interpolate(pixels, size, mode=mode, align_corners=True)
    elif size != places.shape[2:]:
        pool: Any = F.adaptive_avg_pool3d if is_video else F.adaptive_avg_pool2d
        # Pooling would spread the NaN of padding, so sums and numbers of valid pixels are pooled separately.
        shares = pool((~pixels.isnan()).double(), size)
        pixels = pool(pixels.nan_to_num(), size) / shares
    return [pixels.expand(call.shape)]


def _embed(call: _Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [call.places[0][..., None].expand(call.shape)]


def _beside(call: _Call) -> Sequence[Places]:
    """Track a function of elements or of each token's channels: use the places of the first input from the image."""
    shape = call.shape
    for tensor, places in zip(call.inputs, call.places, strict=True):
        if places is None or _is_nowhere(places):
            continue
        # Words that are broadcast over all tokens, such as the mean of words, do not turn the tokens into words.
        is_spread = tensor.shape[:-1] != shape[:-1] and bool((_slim(places) < 0).any())
        if is_spread:
            continue
        if _broadcasts(tensor.shape, shape):
            return [places.expand(shape)]
        # A linear layer, or a norm with other channels, does not move tokens.
        if tensor.ndim > 1 and tensor.shape[:-1] == shape[:-1]:
            return [_mean_of_channels(places, shape)]
    return []


def _mean_of_channels(places: Tensor, shape: torch.Size) -> Places:
    """Return the places of tokens with other channels; None if tokens are along the last axis."""
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
    # Numbers are on the CPU, to use no memory of a GPU and not to wait for it, and in float64, which is exact for them.
    return torch.arange(count, dtype=torch.float64, device="cpu")


def _nowhere(shape: torch.Size) -> Tensor:
    return torch.tensor(torch.nan, dtype=torch.float64, device="cpu").expand(shape)


def _unknown(shape: torch.Size) -> Tensor:
    return torch.tensor(torch.inf, dtype=torch.float64, device="cpu").expand(shape)


def _is_nowhere(places: Tensor) -> bool:
    slim = _slim(places)
    return slim.numel() == 1 and bool(slim.isnan())


def _slim(places: Tensor) -> Tensor:
    """Return places with expanded axes (stride 0) reduced to a single entry."""
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


# Rules by name, because functions and methods of tensors have the same names.
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
