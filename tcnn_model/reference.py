"""GPSA written literally from the T-CNN paper: slow, dense, one head at a time. The oracle of the tests.

It shares no code with the layer. Nothing outside the tests should call it.
"""

import math

import torch
from torch import Tensor

__all__ = ["gpsa_attention_reference", "gpsa_reference"]


def gpsa_attention_reference(
    x: Tensor,
    *,
    query: Tensor,
    key: Tensor,
    locality_strength: Tensor,
    center: Tensor,
    gating: Tensor,
    kernel_size: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """Attention of Eq. (7) over the zero-extended grid.

    Args:
        x: input, shape (B, C_in, H, W).
        query, key: W_qry and W_key, shape (heads * d, C_in), head-major.
        locality_strength, gating: alpha and lambda, shape (heads,).
        center: Delta as (dy, dx), shape (heads, 2).

    Returns:
        shape (B, heads, N_query, N_key), keys row-major over (H + 2 p_y) x (W + 2 p_x).
    """
    batch, _, height, width = x.shape
    heads = len(gating)
    (ky, kx), (sy, sx), (py, px), (dy, dx) = kernel_size, stride, padding, dilation
    out_h = math.floor((height + 2 * py - dy * (ky - 1) - 1) / sy + 1)
    out_w = math.floor((width + 2 * px - dx * (kx - 1) - 1) / sx + 1)
    pixels = [(j, i) for j in range(-py, height + py) for i in range(-px, width + px)]
    bases = [(sy * m, sx * n) for m in range(out_h) for n in range(out_w)]

    def feature(position: tuple[int, int]) -> Tensor:
        j, i = position
        inside = 0 <= j < height and 0 <= i < width
        return x[:, :, j, i] if inside else x.new_zeros(batch, x.shape[1])

    keys = torch.stack([feature(pixel) for pixel in pixels], dim=1)  # (B, N_key, C_in)
    queries = torch.stack([feature(base) for base in bases], dim=1)  # (B, N_query, C_in)
    real = torch.tensor([0 <= j < height and 0 <= i < width for j, i in pixels], device=x.device)
    delta = x.new_tensor([[(j - b, i - a) for j, i in pixels] for b, a in bases])  # (N_query, N_key, 2)
    r = torch.cat([delta.pow(2).sum(-1, keepdim=True), delta], dim=-1)  # (||delta||^2, delta_1, delta_2), Eq. (4)

    d = query.shape[0] // heads
    attention = []
    for h in range(heads):
        q = queries @ query[h * d : (h + 1) * d].T
        k = keys @ key[h * d : (h + 1) * d].T
        logits = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(~real, -math.inf)
        v_pos = -locality_strength[h] * torch.stack(
            [torch.ones_like(center[h, 0]), -2 * center[h, 0], -2 * center[h, 1]]
        )
        sigma = 1 / (1 + torch.exp(-gating[h]))
        attention.append((1 - sigma) * torch.softmax(logits, -1) + sigma * torch.softmax(r @ v_pos, -1))  # Eq. (7)
    return torch.stack(attention, dim=1)


def gpsa_reference(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    value: Tensor,
    padding: tuple[int, int] = (0, 0),
    groups: int = 1,
    **attention: Tensor | tuple[int, int],
) -> Tensor:
    """Output of Eq. (5), ``sum_h A^h X W_val W_out^h + bias``, heads row-major over the taps of ``weight``.

    Args:
        x: input, shape (B, C_in, H, W).
        weight: the convolution's weight, shape (C_out, C_in / groups, k_h, k_w).
        bias: shape (C_out,) or None.
        value: W_val, shape (C_in, C_in).
        attention: the remaining arguments of :func:`gpsa_attention_reference`, ``kernel_size`` excepted.

    Returns:
        shape (B, C_out, N_query): flattened row-major over the output grid.
    """
    kernel_size = (weight.shape[2], weight.shape[3])
    a = gpsa_attention_reference(x, kernel_size=kernel_size, padding=padding, **attention)  # type: ignore[arg-type]
    padded = torch.nn.functional.pad(x, (padding[1], padding[1], padding[0], padding[0])).flatten(2).transpose(1, 2)
    out_per_group, in_per_group = weight.shape[0] // groups, weight.shape[1]
    output = x.new_zeros(x.shape[0], a.shape[2], weight.shape[0])
    for h in range(a.shape[1]):
        w_out = x.new_zeros(x.shape[1], weight.shape[0])  # block-diagonal where the convolution is grouped
        for g in range(groups):
            rows = slice(g * in_per_group, (g + 1) * in_per_group)
            columns = slice(g * out_per_group, (g + 1) * out_per_group)
            w_out[rows, columns] = weight[columns, :, h // kernel_size[1], h % kernel_size[1]].T
        output = output + a[:, h] @ padded @ value.T @ w_out
    return (output if bias is None else output + bias).transpose(1, 2)
