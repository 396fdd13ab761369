"""Numbers that the elements of tensors carry through the functions of torch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tcnn_probe.attention.place_rules import (
    ATTENTION_FUNCTIONS,
    Call,
    Places,
    agreed,
    are_channels,
    contracted,
    contracted_last,
    function_name,
    is_transpose,
    nowhere,
    places_after,
    places_of_tokens,
    unexpanded,
    written_places,
)
from tcnn_probe.hooks.kernel_calls import is_kernel

__all__ = ["CHANNELS", "CarriedNumbers"]

# In the table of keys, for a product whose keys are channels, not tokens.
CHANNELS = torch.tensor([-torch.inf], dtype=torch.float64, device="cpu")

_PRODUCTS = ("matmul", "__matmul__", "bmm", "einsum")
_FILLED = ("zeros", "ones", "full", "empty", "rand", "randn")
# The outputs of these functions do not depend on the image, even if a tensor argument gives their
# shape or device.
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


class CarriedNumbers:
    """Table of the numbers that tensors of a forward carry,
    by the rules of :mod:`tcnn_probe.attention.place_rules`.

    Args:
        of_rows: Whether the numbers tell rows of the batch apart, so that a row keeps its number
            where a learnt query gathers tokens from it, and gets another one where another row is
            written into it.
    """

    def __init__(self, *, of_rows: bool = False) -> None:
        self._of_rows = of_rows
        # Tensors are weak keys of this table, so that none lives longer than in the model.
        self._places: Any = WeakTensorKeyDictionary()
        # For a product of queries and keys, _places has the places of the queries, and this table
        # those of the keys, shape (N_key,).
        self._keys: Any = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._places

    def __setitem__(self, tensor: Tensor, places: Tensor) -> None:
        self._places[tensor] = places

    def of(self, tensor: Tensor) -> Places:
        """Return the numbers that a tensor carries; None if they are unknown."""
        if isinstance(tensor, nn.Parameter):
            return nowhere(tensor.shape)
        return self._places.get(tensor)

    def sides(self, func: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Places, Places]:
        """Return the numbers of queries and keys,
        (..., N, d), if the function computes attention.
        """
        name = function_name(func)
        # Logits have the places of their queries; those of the keys were stored when the product
        # was computed.
        if name == "softmax":
            keys = self._keys.get(inputs[0])
            if keys is CHANNELS:
                return None, CHANNELS
            return self.of(inputs[0]), None if keys is None else keys[:, None]
        queries, keys = (self.of(tokens) for tokens in inputs[:2])
        if is_kernel(func) and "scaled_dot_product" not in name:
            # Tensors are (B, N, heads, d). In packed tensors (N, heads, d), the tokens of each
            # image are unknown.
            queries, keys = (
                None if x is None or x.ndim < 4 else x.transpose(1, 2) for x in (queries, keys)
            )
        if name == "multi_head_attention_forward":  # tokens first, (N, B, d) or (N, d)
            queries, keys = (None if x is None else x.movedim(0, -2) for x in (queries, keys))
        if self._of_rows:
            queries = _of_rows_gathered(queries, keys)
        return queries, keys

    def follow(self, call: Call) -> None:
        """Assign places to the outputs of a function."""
        name = function_name(call.func)
        if self._of_rows and name in ("linear", *_PRODUCTS, *ATTENTION_FUNCTIONS):
            self._follow_rows_of_product(name, call)
            return
        # A list holds constants, such as sizes of maps; an array of NumPy may hold the image
        # itself.
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
        if any(logits) and self._are_added_to_tokens(call, logits):
            # Positions that a product reads from a table are no logits.
            for x in compress(call.inputs, logits):
                self._keys.pop(x)
        elif any(logits) and name not in _PRODUCTS:
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
                if self._of_rows:
                    places = agreed(name, places, call)
                self._places[output] = places

    def _follow_writing(self, name: str, call: Call) -> None:
        """Follow tokens that are written into another tensor."""
        target, places = call.inputs[0], call.places[0]
        written = [target] if name.endswith("_") else call.outputs
        # Overwriting parts of a map, as MViT does to add positional biases, moves no tokens. But an
        # empty tensor may be filled with tokens in any order.
        moves_rows = self._of_rows and name in _WRITES and len(call.inputs) > 1
        is_known = places is not None and not bool(unexpanded(places).isnan().any())
        if is_known and not moves_rows:
            for output in written:
                self._places[output] = places
            return
        for tensor in (*written, *self._sharing(target)):
            self._places.pop(tensor, None)
        if places is not None and name in _WRITES:
            for output in written:
                self._places[output] = written_places(call)

    def _follow_rows_of_product(self, name: str, call: Call) -> None:
        places = call.places
        if name == "einsum":
            rows = contracted(call)
        elif name == "linear":
            # The layer may mix tokens, as an MLP-Mixer does, but these are of one row.
            known = places[0]
            rows = None if known is None else unexpanded(known).nanmean(-1, keepdim=True)
        elif name == "multi_head_attention_forward":
            queries, keys = (None if x is None else x.movedim(0, -2) for x in places[:2])
            rows = _of_rows_gathered(queries, keys)
            rows = None if rows is None else rows[..., :1].movedim(-2, 0)
        else:
            rows = _of_rows_gathered(*places[:2])
            rows = None if rows is None else rows[..., :1]
        for output in call.outputs[:1]:
            self._places.pop(output, None)
            if rows is not None:
                self._places[output] = rows.expand(output.shape)

    def _sharing(self, target: Tensor) -> list[Tensor]:
        """Return the tensors with places that share memory with this one, as views do."""
        memory = target.untyped_storage().data_ptr()
        return [x for x in self._places if x.untyped_storage().data_ptr() == memory]

    def _are_added_to_tokens(self, call: Call, logits: Sequence[bool]) -> bool:
        """Return whether products of parameters meet tokens of the image."""
        others = compress(call.places, [not is_product for is_product in logits])
        products = [*compress(call.places, logits)]
        products += [self._keys[x] for x in compress(call.inputs, logits)]
        return not any(map(_is_somewhere, products)) and any(map(_is_somewhere, others))

    def _exchange_sides(self, logits: Tensor, transpose: Tensor) -> None:
        """Follow a transpose of logits, as Grounding DINO uses them
        in both directions between image and text.
        """
        if self._keys[logits] is CHANNELS:
            self._keys[transpose] = CHANNELS
            return
        queries = places_of_tokens(self.of(logits))
        self._places[transpose] = self._keys[logits][:, None].expand(transpose.shape)
        if queries is not None:
            self._keys[transpose] = queries

    def _follow_keys(self, name: str, call: Call, output: Tensor) -> None:
        """Store the places of a product's keys, also after scaling, masking and reshaping."""
        if name in _PRODUCTS and len(call.inputs) == 2:
            # The second operand is (..., d, N_key), except in einsum, where it may be (..., N_key,
            # d).
            if not self._of_rows and are_channels(contracted_last(call)):
                self._keys[output] = CHANNELS
                return
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


def _is_somewhere(places: Places) -> bool:
    """Return whether some of the places are known, and not those of parameters."""
    return places is not None and not bool(unexpanded(places).isnan().all())


def _of_rows_gathered(queries: Places, keys: Places) -> Places:
    """Return the numbers of queries (..., N, d) or,
    if these come from parameters, of the rows whose keys they see.
    """
    is_learnt = queries is not None and bool(unexpanded(queries).isnan().all())
    if not is_learnt or keys is None:
        return queries
    assert queries is not None
    # The mean of different numbers is the number of no row.
    row = unexpanded(keys).nanmean((-2, -1), keepdim=True)
    leading = torch.broadcast_shapes(row.shape[:-2], queries.shape[:-2])
    return row.expand(*leading, *queries.shape[-2:])
