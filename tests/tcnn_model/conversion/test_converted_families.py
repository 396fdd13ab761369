"""Families of timm convnets: stride "keep" gives the CNN's function,
"unit" that of a CNN un-strided by hand.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model import gpsa_layers, reparameterize
from tests.tcnn_model.conversion.test_layer_choice import LAST_STAGE
from tests.tcnn_model.families import build
from tests.tcnn_model.numerics import (
    CONVOLUTIONAL,
    SHARP,
    assert_every_layer_counts,
    assert_same,
    random,
    relative_error,
)


def _windows(x: Tensor) -> Tensor:
    """Stack the four pixels of every 2 x 2 window,
    with the last row and column repeated: (4, B, C, H, W).
    """
    # Pools of 2 x 2 at stride 1 would lose the last row and column, so these are repeated.
    below = torch.cat([x[:, :, 1:], x[:, :, -1:]], dim=2)
    return torch.stack(
        [
            y
            for rows in (x, below)
            for y in (rows, torch.cat([rows[..., 1:], rows[..., -1:]], dim=3))
        ]
    )


class _Average(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _windows(x).mean(0)


class _Maximum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _windows(x).amax(0)


class _Blur(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # This is timm's BlurPool2d of size 3: [1, 2, 1] / 4 along each axis, with a reflected
        # border.
        x = F.pad(x, (1, 1, 1, 1), mode="reflect")
        rows = (x[:, :, :-2] + 2 * x[:, :, 1:-1] + x[:, :, 2:]) / 4
        return (rows[..., :-2] + 2 * rows[..., 1:-1] + rows[..., 2:]) / 4


class Unstrided(NamedTuple):
    """Operations that carry the stride of a last stage.

    Args:
        convolutions: Convolutions and pools that keep their grid once the stride is 1.
        pools: Pools, with the modules that replace them.
        windows: 2 x 2 convolutions, which then need a pixel of zeros to the right and below.
    """

    convolutions: Sequence[str]
    pools: Mapping[str, Callable[[], nn.Module]] = MappingProxyType({})
    windows: Sequence[str] = ()


_V2 = "stages.3.blocks.0"
# The stride stands in a separate pool, before the last stage.
BY_HAND = {
    "resnet18": Unstrided(("layer4.0.conv1", "layer4.0.downsample.0")),
    "resnetaa50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Average}),
    "resnetblur50": Unstrided(("layer4.0.downsample.0",), {"layer4.0.aa": _Blur}),
    "resnext50_32x4d": Unstrided(("layer4.0.conv2", "layer4.0.downsample.0")),
    "resnetv2_50d_gn": Unstrided((f"{_V2}.conv2",), {f"{_V2}.downsample.pool": _Average}),
    "resnetv2_50x1_bit": Unstrided((f"{_V2}.conv2", f"{_V2}.downsample.conv")),
    "nf_resnet50": Unstrided(("stages.3.0.conv2",), {"stages.3.0.downsample.pool": _Average}),
    "res2net50_26w_4s": Unstrided(
        (
            *(f"layer4.0.convs.{i}" for i in range(3)),
            "layer4.0.pool",
            "layer4.0.downsample.0",
        )
    ),
    "skresnet50": Unstrided(
        (
            "layer4.0.conv2.paths.0.conv",
            "layer4.0.conv2.paths.1.conv",
            "layer4.0.downsample.0",
        )
    ),
    "resnest50d": Unstrided(("layer4.0.avd_last",), {"layer4.0.downsample.0": _Average}),
    "darknetaa53": Unstrided((), {"stages.4.conv_down.0": _Average}),
    "cspresnet50": Unstrided(("stages.3.conv_down.conv",)),
    "dla34": Unstrided(("level5.tree1.conv1",), {"level5.downsample": _Maximum}),
    "tf_efficientnetv2_s": Unstrided(("blocks.5.0.conv_dw",)),
    "convnext_tiny": Unstrided((), windows=("stages.3.downsample.1",)),
    "repvgg_b0": Unstrided(("stages.3.0.conv_kxk.conv", "stages.3.0.conv_1x1.conv")),
    "vgg11_bn": Unstrided(()),
    "densenet121": Unstrided(()),
}
_NO_ODD_STAGES = ("dla34", "resnetaa50")  # the CNNs themselves refuse odd sizes


def _unstride_by_hand(cnn: nn.Module, strides: Unstrided) -> nn.Module:
    model: Any = copy.deepcopy(cnn)
    for conv in strides.convolutions:
        model.get_submodule(conv).stride = (1, 1)
    for pool, replacement in strides.pools.items():
        model.set_submodule(pool, replacement(), strict=True)
    for window in strides.windows:
        conv = model.get_submodule(window)
        model.set_submodule(window, nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), conv), strict=True)
        conv.stride = (1, 1)
    return model


def _assert_unstrided(cnn: Any, strides: Unstrided, x: Tensor, **layers: str) -> None:
    by_hand: Any = _unstride_by_hand(cnn, strides)
    tcnn: Any = reparameterize(cnn, **layers, **SHARP)
    features = tcnn.forward_features(x)
    assert_same(features, by_hand.forward_features(x))
    assert features.shape[-1] == (2 if any(strides) else 1) * cnn.forward_features(x).shape[-1]
    assert_same(tcnn(x), by_hand(x))
    # If a layer precedes a norm of gain zero, the outputs agree whatever it computes.
    assert_every_layer_counts(tcnn, x)


@pytest.mark.study(but=["resnet18", "resnetv2_50d_gn", "convnext_tiny", "repvgg_b0"])
@pytest.mark.parametrize("name", BY_HAND)
@torch.no_grad()
def test_keep_gives_the_cnn_and_unit_the_unstrided_cnn(name: str) -> None:
    cnn = build(name).double()
    # 80 x 96 pixels give 5 x 6 in the last stage: one odd and one even side.
    x = random(1, 3, 64 if name in _NO_ODD_STAGES else 80, 96)
    same = reparameterize(cnn, stride="keep", **SHARP)
    assert_same(same(x), cnn(x))
    assert [*gpsa_layers(same)] == LAST_STAGE.get(name, [*gpsa_layers(same)])
    _assert_unstrided(cnn, BY_HAND[name], x)


@pytest.mark.numerical
@pytest.mark.parametrize("name", ["resnet18", "convnext_tiny"])
@torch.no_grad()
def test_keep_is_the_same_function_in_float32(name: str) -> None:
    cnn = build(name)
    x = random(1, 3, 64, 96, dtype=torch.float32)
    assert_same(reparameterize(cnn, stride="keep", **CONVOLUTIONAL)(x), cnn(x))
    # At the initial values of fine-tuning, the function differs.
    assert relative_error(reparameterize(cnn, stride="keep")(x), cnn(x)) > 1e-3


# There is one model for each way to remove a stride: of convolutions, of a pool, and of 2 x 2
# windows.
EARLIER = {
    "resnext50_32x4d": (
        "layer2",
        Unstrided(("layer2.0.conv2", "layer2.0.downsample.0")),
    ),
    "resnest50d": (
        "layer3",
        Unstrided(("layer3.0.avd_last",), {"layer3.0.downsample.0": _Average}),
    ),
    "convnext_tiny": ("stages.2", Unstrided((), windows=("stages.2.downsample.1",))),
}


@pytest.mark.parametrize("name", EARLIER)
@torch.no_grad()
def test_earlier_stages_are_unstrided(name: str) -> None:
    """An earlier stage at stride 1 leaves the later ones on a grid twice as large."""
    layers, strides = EARLIER[name]
    _assert_unstrided(build(name).double(), strides, random(1, 3, 64, 96), layers=layers)
