"""Reconstruction of softmax attention from calls of torch,
its distinction from other softmaxes, and its verification.

An attention is reconstructed as (rows, heads, N_query, N_key), and compared once with the model's
own. Only a later matrix product shows whether a softmax is multiplied with values of tokens.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_probe.architectures.lookup import as_rows, head_count, known
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.logits import GivenLogits, Logits, ProductLogits
from tcnn_probe.attention.residual_stream import residual_tokens
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.token_grid import is_in_pool, token_counts
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.hooks.interception import (
    SeenAttention,
    SeenCopy,
    SeenOperand,
    SeenProduct,
)
from tcnn_probe.models import split_weights

__all__ = [
    "BETWEEN_CHANNELS",
    "NoTokenAttentionError",
    "ReconstructionError",
    "ValueProductTracker",
    "Verification",
    "discrepancy",
    "is_between_channels",
    "logits_of",
    "relative_difference",
    "softmax_attention_of",
    "tokens_if_channels",
    "tolerance",
    "values_of",
]

# Number of queries that are compared with the model's own softmax: a wrong scale, mask or order of
# axes shows in any.
_QUERIES_TO_CHECK = 64
# With more runs of tokens than these, an index is faster.
_FEW_RUNS = 8
BETWEEN_CHANNELS = "attention between channels, not between tokens"
Key = TypeVar("Key")

# In half precision, fused kernels also round the attention before it is multiplied with the values.
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class NoTokenAttentionError(Exception):
    """The softmax is not attention between tokens; the message says what it is."""


class ReconstructionError(RuntimeError):
    """The attention that was reconstructed for measuring differs from the model's own."""


def softmax_attention_of(
    seen: SeenAttention,
    name: str,
    number: int,
    running: Running,
    images: int | None,
    layout_of: Callable[[int, int, int], Layout],
    with_mask: Callable[[SeenAttention, Layout], SeenAttention],
) -> SoftmaxAttention:
    """Describe a call of torch in the innermost running module
    as an attention between tokens on their grids.

    Args:
        seen: Description of the call.
        name: Name of the layer.
        number: Position of this attention among those of the module's call.
        running: Running modules and their inputs.
        images: Number of images whose tokens the layer gets; None if each row counts as an image.
        layout_of: Function that finds the tokens, given the numbers of queries, of keys and of
            windows of an image.
        with_mask: Function that returns the description with the mask that was added to logits.

    Raises:
        NoTokenAttentionError: The call is not attention between tokens.
    """
    module = running[-1].module
    if reason := known(module).no_attention_matrix:
        raise NoTokenAttentionError(reason)
    # The projections belong to this module, or to one around it.
    with_weights = (x for x, _ in reversed(running) if next(x.parameters(), None) is not None)
    around = next(with_weights, None)
    if around is not None and next(split_weights(around), None) is not None:
        raise NoTokenAttentionError(
            "tensor parallelism splits its heads over ranks: record a copy of the model that is "
            "not split"
        )
    logits = logits_of(seen, module)
    rows, heads, queries, keys = logits.shape
    named = head_count(module)
    is_swapped = named == rows != images if named else images and rows % images
    if is_swapped and heads == images:
        raise NoTokenAttentionError(
            "its attention has the heads before the images: expected (images, heads, queries, keys)"
        )
    columns = None if seen.value is None else seen.value.shape[-1]
    if is_between_channels(logits.shape, columns, running):
        raise NoTokenAttentionError(BETWEEN_CHANNELS)
    # If the rows are not a multiple of the images, for example because a model selects some, each
    # row is an image. So is each row of texts, of which there can be more than images.
    if not images or rows % images:
        images = rows
    windows = rows // images
    layout = layout_of(queries, keys, windows)
    in_order = _in_order(with_mask(seen, layout), layout.order)
    fused = seen.value is not None
    return SoftmaxAttention(
        module=module,
        name=name,
        number=number,
        images=images,
        windows=windows,
        layout=layout,
        logits=logits if in_order is seen else logits_of(in_order, module),
        compare=partial(discrepancy, seen, module),
        find_values=partial(values_of, in_order, module) if fused else None,
        find_outputs=partial(_outputs_in_order, seen, module, layout) if fused else None,
        residual=partial(_residual_in_order, list(running), images, queries * windows, layout),
    )


