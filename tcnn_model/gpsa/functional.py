"""Gated positional self-attention applied to values (T-CNN paper, Eqs. 5 and 7):
one core for every kind of layer.
"""

from dataclasses import replace
from typing import Literal, get_args, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_model import kernels
from tcnn_model.gpsa.attention import GatedAttention, check_values, product
from tcnn_model.gpsa.blocks import mix_and_apply
from tcnn_model.gpsa.positional import Axis, apply_separable, traces_sizes
from tcnn_model.gpsa.statistics import AttentionStatistics, apply_and_measure, measure
from tcnn_model.kernels import trial
from tcnn_model.precision import at_least_float32, autocast_dtype, without_autocast

__all__ = [
    "Backend",
    "attend",
    "attend_and_measure",
    "attend_weighted",
    "check_backend",
    "gpsa",
]

Backend = Literal["auto", "dense", "blocks", "fused", "triton"]

# On a CPU "dense" is about as fast as "blocks" or faster, forward and backward, up to this number
# of keys; beyond it "blocks" is faster and takes less memory (benchmarks/backends.py).
_DENSE_KEYS = 128
# On a GPU "blocks" takes up to twice as long as "dense", which takes 6 GB with so many weights.
_DENSE_WEIGHTS = 2**28
# In half precision the kernels take about as long as "dense" from this number of keys on, and two
# thirds of the time and a fifth of the memory or less with twice as many (H200).
_KERNEL_KEYS = 400


@overload
def gpsa(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    position: Tensor,
    gate: Tensor,
    *,
    y: Axis,
    x: Axis,
    backend: Backend = ...,
    statistics: Literal[False] = ...,
) -> Tensor: ...


@overload
def gpsa(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    position: Tensor,
    gate: Tensor,
    *,
    y: Axis,
    x: Axis,
    backend: Backend = ...,
    statistics: Literal[True],
) -> tuple[Tensor, AttentionStatistics]: ...


def gpsa(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    position: Tensor,
    gate: Tensor,
    *,
    y: Axis,
    x: Axis,
    backend: Backend = "auto",
    statistics: bool = False,
) -> Tensor | tuple[Tensor, AttentionStatistics]:
    """Compute gated positional self-attention: ``A_h v`` with A_h of Eq. (7).

    ``A_h = (1 - gate_h) softmax(q_h k_h^T / sqrt(d)) + gate_h softmax(position_h · r)``, where r is
    ``(||delta||^2, delta_1, delta_2)`` of the offset delta from query to key in pixels. Values on
    padding are zero.

    Args:
        query: Queries, shape (B, heads, N_query, d), row-major over the ``y.queries`` x
            ``x.queries`` grid.
        key: Keys, shape (B, heads, N_key, d), row-major over the ``y.length`` x ``x.length`` pixels
            of the image.
        values: Values, shape (B, 1, N_key, C), shared by the heads, or (B, heads, N_key, C).
        position: v_pos, shape (heads, 3): ``-alpha (1, -2 Delta_1, -2 Delta_2)`` for a Gaussian of
            strength alpha at Delta (:func:`~tcnn_model.gaussian_position`), preferably in float64.
        gate: sigma(lambda), the share of positional attention, shape (heads,).
        y: Vertical :class:`~tcnn_model.Axis`: size, stride, padding.
        x: Horizontal :class:`~tcnn_model.Axis`.
        backend: Algorithm. All algorithms agree up to rounding and give gradients of every tensor,
            "dense" also second derivatives:

            - "dense": Forms both attentions as matrices, mixes them and applies the mixture. Memory
              O(heads N^2).
            - "blocks": Does the same for one block of queries at a time, which is formed again in
              the backward pass. Memory O(heads N C).
            - "fused": Uses torch's fused attention for the content part, and the factors of the
              positional part. Needs separate values for each head, as wide as the queries. Memory
              O(heads N d).
            - "triton": Uses CUDA kernels that form attention in registers (tcnn_model/kernels).
            - "auto": Chooses the fastest applicable algorithm, as measured on a CPU and an H200: on
              GPUs the kernels from 400 keys on in half precision. Their first output of each shape
              is compared with another algorithm's; if it differs, or does not compile, a warning
              says so and they are not used. The environment variable TCNN_PROBE_TRITON=0 keeps
              "auto" from the kernels, and 1 has it try them in place of every "dense" and "blocks".
        statistics: Whether to return :class:`~tcnn_model.AttentionStatistics` as well, without
            gradients. If no gradient is needed, they are computed in the same pass as the output.

    Returns:
        Output of shape (B, heads, N_query, C), with the dtype of the values; with ``statistics``,
        the output and the statistics.

    Raises:
        TypeError: If an argument is neither a floating-point tensor nor, for ``y`` and ``x``, an
            Axis.
        ValueError: If the shapes do not fit each other or the grid, the grid is empty, devices or
            dtypes are mixed, or the backend does not exist or is not applicable.
    """
    attention = GatedAttention(query, key, position, gate, y, x)
    if statistics:
        return attend_and_measure(attention, values, backend=backend)
    return attend(attention, values, backend=backend)


