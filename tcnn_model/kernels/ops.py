"""Gated positional self-attention as PyTorch operators: autograd, torch.compile and autocast see these.

The kernels themselves are imported when an operator first runs, so that neither Triton nor a GPU is needed to import
this file.
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tcnn_model.gpsa.positional import Axis
from tcnn_model.gpsa.statistics import AttentionStatistics
from tcnn_model.kernels import launch
from tcnn_model.kernels.grid import Grid, Line

__all__ = ["available", "gated_attention"]


def available(device: torch.device) -> bool:
    """Whether the kernels run on ``device``: Triton is there, and a GPU or (TRITON_INTERPRET=1) its interpreter."""
    if find_spec("triton") is None:
        return False
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    gate: Tensor,
    y: Axis,
    x: Axis,
    *,
    statistics: bool = False,
) -> tuple[Tensor, AttentionStatistics | None]:
    """``((1 - gate) softmax(q k^T / sqrt(d)) + gate P) v``, without an N x N tensor.

    P is the softmax of ``position[h] . (dy^2 + dx^2, dy, dx)`` over the grid extended by the padding, where values are
    zero (T-CNN paper, Eqs. 3, 4 and 7; ``position`` is its v_pos, ``gate`` its sigma(lambda)).

    Differentiable once in q, k, v, position and gate. Under autocast q, k and v take autocast's dtype. ``received`` is
    summed in no fixed order on a GPU; everything else repeats bit by bit.

    Args:
        q: shape (B, heads, N_q, d), float16, bfloat16, float32 or float64.
        k: shape (B, heads, N_k, d), the dtype of q, as v.
        v: shape (B, 1, N_k, C), shared by all heads, or (B, heads, N_k, C).
        position: shape (heads, 3), float32 or float64.
        gate: shape (heads,), float32 or float64, in [0, 1].
        y: vertical axis; ``y.queries * x.queries`` is N_q and ``y.length * x.length`` is N_k, both row-major.
        x: horizontal axis.
        statistics: also measure the attention.

    Returns:
        out, shape (B, heads, N_q, C), the dtype of v, in memory (B, N_q, heads, C); and the statistics, or None.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        RuntimeError: there is no GPU or no Triton (see :func:`available`).
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    lines = list(Line.of(y)), list(Line.of(x))
    _check(q, k, v, position, gate, Grid.unpack(*lines))
    if not statistics:
        return _forward(q, k, v, position, gate, *lines)[0], None
    out, normaliser, table, *measured = _forward_with_statistics(q, k, v, position, gate, *lines)
    entropy, content_entropy, distance, received = measured
    positional_entropy = table.detach()[:, 11] * _LN2
    highest, total = normaliser.detach()
    lse = highest * _LN2 + total.log()
    return out, AttentionStatistics(lse, entropy, content_entropy, positional_entropy, distance, received)


_LN2 = 0.6931471805599453
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOST_KEYS = 2**22  # the kernels find a key's row by a division in float32


