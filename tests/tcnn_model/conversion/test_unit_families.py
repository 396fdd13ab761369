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
    """What carries the stride of a last stage: what keeps its grid once the stride is 1, pools with what replaces them,
    and 2 x 2 convolutions, which then need a pixel of zeros to the right and below."""

    convolutions: Sequence[str]
    pools: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({})
    windows: Sequence[str] = ()


_BOTTLENECK = ("layer4.0.conv2", "layer4.0.downsample.0")
_V2 = "stages.3.blocks.0"
_REGNET = ("s4.b1.conv2.conv", "s4.b1.downsample.conv")
BY_HAND = {
    "resnet18": Unstrided(("layer4.0.conv1", "layer4.0.downsample.0")),
    "resnet50": Unstrided(_BOTTLENECK),
    "resnet50d": Unstrided(("layer4.0.conv2",), {"layer4.0.downsample.0": _Average}),
    "resnetrs50": Unstrided(("layer4.0.conv2",), {"layer4.0.downsample.0": _Average}),
    "resnetaa50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Average}),
    "resnetblur50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Blur}),
    "darknet53": Unstrided(("stages.4.conv_down.conv",)),
    "darknetaa53": Unstrided((), {"stages.4.conv_down.0": _Average}),
    "cspresnet50": Unstrided(("stages.3.conv_down.conv",)),
    "dla34": Unstrided(("level5.tree1.conv1",), {"level5.downsample": _Maximum}),
    "resnetv2_50": Unstrided((f"{_V2}.conv2", f"{_V2}.downsample.conv")),
    "resnetv2_50d_gn": Unstrided((f"{_V2}.conv2",), {f"{_V2}.downsample.pool": _Average}),
    "resnext50_32x4d": Unstrided(_BOTTLENECK),
    "regnetx_032": Unstrided(_REGNET),
    "regnety_032": Unstrided(_REGNET),
    "efficientnet_b0": Unstrided(("blocks.5.0.conv_dw",)),
    "tf_efficientnetv2_s": Unstrided(("blocks.5.0.conv_dw",)),
    "mobilenetv3_large_100": Unstrided(("blocks.5.0.conv_dw",)),
    "convnext_tiny": Unstrided((), windows=("stages.3.downsample.1",)),
    "resnetv2_50x1_bit": Unstrided((f"{_V2}.conv2", f"{_V2}.downsample.conv")),
    "nf_resnet50": Unstrided(("stages.3.0.conv2",), {"stages.3.0.downsample.pool": _Average}),
    "res2net50_26w_4s": Unstrided(
        (*(f"layer4.0.convs.{i}" for i in range(3)), "layer4.0.pool", "layer4.0.downsample.0")
    ),
    "skresnet50": Unstrided(
        ("layer4.0.conv2.paths.0.conv", "layer4.0.conv2.paths.1.conv", "layer4.0.downsample.0"),
    ),
    "resnest50d": Unstrided(("layer4.0.avd_last",), {"layer4.0.downsample.0": _Average}),
    "repvgg_b0": Unstrided(("stages.3.0.conv_kxk.conv", "stages.3.0.conv_1x1.conv")),
    "xception41": Unstrided(("blocks.11.stack.conv3.conv_dw", "blocks.11.shortcut.conv")),
    "ghostnet_100": Unstrided(("blocks.7.0.conv_dw", "blocks.7.0.shortcut.0")),
    "vgg16_bn": Unstrided(()),  # their strides stand in a pool of its own, before the last stage
    "densenet121": Unstrided(()),
}


def _unstride_by_hand(cnn: nn.Module, what: Unstrided) -> nn.Module:
    model = copy.deepcopy(cnn)
    for conv in what.convolutions:
        model.get_submodule(conv).stride = (1, 1)
    for pool, replacement in what.pools.items():
        model.set_submodule(pool, replacement(), strict=True)
    for window in what.windows:
        conv = model.get_submodule(window)
        model.set_submodule(window, nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv), strict=True)
        conv.stride = (1, 1)
    return model


