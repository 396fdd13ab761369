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
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.attention.layout import Arrangement, Tokens
from tcnn_probe.attention.place_rules import (
    ATTENTION_FUNCTIONS,
    Call,
    Places,
    function_name,
    is_transpose,
    nowhere,
    pixel_numbers,
    places_after,
    places_of_tokens,
    tensors_in,
    unexpanded,
    written_places,
)
from tcnn_probe.hooks.kernel_calls import is_kernel
from tcnn_probe.hooks.modes import is_transformed, never_compiled_alone, unseen
from tcnn_probe.images import channel_axis

__all__ = ["PlaceTracker", "are_words", "arrangement_of", "objection_to_order"]

# A wrong order gives a step of -1 pixel or less; rounding errors of places are far below half a pixel.
_LEAST_STEP = -0.5

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_FILLED = ("zeros", "ones", "full", "empty", "rand", "randn")
# The outputs of these functions do not depend on the image, even if a tensor argument gives their shape or device.
_CONSTANTS = (
    *("arange", "linspace"),
    *_FILLED,
    *(f"{name}_like" for name in _FILLED),
    *(f"new_{name}" for name in _FILLED),
)
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
        tensors = tensors_in(inputs)
        for image in tensors:
            if image.ndim == 4:
                pixels = pixel_numbers(image[0, 0].numel())
                # All images and channels have equal places, so these are expanded; unexpanded() finds strides of 0.
                self._places[image] = pixels.view(image.shape[2:]).expand(image.shape)
            elif image.ndim == 5:
                pixels = image[:1].narrow(channel_axis(image), 0, 1)
                self._places[image] = (
                    pixel_numbers(pixels.numel()).view(pixels.shape).expand(image.shape)
                )
            elif image.ndim == 3 and image.shape[1] == patches:
                places = pixel_numbers(image.shape[1])[:, None]
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
                self._places[tensor] = (-1 - pixel_numbers(tensor.shape[1])).expand(
                    tensor.shape
                )
            elif tensor.ndim == 3 and tensor.is_floating_point():
                places = -1 - pixel_numbers(tensor.shape[1])
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
            inputs = tensors_in((*args, *kwargs.values()))
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
            inputs = tensors_in((*args, *kwargs.values()))
            if not is_transformed(inputs):
                places = [self._of(tensor) for tensor in inputs]
                outputs = tensors_in((output,))
                self._follow(Call(func, args, kwargs, inputs, places, outputs))

    def _sides(
        self, func: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> tuple[Places, Places]:
        """Return the places of queries and keys if the function computes attention."""
        name = function_name(func)
        # Logits have the places of their queries; those of the keys were stored when the product was computed.
        if name == "softmax":
            return places_of_tokens(self._of(inputs[0])), self._keys.get(inputs[0])
        if name not in ATTENTION_FUNCTIONS and not is_kernel(func):
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
        return places_of_tokens(queries), places_of_tokens(keys)

    def _of(self, tensor: Tensor) -> Places:
        if isinstance(tensor, nn.Parameter):
            return nowhere(tensor.shape)
        return self._places.get(tensor)

    def _follow(self, call: Call) -> None:
        """Assign places to the outputs of a function."""
        name = function_name(call.func)
        # A list holds constants, such as sizes of maps; an array of NumPy may hold the image itself.
        is_list = name in ("tensor", "as_tensor") and isinstance(call.args[0], list)
        if name in _CONSTANTS or (is_list and not call.inputs):
            for output in call.outputs:
                self._places[output] = nowhere(output.shape)
            return
        if name in _WRITES or name in _ADDITIONS:
            self._follow_writing(name, call)
            return
        logits = [x in self._keys for x in call.inputs]
        if any(logits[:1]) and is_transpose(call.outputs[0], call.inputs[0]):
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
        for output, places in zip(call.outputs, places_after(name, call), strict=False):
            if places is not None and places.shape == output.shape:
                self._places[output] = places

    def _follow_writing(self, name: str, call: Call) -> None:
        """Follow tokens that are written into another tensor."""
        target, places = call.inputs[0], call.places[0]
        written = [target] if name.endswith("_") else call.outputs
        # Overwriting parts of a map, as MViT does to add positional biases, moves no tokens. But an empty tensor may be
        # filled with tokens in any order.
        if places is not None and not bool(unexpanded(places).isnan().any()):
            for output in written:
                self._places[output] = places
            return
        for tensor in (*written, *self._sharing(target)):
            self._places.pop(tensor, None)
        if places is not None and name in _WRITES:
            for output in written:
                self._places[output] = written_places(call)

    def _sharing(self, target: Tensor) -> list[Tensor]:
        """Return the tensors with places that share memory with this one, as views do."""
        memory = target.untyped_storage().data_ptr()
        return [x for x in self._places if x.untyped_storage().data_ptr() == memory]

    def _exchange_sides(self, logits: Tensor, transpose: Tensor) -> None:
        """Follow a transpose of logits, as Grounding DINO uses them in both directions between image and text."""
        queries = places_of_tokens(self._of(logits))
        self._places[transpose] = self._keys[logits][:, None].expand(transpose.shape)
        if queries is not None:
            self._keys[transpose] = queries

    def _follow_keys(self, name: str, call: Call, output: Tensor) -> None:
        """Store the places of a product's keys, also after scaling, masking and reshaping."""
        if name in _PRODUCTS and len(call.inputs) == 2:
            # The second operand is (..., d, N_key), except in einsum, where it may be (..., N_key, d).
            operand = call.places[1]
            if operand is not None and name != "einsum":
                operand = operand.mT
            keys = places_of_tokens(operand)
            if keys is not None and len(keys) == output.shape[-1]:
                self._keys[output] = keys
            return
        for source in call.inputs:
            keys = self._keys.get(source)
            # Scaling, masking and merging of leading axes do not move queries and keys.
            if keys is not None and source.shape[-2:] == output.shape[-2:]:
                self._keys[output] = keys
