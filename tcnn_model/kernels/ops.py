"""Gated positional self-attention as PyTorch operators, for autograd, torch.compile and autocast.

The kernels themselves are imported when an operator first runs, so that importing this file needs
neither Triton nor a GPU.
"""

import math
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.statistics import AttentionStatistics
from tcnn_model.kernels import launch
from tcnn_model.kernels.grid import Grid, Line
from tcnn_model.precision import at_least_float32, widen, widest

__all__ = ["available", "gated_attention", "is_modern_gpu"]

# torch.compile cannot trace the search.
_HAS_TRITON = find_spec("triton") is not None


def available(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``,
    by Triton on a GPU or its interpreter (TRITON_INTERPRET=1).
    """
    interprets = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return _HAS_TRITON and (device.type == "cuda" or interprets)


def is_modern_gpu(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``
    and it is an NVIDIA GPU of compute capability 8.0 or later.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return available(device) and torch.cuda.get_device_capability(device) >= (8, 0)


def gated_attention(
    attention: GatedAttention, values: Tensor, *, statistics: bool = False
) -> tuple[Tensor, AttentionStatistics | None]:
    """Apply an attention to values and optionally measure it, without an N x N tensor.

    The output is differentiable once in query, key, values, position and gate. On a GPU
    ``received`` is summed in no fixed order; everything else is reproducible bit by bit.

    Args:
        attention: Attention in float16, bfloat16, float32 or float64, for at least one image, on a
            device where the kernels are :func:`available`.
        values: Values, shape (B, 1, H * W, C), shared by all heads, or (B, heads, H * W, C). They
            are not checked here.
        statistics: Whether to measure the attention.

    Returns:
        Output, shape (B, heads, N_query, C), in memory (B, N_query, heads, C); and the statistics,
        or None.

    Raises:
        ValueError: If there are more than 2^22 keys, whose rows are computed by a division in
            float32.
    """
    y = list(Line.of(attention.y))
    x = list(Line.of(attention.x))
    keys = Grid.unpack(y, x).extended
    if keys > _MAX_KEYS:
        raise ValueError(f"expected at most {_MAX_KEYS} keys, padding included, got {keys}")
    position = widest(attention.position)
    arguments = (
        attention.query,
        attention.key,
        values,
        position,
        widen(attention.gate),
        y,
        x,
    )
    if not statistics:
        return _forward(*arguments)[0], None
    out, normaliser, table, entropy, content_entropy, distance, received = _forward_with_statistics(
        *arguments
    )
    # The kernels use logarithms to base 2; statistics are in nats.
    highest, total = normaliser.detach()
    return out, AttentionStatistics(
        log_sum_exp=highest * _LN2 + total.log(),
        entropy=entropy,
        content_entropy=content_entropy,
        positional_entropy=table.detach()[:, 11] * _LN2,
        attention_distance=distance,
        received=received,
    )


_LN2 = 0.6931471805599453
_MAX_KEYS = 2**22  # tiles.key_pixels


def _output(q: Tensor, v: Tensor) -> Tensor:
    """Allocate the output of ``forward.mix``."""
    # torch.compile relies on the strides of a fake result, so they must be those of the real
    # output.
    return launch.padded_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3], like=v).transpose(
        1, 2
    )


def _normaliser(q: Tensor) -> Tensor:
    return q.new_empty((2, *q.shape[:3]), dtype=at_least_float32(q.dtype))


@torch.library.custom_op("tcnn_model::gated_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    gate: Tensor,
    y: list[int],
    x: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    from tcnn_model.kernels import forward, tables

    grid = Grid.unpack(y, x)
    with torch.cuda.device_of(q):
        table = tables.positional_table(position, grid, at_least_float32(q.dtype))
        normaliser, _ = forward.content_normaliser(q, k)
        out, _ = forward.mix(q, k, v, normaliser, gate, table, grid)
    return out, normaliser, table


@torch.library.custom_op("tcnn_model::gated_attention_statistics", mutates_args=())
def _forward_with_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    gate: Tensor,
    y: list[int],
    x: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from tcnn_model.kernels import forward, tables

    grid = Grid.unpack(y, x)
    with torch.cuda.device_of(q):
        table = tables.positional_table(position, grid, at_least_float32(q.dtype))
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
    from tcnn_model.kernels import backward

    with torch.cuda.device_of(q):
        return backward.backward_queries(q, k, v, normaliser, gate, table, Grid.unpack(y, x), grad)


@torch.library.custom_op("tcnn_model::gated_attention_backward_keys", mutates_args=())
def _backward_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normaliser: Tensor,
    gate: Tensor,
    grad: Tensor,
    content_mean: Tensor,
) -> Tensor:
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
    from tcnn_model.kernels import backward

    with torch.cuda.device_of(q):
        return backward.backward_values(q, k, v, normaliser, gate, table, Grid.unpack(y, x), grad)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    normaliser = _normaliser(q)
    table = normaliser.new_empty(q.shape[1], 12, q.shape[2])
    return _output(q, v), normaliser, table


@_forward_with_statistics.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
    normaliser = _normaliser(q)
    table = normaliser.new_empty(q.shape[1], 12, q.shape[2])
    per_query = (normaliser.new_empty(q.shape[:3]) for _ in range(3))
    return (
        _output(q, v),
        normaliser,
        table,
        *per_query,
        normaliser.new_empty(k.shape[:3]),
    )


@register_flop_formula(
    [
        torch.ops.tcnn_model.gated_attention,
        torch.ops.tcnn_model.gated_attention_statistics,
    ]
)
def _flops(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> int:
    """Return twice the multiply-adds of the products with keys and with values;
    arguments are shapes, not tensors.
    """
    weights = math.prod(q[:3]) * k[2]
    return int(2 * weights * (q[3] + v[3]))


@_backward_queries.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, normaliser: Tensor, *rest: Any) -> Any:
    heads = q.shape[1]
    position = q.new_empty((heads, 3), dtype=torch.float64)
    gate = q.new_empty((heads,), dtype=torch.float64)
    return (
        launch.padded_empty(*q.shape, like=q),
        position,
        gate,
        torch.empty_like(normaliser[0]),
    )


@_backward_keys.register_fake
def _(q: Tensor, k: Tensor, *rest: Any) -> Tensor:
    return launch.padded_empty(*k.shape, like=k)


@_backward_values.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return launch.padded_empty(*v.shape, like=v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, gate, ctx.y, ctx.x = inputs
    _, normaliser, table, *_ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, normaliser, gate, table)


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """Run only the kernels whose results autograd needs."""
    q, k, v, normaliser, gate, table = ctx.saved_tensors
    needs_q, needs_k, needs_v, needs_position, needs_gate, *_ = ctx.needs_input_grad
    dq = dk = dv = dposition = dgate = None
    # The gradient of k needs the mean that is computed with the gradients of q, position and gate.
    if needs_q or needs_k or needs_position or needs_gate:
        dq, dposition, dgate, mean = _backward_queries(
            q, k, v, normaliser, gate, table, grad, ctx.y, ctx.x
        )
        dgate = dgate.to(gate.dtype)
        if needs_k:
            dk = _backward_keys(q, k, v, normaliser, gate, grad, mean)
    if needs_v:
        dv = _backward_values(q, k, v, normaliser, gate, table, grad, ctx.y, ctx.x)
    return dq, dk, dv, dposition, dgate, None, None


_differentiable: tuple[Callable[..., Any], ...] = (_forward, _forward_with_statistics)
for _operator in _differentiable:
    _operator.register_autograd(_gradients, setup_context=_save)  # type: ignore[attr-defined]


def _refuse(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError(
        "the kernels can be differentiated once; for second derivatives use backend='dense'"
    )


_backward: tuple[Callable[..., Any], ...] = (
    _backward_queries,
    _backward_keys,
    _backward_values,
)
for _operator in _backward:
    _operator.register_autograd(_refuse)  # type: ignore[attr-defined]
