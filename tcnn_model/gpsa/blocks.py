"""Gated attention applied in memory linear in the number of tokens: one block of queries at a time.

A block's attention is formed, mixed and multiplied by the values while it is in a core's cache, and formed again in
the backward. The positional part comes as the logarithms of its two factors, whose product is taken within the block.

In a depthwise layer W_out of a head weights channels, so it can do that before attention gathers them: sum over heads
of A_h (v * w_h). Then what each head gathers, heads x tokens x channels, is never held, and all heads are one product.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tcnn_model.gpsa.precision import widen

__all__ = ["blocks_of_queries", "mix_and_apply"]

# Attention weights held at a time. On a CPU what stays in a core's cache; elsewhere fewer and larger operations pay.
_BLOCK_ELEMENTS_CPU = 2**19
_BLOCK_ELEMENTS = 2**26
# Weighted values held at a time.
_WEIGHTED_ELEMENTS = 2**18


def blocks_of_queries(query: Tensor, key: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """Image, heads and queries of one block after another, each with a bounded number of attention weights."""
    batch, heads, queries, _ = query.shape
    rows = max(1, (_BLOCK_ELEMENTS_CPU if query.device.type == "cpu" else _BLOCK_ELEMENTS) // key.shape[2])
    heads_together = min(heads, max(1, rows // queries))
    block = math.ceil(queries / math.ceil(queries / min(rows, queries)))
    for head in range(0, heads, heads_together):
        for start in range(0, queries, block):
            for image in range(batch):
                yield image, slice(head, head + heads_together), slice(start, start + block)


@torch.library.custom_op("tcnn_model::mix_and_apply", mutates_args=())
def mix_and_apply(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    log_rows: Tensor,
    log_cols: Tensor,
    gate: Tensor,
    taps: Tensor | None = None,
) -> Tensor:
    """``((1 - gate) softmax(q k^T) + gate (rows (x) cols)) v``, Eq. (7) applied; with taps also Eq. (5), without bias.

    Args:
        query: scaled already, shape (B, heads, N_query, d).
        key: shape (B, heads, H * W, d).
        values: shape (B, 1, H * W, C), shared by the heads, or (B, heads, H * W, C).
        log_rows: shape (heads, queries_y, H), in float32 at least, like ``log_cols`` and ``gate``.
        log_cols: shape (heads, queries_x, W).
        gate: shape (heads,).
        taps: W_out of a depthwise layer, shape (heads, C, C_out / C), for shared values.

    Returns:
        shape (B, heads, N_query, C), in memory (B, N_query, heads, C), so that one matrix product can take it further;
        with taps the sum over heads, shape (B, 1, N_query, C_out).
    """
    output = _empty_output(query, values, taps)
    if taps is not None:
        output = widen(output).zero_()
    wide_query, wide_key, rows, cols = widen(query), widen(key), log_rows.exp(), log_cols.exp()
    for at in blocks_of_queries(query, key):
        image, heads, queries = at
        content = torch.softmax(wide_query[at] @ wide_key[image, heads].transpose(1, 2), -1)
        if image == 0:  # the same for all images
            positional = _positional(rows, cols, heads, queries)
        mixed = content.lerp_(positional, gate[heads, None, None]).to(values.dtype)
        if taps is None:
            for of_head, head in enumerate(range(heads.start, heads.start + len(mixed))):
                _product(mixed[of_head], values[image, head % values.shape[1]], out=output[image, head, queries])
        else:
            for few, weights in _few_heads(mixed, taps[heads]):
                _add_product(_side_by_side(few), _weighted(values[image, 0], weights), to=output[image, 0, queries])
    return output.to(values.dtype)


@mix_and_apply.register_fake
def _(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    log_rows: Tensor,
    log_cols: Tensor,
    gate: Tensor,
    taps: Tensor | None = None,
) -> Tensor:
    return _empty_output(query, values, taps)


@register_flop_formula(torch.ops.tcnn_model.mix_and_apply)
def _flops(query, key, values, *rest, out_shape, **options) -> int:  # type: ignore[no-untyped-def]
    """Twice the multiply-adds of the products with keys and with values; shapes in place of tensors."""
    batch, heads, queries, dim = query
    return int(2 * batch * heads * queries * key[2] * (dim + out_shape[-1]))


@torch.library.custom_op("tcnn_model::mix_and_apply_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    values: Tensor,
    log_rows: Tensor,
    log_cols: Tensor,
    gate: Tensor,
    taps: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the arguments of :func:`mix_and_apply` from that of its output; an empty one for no taps."""
    wide_query, wide_key, rows, cols = widen(query), widen(key), log_rows.exp(), log_cols.exp()
    d_query, d_key, d_values = torch.empty_like(wide_query), torch.zeros_like(wide_key), torch.zeros_like(widen(values))
    d_rows, d_cols, d_gate = torch.zeros_like(rows), torch.zeros_like(cols), torch.zeros_like(gate)
    d_taps = values.new_empty(0) if taps is None else torch.zeros_like(widen(taps))
    for at in blocks_of_queries(query, key):
        image, heads, queries = at
        q, k, share = wide_query[at], wide_key[image, heads], gate[heads, None, None]
        content = torch.softmax(q @ k.transpose(1, 2), -1)
        if image == 0:
            positional = _positional(rows, cols, heads, queries)
        mixed = torch.lerp(content, positional, share)
        narrow, d_mixed = mixed.to(values.dtype), torch.empty_like(mixed, dtype=values.dtype)
        if taps is None:
            for of_head, head in enumerate(range(heads.start, heads.start + len(mixed))):
                upstream, of_values = d_output[image, head, queries], head % values.shape[1]
                _add_product(narrow[of_head].T, upstream, to=d_values[image, of_values])
                _product(upstream, values[image, of_values].T, out=d_mixed[of_head])
        else:
            upstream = d_output[image, 0, queries].contiguous()
            for few, weights, d_few, d_weights in _few_heads(narrow, taps[heads], d_mixed, d_taps[heads]):
                d_weighted = (_side_by_side(few).T @ upstream).view(len(few), len(key[0, 0]), *weights.shape[1:])
                d_values[image, 0] += (d_weighted * weights[:, None]).sum((0, 3))
                d_weights += (d_weighted * values[image, 0, :, :, None]).sum(1)
                d_side = upstream @ _weighted(values[image, 0], weights).T
                d_few.copy_(d_side.unflatten(1, (len(few), -1)).transpose(0, 1))
        d_mixed = widen(d_mixed)

        d_logits = content * d_mixed
        content_sums = d_logits.sum(2, keepdim=True)
        d_logits.addcmul_(content, content_sums, value=-1)  # but for 1 - share, which is the same for all of a head
        d_query[at] = (d_logits @ k).mul_(1 - share)
        d_key[image, heads] += (d_logits.transpose(1, 2) @ q).mul_(1 - share)

        on_grid = d_mixed.mul_(positional).unflatten(2, (rows.shape[2], cols.shape[2]))
        along_y, along_x = on_grid.sum(3), on_grid.sum(2)  # (heads, queries, H) and (heads, queries, W)
        d_gate[heads] += (along_x.sum(2) - content_sums[..., 0]).sum(1)
        index = torch.arange(query.shape[2], device=query.device)[queries]
        d_rows[heads].index_add_(1, index // cols.shape[1], along_y * share)
        d_cols[heads].index_add_(1, index % cols.shape[1], along_x * share)
    d_taps = d_taps.to(values.dtype)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_values.to(values.dtype), d_rows, d_cols, d_gate, d_taps


@_backward.register_fake
def _(d_output: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(d_output.new_empty(0) if x is None else torch.empty_like(x) for x in inputs)


def _remember(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    *gradients, d_taps = _backward(d_output, *ctx.saved_tensors)
    return *gradients, None if ctx.saved_tensors[-1] is None else d_taps


def _refuse(ctx, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    raise RuntimeError("attention in blocks can be differentiated once; for second derivatives use backend='dense'")


mix_and_apply.register_autograd(_differentiate, setup_context=_remember)
_backward.register_autograd(_refuse)


def _product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Write ``left @ right`` to ``out``, whose rows may lie apart: torch 2.8 errs there for half-precision vectors."""
    if out.dtype in (torch.float16, torch.bfloat16):
        out.copy_(left.contiguous() @ right)
    else:
        torch.mm(left, right, out=out)


def _add_product(left: Tensor, right: Tensor, *, to: Tensor) -> None:
    """Add ``left @ right`` to a tensor, which may have a wider type."""
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    else:
        to += left @ right.contiguous()


def _few_heads(*of_heads: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Parts of tensors (heads, ...), of so many heads that their weighted values stay in a core's cache."""
    attention, taps = of_heads[:2]
    together = max(1, _WEIGHTED_ELEMENTS // (attention.shape[2] * taps[0].numel()))
    return zip(*(tensor.split(together) for tensor in of_heads), strict=True)


def _weighted(values: Tensor, taps: Tensor) -> Tensor:
    """Values (N_key, C) times W_out of each head, (heads, C, C_out / C): (heads * N_key, C_out)."""
    return (values[:, :, None] * taps[:, None]).flatten(2).flatten(0, 1)


def _side_by_side(attention: Tensor) -> Tensor:
    """(heads, n, N_key) -> (n, heads * N_key)."""
    return attention.transpose(0, 1).flatten(1)


def _positional(rows: Tensor, cols: Tensor, heads: slice, queries: slice) -> Tensor:
    """Rows (x) cols of a block of queries, (heads, queries, H * W)."""
    index = torch.arange(rows.shape[1] * cols.shape[1], device=rows.device)[queries]
    at_row, at_col = rows[heads][:, index // cols.shape[1]], cols[heads][:, index % cols.shape[1]]
    return (at_row[..., :, None] * at_col[..., None, :]).flatten(2)


def _empty_output(query: Tensor, values: Tensor, taps: Tensor | None) -> Tensor:
    batch, heads, queries, _ = query.shape
    if taps is not None:
        return values.new_empty(batch, 1, queries, taps.shape[1] * taps.shape[2])
    return values.new_empty(batch, queries, heads, values.shape[3]).transpose(1, 2)
