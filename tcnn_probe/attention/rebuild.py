"""Rebuilds attention from what torch was asked for, as (rows, heads, N_query, N_key), and checks that it is right."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.architectures.grids import Windows
from tcnn_probe.architectures.lookup import head_count, known
from tcnn_probe.attention.call import AttentionCall, GivenLogits, Logits, ProductLogits
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.token_grid import find_layout, pool_layout, token_counts
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.hooks.interception import SeenAttention

__all__ = [
    "NoTokenAttentionError",
    "ReconstructionError",
    "Verification",
    "as_rows",
    "between_channels",
    "discrepancy",
    "from_rows",
    "heads_axis",
    "logits_of",
    "rebuild",
    "relative_difference",
    "tolerance",
    "values_of",
]

_QUERIES_TO_CHECK = 64
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}  # their fused kernels round the attention too


class NoTokenAttentionError(Exception):
    """A softmax that is no attention between tokens; the message says what it is."""


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


def rebuild(seen: SeenAttention, name: str, running: Running, maps: FeatureMaps) -> AttentionCall:
    """Turn what torch was asked for by the last of the running modules into an attention of the layer ``name``.

    Raises:
        NoTokenAttentionError: it is no attention between tokens.
    """
    module, inputs = running[-1]
    if reason := known(module).no_attention_matrix:
        raise NoTokenAttentionError(reason)
    logits = logits_of(seen, module)
    rows, heads, queries, keys = logits.shape
    layout = pool_layout(queries, keys, running, maps)
    if layout is None and queries == keys and between_channels(keys, heads, inputs):
        raise NoTokenAttentionError("attention between channels, not between tokens")
    images = maps.images if maps.images and rows % maps.images == 0 else rows
    windows = rows // images
    cut = _find_windows(running)
    if layout is None and seen.not_on_grid:
        layout = Layout(None, None, seen.not_on_grid)
    elif layout is None:
        layout = find_layout(queries, keys, windows, running, maps)
        if layout.keys is None and cut is not None and queries == keys == cut.window[0] * cut.window[1]:
            layout = Layout(Tokens(0, *cut.window), Tokens(0, *cut.window))
        behind = any((maps.around(count) or (0, 0))[1] for count in (queries, keys))
        if layout.keys is not None and windows == 1 and behind:
            logits = logits_of(_grid_last(seen, maps), module)
    if windows == 1 and cut is not None and cut.grid == cut.window:
        cut = None  # the window is the image: no part of it has to be put anywhere
    special = maps.special
    tokens = maps.has_class_token(keys), special.distillation_token
    return AttentionCall(module, images, windows, logits, layout, name, *tokens, cut)


def _find_windows(running: Running) -> Windows | None:
    """Return the windows of the innermost module that is known to cut its input; None if there is none."""
    for module, inputs in reversed(running):
        if cut := known(module).windows:
            return cut(module, inputs)
    return None


def _grid_last(seen: SeenAttention, maps: FeatureMaps) -> SeenAttention:
    """With the tokens that are after the grid before it."""

    def ordered(x: Tensor, dim: int) -> Tensor:
        count = x.shape[dim]
        before, after = maps.around(count) or (0, 0)
        if not after or count <= before + after:
            return x
        first, grid, last, end = x.split([before, count - before - after, after - 1, 1], dim)
        return torch.cat([end, first, last, grid] if maps.class_token_is_last(count) else [first, last, end, grid], dim)

    def both(x: Tensor | None) -> Tensor | None:
        return None if x is None else ordered(ordered(x, -2), -1)

    if seen.logits is not None:
        return replace(seen, logits=both(seen.logits))
    assert seen.query is not None
    assert seen.key is not None
    return replace(seen, query=ordered(seen.query, -2), key=ordered(seen.key, -2), mask=both(seen.mask))


@torch.no_grad()
def discrepancy(seen: SeenAttention, module: nn.Module) -> tuple[Tensor, float] | None:
    """Compare the first row of the rebuilt attention with what torch gave the model.

    Returns:
        the largest difference as a share of torch's largest value, shape () in float32, and the largest share that
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
    """What is weighed, shape (rows, heads, N_key, d_value)."""
    return as_rows(_alike(seen)[2], module, seen.heads)


