"""GPSA written literally from the T-CNN paper: slow, dense, one head at a time.

This module is the oracle of the tests and shares no code with the layer. Nothing outside the tests
should call it.
"""

import itertools
import math

import torch
from torch import Tensor

__all__ = ["gpsa_attention_reference", "gpsa_reference", "zero_padding"]


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
    padding: tuple[int, int] | str = (0, 0),
    dilation: tuple[int, int] = (1, 1),
) -> Tensor:
    """Compute the attention of Eq. (7) over the zero-extended grid.

    Args:
        x: Input, shape (B, C_in, H, W).
        query, key: W_qry and W_key, shape (heads * d, C_in), head-major.
        locality_strength, gating: alpha and lambda, shape (heads,).
        center: Delta as (dy, dx), shape (heads, 2).
        kernel_size, stride, padding, dilation: Geometry of the convolution, along y and x.

    Returns:
        Attention of shape (B, heads, N_query, N_key), keys row-major over the image and its
        padding.
    """
    batch, _, height, width = x.shape
    heads = len(gating)
    ky, kx = kernel_size
    sy, sx = stride
    dy, dx = dilation
    (top, bottom), (left, right) = zero_padding(
        (height, width), kernel_size, stride, padding, dilation
    )
    # Numbers of pixels that the dilated kernel spans.
    reach_y = dy * (ky - 1) + 1
    reach_x = dx * (kx - 1) + 1
    out_h = math.floor((height + top + bottom - reach_y) / sy + 1)
    out_w = math.floor((width + left + right - reach_x) / sx + 1)
    pixel_rows = range(-top, height + bottom)
    pixel_columns = range(-left, width + right)
    pixels = list(itertools.product(pixel_rows, pixel_columns))
    # "same" puts the query at the centre of the kernel; with numeric padding, query (y, x) is at
    # the pixel s (y, x).
    y0, x0 = 0, 0
    if padding == "same":
        y0 = (reach_y - 1) // 2 - top
        x0 = (reach_x - 1) // 2 - left
    rows = [sy * m + y0 for m in range(out_h)]
    columns = [sx * n + x0 for n in range(out_w)]
    bases = list(itertools.product(rows, columns))

    def inside(pixel: tuple[int, int]) -> bool:
        j, i = pixel
        return 0 <= j < height and 0 <= i < width

    def feature(pixel: tuple[int, int]) -> Tensor:
        j, i = pixel
        return x[:, :, j, i] if inside(pixel) else x.new_zeros(batch, x.shape[1])

    # (B, N_key, C_in).
    keys = torch.stack([feature(pixel) for pixel in pixels], dim=1)
    # (B, N_query, C_in).
    queries = torch.stack([feature(base) for base in bases], dim=1)
    real = torch.tensor([inside(pixel) for pixel in pixels], device=x.device)
    # (N_query, N_key, 2).
    delta = x.new_tensor(pixels) - x.new_tensor(bases)[:, None]
    # r = (||delta||^2, delta_1, delta_2), Eq. (4).
    r = torch.cat([delta.pow(2).sum(-1, keepdim=True), delta], dim=-1)

    d = query.shape[0] // heads
    # (heads, d, C_in).
    w_qry = query.unflatten(0, (heads, d))
    w_key = key.unflatten(0, (heads, d))
    attention = []
    for h in range(heads):
        q = queries @ w_qry[h].T
        k = keys @ w_key[h].T
        products = q @ k.transpose(1, 2)
        logits = products / math.sqrt(d)
        # Padding gets no content attention.
        logits = logits.masked_fill(~real, -math.inf)
        content = torch.softmax(logits, -1)

        alpha = locality_strength[h]
        delta_1, delta_2 = center[h]
        # v_pos = -alpha (1, -2 Delta_1, -2 Delta_2), Eq. (4).
        v_pos = torch.stack([-alpha, 2 * alpha * delta_1, 2 * alpha * delta_2])
        positional = torch.softmax(r @ v_pos, -1)

        sigma = 1 / (1 + torch.exp(-gating[h]))
        attention.append((1 - sigma) * content + sigma * positional)  # Eq. (7)
    return torch.stack(attention, dim=1)


def zero_padding(
    size: tuple[int, int],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    dilation: tuple[int, int],
) -> list[tuple[int, int]]:
    """Return the numbers of zeros before and after each axis; "same" follows TensorFlow's rule."""
    if not isinstance(padding, str):
        return [(p, p) for p in padding]
    sides = []
    for n, k, s, d in zip(size, kernel_size, stride, dilation, strict=True):
        last = (math.ceil(n / s) - 1) * s
        reach = d * (k - 1) + 1
        total = max(0, last + reach - n)
        sides.append((math.floor(total / 2), math.ceil(total / 2)))
    return sides


def gpsa_reference(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    value: Tensor,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] | str = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    **attention: Tensor,
) -> Tensor:
    """Compute the output of Eq. (5), ``sum_h A^h X W_val W_out^h + bias``,
    heads row-major over the taps of ``weight``.

    Args:
        x: Input, shape (B, C_in, H, W).
        weight: Weight of the convolution, shape (C_out, C_in / groups, k_h, k_w).
        bias: Bias, shape (C_out,), or None.
        value: W_val, shape (C_in, C_in).
        stride, padding, dilation, groups: Geometry of the convolution.
        attention: Remaining arguments of :func:`gpsa_attention_reference`, except ``kernel_size``.

    Returns:
        Output of shape (B, C_out, N_query), flattened row-major over the output grid.
    """
    kernel_size = (weight.shape[2], weight.shape[3])
    a = gpsa_attention_reference(
        x,
        kernel_size=kernel_size,
        stride=stride,
        padding=padding,
        dilation=dilation,
        **attention,
    )
    rows, columns = zero_padding((x.shape[2], x.shape[3]), kernel_size, stride, padding, dilation)
    padded = torch.nn.functional.pad(x, (*columns, *rows))
    # (B, N_key, C_in).
    tokens = padded.flatten(2).transpose(1, 2)
    # (C_out, C_in / groups, heads).
    taps = weight.flatten(2)
    c_out, in_per_group, heads = taps.shape
    out_per_group = c_out // groups
    output = x.new_zeros(x.shape[0], a.shape[2], c_out)
    for h in range(heads):
        # W_out is block-diagonal if the convolution is grouped.
        w_out = x.new_zeros(x.shape[1], c_out)
        for g in range(groups):
            inputs = slice(g * in_per_group, (g + 1) * in_per_group)
            outputs = slice(g * out_per_group, (g + 1) * out_per_group)
            w_out[inputs, outputs] = taps[outputs, :, h].T
        output = output + a[:, h] @ tokens @ value.T @ w_out
    if bias is not None:
        output = output + bias
    return output.transpose(1, 2)
