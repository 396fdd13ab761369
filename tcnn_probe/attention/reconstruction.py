"""Rebuilds softmax attention from what torch was asked for, tells it from other softmaxes, and checks it.

An attention is rebuilt as (rows, heads, N_query, N_key), and compared once with what the model used. Whether a softmax
weighs values of tokens shows only later, in a matrix product.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_probe.architectures.grids import Windows
from tcnn_probe.architectures.lookup import as_rows, known
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.mask_units import UnitOrder, find_unit_order
from tcnn_probe.attention.residual_stream import residual_tokens
from tcnn_probe.attention.softmax import (
    GivenLogits,
    Logits,
    ProductLogits,
    SoftmaxAttention,
)
from tcnn_probe.attention.token_grid import (
    FeatureMaps,
    find_layout,
    pool_layout,
    token_counts,
)
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.hooks.interception import (
    SeenAttention,
    SeenCopy,
    SeenOperand,
    SeenProduct,
)

__all__ = [
    "NoTokenAttentionError",
    "ReconstructionError",
    "ValueProductTracker",
    "Verification",
    "discrepancy",
    "is_between_channels",
    "logits_of",
    "relative_difference",
    "softmax_attention_of",
    "tolerance",
    "values_of",
]

# Queries that are compared with the model's own softmax: a slip in scale, mask or order of axes shows in any of them.
_QUERIES_TO_CHECK = 64
Key = TypeVar("Key")

# In half precision fused kernels round the attention, too, before it weighs the values.
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class NoTokenAttentionError(Exception):
    """A softmax that is no attention between tokens; the message says what it is."""


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


def softmax_attention_of(
    request: SeenAttention, name: str, number: int, running: Running, maps: FeatureMaps
) -> SoftmaxAttention:
    """Describe what the last of the running modules asked torch for as an attention between tokens on their grids.

    Args:
        request: Attention as torch was asked for it.
        name: Name of the layer.
        number: Place of this attention among those of the module's call.
        running: Modules that are running, and their inputs.
        maps: Feature maps of the forward so far, which show the grids.

    Raises:
        NoTokenAttentionError: It is no attention between tokens.
    """
    module, inputs = running[-1]
    if reason := known(module).no_attention_matrix:
        raise NoTokenAttentionError(reason)
    logits = logits_of(request, module)
    rows, heads, queries, keys = logits.shape
    in_order, is_moved, fused = request, False, request.value is not None
    layout = pool_layout(queries, keys, running, maps)
    # Pools are known by their class, before shapes are judged: a pool can have as many classes as patches.
    if layout is None and queries == keys and is_between_channels(keys, heads, inputs):
        raise NoTokenAttentionError("attention between channels, not between tokens")
    # Rows that are no multiple of the images, as where a model repeats or selects some, count as images themselves.
    # So do rows of texts, of which there can be more than images.
    is_of_images = maps.images and rows % maps.images == 0 and not maps.words_ask
    images = maps.images if maps.images and is_of_images else rows
    windows = rows // images
    cut = _find_windows(running)
    units = find_unit_order(queries, keys, windows, running)
    if units is not None:
        layout, cut = units.layout, units.cut
        in_order = _units_in_order(request, units)
        logits = logits_of(in_order, module)
    if layout is None and request.not_on_grid:
        layout = Layout(None, None, request.not_on_grid)
    elif layout is None:
        layout = find_layout(queries, keys, windows, running, maps)
        if (
            layout.keys is None
            and cut is not None
            and queries == keys == cut.window[0] * cut.window[1]
        ):
            # No feature map is as small as a window, but the block that cuts windows knows their rows and columns.
            layout = Layout(Tokens(0, *cut.window), Tokens(0, *cut.window))
        is_moved = any(maps.order(count) != range(count) for count in (queries, keys))
        is_moved = is_moved and layout.keys is not None and windows == 1
        if is_moved:
            # Whatever reads an attention expects class and register tokens first: it is reordered once, here.
            in_order = _grid_last(request, maps)
            logits = logits_of(in_order, module)
        if maps.words_ask:
            reason = "the queries are words, which lie on no grid"
            reason = reason if layout.keys else layout.reason
            layout = Layout(None, layout.keys, reason, "words")
        layout = replace(layout, words=maps.words(keys) if layout.keys else 0)
    if windows == 1 and cut is not None and cut.grid == cut.window:
        cut = None  # the window is the image: no part of it has to be put anywhere
    return SoftmaxAttention(
        module=module,
        name=name,
        number=number,
        images=images,
        windows=windows,
        layout=layout,
        cut=cut,
        query_cut=cut if units is None else units.query_cut,
        order=None if units is None else (units.queries, units.keys),
        logits=logits,
        is_moved=is_moved,
        class_token=maps.has_class_token(keys),
        distillation_token=maps.special.distillation_token,
        compare=partial(discrepancy, request, module),
        find_values=partial(values_of, in_order, module) if fused else None,
        find_outputs=partial(_outputs_of, request, module) if fused else None,
        residual=partial(
            _residual_in_order, list(running), images, queries * windows, maps
        ),
    )


def _find_windows(running: Running) -> Windows | None:
    """Return the windows of the innermost module that is known to cut its input; None if there is none."""
    for module, inputs in reversed(running):
        if cut := known(module).windows:
            return cut(module, inputs)
    return None


def _grid_last(request: SeenAttention, maps: FeatureMaps) -> SeenAttention:
    """Return the attention with the tokens that are behind the grid in front of it."""

    def ordered_matrix(x: Tensor | None) -> Tensor | None:
        return (
            None if x is None else _put_grid_last(_put_grid_last(x, -2, maps), -1, maps)
        )

    if request.logits is not None:
        return replace(request, logits=ordered_matrix(request.logits))
    assert request.query is not None
    assert request.key is not None
    assert request.value is not None
    query, key, value = (
        _put_grid_last(x, -2, maps) for x in (request.query, request.key, request.value)
    )
    modification = request.modification
    if modification is not None:
        modification = replace(
            modification,
            queries=_put_grid_last(modification.queries, 0, maps),
            keys=_put_grid_last(modification.keys, 0, maps),
        )
    return replace(
        request,
        query=query,
        key=key,
        value=value,
        mask=ordered_matrix(request.mask),
        modification=modification,
    )


def _units_in_order(request: SeenAttention, units: UnitOrder) -> SeenAttention:
    """Return the attention with the tokens of each unit row by row."""

    def ordered(x: Tensor | None, dim: int, order: Tensor) -> Tensor | None:
        return None if x is None else x.index_select(dim, order.to(x.device))

    return replace(
        request,
        logits=ordered(ordered(request.logits, -2, units.queries), -1, units.keys),
        query=ordered(request.query, -2, units.queries),
        key=ordered(request.key, -2, units.keys),
        value=ordered(request.value, -2, units.keys),
    )


def _put_grid_last(x: Tensor, dim: int, maps: FeatureMaps) -> Tensor:
    """Put tokens in the order of a layout, along one axis."""
    order = maps.order(x.shape[dim])
    # Whole runs of neighbours are moved: an index would have to go to the device first.
    starts = [i for i, place in enumerate(order) if i == 0 or place != order[i - 1] + 1]
    ends = [*starts[1:], len(order)]
    runs = [
        x.narrow(dim, order[start], end - start)
        for start, end in zip(starts, ends, strict=True)
    ]
    return torch.cat(runs, dim) if len(runs) > 1 else x


def _residual_in_order(
    running: Running, images: int, count: int, maps: FeatureMaps
) -> Tensor | None:
    """Return the tokens that enter the block, those before and behind the grid first."""
    tokens = residual_tokens(running, images, count)
    return None if tokens is None else _put_grid_last(tokens, 1, maps)


@torch.no_grad()
def discrepancy(
    request: SeenAttention, module: nn.Module
) -> tuple[Tensor, float] | None:
    """Compare the first row of the rebuilt attention with what torch gave the model.

    Returns:
        The largest difference as a share of torch's largest value, shape () in float32, and the largest share that
        rounding explains; None if dropout leaves nothing to compare with.
    """
    if request.output is None:
        return None
    logits = logits_of(request, module)
    queries = slice(0, logits.shape[2] if request.finish else _QUERIES_TO_CHECK)
    first = slice(0, 1)
    rebuilt = torch.softmax(logits(first, queries), -1)
    if request.logits is not None:
        expected = as_rows(request.output, module, None)[first, :, queries]
    else:
        values = values_of(request, module)[first].to(rebuilt.dtype)
        # A query that may see no key is NaN here, and zero in torch's fused attention.
        rebuilt = torch.nan_to_num(rebuilt) @ values
        if request.finish is not None:
            rebuilt = request.finish(rebuilt)
            expected = (
                request.output[:, :1] if request.output.ndim == 3 else request.output
            )
        else:
            output = request.output if request.output.ndim > 2 else request.output[None]
            expected = as_rows(output, module, request.heads)[first, :, queries]
    return relative_difference(rebuilt, expected), tolerance(request.output.dtype)


def values_of(request: SeenAttention, module: nn.Module) -> Tensor:
    """Return the values that are weighed, shape (rows, heads, N_key, d_value)."""
    return as_rows(_broadcast(request)[2], module, request.heads)


def _outputs_of(request: SeenAttention, module: nn.Module) -> Tensor:
    """Return what the heads make of the values, shape (rows, heads, N_query, d_value), without dropout."""
    # The output of multi-head attention is mixed by its projection; after dropout there is none to read.
    if request.output is None or request.finish is not None or request.output.ndim < 3:
        query, key, value = _broadcast(request)
        output = F.scaled_dot_product_attention(
            query, key, value, request.mask, scale=request.scale
        )
        return as_rows(output, module, request.heads)
    return as_rows(request.output, module, request.heads)


def logits_of(request: SeenAttention, module: nn.Module) -> Logits:
    """Return the logits of an attention as torch was asked for it."""
    if request.logits is not None:
        return GivenLogits(as_rows(request.logits, module, request.heads))
    query, key, _ = _broadcast(request)
    mask = request.mask
    if mask is not None:
        mask = as_rows(
            mask.expand(*query.shape[:-1], key.shape[-2]), module, request.heads
        )
    return ProductLogits(
        as_rows(query, module, request.heads),
        as_rows(key, module, request.heads),
        request.scale,
        mask,
        request.modification,
    )


def _broadcast(request: SeenAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the same leading dimensions, of which there is at least one."""
    query, key, value = request.query, request.key, request.value
    assert query is not None
    assert key is not None
    assert value is not None
    shapes = [(1,), query.shape[:-2], key.shape[:-2], value.shape[:-2]]
    if request.mask is not None:
        shapes.append(request.mask.shape[:-2])
    # torch broadcasts images and heads of all four, such as a query without images that a pool has learned.
    leading = np.broadcast_shapes(*shapes)
    query, key, value = (x.expand(*leading, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def is_between_channels(keys: int, heads: int, inputs: Sequence[Any]) -> bool:
    """Return whether the keys can only be the channels of each head, by the shapes of the layer's inputs."""
    # Of inputs (B, N, C) or (B, C, H, W). Between channels, the matrix of a head has the sides C / heads.
    features = [x for x in inputs if isinstance(x, Tensor) and x.ndim in (3, 4)]
    channels = {x.shape[-1] if x.ndim == 3 else x.shape[1] for x in features}
    return keys * heads in channels and keys not in token_counts(inputs)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest share of the output's largest value that rounding explains."""
    # Far above rounding in float32, fused or not: what is looked for is another scale, mask or order, not precision.
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference as a share of the largest finite expected value, shape () in float32."""
    broken = ~expected.isfinite()  # by what the model was given
    difference, size = (
        x.masked_fill(broken, 0).abs().amax().float()
        for x in (rebuilt - expected, expected)
    )
    # An output of zeros, as of a projection that starts at zero, is not to divide by zero.
    return difference / size.clamp_min(torch.finfo(torch.float32).tiny)


class Verification:
    """Comparisons of a forward, which are looked at when it has ended: reading one waits for the device."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._open: list[tuple[str, Tensor, float]] = []

    def begin(self) -> None:
        """Forget the comparisons of a forward that did not end."""
        self._open = []

    def needed(self, layer: str) -> bool:
        """Return whether no forward has shown yet that the layer is rebuilt rightly."""
        return layer not in self._passed

    def add(self, layer: str, compared: tuple[Tensor, float] | None) -> None:
        """Add a relative difference and the largest that may be; None where nothing could be compared."""
        if compared is not None:
            self._open.append((layer, *compared))

    def settle(self) -> None:
        """Read all comparisons.

        Raises:
            ReconstructionError: One is larger than rounding explains.
        """
        # Forgotten first, as the error below ends the forward.
        compared, self._open = self._open, []
        shares = {layer: float(difference) for layer, difference, _ in compared}
        wrong = {
            layer: shares[layer]
            for layer, _, largest in compared
            # Not ">": NaN is wrong, too.
            if not shares[layer] <= largest
        }
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._passed |= shares.keys()


class ValueProductTracker:
    """Tells, in one forward, whether a softmax weighs the values of tokens.

    It does not if what it weighs is the same for all images (a codebook, the classes' embeddings), or a product of keys
    and values: then its last axis is an axis of channels, as in linear attention.
    """

    def __init__(self) -> None:
        self._summaries: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []
        self._shared: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []

    def copied(self, copy: SeenCopy) -> None:
        """Note a copy: what holds of a tensor holds of its copy."""
        output = copy.output()
        if output is None:
            return
        entry = SeenOperand.of(output), copy.output
        if all(source.shared for source in copy.sources):
            self._shared.append(entry)
        if any(_contains(self._summaries, source) for source in copy.sources):
            self._summaries.append(entry)

    def weighed_by(
        self, product: SeenProduct, softmaxes: Mapping[Key, tuple[SeenOperand, bool]]
    ) -> dict[Key, str]:
        """Return which softmaxes weigh something in a product.

        Args:
            product: Matrix product.
            softmaxes: Softmaxes that have weighed nothing yet, and whether each has an axis of heads.

        Returns:
            By the softmax's key: "" if it weighs values of tokens, else why it is no attention between tokens.
        """
        reasons = {}
        for key, (softmax, has_heads) in softmaxes.items():
            for operand, values in product.pairs:
                if softmax.is_in(operand, heads=has_heads):
                    reasons[key] = self._objection(values)
                    break
        output = product.output()
        is_shared = any(operand.shared for pair in product.pairs for operand in pair)
        # A product of two activations, neither of them a softmax that waits: perhaps keys times values.
        if not reasons and output is not None and not is_shared:
            self._summaries.append((SeenOperand.of(output), product.output))
        return reasons

    def _objection(self, values: SeenOperand) -> str:
        if values.shared or _contains(self._shared, values):
            return "a softmax over what is the same for all images, not over tokens"
        if _contains(self._summaries, values):
            return "a softmax over channels, which weighs products of keys and values (linear attention)"
        return ""


def _contains(
    tensors: list[tuple[SeenOperand, weakref.ref[Tensor]]], operand: SeenOperand
) -> bool:
    """Return whether an operand is one of the tensors that are still alive, perhaps with its axes in another order."""
    return any(
        # Once a tensor is gone, another one may have its address.
        tensor.place == operand.place
        and tensor.shape.numel() == operand.shape.numel()
        and alive() is not None
        for tensor, alive in tensors
    )
