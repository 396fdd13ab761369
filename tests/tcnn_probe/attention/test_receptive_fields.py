"""Positions of cells equal the centres of what they see
when single rows and columns of the image are lit.
"""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import AttentionStream

SIZE = (61, 73)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same")


class Branches(nn.Module):
    """Shortcut of a ResNet-D and a strided convolution in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, 2, 1)
        self.pool = nn.AvgPool2d(2, ceil_mode=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.pool(x)


class Mirrored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(x, (3, 1, 2, 4), mode="reflect"), 3, (2, 3))


def conv(*args: int, **options: object) -> nn.Module:
    return nn.Conv2d(1, 1, *args, **options)


MODELS = {
    "patches": [conv(7, 7)],
    "overlapping, odd padding": [conv(4, 2, 1)],
    "overlapping, even padding": [conv(7, 4, 2)],
    "oblong": [conv((3, 2), (1, 3), (0, 1))],
    "dilated": [
        conv(3, 2, dilation=2),
        conv(3, padding="same"),
        conv(4, padding="same"),
    ],
    "stem": [conv(7, 2, 3), nn.MaxPool2d(3, 2, 1), Branches()],
    "padded as in TensorFlow": [
        timm.layers.Conv2dSame(1, 1, 3, 2),
        timm.layers.Conv2dSame(1, 1, 5, 2),
    ],
    "blurred": [timm.layers.BlurPool2d(1, stride=2), nn.AvgPool2d(3)],
    "padded by hand": [Mirrored(), nn.ZeroPad2d((1, 0, 2, 0)), conv(3)],
}


def seen_along(model: nn.Module, side: int) -> tuple[tuple[int, int], list[float]]:
    """Return the map's size and the centres of the rows (0)
    or columns (1) that cells see; NaN at the border.
    """
    length = SIZE[side]
    images = torch.zeros(length, 1, *SIZE, dtype=torch.float64)
    for place in range(length):
        images[place].select(1 + side, place).fill_(1)
    cells = model(images) != model(torch.zeros_like(images[:1]))
    lit = cells.any(3 - side)[:, 0]  # (pixels, cells)
    middles = []
    for pixels in lit.T:
        at = pixels.nonzero()[:, 0].tolist()
        middles.append(
            (at[0] + at[-1]) / 2 if at and at[0] > 0 and at[-1] < length - 1 else float("nan")
        )
    return (cells.shape[2], cells.shape[3]), middles


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cells_lie_at_the_centre_of_what_they_see(name: str, mode: type) -> None:
    model = nn.Sequential(*MODELS[name]).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    with mode():
        fields = ReceptiveFields(SIZE)
        with AttentionStream(model, AttentionListener(), fields=fields).following():
            model(torch.rand(1, 1, *SIZE, dtype=torch.float64))
        for side in (0, 1):
            grid, middles = seen_along(model, side)
            first, spacing = fields.places(grid)[side]
            places = torch.tensor([first + cell * spacing for cell in range(grid[side])])
            known = ~torch.tensor(middles).isnan()
            assert known.sum() > 1
            assert places[known].tolist() == torch.tensor(middles)[known].tolist()


def test_keys_that_are_pooled_to_the_grid_of_a_later_stage() -> None:
    """PVT has a stride of 4, 8, 16 and 32, and pools the keys of each stage to the last grid."""
    model = timm.create_model("pvt_v2_b0", depths=(1,) * 4).eval()
    maps = tcnn_probe.attention_maps(model, torch.randn(1, 3, 96, 160), queries=[(40, 70)])
    starts = {
        layer: node.pixel_y.values[0]
        for node in maps.children.values()
        for layer in node.layer.values
    }
    # A stage has its cells at multiples of its stride s, and a key is the mean of 32 / s of them.
    expected = [(32 - stride) / 2 for stride in (4, 8, 16, 32)]
    assert starts == {f"stages.{n}.blocks.0.attn": at for n, at in enumerate(expected)}


def test_a_map_without_convolutions_divides_the_image_evenly() -> None:
    fields = ReceptiveFields((28, 42))
    assert fields.places((4, 3)) == ((3, 7), (6.5, 14))