def _in_order(seen: SeenAttention, order: tuple[Tensor, Tensor] | None) -> SeenAttention:
    """Return the description with queries and keys in another order, given by their indices."""
    if order is None:
        return seen
    # Users of an attention expect class and register tokens first, and the grid row by row.
    queries, keys = order

    def ordered_matrix(x: Tensor | None) -> Tensor | None:
        return None if x is None else _put(_put(x, -2, queries), -1, keys)

    modification = seen.modification
    if modification is not None:
        modification = replace(
            modification,
            queries=_put(modification.queries, 0, queries),
            keys=_put(modification.keys, 0, keys),
        )
    query, key, value = (
        None if x is None else _put(x, -2, order)
        for x, order in (
            (seen.query, queries),
            (seen.key, keys),
            (seen.value, keys),
        )
    )
    return replace(
        seen,
        logits=ordered_matrix(seen.logits),
        query=query,
        key=key,
        value=value,
        mask=ordered_matrix(seen.mask),
        modification=modification,
    )


def _put(x: Tensor, dim: int, order: Tensor) -> Tensor:
    """Put tokens in an order along one axis; a mask may be the same for all of them."""
    if x.shape[dim] != len(order):
        return x
    indices = order.tolist()
    # Runs of consecutive tokens are concatenated, because an index would first have to be copied to
    # the device.
    starts = [i for i, index in enumerate(indices) if i == 0 or index != indices[i - 1] + 1]
    if len(starts) > _FEW_RUNS:
        return x.index_select(dim, order.to(x.device))
    ends = [*starts[1:], len(indices)]
    runs = [
        x.narrow(dim, indices[start], end - start) for start, end in zip(starts, ends, strict=True)
    ]
    return torch.cat(runs, dim) if len(runs) > 1 else x


def _residual_in_order(running: Running, images: int, count: int, layout: Layout) -> Tensor | None:
    """Return the tokens that enter the block, in the order of the layout's queries."""
    tokens = residual_tokens(running, images, count)
    if tokens is None or layout.order is None:
        return tokens
    return _put(tokens, 1, layout.order[0])


@torch.no_grad()
def discrepancy(seen: SeenAttention, module: nn.Module) -> tuple[Tensor, float] | None:
    """Compare the first row of the reconstructed attention with torch's own output.

    Returns:
        The largest difference relative to torch's largest value, shape () in float32, and the
        largest relative difference that rounding explains; None if nothing can be compared because
        of dropout.
    """
    if seen.output is None:
        return None
    logits = logits_of(seen, module)
    queries = slice(0, logits.shape[2] if seen.finish else _QUERIES_TO_CHECK)
    first = slice(0, 1)
    rebuilt = torch.softmax(logits(first, queries), -1)
    if seen.logits is not None:
        expected = as_rows(seen.output, module, None)[first, :, queries]
    else:
        values = values_of(seen, module)[first].to(rebuilt.dtype)
        # A query from which all keys are hidden is NaN here, but zero in torch's fused attention.
        rebuilt = torch.nan_to_num(rebuilt) @ values
        if seen.finish is not None:
            rebuilt = seen.finish(rebuilt)
            expected = seen.output[:, :1] if seen.output.ndim == 3 else seen.output
        else:
            output = seen.output if seen.output.ndim > 2 else seen.output[None]
            expected = as_rows(output, module, seen.heads)[first, :, queries]
    return relative_difference(rebuilt, expected), tolerance(seen.output.dtype)


def values_of(seen: SeenAttention, module: nn.Module) -> Tensor:
    """Return the values of fused attention, shape (rows, heads, N_key, d_value)."""
    return as_rows(_broadcast(seen)[2], module, seen.heads)


def _outputs_of(seen: SeenAttention, module: nn.Module) -> Tensor:
    """Return the outputs of the heads, shape (rows, heads, N_query, d_value), without dropout."""
    # They are computed again if the projection of multi-head attention has mixed them, or after
    # dropout.
    if seen.output is None or seen.finish is not None or seen.output.ndim < 3:
        query, key, value = _broadcast(seen)
        output = F.scaled_dot_product_attention(query, key, value, seen.mask, scale=seen.scale)
        return as_rows(output, module, seen.heads)
    return as_rows(seen.output, module, seen.heads)


def _outputs_in_order(seen: SeenAttention, module: nn.Module, layout: Layout) -> Tensor:
    """Return the outputs of the heads, in the order of the layout's queries."""
    outputs = _outputs_of(seen, module)
    return outputs if layout.order is None else _put(outputs, -2, layout.order[0])


def logits_of(seen: SeenAttention, module: nn.Module) -> Logits:
    """Return the logits of a described call."""
    if seen.logits is not None:
        mask = None if seen.mask is None else as_rows(seen.mask, module, seen.heads)
        return GivenLogits(as_rows(seen.logits, module, seen.heads), mask)
    query, key, _ = _broadcast(seen)
    mask = seen.mask
    if mask is not None:
        mask = as_rows(mask.expand(*query.shape[:-1], key.shape[-2]), module, seen.heads)
    return ProductLogits(
        as_rows(query, module, seen.heads),
        as_rows(key, module, seen.heads),
        seen.scale,
        mask,
        seen.modification,
    )


