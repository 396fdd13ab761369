"""The axes of a layer, and positional attention as two one-dimensional factors."""

from itertools import product
from typing import Any

import pytest
import torch
from timm.layers.padding import get_same_padding

from tcnn_model.gpsa.positional import (
    Axis,
    apply_separable,
    gaussian_position,
    positional_factors,
)
from tests.tcnn_model.numerics import assert_same, random

pytestmark = pytest.mark.numerical


def test_queries_and_keys_are_those_of_the_convolution() -> None:
    # Lengths are even and odd, so that some strides leave out pixels at the end.
    for kernel, stride, padding, dilation, length in product(
        (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2), (11, 13, 16)
    ):
        conv = torch.nn.Conv1d(1, 1, kernel, stride, padding, dilation)
        axis = Axis(length, stride, padding, extent=dilation * (kernel - 1) + 1)
        assert axis.queries == conv(torch.zeros(1, 1, length)).shape[-1]
        assert axis.keys == length + 2 * padding


def test_positions_are_in_input_pixels() -> None:
    axis = Axis(length=5, stride=2, padding=1, extent=3)
    like = torch.zeros(0, dtype=torch.float64)
    assert axis.query_positions(like).tolist() == [0, 2, 4]
    assert axis.key_positions(like).tolist() == [-1, 0, 1, 2, 3, 4, 5]
    assert axis.key_positions(like).dtype == torch.float64


def test_factors_are_the_dense_gaussian() -> None:
    y = Axis(length=5, stride=2, padding=1, extent=3)
    x = Axis(length=11, stride=3, padding=2, extent=5)
    # Strengths are positive, as softplus gives them; centres lie between pixels.
    alpha = random(7, seed=1).abs() + 0.01
    center = random(7, 2, seed=2)
    rows, cols = positional_factors(gaussian_position(alpha, center), y, x)

    keys = [(j, i) for j in range(-1, 5 + 1) for i in range(-2, 11 + 2)]
    bases = [(2 * m, 3 * n) for m in range(3) for n in range(4)]
    assert rows.shape == (7, 3, 7)
    assert cols.shape == (7, 4, 15)
    for h in range(7):
        squares = torch.tensor(
            [
                [(j - b - center[h, 0]) ** 2 + (i - a - center[h, 1]) ** 2 for j, i in keys]
                for b, a in bases
            ]
        ).double()
        dense = torch.exp(-alpha[h] * squares)
        dense = dense / dense.sum(-1, keepdim=True)
        assert_same(torch.kron(rows[h], cols[h]), dense)


# Values are shared by all heads and broadcast, or differ between heads.
@pytest.mark.parametrize("value_heads", [1, 7])
def test_separable_application_equals_the_dense_one(value_heads: int) -> None:
    rows = random(7, 3, 5, seed=1)
    cols = random(7, 2, 11, seed=2)
    values = random(2, value_heads, 5, 11, 13, seed=3)
    # Shape (heads, N_query, H * W).
    dense = torch.stack([torch.kron(rows[h], cols[h]) for h in range(7)])
    head_values = values.flatten(2, 3).expand(2, 7, 55, 13)
    expected = torch.stack(
        [(dense[h] @ head_values[:, h]).reshape(2, 3, 2, 13) for h in range(7)], dim=1
    )
    assert_same(apply_separable(rows, cols, values), expected)


def test_far_centres_and_strong_locality_stay_finite() -> None:
    axis = Axis(length=13, stride=2, padding=1, extent=3)
    # The centre is so far outside the map that exp(-alpha d^2) underflows at every key, and a
    # softmax without shift gives 0 / 0.
    center = torch.tensor([[500.0, 0.0], [-500.0, 0.0]], dtype=torch.float64)
    position = gaussian_position(torch.tensor([1e4, 1e-4], dtype=torch.float64), center)
    attention = positional_factors(position, axis, axis)[0]
    assert_same(attention.sum(-1), torch.ones(2, axis.queries, dtype=torch.float64))
    # The maximum is at the pixel nearest to the centre.
    assert attention[0].argmax(-1).tolist() == [axis.keys - 1] * axis.queries


def test_same_padding_equals_tensorflows() -> None:
    for kernel, stride, dilation, length in product(
        (1, 2, 3, 5), (1, 2, 3), (1, 2), (5, 11, 12, 13, 16)
    ):
        axis = Axis(length, stride, "same", extent=dilation * (kernel - 1) + 1)
        total = get_same_padding(length, kernel, stride, dilation)
        assert axis.before == total // 2
        assert axis.after == total - total // 2
        assert axis.queries == -(-length // stride)
        # Queries sit at the centre of the kernel, so they are pixels of the image.
        assert axis.first_query == (axis.extent - 1) // 2 - axis.before
        assert 0 <= axis.first_query <= axis.first_query + (axis.queries - 1) * stride < length


@pytest.mark.parametrize(
    "arguments",
    [(-1,), (5, 0), (5, 1, -1), (5, 1, 1, 0), (5, 1, "valid"), (5, 1.5), (5, 1, 0.5)],
    ids=str,
)
def test_invalid_axes_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=rf"all integers; got Axis\(length={arguments[0]}"):
        Axis(*arguments)
