"""The saliency of a model that attends to one known pixel peaks there,
for each method with a grid.
"""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe

SIZE = (36, 50)
CASES = [
    (kernel, stride, kernel // 2 - shortfall)
    # Kernels are even and odd, and overlap, touch or lie apart; the padding is half the kernel, or
    # one pixel less.
    for kernel, stride, shortfall in itertools.product((4, 7), (2, 4, 7), (0, 1))
]


class Attends(nn.Module):
    """Attention of each token to bright tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Identity()

    def forward(self, tokens: Tensor) -> Tensor:
        # The query is large enough that the bright token gets most of the weight.
        query = 0 * tokens[:, None] + 4
        return tokens + self.drop(
            F.scaled_dot_product_attention(query, tokens[:, None], tokens[:, None])[:, 0]
        )


class Looks(nn.Module):
    """Class token, first or last, and patches that respond most to their centre."""

    def __init__(self, kernel: int, stride: int, padding: int, *, last: bool) -> None:
        super().__init__()
        self.last = last
        self.embed = nn.Conv2d(1, 1, kernel, stride, padding, bias=False)
        # Weights fall off from the middle, so that a cell responds most to its central pixel.
        hat = kernel - (torch.arange(kernel) - (kernel - 1) / 2).abs()
        self.embed.weight.data.copy_(hat[:, None] * hat / hat.max() ** 2)
        self.blocks = nn.Sequential(Attends(), Attends())

    def forward(self, x: Tensor) -> Tensor:
        cells = self.embed(x).flatten(2).transpose(1, 2)
        token = torch.zeros_like(cells[:, :1])
        tokens = self.blocks(torch.cat([cells, token] if self.last else [token, cells], 1))
        # Class 0 scores 0.
        return F.pad(tokens[:, -1 if self.last else 0], (1, 0))


METHODS: dict[str, dict[str, Any]] = {
    "class_attention": {},
    "rollout": {},
    "gradcam": {},  # on tokens
    "gradcam of a feature map": {"layer": "embed"},
    "LayerGradientXActivation": {"layer": "embed"},
}


@pytest.mark.study(but=["gradcam", "class_attention"])
@pytest.mark.parametrize("method", METHODS)
def test_the_peak_is_at_the_pixel(method: str) -> None:
    for kernel, stride, padding in CASES:
        model = Looks(kernel, stride, padding, last=stride == 4)
        image = torch.zeros(1, 1, *SIZE)
        # This is the centre of the cell's receptive field.
        y, x = (stride * cell - padding + (kernel - 1) // 2 for cell in (3, 5))
        image[0, 0, y, x] = 1
        maps = tcnn_probe.saliency(model, image, 1, method.split()[0], **METHODS[method])[0]
        assert float(maps[y, x]) == pytest.approx(float(maps.max()), rel=1e-6), (
            kernel,
            stride,
            padding,
        )
        peak = (maps > float(maps.max()) * (1 - 1e-6)).values.nonzero()
        rows, columns = peak
        assert max(abs(rows - y)) <= 1
        assert max(abs(columns - x)) <= 1