def logits_of(seen: SeenAttention, module: nn.Module) -> Logits:
    """The logits of an attention as torch was asked for it."""
    if seen.logits is not None:
        return GivenLogits(as_rows(seen.logits, module, seen.heads))
    query, key, _ = _alike(seen)
    mask = seen.mask
    if mask is not None:
        mask = as_rows(mask.expand(*query.shape[:-1], key.shape[-2]), module, seen.heads)
    return ProductLogits(as_rows(query, module, seen.heads), as_rows(key, module, seen.heads), seen.scale, mask)


def _alike(seen: SeenAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, broadcast to common leading dimensions, of which there is at least one."""
    given = [seen.query, seen.key, seen.value]
    shapes = [(1,), *(x.shape[:-2] for x in given if x is not None)]
    if seen.mask is not None:
        shapes.append(seen.mask.shape[:-2])
    leading = np.broadcast_shapes(*shapes)
    query, key, value = (x.expand(*leading, *x.shape[-2:]) for x in given if x is not None)
    return query, key, value


def heads_axis(leading: Sequence[int], module: nn.Module, given: int | None = None) -> tuple[int | str, int]:
    """Find the axis of heads among the sizes before N_query, and the number of heads.

    The axis is "merged" if heads are part of the first axis, and "one" if there is none; ``given`` if it is known.
    """
    axis: int | str | None = given if given is not None else known(module).heads_axis
    count = head_count(module) or 0
    if axis is None:
        if count and count in leading[1:]:
            axis = len(leading) - 1 - leading[::-1].index(count)  # windows of the same number come before the heads
        elif len(leading) > 1:
            axis = 1
        else:
            axis = "merged" if count and leading[0] % count == 0 else "one"
    return axis, 1 if axis == "one" else count if axis == "merged" else leading[int(axis)]


def as_rows(x: Tensor, module: nn.Module, heads: int | None = None) -> Tensor:
    """(..., N, d) as (rows, heads, N, d), a view where strides allow it."""
    axis, count = heads_axis(x.shape[:-2], module, heads)
    if axis == "one":
        return x.flatten(0, -3).unsqueeze(1)
    if axis == "merged":
        x, axis = x.unflatten(0, (-1, count)), 1
    x = x.movedim(int(axis), -3)
    return x.flatten(0, -4) if x.ndim > 4 else x


def from_rows(rows: Tensor, leading: Sequence[int], module: nn.Module, heads: int | None) -> Tensor:
    """The inverse of :func:`as_rows`, for an x of shape (*leading, N, d)."""
    axis, count = heads_axis(leading, module, heads)
    if axis == "one":
        return rows.reshape(*leading, *rows.shape[-2:])
    at, sizes = (1, [-1, count, *leading[1:]]) if axis == "merged" else (int(axis), [*leading])
    x = rows.reshape(*sizes[:at], *sizes[at + 1 :], *rows.shape[1:]).movedim(-3, at)
    return x.flatten(0, 1) if axis == "merged" else x


def between_channels(keys: int, heads: int, inputs: Sequence[Any]) -> bool:
    """Whether the keys can only be the channels of each head, by the shapes of the layer's inputs."""
    features = [x for x in inputs if isinstance(x, Tensor) and x.ndim in (3, 4)]
    channels = {x.shape[-1] if x.ndim == 3 else x.shape[1] for x in features}
    return keys * heads in channels and keys not in token_counts(inputs)


def tolerance(dtype: torch.dtype) -> float:
    """The largest share of the output's largest value that rounding explains."""
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """The largest difference as a share of the largest expected value, shape () in float32, where that is finite."""
    broken = ~expected.isfinite()  # by what the model was given
    off, size = (x.masked_fill(broken, 0).abs().amax().float() for x in (rebuilt - expected, expected))
    return off / size.clamp_min(torch.finfo(torch.float32).tiny)


class Verification:
    """Comparisons of a forward, which are looked at when it has ended: reading one waits for the device."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._open: list[tuple[str, Tensor, float]] = []

    def begin(self) -> None:
        """Forget what was compared in a forward that did not end."""
        self._open = []

    def needed(self, layer: str) -> bool:
        """Whether no forward has shown yet that the layer is rebuilt rightly."""
        return layer not in self._passed

    def add(self, layer: str, off: Tensor, most: float) -> None:
        """A relative difference, and the largest that may be."""
        self._open.append((layer, off, most))

    def settle(self) -> None:
        """Look at all of them."""
        compared, self._open = self._open, []
        wrong = {layer: share for layer, off, most in compared if not (share := float(off)) <= most}
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._passed |= {layer for layer, _, _ in compared}
