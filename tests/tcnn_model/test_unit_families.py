"""stride="unit" against CNNs whose last stage is un-strided here by hand, module by module."""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model import reparameterize
from tests.tcnn_model.families import build
from tests.tcnn_model.helpers import SHARP, assert_every_layer_counts, random, relative_error


def _windows(x: Tensor) -> Tensor:
    """The four pixels of every 2 x 2 window, with the last row and column repeated: (4, B, C, H, W)."""
    below = torch.cat([x[:, :, 1:], x[:, :, -1:]], dim=2)
    return torch.stack([y for rows in (x, below) for y in (rows, torch.cat([rows[..., 1:], rows[..., -1:]], dim=3))])


class _Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _windows(x).mean(0)


class _Maximum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _windows(x).amax(0)


class _Blur(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1, 1, 1), mode="reflect")
        rows = (x[:, :, :-2] + 2 * x[:, :, 1:-1] + x[:, :, 2:]) / 4
        return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:]) / 4


class Unstrided(NamedTuple):
    """What carries the stride of a last stage: convolutions, and pools with what replaces them."""

    convolutions: Sequence[str]
    pools: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({})


_BOTTLENECK = ("layer4.0.conv2", "layer4.0.downsample.0")
_V2 = "stages.3.blocks.0"
BY_HAND = {
    "resnet18": Unstrided(("layer4.0.conv1", "layer4.0.downsample.0")),
    "resnet50": Unstrided(_BOTTLENECK),
    "resnet50d": Unstrided(("layer4.0.conv2",), {"layer4.0.downsample.0": _Average}),
    "resnetrs50": Unstrided(("layer4.0.conv2",), {"layer4.0.downsample.0": _Average}),
    "resnetaa50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Average}),
    "resnetblur50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Blur}),
    "darknet53": Unstrided(("stages.4.conv_down.conv",)),
    "cspresnet50": Unstrided(("stages.3.conv_down.conv",)),
    "dla34": Unstrided(("level5.tree1.conv1",), {"level5.downsample": _Maximum}),
    "resnetv2_50": Unstrided((f"{_V2}.conv2", f"{_V2}.downsample.conv")),
    "resnetv2_50d_gn": Unstrided((f"{_V2}.conv2",), {f"{_V2}.downsample.pool": _Average}),
    "vgg16_bn": Unstrided(()),  # their strides stand in a pool of its own, before the last stage
    "densenet121": Unstrided(()),
}


def _unstride_by_hand(cnn: nn.Module, name: str) -> nn.Module:
    model = copy.deepcopy(cnn)
    for conv in BY_HAND[name].convolutions:
        model.get_submodule(conv).stride = (1, 1)
    for pool, replacement in BY_HAND[name].pools.items():
        model.set_submodule(pool, replacement(), strict=True)
    return model


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_unit_is_the_unstrided_cnn(name: str) -> None:
    cnn = build(name).double()
    by_hand, tcnn = _unstride_by_hand(cnn, name), reparameterize(cnn, stride="unit", **SHARP)
    growth = 2 if any(BY_HAND[name]) else 1
    refuses_odd_stages = name in ("dla34", "resnetaa50")
    for grid in ((64, 64), (64, 96) if refuses_odd_stages else (80, 96)):
        x = random(1, 3, *grid)
        features, expected = tcnn.forward_features(x), by_hand.forward_features(x)
        assert relative_error(features, expected) < 1e-8
        assert features.shape[-1] == growth * cnn.forward_features(x).shape[-1]
        assert relative_error(tcnn(x), by_hand(x)) < 1e-8
    assert_every_layer_counts(tcnn, x)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("resnet50", (4, 6)),
        ("resnet50", (5, 7)),
        ("resnet50d", (5, 7)),
        ("resnetblur50", (5, 7)),
        ("resnetaa50", (4, 6)),  # the CNN itself refuses odd ones
    ],
)
@torch.no_grad()
def test_unit_passes_through_the_strided_grid(name: str, grid: tuple[int, int]) -> None:
    """After the first block of the last stage, every second pixel is what the strided block gave."""
    cnn = build(name).double()
    strided = cnn.get_submodule("layer4.0")
    unit = reparameterize(cnn, **SHARP).get_submodule("layer4.0")
    x = random(1, strided.get_submodule("conv1").in_channels, *grid)
    assert unit(x).shape[-2:] == grid
    assert relative_error(unit(x)[:, :, ::2, ::2], strided(x)) < 1e-8
