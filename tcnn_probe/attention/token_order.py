"""Follows the pixels of images through a forward, to see in which order the tokens of each attention lie.

Numbers of tokens do not show their order: a masked autoencoder shuffles its tokens, Hiera orders them by mask unit, and
DETR can have as many object queries as there are cells. So the tensors of a forward get places, of the same shape: the
numbers of the pixels, row by row, that their elements are made of, on average; NaN if these are made of parameters
alone. A function that moves elements moves their places; a convolution takes their mean; a token keeps its own place
in attention and beside a residual. The model computes what it would compute otherwise, and once.

A tensor without places is unknown: it came from elsewhere, or from a function that is not followed. There is no
objection to what is unknown.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.attention.layout import Tokens
from tcnn_probe.hooks.modes import is_transformed, unseen

__all__ = ["PlaceTracker", "objection_to_order"]

# By name, which a method of tensors shares with the function of torch.
_RESHAPES = frozenset(
    "view reshape view_as reshape_as flatten unflatten squeeze unsqueeze ravel".split()
)
# Getters of properties such as mT have the name __get__.
_MOVES = frozenset(
    "__get__ __getitem__ permute transpose swapaxes swapdims movedim moveaxis t adjoint chunk split tensor_split "
    "split_with_sizes unbind gather index_select take_along_dim roll flip rot90 unfold narrow select repeat tile "
    "repeat_interleave pixel_shuffle pixel_unshuffle".split()
)
_JOINS = frozenset("cat concat concatenate stack".split())
_SCATTERS = frozenset(
    "__setitem__ scatter scatter_ scatter_add scatter_add_ index_copy index_copy_ index_put index_put_ index_add "
    "index_add_ masked_scatter masked_scatter_".split()
)
_PRODUCTS = frozenset("matmul __matmul__ bmm".split())
_REDUCTIONS = frozenset("mean sum amax amin max".split())
_ATTENTION = frozenset(
    "scaled_dot_product_attention multi_head_attention_forward".split()
)

# Places are exact in float64; a token half a pixel before the one before it is no matter of rounding.
_LEAST_STEP = 0.5


def objection_to_order(places: Tensor | None, tokens: Tokens, behind: int = 0) -> str:
    """Say why tokens do not lie on a grid row by row; "" if they do, or if it is unknown.

    Args:
        places: Places of the tokens, shape (N,), as they come; None if these are unknown.
        tokens: The grid on which they are taken to lie.
        behind: Number of tokens after the grid, which ``tokens`` counts as before it.
    """
    if places is None or len(places) != tokens.count:
        return ""
    grid = places[tokens.prefix - behind : tokens.count - behind]
    on_image = grid[~grid.isnan()]
    if not len(on_image):
        return "the tokens are made of parameters, not of the image"
    if bool((on_image.diff() < -_LEAST_STEP).any()):
        return "the tokens are not in the order of the image's rows"
    return ""


class PlaceTracker(TorchFunctionMode):
    """Mode that follows the pixels of images, while entered.

    Attributes:
        queries, keys: Places of the queries and keys of the attention that torch is being asked for, shapes (N_query,)
            and (N_key,), of the first image and head; None if these are unknown.

    Args:
        inputs: Inputs of the model; images are (B, C, H, W).
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        super().__init__()
        self.queries: Tensor | None = None
        self.keys: Tensor | None = None
        # Of weak keys: a tensor lives as long as the model keeps it.
        self._places: Any = WeakTensorKeyDictionary()
        # Places of the keys, shape (N_key,), of products of queries and keys.
        self._columns: Any = WeakTensorKeyDictionary()
        for image in inputs:
            if isinstance(image, Tensor) and image.ndim == 4:
                rows, columns = image.shape[2:]
                pixels = torch.arange(rows * columns, dtype=torch.float64, device="cpu")
                self._places[image] = pixels.view(1, 1, rows, columns).expand(
                    image.shape
                )

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
        name = getattr(func, "__name__", "")
        with unseen():
            inputs = _tensors([*args, *kwargs.values()])
            self._look_at(name, inputs)
        output = func(*args, **kwargs)
        if isinstance(output, (Tensor, tuple, list)) or name in _SCATTERS:
            with unseen():
                if not is_transformed(inputs):
                    self._follow(name, func, output, inputs, args, kwargs)
        return output

    def _look_at(self, name: str, inputs: Sequence[Tensor]) -> None:
        """Read off the places of queries and keys, if this is attention."""
        self.queries = self.keys = None
        if name == "softmax" and inputs:
            self.queries = _first_tokens(self._of(inputs[0]))
            self.keys = self._columns.get(inputs[0])
        elif name == "scaled_dot_product_attention":
            self.queries, self.keys = (
                _first_tokens(self._of(tokens)) for tokens in inputs[:2]
            )
        elif name == "multi_head_attention_forward":  # (N, B, d) or (N, d)
            places = [self._of(tokens) for tokens in inputs[:2]]
            self.queries, self.keys = (
                None if x is None else x.flatten(1, -1)[:, :1].mean(-1) for x in places
            )

    def _follow(
        self,
        name: str,
        func: Callable[..., Any],
        output: Any,
        inputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Give the output of a function its places."""
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        if name in _SCATTERS and inputs:
            # Parts of a map are overwritten in place, as by MViT's positional biases; a canvas is filled with tokens.
            places = self._of(inputs[0])
            if places is None or _is_nowhere(places):
                self._forget(inputs[0])
            return
        try:
            places = self._places_of(name, func, outputs, inputs, args, kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError):
            # A function takes arguments that places cannot stand for.
            places = []
        for tensor, place in zip(
            outputs, [*places, *[None] * len(outputs)], strict=False
        ):
            if not isinstance(tensor, Tensor):
                continue
            self._forget(tensor)
            if place is not None and place.shape == tensor.shape:
                self._places[tensor] = place
            for source in inputs:
                columns = self._columns.get(source)
                if columns is not None and source.shape[-2:] == tensor.shape[-2:]:
                    self._columns[tensor] = columns
        if name in _PRODUCTS or name == "einsum":
            keys = self._of(inputs[1])
            if keys is not None and name != "einsum":
                keys = keys.mT
            if (
                keys is not None
                and keys.ndim > 2
                and keys.shape[-2] == outputs[0].shape[-1]
            ):
                self._columns[outputs[0]] = _first_tokens(keys)

    def _places_of(
        self,
        name: str,
        func: Callable[..., Any],
        outputs: Sequence[Any],
        inputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Sequence[Tensor | None]:
        known = [(tensor, self._of(tensor)) for tensor in inputs]
        if not known or not isinstance(outputs[0], Tensor):
            return []
        shape = outputs[0].shape
        if all(places is not None and _is_nowhere(places) for _, places in known):
            nowhere = torch.tensor(torch.nan, dtype=torch.float64)
            return [nowhere.expand(x.shape) for x in outputs if isinstance(x, Tensor)]
        places = known[0][1]
        if name in _JOINS:
            return [_joined(func, [p for _, p in known], kwargs, args)]
        if name in (_RESHAPES | _MOVES | _REDUCTIONS | _PRODUCTS | _ATTENTION):
            if places is None:
                return []
            if name in _RESHAPES:
                return [_reshaped(places, shape)]
            if name in _REDUCTIONS:
                axes = args[1] if len(args) > 1 else kwargs["dim"]
                return [places.nanmean(axes).reshape(shape)]
            if name in _PRODUCTS or name in _ATTENTION:
                # Tokens mixed by weights that no query has a part in lie nowhere.
                if (
                    name in _PRODUCTS
                    and _is_nowhere(places)
                    and inputs[0] not in self._columns
                ):
                    return []
                mean = _slim(places).nanmean(-1, keepdim=True)
                return [mean.expand(shape)]
            rest, options = _on_cpu(args[1:]), _on_cpu(kwargs)
            if func is F.unfold:  # which pads with zeros
                moved = func(places + 1, *rest, **options)
                return [moved.masked_fill(moved == 0, torch.nan) - 1]
            moved = func(places, *rest, **options)
            return list(moved) if isinstance(moved, (tuple, list)) else [moved]
        if name == "pad" and places is not None:
            pads = args[1] if len(args) > 1 else kwargs["pad"]
            return [F.pad(places, pads, value=torch.nan)]
        if len(shape) == 4 and any(
            word in name for word in ("conv", "pool", "interpolate")
        ):
            return [] if places is None else [_resampled(places, shape)]
        return [_beside(known, shape)]

    def _of(self, tensor: Tensor) -> Tensor | None:
        if isinstance(tensor, nn.Parameter):
            return torch.tensor(torch.nan, dtype=torch.float64).expand(tensor.shape)
        return self._places.get(tensor)

    def _forget(self, tensor: Tensor) -> None:
        self._places.pop(tensor, None)
        self._columns.pop(tensor, None)


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


def _slim(places: Tensor) -> Tensor:
    """Return places with one entry along each axis that they do not vary along."""
    for axis, stride in enumerate(places.stride()):
        if stride == 0 and places.shape[axis] > 1:
            places = places.narrow(axis, 0, 1)
    return places


def _is_nowhere(places: Tensor) -> bool:
    slim = _slim(places)
    return slim.numel() == 1 and bool(slim.isnan())


def _first_tokens(places: Tensor | None) -> Tensor | None:
    """Return the places of the tokens of the first image and head, shape (N,), of (..., N, d)."""
    if places is None:
        return None
    while places.ndim > 2:
        places = places[0]
    return _slim(places).nanmean(-1).expand(places.shape[0])


def _reshaped(places: Tensor, shape: torch.Size) -> Tensor:
    if places.shape[-1:] == shape[-1:] and places.stride(-1) == 0:
        return places[..., :1].reshape(*shape[:-1], 1).expand(shape)
    return places.reshape(shape)


def _joined(
    func: Callable[..., Any],
    parts: Sequence[Tensor | None],
    kwargs: dict[str, Any],
    args: tuple[Any, ...],
) -> Tensor | None:
    known = [places for places in parts if places is not None]
    if len(known) < len(parts):
        return None
    return func(known, *args[1:], **kwargs)


def _resampled(places: Tensor, shape: torch.Size) -> Tensor:
    """Return the places (B, C, H, W) of a map of another size."""
    mean = _slim(places).nanmean(1, keepdim=True)
    size = (shape[2], shape[3])
    if places.shape[2:] != shape[2:]:
        if size[0] > places.shape[2] or size[1] > places.shape[3]:
            mean = F.interpolate(
                mean.expand(-1, -1, *places.shape[2:]),
                size,
                mode="bilinear",
                align_corners=True,
            )
        else:
            mean = mean.expand(-1, -1, *places.shape[2:])
            shares = F.adaptive_avg_pool2d((~mean.isnan()).double(), size)
            mean = F.adaptive_avg_pool2d(mean.nan_to_num(), size) / shares
    return mean.expand(shape)


def _beside(
    known: Sequence[tuple[Tensor, Tensor | None]], shape: torch.Size
) -> Tensor | None:
    """Return the places of what a function makes of tensors that lie beside each other."""
    unknown = False
    nowhere = None
    for tensor, places in known:
        if places is None:
            unknown |= tensor.ndim > 1
            continue
        fits = None
        if len(shape) >= tensor.ndim and all(
            size in (1, n)
            for size, n in zip(
                tensor.shape[::-1], shape[::-1][: tensor.ndim], strict=True
            )
        ):
            fits = places.expand(shape)
        elif tensor.shape[:-1] == shape[:-1] and tensor.ndim > 1:
            fits = _slim(places).nanmean(-1, keepdim=True).expand(shape)
        if fits is None:
            continue
        if not _is_nowhere(places):
            return fits
        nowhere = fits
    return None if unknown else nowhere
