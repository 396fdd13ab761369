"""Rebuilds softmax attention from what torch was asked for, as (rows, heads, N_query, N_key), and checks it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.architectures.grids import Windows
from tcnn_probe.architectures.lookup import head_count, known
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.softmax import GivenLogits, Logits, ProductLogits, SoftmaxAttention
from tcnn_probe.attention.token_grid import find_layout, pool_layout, token_counts
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.hooks.interception import SeenAttention

__all__ = [
    "NoTokenAttentionError",
    "ReconstructionError",
    "Verification",
    "as_rows",
    "discrepancy",
    "from_rows",
    "heads_axis",
    "is_between_channels",
    "logits_of",
    "relative_difference",
    "softmax_attention_of",
    "tolerance",
    "values_of",
]

# Queries that are compared with the model's own softmax: a slip in scale, mask or order of axes shows in any of them.
_QUERIES_TO_CHECK = 64
# In half precision fused kernels round the attention, too, before it weighs the values.
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class NoTokenAttentionError(Exception):
    """A softmax that is no attention between tokens; the message says what it is."""


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


def softmax_attention_of(
    seen: SeenAttention, name: str, number: int, running: Running, maps: FeatureMaps
) -> SoftmaxAttention:
    """Describe what the last of the running modules asked torch for as an attention between tokens on their grids.

    Args:
        seen: Attention as torch was asked for it.
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
    logits = logits_of(seen, module)
    rows, heads, queries, keys = logits.shape
    layout = pool_layout(queries, keys, running, maps)
    if layout is None and queries == keys and is_between_channels(keys, heads, inputs):
        raise NoTokenAttentionError("attention between channels, not between tokens")
    images = maps.images if maps.images and rows % maps.images == 0 else rows
    windows = rows // images
    cut = _find_windows(running)
    if windows == 1 and cut is not None and cut.grid == cut.window:
        cut = None
    if layout is None and seen.not_on_grid:
        layout = Layout(None, None, seen.not_on_grid)
    elif layout is None:
        layout = find_layout(queries, keys, windows, running, maps)
        if layout.keys is None and cut is not None and queries == keys == cut.window[0] * cut.window[1]:
            layout = Layout(Tokens(0, *cut.window), Tokens(0, *cut.window))
        tokens_behind = any((maps.around(count) or (0, 0))[1] for count in (queries, keys))
        if layout.keys is not None and windows == 1 and tokens_behind:
            logits = logits_of(_grid_last(seen, maps), module)
    return SoftmaxAttention(
        module=module,
        name=name,
        number=number,
        images=images,
        windows=windows,
        layout=layout,
        cut=cut,
        logits=logits,
        class_token=maps.special.class_token,
        distillation_token=maps.special.distillation_token,
        compare=partial(discrepancy, seen, module),
    )


def _find_windows(running: Running) -> Windows | None:
    """Return the windows of the innermost module that is known to cut its input; None if there is none."""
    for module, inputs in reversed(running):
        if cut := known(module).windows:
            return cut(module, inputs)
    return None


def _grid_last(seen: SeenAttention, maps: FeatureMaps) -> SeenAttention:
    """Return the attention with the tokens that are behind the grid in front of it."""

    def ordered(x: Tensor, dim: int) -> Tensor:
        count = x.shape[dim]
        before, after = maps.around(count) or (0, 0)
        if not after or count <= before + after:
            return x
        first, grid, behind, last = x.split([before, count - before - after, after - 1, 1], dim)
        in_order = [last, first, behind, grid] if maps.class_token_is_last(count) else [first, behind, last, grid]
        return torch.cat(in_order, dim)

    def ordered_matrix(x: Tensor | None) -> Tensor | None:
        return None if x is None else ordered(ordered(x, -2), -1)

    if seen.logits is not None:
        return replace(seen, logits=ordered_matrix(seen.logits))
    assert seen.query is not None
    assert seen.key is not None
    query, key = ordered(seen.query, -2), ordered(seen.key, -2)
    return replace(seen, query=query, key=key, mask=ordered_matrix(seen.mask))


