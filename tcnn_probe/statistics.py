"""Statistics of attention, one block of queries at a time: plain tensors in, plain tensors out.

All are means over the queries of each image. A is the whole attention, C its content and P its positional part. A and
P are distributions over the real pixels and the zero padding, C over real pixels only. Entropies are in nats,
distances in input pixels of the layer.
"""

import torch
from torch import Tensor

from tcnn_model import GatedAttention

__all__ = ["gated_attention_statistics"]

_BLOCK_ELEMENTS = 2**22  # attention weights held at a time, for each of a few temporaries: 16 MiB in float32


@torch.no_grad()
def gated_attention_statistics(attention: GatedAttention, *, block: int | None = None) -> dict[str, Tensor]:
    """Entropies and mean distance of gated positional attention, exact, without an N x N tensor for large N.

    - ``entropy``: ``-sum_j A_ij log A_ij``
    - ``content_entropy``, ``positional_entropy``: the same of C and of P
    - ``attention_distance``: ``sum_j A_ij ||delta_ij||``, ConViT's non-locality

    Args:
        attention: of a batch of B images.
        block: queries at a time; chosen to hold about 4 million attention weights unless given.

    Returns:
        for each name, the mean over queries for every image and head, shape (B, heads), in float32 (float64 if the
        attention is in float64).
    """
    with torch.autocast(attention.query.device.type, enabled=False):
        return _statistics(attention, block)


def _statistics(attention: GatedAttention, block: int | None) -> dict[str, Tensor]:
    query, key = _at_least_float32(attention.query) * attention.scale, _at_least_float32(attention.key)
    rows, cols = attention.rows.to(query.dtype), attention.cols.to(query.dtype)
    gate = attention.gate.to(query.dtype)[:, None, None]
    y, x = attention.y, attention.x
    real, padding = (index.to(query.device) for index in _real_and_padding(attention))
    queries = y.queries * x.queries
    if block is None:
        block = max(1, _BLOCK_ELEMENTS // max(1, key.shape[0] * key.shape[1] * key.shape[2]))

    sums = {name: query.new_zeros(query.shape[:2]) for name in ("entropy", "content_entropy", "attention_distance")}
    for start in range(0, queries, block):
        index = torch.arange(start, min(start + block, queries), device=query.device)
        at_row, at_col = index // x.queries, index % x.queries
        distance = torch.hypot(
            (y.key_positions(query) - y.query_positions(query)[at_row, None])[:, :, None],
            (x.key_positions(query) - x.query_positions(query)[at_col, None])[:, None, :],
        ).flatten(1)  # (block, N_key)
        positional = (rows[:, at_row, :, None] * cols[:, at_col, None, :]).flatten(2)  # (heads, block, N_key)
        content = torch.softmax(query[:, :, start : start + block] @ key.transpose(-2, -1), dim=-1)
        on_real = (1 - gate) * content + gate * positional[..., real]  # (B, heads, block, H * W)
        on_padding = gate * positional[..., padding]  # the same for every image
        sums["entropy"] += torch.special.entr(on_real).sum((-2, -1)) + torch.special.entr(on_padding).sum((-2, -1))
        sums["content_entropy"] += torch.special.entr(content).sum((-2, -1))
        sums["attention_distance"] += (on_real * distance[:, real]).sum((-2, -1))
        sums["attention_distance"] += (on_padding * distance[:, padding]).sum((-2, -1))

    means = {name: total / queries for name, total in sums.items()}
    # The entropy of a product of distributions is the sum of theirs.
    product_entropy = _entropy(rows).mean(1) + _entropy(cols).mean(1)
    means["positional_entropy"] = product_entropy.expand_as(means["entropy"])
    return means


def _entropy(attention: Tensor) -> Tensor:
    return torch.special.entr(attention).sum(-1)


def _real_and_padding(attention: GatedAttention) -> tuple[Tensor, Tensor]:
    """Indices, into the flattened extended grid, of the image's pixels and of the padding; on the CPU."""
    real = torch.zeros(attention.y.keys, attention.x.keys, dtype=torch.bool)
    top, left = attention.y.before, attention.x.before
    real[top : top + attention.y.length, left : left + attention.x.length] = True
    real = real.flatten()
    return real.nonzero()[:, 0], (~real).nonzero()[:, 0]


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
