"""GPSA written literally from the T-CNN paper: slow, dense, one head at a time.

The oracle of the tests, which shares no code with the layer. Nothing outside the tests should call it.
"""

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
        Attention of shape (B, heads, N_query, N_key), keys row-major over the image and its padding.
    """
    batch, _, height, width = x.shape
    heads = len(gating)
    ky, kx = kernel_size
    sy, sx = stride
    dy, dx = dilation
    (top, bottom), (left, right) = zero_padding(
        (height, width), kernel_size, stride, padding, dilation
    )
    # The kernel reaches over this many pixels.
    reach_y = dy * (ky - 1) + 1
    reach_x = dx * (kx - 1) + 1
    out_h = math.floor((height + top + bottom - reach_y) / sy + 1)
    out_w = math.floor((width + left + right - reach_x) / sx + 1)
    pixels = [
        (j, i)
        for j in range(-top, height + bottom)
        for i in range(-left, width + right)
    ]
    # "same" puts the query at the centre of the kernel; with numeric padding its base is the pixel s (y, x).
    y0, x0 = 0, 0
    if padding == "same":
        y0 = (reach_y - 1) // 2 - top
        x0 = (reach_x - 1) // 2 - left
    rows = [sy * m + y0 for m in range(out_h)]
    columns = [sx * n + x0 for n in range(out_w)]
    bases = [(row, column) for row in rows for column in columns]

    def feature(position: tuple[int, int]) -> Tensor:
        j, i = position
        inside = 0 <= j < height and 0 <= i < width
        return x[:, :, j, i] if inside else x.new_zeros(batch, x.shape[1])

    # (B, N_key, C_in).
    keys = torch.stack([feature(pixel) for pixel in pixels], dim=1)
    # (B, N_query, C_in).
    queries = torch.stack([feature(base) for base in bases], dim=1)
    real = torch.tensor(
        [0 <= j < height and 0 <= i < width for j, i in pixels], device=x.device
    )
    # (N_query, N_key, 2).
    offsets = [[(j - row, i - column) for j, i in pixels] for row, column in bases]
    delta = x.new_tensor(offsets)
    # r = (||delta||^2, delta_1, delta_2), Eq. (4).
    r = torch.cat([delta.pow(2).sum(-1, keepdim=True), delta], dim=-1)

    d = query.shape[0] // heads
    attention = []
    for h in range(heads):
        q = queries @ query[h * d : (h + 1) * d].T
        k = keys @ key[h * d : (h + 1) * d].T
        products = q @ k.transpose(1, 2)
        # Padding gets no content attention.
        logits = (products / math.sqrt(d)).masked_fill(~real, -math.inf)
        v_pos = -locality_strength[h] * torch.stack(
            [torch.ones_like(center[h, 0]), -2 * center[h, 0], -2 * center[h, 1]]
        )
        sigma = 1 / (1 + torch.exp(-gating[h]))
        content = torch.softmax(logits, -1)
        positional = torch.softmax(r @ v_pos, -1)
        attention.append((1 - sigma) * content + sigma * positional)  # Eq. (7)
    return torch.stack(attention, dim=1)


def zero_padding(
    size: tuple[int, int],
    kernel_size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int] | str,
    dilation: tuple[int, int],
) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis; "same" is TensorFlow's rule."""
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
    """Compute the output of Eq. (5), ``sum_h A^h X W_val W_out^h + bias``, heads row-major over the taps of ``weight``.

    Args:
        x: Input, shape (B, C_in, H, W).
        weight: Weight of the convolution, shape (C_out, C_in / groups, k_h, k_w).
        bias: Bias, shape (C_out,), or None.
        value: W_val, shape (C_in, C_in).
        stride, padding, dilation, groups: Geometry of the convolution.
        attention: Remaining arguments of :func:`gpsa_attention_reference`, ``kernel_size`` excepted.

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
    rows, columns = zero_padding(
        (x.shape[2], x.shape[3]), kernel_size, stride, padding, dilation
    )
    padded = torch.nn.functional.pad(x, (*columns, *rows)).flatten(2).transpose(1, 2)
    out_per_group = weight.shape[0] // groups
    in_per_group = weight.shape[1]
    output = x.new_zeros(x.shape[0], a.shape[2], weight.shape[0])
    for h in range(a.shape[1]):
        # Block-diagonal if the convolution is grouped.
        w_out = x.new_zeros(x.shape[1], weight.shape[0])
        for g in range(groups):
            inputs = slice(g * in_per_group, (g + 1) * in_per_group)
            outputs = slice(g * out_per_group, (g + 1) * out_per_group)
            w_out[inputs, outputs] = weight[
                outputs, :, h // kernel_size[1], h % kernel_size[1]
            ].T
        output = output + a[:, h] @ padded @ value.T @ w_out
    return (output if bias is None else output + bias).transpose(1, 2)