@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_unit_is_the_unstrided_cnn(name: str) -> None:
    cnn = build(name).double()
    by_hand, tcnn = _unstride_by_hand(cnn, BY_HAND[name]), reparameterize(cnn, stride="unit", **SHARP)
    growth = 2 if any(BY_HAND[name]) else 1
    refuses_odd_stages = name in ("dla34", "resnetaa50")
    for grid in ((64, 64), (64, 96) if refuses_odd_stages else (80, 96)):
        x = random(1, 3, *grid)
        features, expected = tcnn.forward_features(x), by_hand.forward_features(x)
        assert relative_error(features, expected) < 1e-8
        assert features.shape[-1] == growth * cnn.forward_features(x).shape[-1]
        assert relative_error(tcnn(x), by_hand(x)) < 1e-8
    assert_every_layer_counts(tcnn, x)


EARLIER = {
    "resnext50_32x4d": ("layer2", Unstrided(("layer2.0.conv2", "layer2.0.downsample.0"))),
    "resnest50d": ("layer3", Unstrided(("layer3.0.avd_last",), {"layer3.0.downsample.0": _Average})),
    "convnext_tiny": ("stages.2", Unstrided((), windows=("stages.2.downsample.1",))),
    "tf_efficientnetv2_s": ("blocks.3", Unstrided(("blocks.3.0.conv_dw",))),
}


@pytest.mark.parametrize("name", EARLIER)
@torch.no_grad()
def test_earlier_stage(name: str) -> None:
    """The later stages then work on a grid twice as large."""
    cnn = build(name).double()
    layers, what = EARLIER[name]
    x = random(1, 3, 64, 96)
    same = reparameterize(cnn, layers=layers, stride="keep", **SHARP)
    assert relative_error(same(x), cnn(x)) < 1e-8
    by_hand, tcnn = _unstride_by_hand(cnn, what), reparameterize(cnn, layers=layers, **SHARP)
    features, expected = tcnn.forward_features(x), by_hand.forward_features(x)
    assert features.shape[-1] == 2 * cnn.forward_features(x).shape[-1]
    assert relative_error(features, expected) < 1e-8
    assert_every_layer_counts(tcnn, x)


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("resnet50", (4, 6)),
        ("resnet50", (5, 7)),
        ("resnet50d", (5, 7)),
        ("resnetblur50", (5, 7)),
        ("resnetaa50", (4, 6)),  # the CNN itself refuses odd ones
        ("resnext50_32x4d", (5, 6)),
        ("resnest50d", (5, 7)),
        ("nf_resnet50", (5, 7)),
        ("res2net50_26w_4s", (5, 6)),
        ("repvgg_b0", (5, 6)),
    ],
)
@torch.no_grad()
def test_unit_passes_through_the_strided_grid(name: str, grid: tuple[int, int]) -> None:
    """After the first block of the last stage, every second pixel is what the strided block gave."""
    cnn = build(name).double()
    block = {"nf_resnet50": "stages.3.0", "repvgg_b0": "stages.3.0"}.get(name, "layer4.0")
    strided, unit = cnn.get_submodule(block), reparameterize(cnn, **SHARP).get_submodule(block)
    first = next(m for m in strided.modules() if isinstance(m, nn.Conv2d))
    x = random(1, first.in_channels, *grid)
    assert unit(x).shape[-2:] == grid
    assert relative_error(unit(x)[:, :, ::2, ::2], strided(x)) < 1e-8


@pytest.mark.parametrize(
    ("name", "layer", "phase"),
    [("tf_efficientnetv2_s", "blocks.5.0.conv_dw", 1), ("convnext_tiny", "stages.3.downsample.1", 0)],
)
@torch.no_grad()
def test_unit_keeps_every_second_window(name: str, layer: str, phase: int) -> None:
    """A "same" convolution of an even image starts at its second pixel, a 2 x 2 window at the first."""
    cnn = build(name).double()
    strided, unit = cnn.get_submodule(layer), reparameterize(cnn, **SHARP).get_submodule(layer)
    x = random(1, strided.in_channels, 6, 4)
    assert unit(x).shape[-2:] == (6, 4)
    assert relative_error(unit(x)[:, :, phase::2, phase::2], strided(x)) < 1e-8