def _check(q: Tensor, k: Tensor, v: Tensor, position: Tensor, gate: Tensor, grid: Grid) -> None:
    """Raise ValueError, with what was expected and what was given."""
    batch, heads, _, dim = q.shape
    expected = {
        "q": (q, (batch, heads, grid.queries, dim)),
        "k": (k, (batch, heads, grid.pixels, dim)),
        "v": (v, (batch, heads if v.shape[1] != 1 else 1, grid.pixels, v.shape[-1])),
        "position": (position, (heads, 3)),
        "gate": (gate, (heads,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one of {_DTYPES}, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, tensor in (("position", position), ("gate", gate)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} must be float32 or float64, got {tensor.dtype}")
    if min(*q.shape, *v.shape) < 1 or grid.extended > _MOST_KEYS:
        raise ValueError(f"expected at least one of everything and at most {_MOST_KEYS} keys, got q {tuple(q.shape)}")


def _require(device: torch.device) -> None:
    if not available(device):
        raise RuntimeError(f'the Triton kernels do not run on {device} here; choose backend="blocks"')


def _output(q: Tensor, v: Tensor) -> Tensor:
    """What ``forward.mix`` returns, uninitialised: its strides are part of an operator's promise."""
    return launch.padded_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], like=v).transpose(1, 2)


def _normaliser(q: Tensor) -> Tensor:
    return q.new_empty((2, *q.shape[:3]), dtype=launch.wide(q.dtype))


@torch.library.custom_op("tcnn_model::gated_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, gate: Tensor, y: list[int], x: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    _require(q.device)
    from tcnn_model.kernels import forward, tables

    grid = Grid.unpack(y, x)
    with torch.cuda.device_of(q):
        table = tables.positional_table(position, grid, launch.wide(q.dtype))
        normaliser, _ = forward.content_normaliser(q, k)
        out, _ = forward.mix(q, k, v, normaliser, gate, table, grid)
    return out, normaliser, table


@torch.library.custom_op("tcnn_model::gated_attention_statistics", mutates_args=())
def _forward_with_statistics(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, gate: Tensor, y: list[int], x: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require(q.device)
    from tcnn_model.kernels import forward, tables

    grid = Grid.unpack(y, x)
    with torch.cuda.device_of(q):
        table = tables.positional_table(position, grid, launch.wide(q.dtype))
        normaliser, content_entropy = forward.content_normaliser(q, k, statistics=True)
        out, measured = forward.mix(q, k, v, normaliser, gate, table, grid, statistics=True)
    assert content_entropy is not None
    assert measured is not None
    entropy, distance, received = measured
    return out, normaliser, table, entropy, content_entropy, distance, received


@torch.library.custom_op("tcnn_model::gated_attention_backward_queries", mutates_args=())
def _backward_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grad: Tensor,
    y: list[int],
    x: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require(q.device)
    from tcnn_model.kernels import backward

    with torch.cuda.device_of(q):
        return backward.backward_queries(q, k, v, normaliser, gate, table, Grid.unpack(y, x), grad)


@torch.library.custom_op("tcnn_model::gated_attention_backward_keys", mutates_args=())
def _backward_keys(
    q: Tensor, k: Tensor, v: Tensor, normaliser: Tensor, gate: Tensor, grad: Tensor, content_mean: Tensor
) -> Tensor:
    _require(q.device)
    from tcnn_model.kernels import backward

    with torch.cuda.device_of(q):
        return backward.backward_keys(q, k, v, normaliser, gate, grad, content_mean)


@torch.library.custom_op("tcnn_model::gated_attention_backward_values", mutates_args=())
def _backward_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grad: Tensor,
    y: list[int],
    x: list[int],
) -> Tensor:
    _require(q.device)
    from tcnn_model.kernels import backward

    with torch.cuda.device_of(q):
        return backward.backward_values(q, k, v, normaliser, gate, table, Grid.unpack(y, x), grad)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, position: Tensor, gate: Tensor, y: list[int], x: list[int]) -> Any:
    normaliser = _normaliser(q)
    return _output(q, v), normaliser, normaliser.new_empty(q.shape[1], 12, q.shape[2])


@_forward_with_statistics.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, position: Tensor, gate: Tensor, y: list[int], x: list[int]) -> Any:
    normaliser = _normaliser(q)
    table = normaliser.new_empty(q.shape[1], 12, q.shape[2])
    per_query = (normaliser.new_empty(q.shape[:3]) for _ in range(3))
    return _output(q, v), normaliser, table, *per_query, normaliser.new_empty(k.shape[:3])


@_backward_queries.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grad: Tensor,
    y: list[int],
    x: list[int],
) -> Any:
    heads = q.shape[1]
    position, share = (q.new_empty(shape, dtype=torch.float64) for shape in ((heads, 3), (heads,)))
    return launch.padded_empty(*q.shape, like=q), position, share, torch.empty_like(normaliser[0])


@_backward_keys.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, normaliser: Tensor, gate: Tensor, grad: Tensor, content_mean: Tensor) -> Tensor:
    return launch.padded_empty(*k.shape, like=k)


@_backward_values.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    table: Tensor,
    grad: Tensor,
    y: list[int],
    x: list[int],
) -> Tensor:
    return launch.padded_empty(*v.shape, like=v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, position, gate, ctx.y, ctx.x = inputs
    _, normaliser, table, *_ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, normaliser, gate, table)
    ctx.position_dtype = position.dtype


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Runs only the kernels whose results someone asked for."""
    q, k, v, normaliser, gate, table = ctx.saved_tensors
    wants_q, wants_k, wants_v, wants_position, wants_gate, *_ = ctx.needs_input_grad
    dq = dk = dv = dposition = dgate = None
    if wants_q or wants_k or wants_position or wants_gate:
        dq, dposition, dgate, mean = _backward_queries(q, k, v, normaliser, gate, table, grad, ctx.y, ctx.x)
        dposition, dgate = dposition.to(ctx.position_dtype), dgate.to(gate.dtype)
        if wants_k:
            dk = _backward_keys(q, k, v, normaliser, gate, grad, mean)
    if wants_v:
        dv = _backward_values(q, k, v, normaliser, gate, table, grad, ctx.y, ctx.x)
    return dq, dk, dv, dposition, dgate, None, None


_differentiable: tuple[Callable[..., Any], ...] = (_forward, _forward_with_statistics)
for _operator in _differentiable:
    _operator.register_autograd(_gradients, setup_context=_save)  # type: ignore[attr-defined]


def _refuse(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError("the kernels can be differentiated once; for second derivatives use backend='dense'")


_backward: tuple[Callable[..., Any], ...] = (_backward_queries, _backward_keys, _backward_values)
for _operator in _backward:
    _operator.register_autograd(_refuse)  # type: ignore[attr-defined]
