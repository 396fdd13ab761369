"""Rules by which torch functions move the places of pixels,
see :mod:`tcnn_probe.attention.token_order`.

A rule computes the places of a function's outputs from those of its inputs: it moves, averages or
keeps them. Equal places of images and channels are expanded views with a stride of 0, which rules
do not copy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "ATTENTION_FUNCTIONS",
    "Call",
    "Places",
    "agreed",
    "are_channels",
    "contracted",
    "contracted_last",
    "function_name",
    "is_transpose",
    "nowhere",
    "pixel_numbers",
    "places_after",
    "places_of_tokens",
    "tensors_in",
    "unexpanded",
    "written_places",
]

Places = Tensor | None

ATTENTION_FUNCTIONS = (
    "flex_attention",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
# Parts of the names of functions that resample feature maps, (B, C, H, W) or (B, C, T, H, W).
_KERNELS = ("conv", "pool", "interpolate")


@dataclass(frozen=True)
class Call:
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


def places_after(name: str, call: Call) -> Sequence[Places]:
    """Return the places of a function's outputs, as far as they are known."""
    of_parameters = all(x is not None and _is_nowhere(x) for x in call.places)
    if of_parameters and call.inputs:
        return [nowhere(x.shape) for x in call.outputs]
    is_map = call.outputs[0].ndim in (4, 5)
    is_resampled = is_map and any(word in name for word in _KERNELS)
    rule = _resample if is_resampled else _RULES.get(name, _beside)
    if rule not in (_join, _beside, _sample) and call.places[0] is None:
        return []
    return rule(call)


def _reshape(call: Call) -> Sequence[Places]:
    places, shape = call.places[0], list(call.shape)
    assert places is not None
    # Images and channels with equal places are reduced to one, as the reshaping would copy them.
    for axis in (0, -1):
        if places.stride(axis) == 0 and places.shape[axis] == shape[axis]:
            places, shape[axis] = places.narrow(axis, 0, 1), 1
    return [places.reshape(shape).expand(call.shape)]


def _move(call: Call) -> Sequence[Places]:
    assert call.places[0] is not None
    # Moved, these places would no longer be expanded, and look like some of an image.
    if _is_nowhere(call.places[0]):
        return [nowhere(x.shape) for x in call.outputs]
    arguments, options = _on_cpu(call.args[1:]), _on_cpu(call.kwargs)
    moved = call.func(call.places[0], *arguments, **options)
    return list(moved) if isinstance(moved, (tuple, list)) else [moved]


def _turn(call: Call) -> Sequence[Places]:
    """Track roll and flip, which keep axes,
    so that equal places along an axis need not be copied.
    """
    assert call.places[0] is not None
    turned = call.func(unexpanded(call.places[0]), *call.args[1:], **call.kwargs)
    return [turned.expand(call.shape)]


def _cut_patches(call: Call) -> Sequence[Places]:
    """Follow F.unfold, which pads with zeros; Tensor.unfold has the same name."""
    if call.func is not F.unfold:
        return _move(call)
    assert call.places[0] is not None
    # Pixels are numbered from 1 here, because F.unfold pads with 0.
    patches = F.unfold(call.places[0] + 1, *call.args[1:], **call.kwargs)
    return [patches.masked_fill(patches == 0, torch.nan) - 1]


