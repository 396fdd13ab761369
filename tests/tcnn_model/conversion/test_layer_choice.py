"""The choice of convolutions, and the grids of the stages after un-striding."""

import re
from collections.abc import Callable, Collection

import pytest
import torch
from torch import nn

from tcnn_model import GPSA, gpsa_layers, reparameterize
from tests.tcnn_model.families import NARROW, build
from tests.tcnn_model.numerics import SHARP, assert_same, on_meta, random

BOTTLENECKS = [f"layer4.{i}.conv2" for i in range(2)]
# There is one model for each structure, narrow and shallow where timm can build it so.
LAST_STAGE = {
    "resnet18": [
        "layer4.0.conv1",
        "layer4.0.conv2",
        "layer4.1.conv1",
        "layer4.1.conv2",
    ],
    "resnetrs50": BOTTLENECKS,
    "resnetv2_50d_gn": [f"stages.3.blocks.{i}.conv2" for i in range(2)],
    "vgg11_bn": ["features.22", "features.25"],
    "densenet121": [f"features.denseblock4.denselayer{i}.conv2" for i in range(1, 3)],
    # conv_head is missing, as it is 1 x 1.
    "efficientnet_b0": [
        *(f"blocks.5.{i}.conv_dw" for i in range(4)),
        "blocks.6.0.conv_dw",
    ],
    "convnext_tiny": [
        "stages.3.downsample.1",
        *(f"stages.3.blocks.{i}.conv_dw" for i in range(2)),
    ],
    "res2net50_26w_4s": [f"layer4.{i}.convs.{j}" for i in range(2) for j in range(3)],
    "skresnet50": [f"layer4.{i}.conv2.paths.{j}.conv" for i in range(2) for j in range(2)],
    "resnest50d": [f"layer4.{i}.conv2.conv" for i in range(2)],
    "repvgg_b0": ["stages.3.0.conv_kxk.conv"],
    "xception41": [
        "blocks.11.stack.conv3.conv_dw",
        *(f"blocks.12.stack.conv{i}.conv_dw" for i in (1, 2, 3)),
    ],
    "pvt_v2_b0": [
        "stages.3.downsample.proj",
        "stages.3.blocks.0.mlp.dwconv",
        "stages.3.blocks.1.mlp.dwconv",
    ],
    "darknet53": [
        "stages.4.conv_down.conv",
        *(f"stages.4.blocks.{i}.conv2.conv" for i in range(2)),
    ],
    "cspresnet50": [
        "stages.3.conv_down.conv",
        *(f"stages.3.blocks.{i}.conv2.conv" for i in range(2)),
    ],
    "dla34": [f"level5.tree{i}.conv{j}" for i in (1, 2) for j in (1, 2)],
}


# test_converted_families.py converts the other models, and checks their layers.
@pytest.mark.parametrize(
    "name", ["resnetrs50", "efficientnet_b0", "xception41", "pvt_v2_b0", "darknet53"]
)
def test_last_stage_of_timm_models(name: str) -> None:
    options = NARROW.get(name, {})
    assert (
        list(gpsa_layers(reparameterize(on_meta(name, **options), inplace=True)))
        == LAST_STAGE[name]
    )


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("layer4.1.conv2", ["layer4.1.conv2"]),
        ("layer4", BOTTLENECKS),
        ("layer3", ["layer3.0.conv2", "layer3.1.conv2"]),
        ("layer[34].0.*", ["layer3.0.conv2", "layer4.0.conv2"]),
        (["layer4.1", "layer2"], ["layer2.0.conv2", "layer4.1.conv2"]),
        # None leaves 1 x 1 convolutions alone, but they can be chosen by name.
        ({"layer4.0.conv1"}, ["layer4.0.conv1"]),
        (
            lambda name, conv: conv.in_channels == 32 and name.startswith("layer4"),
            BOTTLENECKS,
        ),
    ],
)
@torch.no_grad()
def test_layers_are_chosen_by_name_pattern_or_predicate(
    layers: str | Collection[str] | Callable[[str, nn.Module], bool],
    expected: list[str],
) -> None:
    cnn = build("resnet50").double()
    tcnn = reparameterize(cnn, layers=layers, stride="keep", **SHARP)
    assert list(gpsa_layers(tcnn)) == expected
    x = random(1, 3, 64, 96)
    assert_same(tcnn(x), cnn(x))


def _reductions(model: nn.Module) -> list[int]:
    info = model.feature_info
    return [entry["reduction"] for entry in getattr(info, "info", info)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        # These are the reductions of the stem and the four stages; 32 becomes 16.
        (None, [2, 4, 8, 16, 16]),
        # Neither the layer nor its block has a stride.
        ("layer4.1.conv2", [2, 4, 8, 16, 32]),
        (["layer3", "layer4"], [2, 4, 8, 8, 8]),
    ],
)
@torch.no_grad()
def test_unit_stride_halves_the_reduction(
    layers: str | list[str] | None, expected: list[int]
) -> None:
    cnn = build("resnet50")
    tcnn = reparameterize(cnn, layers=layers)
    assert _reductions(tcnn) == expected
    features = tcnn.forward_intermediates(torch.zeros(1, 3, 64, 96), intermediates_only=True)
    reductions = [(64 // f.shape[2], 96 // f.shape[3]) for f in features]
    assert reductions == [(r, r) for r in expected]
    assert (
        _reductions(cnn)
        == _reductions(reparameterize(cnn, layers=layers, stride="keep"))
        == [2, 4, 8, 16, 32]
    )


@torch.no_grad()
@pytest.mark.parametrize("padding", [1, 0])
def test_sequential_model_with_and_without_padding(padding: int) -> None:
    """Without padding, the last convolution shrinks its map by a border,
    which must not count as a stride.
    """
    torch.manual_seed(0)
    stage = nn.Sequential(
        nn.Conv2d(5, 7, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(7, 11, 3, padding=padding),
    )
    head = (nn.ReLU(), nn.Conv2d(11, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    cnn = nn.Sequential(nn.Conv2d(2, 5, 5, stride=2, padding=2), nn.ReLU(), stage, *head).double()
    # On even sizes, the strided and the unstrided grid could nest by accident.
    x = random(1, 2, 37, 53)
    if padding == 0:
        for stride in ("unit", "keep"):
            same = reparameterize(cnn, layers="2.2", stride=stride, **SHARP)
            assert isinstance(same.get_submodule("2.2"), GPSA)
            assert_same(same(x), cnn(x))
        return
    same = reparameterize(cnn, stride="keep", **SHARP)
    assert list(gpsa_layers(same)) == ["2.0", "2.2"]
    assert_same(same(x), cnn(x))
    unit = reparameterize(cnn, **SHARP)
    stage[0].stride = (1, 1)
    assert_same(unit(x), cnn(x))


def test_hint_names_close_layers() -> None:
    with pytest.raises(ValueError, match=re.escape("did you mean 'layer4.")):
        reparameterize(build("resnet18"), layers="layer4.0.conv3")