@torch.no_grad()
def discrepancy(seen: SeenAttention, module: nn.Module) -> tuple[Tensor, float] | None:
    """Compare the first row of the rebuilt attention with what torch gave the model.

    Returns:
        The largest difference as a share of torch's largest value, shape () in float32, and the largest share that
        rounding explains; None if dropout leaves nothing to compare with.
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
        rebuilt = torch.nan_to_num(rebuilt) @ values
        if seen.finish is not None:
            rebuilt = seen.finish(rebuilt)
            expected = seen.output[:, :1] if seen.output.ndim == 3 else seen.output
        else:
            output = seen.output if seen.output.ndim > 2 else seen.output[None]
            expected = as_rows(output, module, seen.heads)[first, :, queries]
    return relative_difference(rebuilt, expected), tolerance(seen.output.dtype)


def values_of(seen: SeenAttention, module: nn.Module) -> Tensor:
    """Return the values that are weighed, shape (rows, heads, N_key, d_value)."""
    return as_rows(_broadcast(seen)[2], module, seen.heads)


def logits_of(seen: SeenAttention, module: nn.Module) -> Logits:
    """Return the logits of an attention as torch was asked for it."""
    if seen.logits is not None:
        return GivenLogits(as_rows(seen.logits, module, seen.heads))
    query, key, _ = _broadcast(seen)
    mask = seen.mask
    if mask is not None:
        mask = as_rows(mask.expand(*query.shape[:-1], key.shape[-2]), module, seen.heads)
    return ProductLogits(as_rows(query, module, seen.heads), as_rows(key, module, seen.heads), seen.scale, mask)


def _broadcast(seen: SeenAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the same leading dimensions, of which there is at least one."""
    query, key, value = seen.query, seen.key, seen.value
    assert query is not None
    assert key is not None
    assert value is not None
    shapes = [(1,), query.shape[:-2], key.shape[:-2], value.shape[:-2]]
    if seen.mask is not None:
        shapes.append(seen.mask.shape[:-2])
    leading = np.broadcast_shapes(*shapes)
    query, key, value = (x.expand(*leading, *x.shape[-2:]) for x in (query, key, value))
    return query, key, value


def heads_axis(leading: Sequence[int], module: nn.Module, known_axis: int | None = None) -> tuple[int | str, int]:
    """Find the axis of heads among the sizes before N_query, and the number of heads.

    Args:
        leading: Sizes before (N_query, d).
        module: Module that attends.
        known_axis: The axis, where the call says so.

    Returns:
        The axis, "merged" if heads are part of the first axis, or "one" if there is none; and the number of heads.
    """
    axis: int | str | None = known_axis if known_axis is not None else known(module).heads_axis
    count = head_count(module) or 0
    if axis is None:
        if count and count in leading[1:]:
            axis = len(leading) - 1 - leading[::-1].index(count)  # windows of the same number come before the heads
        elif len(leading) > 1:
            axis = 1
        else:
            axis = "merged" if count and leading[0] % count == 0 else "one"
    return axis, 1 if axis == "one" else count if axis == "merged" else leading[int(axis)]


def as_rows(x: Tensor, module: nn.Module, known_axis: int | None = None) -> Tensor:
    """Return (..., N, d) as (rows, heads, N, d), a view where strides allow it."""
    axis, count = heads_axis(x.shape[:-2], module, known_axis)
    if axis == "one":
        return x.flatten(0, -3).unsqueeze(1)
    if axis == "merged":
        x, axis = x.unflatten(0, (-1, count)), 1
    x = x.movedim(int(axis), -3)
    return x.flatten(0, -4) if x.ndim > 4 else x


def from_rows(rows: Tensor, leading: Sequence[int], module: nn.Module, known_axis: int | None = None) -> Tensor:
    """Return (rows, heads, N, d) as (..., N, d) with these leading sizes, the inverse of :func:`as_rows`."""
    axis, count = heads_axis(leading, module, known_axis)
    if axis == "one":
        return rows.reshape(*leading, *rows.shape[-2:])
    place, sizes = (1, [-1, count, *leading[1:]]) if axis == "merged" else (int(axis), [*leading])
    x = rows.reshape(*sizes[:place], *sizes[place + 1 :], *rows.shape[1:]).movedim(-3, place)
    return x.flatten(0, 1) if axis == "merged" else x


def is_between_channels(keys: int, heads: int, inputs: Sequence[Any]) -> bool:
    """Return whether the keys can only be the channels of each head, by the shapes of the layer's inputs."""
    features = [x for x in inputs if isinstance(x, Tensor) and x.ndim in (3, 4)]
    channels = {x.shape[-1] if x.ndim == 3 else x.shape[1] for x in features}
    return keys * heads in channels and keys not in token_counts(inputs)


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest share of the output's largest value that rounding explains."""
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference as a share of the largest expected value, shape () in float32, where finite."""
    broken = ~expected.isfinite()  # by what the model was given
    difference, size = (x.masked_fill(broken, 0).abs().amax().float() for x in (rebuilt - expected, expected))
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
        compared, self._open = self._open, []
        shares = {layer: float(difference) for layer, difference, _ in compared}
        wrong = {layer: shares[layer] for layer, _, largest in compared if not shares[layer] <= largest}
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._passed |= shares.keys()