def _broadcast(seen: SeenAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values broadcast to common leading dimensions, at least one."""
    query, key, value = seen.query, seen.key, seen.value
    assert query is not None
    assert key is not None
    assert value is not None
    shapes = [query.shape[:-2], key.shape[:-2], value.shape[:-2], torch.Size([1])]
    if seen.mask is not None:
        shapes.append(seen.mask.shape[:-2])
    elif shapes[0] == shapes[1] == shapes[2] != ():
        return query, key, value  # as in nearly all models
    # torch broadcasts images and heads of all four tensors, for example of a pool's learned query
    # without images.
    leading = np.broadcast_shapes(*shapes)
    query, key, value = (x.expand(*leading, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def is_between_channels(
    shape: tuple[int, int, int, int], columns: int | None, running: Running
) -> bool:
    """Return whether, by the shapes of the layer's inputs,
    the keys can only be the channels of each head.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        columns: Number of columns of the values; None if they are unknown yet.
        running: Running modules and their inputs.
    """
    (_, heads, queries, keys), (_, inputs) = shape, running[-1]
    # Inputs are (B, N, C) or (B, C, H, W). In attention between channels, the matrix of each head
    # has the size C / heads.
    features = [x for x in inputs if isinstance(x, Tensor) and x.ndim in (3, 4)]
    channels = {x.shape[-1] if x.ndim == 3 else x.shape[1] for x in features}
    is_matrix = queries == keys and keys * heads in channels and keys not in token_counts(inputs)
    # A pool is recognised by its class, because it can have as many classes as patches.
    if is_matrix and not is_in_pool(running):
        return True
    return columns is not None and columns in tokens_if_channels(shape, running)


def tokens_if_channels(shape: tuple[int, int, int, int], running: Running) -> frozenset[int]:
    """Return the numbers of tokens of a layer
    if its keys may be channels of each head instead; else none.

    They are channels if the values have as many columns as there are tokens (XCiT of vit-pytorch,
    whose heads together are wider or narrower than the tokens).
    """
    (_, heads, queries, keys), (module, inputs) = shape, running[-1]
    # The sequence of torch's own layers may come first.
    if queries != keys or isinstance(module, nn.MultiheadAttention):
        return frozenset()
    tokens: set[int] = set()
    for x in inputs:
        # (B, N, C), (B, H, W, C) or (B, C, H, W)
        if isinstance(x, Tensor) and x.ndim in (3, 4):
            tokens.add(x.shape[1:-1].numel())
        if isinstance(x, Tensor) and x.ndim == 4:
            tokens.add(x.shape[2:].numel())
    if keys in tokens:
        return frozenset()
    widths = {x.shape[0] for x in module.parameters() if x.ndim > 1}
    # One layer may return queries, keys and values side by side.
    is_width = any(keys * heads * parts in widths for parts in (1, 2, 3))
    return frozenset(tokens) if is_width else frozenset()


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest relative difference that rounding explains."""
    # In float32 this is far above rounding, because the comparison looks for a wrong scale, mask or
    # order.
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference relative to the largest finite expected value,
    shape () in float32.
    """
    # Values that are not finite come from the model, not from an error of the reconstruction.
    nonfinite = ~expected.isfinite()
    difference, size = (
        x.masked_fill(nonfinite, 0).abs().amax().float() for x in (rebuilt - expected, expected)
    )
    # The output can be zero, for example if a projection is initialised with zeros.
    return difference / size.clamp_min(torch.finfo(torch.float32).tiny)


class Verification:
    """Comparisons of reconstructed attention in a forward. They are read when it has ended,
    as this waits for a GPU.
    """

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._masks: dict[str, str] = {}
        self._open: list[tuple[str, Tensor, float]] = []

    def begin(self) -> None:
        """Discard the comparisons of a forward that did not end."""
        self._open = []

    def needed(self, layer: str) -> bool:
        """Return whether the layer's reconstruction was not verified yet."""
        return layer not in self._passed

    def add(self, layer: str, compared: tuple[Tensor, float] | None, mask: str = "") -> None:
        """Add a relative difference and its tolerance,
        None if nothing could be compared; and the mask's odd dtype.
        """
        if mask:
            self._masks[layer] = mask
        if compared is not None:
            self._open.append((layer, *compared))

    def settle(self) -> None:
        """Read all comparisons.

        Raises:
            ReconstructionError: A difference is larger than rounding explains.
        """
        # The list is cleared before the check, because an error ends the forward.
        compared, self._open = self._open, []
        shares = {layer: float(difference) for layer, difference, _ in compared}
        mismatches = {
            layer: shares[layer]
            for layer, _, largest in compared
            # This is not written with ">", so that NaN counts as a mismatch, too.
            if not shares[layer] <= largest
        }
        masks = {name: self._masks[name] for name in mismatches if name in self._masks}
        if masks:
            raise ReconstructionError(
                f"a mask has another dtype than the queries ({masks}), for which torch's fused "
                "attention can be wrong, and is, by these shares of its largest value: "
                f"{mismatches}; give the mask the dtype of the queries, mask.to(query.dtype), or "
                "record the other layers with layers="
            )
        if mismatches:
            raise ReconstructionError(
                "attention rebuilt from what reached it differs from the model's own output, by "
                f"these shares of its largest value: {mismatches}; record the other layers with "
                "layers=, or write a probe for this kind of layer"
            )
        self._passed |= shares.keys()


class _Waiting(NamedTuple):
    """A softmax that was not multiplied yet.

    Args:
        softmax: The softmax.
        has_heads: Whether it has an axis of heads.
        tokens: Numbers of tokens of the layer if its keys may be channels.
    """

    softmax: SeenOperand
    has_heads: bool
    tokens: frozenset[int]


class ValueProductTracker(Generic[Key]):
    """Tells, in one forward, whether a softmax is multiplied with values of tokens.

    It is not attention between tokens if its factor is the same for all images (a codebook, or
    embeddings of classes), or a product of keys and values: then its last axis is an axis of
    channels, as in linear attention.

    Attributes:
        waiting: Softmaxes that were not multiplied yet, by key.
    """

    def __init__(self) -> None:
        self.waiting: dict[Key, _Waiting] = {}
        self._summaries: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []
        self._shared: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []

    def wait(self, key: Key, softmax: Tensor, *, has_heads: bool, tokens: frozenset[int]) -> None:
        """Wait until a softmax is multiplied, or until its edited form is."""
        has_heads |= softmax.ndim > 3
        self.waiting[key] = _Waiting(SeenOperand.of(softmax), has_heads, tokens)

    def replace(self, key: Key, softmax: Tensor) -> None:
        """Wait for another tensor in place of a softmax."""
        self.waiting[key] = self.waiting[key]._replace(softmax=SeenOperand.of(softmax))

    def copied(self, copy: SeenCopy) -> None:
        """Note a copy, which has the properties of its sources."""
        output = copy.output()
        if output is None:
            return
        entry = SeenOperand.of(output), copy.output
        if all(source.shared for source in copy.sources):
            self._shared.append(entry)
        if any(_contains(self._summaries, source) for source in copy.sources):
            self._summaries.append(entry)

    def multiplied(self, product: SeenProduct) -> dict[Key, str]:
        """Return the waiting softmaxes that are factors of a product, which do not wait any more.

        Returns:
            By the softmax's key: "" if it is multiplied with values of tokens, else the reason why
            it is not attention between tokens.
        """
        reasons = {}
        for key, (softmax, has_heads, tokens) in self.waiting.items():
            for operand, values in product.pairs:
                if softmax.is_in(operand, heads=has_heads):
                    is_channels = values.shape[-1] in tokens
                    reasons[key] = BETWEEN_CHANNELS if is_channels else self._objection(values)
                    break
        for key in reasons:
            del self.waiting[key]
        output = product.output()
        is_shared = any(operand.shared for pair in product.pairs for operand in pair)
        # A product of two activations, none of which is such a softmax, may be a product of keys
        # and values.
        if not reasons and output is not None and not is_shared:
            self._summaries.append((SeenOperand.of(output), product.output))
        return reasons

    def _objection(self, values: SeenOperand) -> str:
        if values.shared or _contains(self._shared, values):
            return "a softmax over values that are the same for all images, not over tokens"
        if _contains(self._summaries, values):
            return (
                "a softmax over channels, which weighs products of keys and values (linear "
                "attention)"
            )
        return ""


def _contains(tensors: list[tuple[SeenOperand, weakref.ref[Tensor]]], operand: SeenOperand) -> bool:
    """Return whether an operand is one of the tensors that are still alive,
    even with its axes in another order.
    """
    return any(
        # After a tensor is freed, another one may have its address.
        tensor.place == operand.place
        and tensor.shape.numel() == operand.shape.numel()
        and alive() is not None
        for tensor, alive in tensors
    )