def attend(attention: GatedAttention, values: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Apply an attention to values: the output of :func:`gpsa`, shape (B, heads, N_query, C)."""
    may_try = backend == "auto"
    attention, values, backend = _prepare(attention, values, backend)
    with without_autocast(values):
        if may_try and backend in ("dense", "blocks") and _tries_kernels(attention, values):
            return _try_kernels(attention, values, backend)
        return _APPLY[backend](attention, values)


def attend_weighted(attention: GatedAttention, values: Tensor, taps: Tensor) -> Tensor:
    """Apply an attention and W_out of a depthwise layer,
    Eq. (5) without bias, without forming outputs of heads.

    Args:
        attention: Attention of all heads.
        values: Values shared by the heads, shape (B, 1, N_key, C).
        taps: W_out, shape (heads, C, C_out / C).

    Returns:
        Output of shape (B, N_query, C_out).
    """
    attention, values, _ = _prepare(attention, values, "blocks")
    with without_autocast(values):
        return _blocks(attention, values.contiguous(), taps.to(values.dtype).contiguous())[:, 0]


def attend_and_measure(
    attention: GatedAttention, values: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, AttentionStatistics]:
    """Apply an attention to values and measure it: the output and statistics of :func:`gpsa`."""
    attention, values, backend = _prepare(attention, values, backend)
    with without_autocast(values):
        if backend == "triton":
            output, statistics = kernels.gated_attention(attention, values, statistics=True)
            assert statistics is not None
            return output, statistics
        inputs = (
            values,
            attention.query,
            attention.key,
            attention.position,
            attention.gate,
        )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return _APPLY[backend](attention, values), measure(attention)
        return apply_and_measure(attention, values)


def _prepare(
    attention: GatedAttention, values: Tensor, backend: Backend
) -> tuple[GatedAttention, Tensor, Backend]:
    """Return the arguments, cast as under autocast,
    and the backend to use; raise if the backend is not applicable.
    """
    # Position and gate are not cast: positional logits of far pixels need the range, and gates near
    # 1 the precision.
    dtype = autocast_dtype(attention.query)
    if dtype != attention.query.dtype:
        attention = replace(attention, query=attention.query.to(dtype), key=attention.key.to(dtype))
    values = values.to(autocast_dtype(values))
    check_values(attention, values)
    if check_backend(backend) == "auto":
        backend = _choose(attention, values)
    if backend == "fused" and (reason := _why_not_fused(attention, values)):
        raise ValueError(f"backend='fused' {reason}; use 'blocks' or 'auto'")
    if backend == "triton" and values.is_meta:
        backend = "dense"  # nothing is computed, as in the rehearsal of a conversion
    if backend == "triton" and not kernels.available(values.device):
        raise ValueError(
            f"backend='triton' needs Triton and a CUDA device; the tensors are on {values.device}"
        )
    # Blocks and kernels are not launched on an empty batch; "dense" needs no special case for it.
    is_empty = not traces_sizes() and len(values) == 0
    return attention, values, "dense" if is_empty else backend


def check_backend(backend: Backend) -> Backend:
    """Return the backend; raise if it does not exist."""
    if backend not in get_args(Backend):
        raise ValueError(
            f"expected backend to be one of {', '.join(get_args(Backend))}; got {backend!r}"
        )
    return backend


def _choose(attention: GatedAttention, values: Tensor) -> Backend:
    if traces_sizes():
        return "dense"  # torch's own operators, which run in other programs, for any size
    if _why_not_fused(attention, values) is None:
        return "fused"
    batch, heads, queries, keys = (*attention.query.shape[:3], attention.key.shape[2])
    if values.device.type == "cpu":
        return "dense" if keys <= _DENSE_KEYS else "blocks"
    return "dense" if batch * heads * queries * keys <= _DENSE_WEIGHTS else "blocks"


def _why_not_fused(attention: GatedAttention, values: Tensor) -> str | None:
    """Return the reason why torch's fused attention is not applicable,
    or None if it is applicable.
    """
    query = attention.query
    expected = (query.shape[1], query.shape[3])
    actual = (values.shape[1], values.shape[3])
    if actual != expected:
        return (
            f"needs values for each head, as wide as the queries, (heads, d) = {expected}; got "
            f"{actual}"
        )
    # torch has no flash or memory-efficient kernel for float64 on CUDA; its fallback forms the N x
    # N matrix.
    if query.dtype == torch.float64 and query.device.type != "cpu":
        return "has no kernel for float64 but on the CPU"
    return None


def _dense(attention: GatedAttention, values: Tensor) -> Tensor:
    content = attention.content()  # (B, heads, N_query, H * W)
    rows, cols = attention.factors_on_pixels(content.dtype)
    gate = attention.gate[:, None, None].to(content.dtype)
    mixed = torch.lerp(content, product(rows, cols), gate).to(values.dtype)
    return mixed @ values


def _blocks(attention: GatedAttention, values: Tensor, taps: Tensor | None = None) -> Tensor:
    dtype = at_least_float32(values.dtype)
    # The gradient of a logarithm is the gradient of the attention times the attention, so the
    # backward pass needs only the product of both factors.
    log_rows, log_cols = attention.factors_on_pixels(dtype, logarithm=True)
    scaled = attention.query * attention.scale
    return mix_and_apply(
        scaled,
        attention.key,
        values,
        log_rows,
        log_cols,
        attention.gate.to(dtype),
        taps,
    )


def _fused(attention: GatedAttention, values: Tensor) -> Tensor:
    rows, cols = attention.factors_on_pixels(values.dtype)
    on_grid = values.unflatten(2, (attention.y.length, attention.x.length))
    positional = apply_separable(rows, cols, on_grid).flatten(2, 3)
    # If channels are not innermost in memory, torch falls back to forming the N x N matrix.
    q, k, v = (
        t if t.stride(-1) == 1 else t.contiguous() for t in (attention.query, attention.key, values)
    )
    content = F.scaled_dot_product_attention(q, k, v)
    return torch.lerp(content, positional, attention.gate[:, None, None].to(values.dtype))


def _tries_kernels(attention: GatedAttention, values: Tensor) -> bool:
    """Return whether the kernels are tried:
    they are compared in eager mode, and not tuned for float64.
    """
    return (
        not torch.compiler.is_compiling()
        and trial.enabled(default=_kernels_are_faster(attention, values))
        and kernels.available(values.device)
        and len(values) > 0
        and values.dtype != torch.float64
    )


def _kernels_are_faster(attention: GatedAttention, values: Tensor) -> bool:
    has_many_keys = values.dtype.itemsize == 2 and attention.key.shape[2] >= _KERNEL_KEYS
    return has_many_keys and kernels.is_modern_gpu(values.device)


def _try_kernels(attention: GatedAttention, values: Tensor, other: Backend) -> Tensor:
    """Apply an attention with the kernels if they agree
    with another backend at the first call with this shape.
    """
    shapes = (attention.query.shape, attention.key.shape, values.shape)
    return trial.tried(
        "gated attention",
        (*map(tuple, shapes), attention.y, attention.x, values.dtype, values.device),
        lambda: _triton(attention, values),
        lambda: _APPLY[other](attention, values),
        lambda output: (output,),
        logits=lambda: trial.logit_bound(attention.query, attention.key, attention.scale),
        dtype=values.dtype,
    )


def _triton(attention: GatedAttention, values: Tensor) -> Tensor:
    return kernels.gated_attention(attention, values)[0]


_APPLY = {"dense": _dense, "blocks": _blocks, "fused": _fused, "triton": _triton}