def _pad(call: Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [F.pad(call.places[0], call.argument(1, "pad"), value=torch.nan)]


def _join(call: Call) -> Sequence[Places]:
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
    if function_name(call.func) != "stack":  # stack joins along a new axis
        for axis in range(len(call.shape)):
            if axis != joined and all(part.stride(axis) == 0 for part in parts):
                parts = [part.narrow(axis, 0, 1) for part in parts]
    places = call.func(parts, *call.args[1:], **call.kwargs)
    return [places.expand(call.shape)]


def _sample(call: Call) -> Sequence[Places]:
    """Assign to samples the places of the queries
    that determine where deformable attention takes them.
    """
    grid = call.places[1]
    if grid is None:
        return []
    return [unexpanded(grid).nanmean(-1)[:, None].expand(call.shape)]


def written_places(call: Call) -> Tensor:
    """Write the places of tokens to the positions to which the tokens are written."""
    assert call.places[0] is not None
    canvas = call.places[0].clone()
    *indices, value = call.args[1:]
    if isinstance(value, Tensor):
        places = next(
            place for tensor, place in zip(call.inputs, call.places, strict=True) if tensor is value
        )
        value = _unknown(value.shape) if places is None else places
    else:
        value = torch.nan
    filled = call.func(canvas, *_on_cpu(indices), value)
    return canvas if filled is None else filled


def _reduce(call: Call) -> Sequence[Places]:
    places, reduced = call.places[0], call.argument(1, "dim")
    assert places is not None
    axes = (reduced,) if isinstance(reduced, int) else reduced
    # The mean of places is used for sums and maxima, too, as it keeps the order of tokens.
    mean = unexpanded(places).nanmean(axes, keepdim=True)
    shape = list(places.shape)
    for axis in axes:
        shape[axis] = 1
    return [mean.expand(shape).reshape(call.shape)]


def _multiply(call: Call) -> Sequence[Places]:
    """Keep the rows of the first operand, which are queries in both products of attention."""
    first, second = call.inputs[:2]
    assert call.places[0] is not None
    # If a layer's weights mix tokens, the results have no known places.
    if _is_nowhere(call.places[0]) and first.ndim < second.ndim:
        return []
    return [_mean_of_channels(call.places[0], call.shape)]


def agreed(name: str, places: Tensor, call: Call) -> Tensor:
    """Return the numbers of rows after a function of elements;
    infinity where it mixes rows, as mixup does.
    """
    if name in _RULES or len(call.inputs) < 2:
        return places
    for tensor, numbers in zip(call.inputs, call.places, strict=True):
        # What is broadcast, such as a mean over the batch, leaves each row its image. Learnt tokens
        # have no row.
        if numbers is None or tensor.shape != places.shape:
            continue
        differ = (unexpanded(places) - unexpanded(numbers)).abs() > 1e-9
        if bool(differ.any()):
            places = places.masked_fill(differ, torch.inf)
    return places


def contracted(call: Call) -> Places:
    """Return the numbers of rows after einsum:
    those on which all operands with known rows agree; None if unknown.
    """
    equation = call.args[0]
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    operands, result = equation.replace(" ", "").split("->")
    rows: Places = None
    for labels, places in zip(operands.split(","), call.places, strict=True):
        if places is None:
            return None
        if _is_nowhere(places):
            continue
        slim = unexpanded(places)
        # The mean of the numbers of several rows is the number of none.
        lost = [axis for axis, label in enumerate(labels) if label not in result]
        slim = slim.nanmean(lost, keepdim=True) if lost else slim
        kept = [labels.index(label) for label in result if label in labels]
        slim = slim.permute(*kept, *lost).reshape([slim.shape[axis] for axis in kept])
        slim = slim[tuple(slice(None) if label in labels else None for label in result)]
        if rows is None:
            rows = slim
            continue
        # Learnt tokens, such as a class token among the queries, have no row of their own.
        differ = (rows - slim).abs() > 1e-9
        rows = torch.where(rows.isnan(), slim, rows).masked_fill(differ, torch.inf)
    return rows


def _attend(call: Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [_mean_of_channels(call.places[0], call.shape)]


def _resample(call: Call) -> Sequence[Places]:
    """Track a convolution, pooling or interpolation
    of (B, C, H, W) or (B, C, T, H, W), with any kernel.
    """
    places, size = call.places[0], call.shape[2:]
    assert places is not None
    if places.isinf().any():
        return []
    is_video = len(size) == 3
    pixels = unexpanded(places).nanmean(1, keepdim=True)
    pixels = pixels.expand(-1, -1, *places.shape[2:])
    if any(new > old for new, old in zip(size, places.shape[2:], strict=True)):
        # Linear interpolation gives all rows and columns different places.
        mode = "trilinear" if is_video else "bilinear"
        pixels = F.interpolate(pixels, size, mode=mode, align_corners=True)
    elif size != places.shape[2:]:
        pool: Any = F.adaptive_avg_pool3d if is_video else F.adaptive_avg_pool2d
        # Pooling would spread the NaN of padding, so sums and numbers of valid pixels are pooled
        # separately.
        shares = pool((~pixels.isnan()).double(), size)
        pixels = pool(pixels.nan_to_num(), size) / shares
    return [pixels.expand(call.shape)]


def _embed(call: Call) -> Sequence[Places]:
    assert call.places[0] is not None
    return [call.places[0][..., None].expand(call.shape)]


def _beside(call: Call) -> Sequence[Places]:
    """Track a function of elements or of each token's channels:
    use the places of the first input from the image.
    """
    shape = call.shape
    for tensor, places in zip(call.inputs, call.places, strict=True):
        if places is None or _is_nowhere(places):
            continue
        # Words that are broadcast over all tokens, such as the mean of words, do not turn the
        # tokens into words.
        is_spread = tensor.shape[:-1] != shape[:-1] and bool((unexpanded(places) < 0).any())
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
    slim = unexpanded(places)
    if slim.shape[-1] > 1 and slim.shape[-2] == 1:
        return None
    return slim.nanmean(-1, keepdim=True).expand(shape)


def places_of_tokens(places: Places) -> Places:
    """Return the places of the tokens of the first image and head, shape (N,), of (..., N, d)."""
    while places is not None and places.ndim > 2:
        places = places[0]
    return None if places is None else unexpanded(places).nanmean(-1).expand(len(places))


def contracted_last(call: Call) -> Places:
    """Return the places of a product's first operand, with the axis that the product sums last."""
    places, equation = call.places[0], call.args[0]
    if function_name(call.func) != "einsum":
        return places
    if places is None or not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    operands, result = equation.replace(" ", "").split("->")
    first = operands.split(",")[0]
    summed = [axis for axis, label in enumerate(first) if label not in result]
    return places.movedim(summed, [*range(-len(summed), 0)])


def are_channels(places: Places) -> bool:
    """Return whether the vectors (..., n, d) of the first image and head are channels, each of them
    over all tokens.
    """
    while places is not None and places.ndim > 2:
        places = places[0]
    if places is None or len(places) < 2:
        return False
    slim = unexpanded(places).nan_to_num(-1)
    return bool((slim == slim[:1]).all() and (slim != slim[:, :1]).any())


def pixel_numbers(count: int) -> Tensor:
    """Return the numbers of ``count`` pixels, shape (count,)."""
    # Numbers are on the CPU, to use no memory of a GPU and not to wait for it, and in float64,
    # which is exact for them.
    return torch.arange(count, dtype=torch.float64, device="cpu")


def nowhere(shape: torch.Size) -> Tensor:
    """Return the places of a tensor that does not depend on the image."""
    return torch.tensor(torch.nan, dtype=torch.float64, device="cpu").expand(shape)


def _unknown(shape: torch.Size) -> Tensor:
    return torch.tensor(torch.inf, dtype=torch.float64, device="cpu").expand(shape)


def _is_nowhere(places: Tensor) -> bool:
    slim = unexpanded(places)
    return slim.numel() == 1 and bool(slim.isnan())


def unexpanded(places: Tensor) -> Tensor:
    """Return places with expanded axes (stride 0) reduced to a single entry."""
    for axis, stride in enumerate(places.stride()):
        if stride == 0 and places.shape[axis] > 1:
            places = places.narrow(axis, 0, 1)
    return places


def is_transpose(view: Tensor, x: Tensor) -> bool:
    """Return whether a tensor is a view of another with the last two axes exchanged."""
    is_view = view.ndim == x.ndim and view.data_ptr() == x.data_ptr()
    exchanged = x.mT
    return is_view and view.shape == exchanged.shape and view.stride() == exchanged.stride()


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    sides = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(side in (1, size) for side, size in sides)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in tuples and lists among them."""
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


def function_name(func: Callable[..., Any]) -> str:
    """Return the name of a function; "" if it has none."""
    return getattr(func, "__name__", "")


# Rules by name, because functions and methods of tensors have the same names.
_RULES: Mapping[str, Callable[[Call], Sequence[Places]]] = {
    **dict.fromkeys(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten"), _reshape),
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
    **dict.fromkeys(ATTENTION_FUNCTIONS, _attend),
    "embedding": _embed,
    "grid_sample": _sample,
    "unfold": _cut_patches,
    "pad": _pad,
}
