"""Gated attention applied in memory linear in the number of tokens: one block of queries at a time.

A block's attention is formed, mixed and multiplied by the values while it is in a core's cache, and
is formed again in the backward pass. The positional part is given by the logarithms of its two
factors, which are multiplied within each block.

In a depthwise layer, W_out of a head is one weight per channel and can be applied before attention
gathers the values: the output is the sum over heads of A_h (v * w_h). The gathered values of all
heads, heads x tokens x channels, are then never stored, and one matrix product computes the sum.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from tcnn_model.precision import widen

__all__ = ["blocks_of_queries", "mix_and_apply"]

# Attention weights held at a time. 2^19 float32 numbers stay in a CPU core's cache; elsewhere fewer
# and larger operations are faster.
_BLOCK_ELEMENTS_CPU = 2**19
_BLOCK_ELEMENTS = 2**26
# Whether a block on a CPU may have several images; elsewhere it has as many as fit.
_IMAGES_TOGETHER_CPU = False
# Weighted values held at a time in a depthwise layer: 1 MB in float32, for the same reason.
_WEIGHTED_ELEMENTS = 2**18


def blocks_of_queries(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Iterate over blocks with a bounded number of attention weights,
    each as (images, heads, queries).
    """
    batch, heads, queries, _ = query.shape
    on_cpu = query.device.type == "cpu"
    elements = _BLOCK_ELEMENTS_CPU if on_cpu else _BLOCK_ELEMENTS
    # Rows of attention in a block: all queries of one or several heads, or some queries of one
    # head.
    rows = max(1, elements // key.shape[2])
    heads_per_block = min(heads, max(1, rows // queries))
    # Blocks have about equal sizes, so that no small block is left at the end.
    num_blocks = math.ceil(queries / min(rows, queries))
    block = math.ceil(queries / num_blocks)
    together = _IMAGES_TOGETHER_CPU or not on_cpu
    images = max(1, rows // (heads_per_block * block)) if together else 1
    # The loop over images is innermost: positional attention is the same for all images, so it is
    # formed for the first image and reused.
    for head in range(0, heads, heads_per_block):
        for start in range(0, queries, block):
            for image in range(0, batch, images):
                yield (
                    slice(image, image + images),
                    slice(head, head + heads_per_block),
                    slice(start, start + block),
                )


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
    """Apply ``((1 - gate) softmax(q k^T) + gate (rows (x) cols)) v``,
    Eq. (7); with taps also Eq. (5) without bias.

    Args:
        query: Queries, scaled by 1 / sqrt(d) already, shape (B, heads, N_query, d).
        key: Keys, shape (B, heads, H * W, d).
        values: Values, shape (B, 1, H * W, C), shared by the heads, or (B, heads, H * W, C).
        log_rows: Logarithm of positional attention along y, shape (heads, queries_y, H). Like
            ``log_cols`` and ``gate`` in float32 at least.
        log_cols: Logarithm of positional attention along x, shape (heads, queries_x, W).
        gate: Share of positional attention, shape (heads,).
        taps: W_out of a depthwise layer, shape (heads, C, C_out / C). Requires shared values.

    Returns:
        Output of shape (B, heads, N_query, C), in memory (B, N_query, heads, C) so that W_out is
        one matrix product. With taps, the sum over heads, shape (B, 1, N_query, C_out).
    """
    output = _empty_output(query, values, taps)
    if taps is not None:
        # Heads are summed in float32, so that the sum is rounded only once.
        output = widen(output).zero_()
    wide_query = widen(query)
    wide_key = widen(key)
    rows = log_rows.exp()
    cols = log_cols.exp()
    for block in blocks_of_queries(query, key):
        # The attention of the block, Eq. (7).
        images, heads, queries = block
        if images.start == 0:
            positional = _positional(rows, cols, heads, queries)
        q = wide_query[block]
        k = wide_key[images, heads]
        share = gate[heads, None, None]
        content = torch.softmax(q @ k.mT, -1)
        mixed = content.lerp_(positional, share).to(values.dtype)
        if taps is None:
            for head, weights in enumerate(mixed.unbind(1), heads.start):
                # Shared values have one head, whose index is 0.
                value_head = head % values.shape[1]
                block_output = output[images, head, queries]
                _product(weights, values[images, value_head], out=block_output)
        else:
            block_output = output[images, 0, queries]
            for attention, group_taps in _head_groups(mixed, taps[heads]):
                weighted = _weighted(values[images, 0], group_taps)
                _add_product(_side_by_side(attention), weighted, to=block_output)
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
    """Return twice the multiply-adds of the products with keys and with values;
    arguments are shapes, not tensors.
    """
    batch, heads, queries, dim = query
    channels = out_shape[-1]
    weights = batch * heads * queries * key[2]
    return int(2 * weights * (dim + channels))


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
    """Return the gradients of the arguments of :func:`mix_and_apply`,
    an empty tensor for taps that are None.
    """
    wide_query = widen(query)
    wide_key = widen(key)
    rows = log_rows.exp()
    cols = log_cols.exp()
    d_query = torch.empty_like(wide_query)
    d_key = torch.zeros_like(wide_key)
    d_values = torch.zeros_like(widen(values))
    d_rows = torch.zeros_like(rows)
    d_cols = torch.zeros_like(cols)
    d_gate = torch.zeros_like(gate)
    # A custom operator cannot return None in place of a tensor.
    d_taps = values.new_empty(0) if taps is None else torch.zeros_like(widen(taps))
    for block in blocks_of_queries(query, key):
        images, heads, queries = block
        if images.start == 0:
            positional = _positional(rows, cols, heads, queries)
        q = wide_query[block]
        k = wide_key[images, heads]
        share = gate[heads, None, None]
        content = torch.softmax(q @ k.mT, -1)
        mixed = torch.lerp(content, positional, share).to(values.dtype)

        # The products with the values.
        d_mixed = torch.empty_like(mixed)
        if taps is None:
            # O = A v: dv = A^T dO and dA = dO v^T.
            pairs = zip(mixed.unbind(1), d_mixed.unbind(1), strict=True)
            for head, (weights, d_weights) in enumerate(pairs, heads.start):
                upstream = d_output[images, head, queries]
                value_head = head % values.shape[1]
                _add_product(weights.mT, upstream, to=d_values[images, value_head])
                _product(upstream, values[images, value_head].mT, out=d_weights)
        else:
            upstream = d_output[images, 0, queries].contiguous()
            groups = _head_groups(mixed, taps[heads], d_mixed, d_taps[heads])
            for attention, group_taps, d_attention, d_group_taps in groups:
                # O = sum_h A_h (v w_h): the gradient of the weighted values is A_h^T dO, from which
                # dv is a sum over heads and outputs, and dw_h a sum over keys.
                d_weighted = _side_by_side(attention).mT @ upstream
                # (images, heads, N_key, C, C_out / C).
                shape = (*attention.shape[:2], key.shape[2], *group_taps.shape[1:])
                d_weighted = d_weighted.view(shape)
                d_value_terms = d_weighted * group_taps[:, None]
                d_values[images, 0] += d_value_terms.sum((1, 4))
                d_tap_terms = d_weighted * values[images, 0, :, :, None].unsqueeze(1)
                d_group_taps += d_tap_terms.sum((0, 2))
                d_side = upstream @ _weighted(values[images, 0], group_taps).mT
                by_head = d_side.unflatten(2, (attention.shape[1], -1))
                d_attention.copy_(by_head.transpose(1, 2))
        d_mixed = widen(d_mixed)

        # The factor 1 - share is the same for all logits of a head, so it is applied to the smaller
        # products instead.
        d_logits = content * d_mixed
        # Softmax: dS = C (dC - sum_j C_j dC_j), with dC = (1 - g) dA.
        content_sums = d_logits.sum(3, keepdim=True)
        d_logits.addcmul_(content, content_sums, value=-1)
        d_query[block] = (d_logits @ k).mul_(1 - share)
        d_keys_of_block = d_logits.mT @ q
        d_key[images, heads] += d_keys_of_block.mul_(1 - share)

        # P = exp(log rows + log cols): the gradient of each logarithm is g dA P, summed over the
        # other axis.
        grid = (rows.shape[2], cols.shape[2])
        by_image = d_mixed.mul_(positional)
        on_grid = (by_image[0] if len(by_image) == 1 else by_image.sum(0)).unflatten(2, grid)
        along_y = on_grid.sum(3)  # (heads, queries, H)
        along_x = on_grid.sum(2)  # (heads, queries, W)
        # dA/dg = P - C, summed over images, keys and queries.
        d_gate[heads] += (along_x.sum(2) - content_sums[..., 0].sum(0)).sum(1)
        index = torch.arange(query.shape[2], device=query.device)[queries]
        queries_x = cols.shape[1]
        d_rows[heads].index_add_(1, index // queries_x, along_y * share)
        d_cols[heads].index_add_(1, index % queries_x, along_x * share)
    return (
        d_query.to(query.dtype),
        d_key.to(key.dtype),
        d_values.to(values.dtype),
        d_rows,
        d_cols,
        d_gate,
        d_taps.to(values.dtype),
    )


@_backward.register_fake
def _(d_output: Tensor, *inputs: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(d_output.new_empty(0) if x is None else torch.empty_like(x) for x in inputs)


def _save_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, d_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
    *gradients, d_taps = _backward(d_output, *ctx.saved_tensors)
    return *gradients, None if ctx.saved_tensors[-1] is None else d_taps


def _refuse(ctx, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
    raise RuntimeError(
        "attention in blocks can be differentiated once; for second derivatives use backend='dense'"
    )


mix_and_apply.register_autograd(_differentiate, setup_context=_save_inputs)
_backward.register_autograd(_refuse)


def _product(left: Tensor, right: Tensor, *, out: Tensor) -> None:
    """Write the products ``left @ right`` of images to ``out``, which need not be contiguous."""
    if len(out) == 1 and out.dtype not in (torch.float16, torch.bfloat16):
        torch.mm(left[0], right[0], out=out[0])
    else:
        # torch 2.8 mishandles mm(out=...) of a half-precision vector whose elements are not
        # adjacent in memory.
        out.copy_(left.contiguous() @ right)


def _add_product(left: Tensor, right: Tensor, *, to: Tensor) -> None:
    """Add the products ``left @ right`` of images to a tensor, which may have a wider dtype."""
    if len(to) == 1 and to.dtype == left.dtype:
        to[0].addmm_(left[0], right[0])
    else:
        to += left @ right.contiguous()


def _head_groups(
    attention: Tensor, taps: Tensor, d_attention: Tensor | None = None, d_taps: Tensor | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Split attention (images, heads, ...), taps (heads, ...)
    and their gradients into groups of heads whose weighted values stay in a core's cache.
    """
    images, _, _, keys = attention.shape
    heads_per_group = max(1, _WEIGHTED_ELEMENTS // (images * keys * taps[0].numel()))
    pairs = ((attention, 1), (taps, 0), (d_attention, 1), (d_taps, 0))
    groups = (x.split(heads_per_group, dim) for x, dim in pairs if x is not None)
    return zip(*groups, strict=True)


def _weighted(values: Tensor, taps: Tensor) -> Tensor:
    """Multiply values (images, N_key, C) by W_out of each head,
    (heads, C, C_out / C), into (images, heads * N_key, C_out).
    """
    # (images, heads, N_key, C, C_out / C).
    by_head = values[:, None, :, :, None] * taps[:, None]
    return by_head.flatten(3).flatten(1, 2)


def _side_by_side(attention: Tensor) -> Tensor:
    """Lay the heads of (images, heads, n, N_key) side by side in (images, n, heads * N_key)."""
    return attention.transpose(1, 2).flatten(2)


def _positional(rows: Tensor, cols: Tensor, heads: slice, queries: slice) -> Tensor:
    """Return rows (x) cols of a block of queries, (heads, queries, H * W)."""
    queries_y = rows.shape[1]
    queries_x = cols.shape[1]
    index = torch.arange(queries_y * queries_x, device=rows.device)[queries]
    along_y = rows[heads][:, index // queries_x]
    along_x = cols[heads][:, index % queries_x]
    return (along_y[..., :, None] * along_x[..., None, :]).flatten(2)


def _empty_output(query: Tensor, values: Tensor, taps: Tensor | None) -> Tensor:
    batch, heads, queries, _ = query.shape
    if taps is not None:
        channels = taps.shape[1] * taps.shape[2]
        return values.new_empty(batch, 1, queries, channels)
    # The memory layout is (B, N_query, heads, C), so that W_out is one matrix product.
    return values.new_empty(batch, queries, heads, values.shape[3]).transpose(1, 2)
