"""The layer written from the T-CNN paper: slow and dense, with the attention of ``dense``."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tcnn_model import GPSA, Axis
from tests.tcnn_model import dense

__all__ = ["gpsa_attention_reference", "gpsa_reference"]


def gpsa_attention_reference(layer: GPSA, x: Tensor, **changed: Tensor | None) -> Tensor:
    """Compute the attention of Eq. (7) over the zero-extended grid, in the dtype of the input.

    Args:
        layer: Layer with numeric padding.
        x: Input, shape (B, C_in, H, W).
        changed: Parameters to use in place of the layer's.

    Returns:
        Attention of shape (B, heads, N_query, N_key), keys row-major over the image and its
        padding.
    """
    names = ("query", "key", "locality_strength", "center", "gating")
    query, key, alpha, center, gating = _parameters(layer, x, names, changed)
    taps = zip(layer.dilation, layer.kernel_size, strict=True)
    extents = [step * (count - 1) + 1 for step, count in taps]
    padding: Any = layer.padding
    rows, columns = map(Axis, x.shape[2:], layer.stride, padding, extents)
    # Query (m, n) is the pixel (stride_y m, stride_x n), which may lie on the padding.
    extended = torch.nn.functional.pad(x, (0, 2 * padding[1], 0, 2 * padding[0]))
    strided = extended[:, :, :: rows.stride, :: columns.stride]
    queries = strided[:, :, : rows.queries, : columns.queries]
    by_head = (layer.heads, layer.qk_dim)
    # v_pos = -alpha (1, -2 Delta_1, -2 Delta_2), Eq. (4).
    ones = torch.ones_like(center[:, :1])
    position = -alpha[:, None] * torch.cat([ones, -2 * center], 1)
    tensors = {
        "query": (query @ queries.flatten(2)).unflatten(1, by_head).mT,
        "key": (key @ x.flatten(2)).unflatten(1, by_head).mT,
        "values": x,
        "position": position,
        "gate": 1 / (1 + torch.exp(-gating)),
    }
    return dense.attention(tensors, rows, columns).mixed.to(x.dtype)


def gpsa_reference(layer: GPSA, x: Tensor, **changed: Tensor | None) -> Tensor:
    """Compute the output of Eq. (5), ``sum_h A^h X W_val W_out^h + bias``,
    heads row-major over the taps of ``weight``.

    Args:
        layer: Layer with numeric padding.
        x: Input, shape (B, C_in, H, W).
        changed: Parameters to use in place of the layer's.

    Returns:
        Output of shape (B, C_out, N_query), flattened row-major over the output grid.
    """
    attention = gpsa_attention_reference(layer, x, **changed)
    weight, value = _parameters(layer, x, ("weight", "value"), changed)
    bias = changed.get("bias", layer.bias)
    top, left = layer.padding
    values = value @ torch.nn.functional.pad(x, (left, left, top, top)).flatten(2)
    output = x.new_zeros(1) if bias is None else bias.to(x)[:, None]
    for head, tap in enumerate(weight.flatten(2).unbind(2)):
        # W_out is block-diagonal if the convolution is grouped.
        w_out = torch.block_diag(*tap.chunk(layer.groups))
        output = output + w_out @ values @ attention[:, head].mT
    return output


def _parameters(
    layer: GPSA, x: Tensor, names: tuple[str, ...], changed: dict[str, Tensor | None]
) -> Iterator[Tensor]:
    for name in names:
        parameter: Any = changed.get(name)
        yield (getattr(layer, name) if parameter is None else parameter).to(x)
