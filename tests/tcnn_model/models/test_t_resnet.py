"""The T-CNNs in timm's registry."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import get_pretrained_cfg

from tcnn_model import gpsa_layers, reparameterize
from tests.tcnn_model.numerics import (
    CONVOLUTIONAL,
    assert_same,
    on_meta,
    random,
    randomise_norms,
)

NAMES = {
    *(f"t_resnetrs{depth}" for depth in (50, 101, 152, 200, 270, 350)),
    *(f"t_resnet{depth}d" for depth in (50, 101, 152, 200)),
    "t_resnet50",
}
# The last stage has two blocks: the first has the stride, the second none.
SMALL = {"layers": (1, 1, 1, 2), "channels": (8, 8, 16, 16)}


def test_all_models_are_in_timms_registry() -> None:
    assert set(timm.list_models("t_resnet*")) == NAMES


@pytest.mark.parametrize("name", ["t_resnetrs50", "t_resnet101d"])
def test_model_is_its_converted_cnn(name: str) -> None:
    short = {"layers": (1, 1, 1, 2)}
    # The model has its full width, which costs nothing without storage.
    tcnn = on_meta(name, **short)
    expected = reparameterize(on_meta(name.removeprefix("t_"), **short), inplace=True)
    shapes, expected_shapes = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (tcnn, expected)
    )
    assert shapes == expected_shapes
    assert all(layer.stride == (1, 1) for layer in gpsa_layers(tcnn).values())


@pytest.mark.study
@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [("t_resnetrs50", 38.0, 3), ("t_resnetrs270", 133.0, 4)],
)
def test_parameters_as_published(name: str, millions: float, layers: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    # The paper gives them to a tenth of a million.
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert len(gpsa_layers(model)) == layers


@torch.no_grad()
def test_arguments_of_the_cnn_and_of_the_conversion() -> None:
    arguments = {"num_classes": 3, "in_chans": 1, **SMALL}
    cnn = randomise_norms(timm.create_model("resnet50", **arguments)).eval()
    # None of these is the default, so that a lost argument shows.
    options = {"stride": "keep", "qk_dim": 5, "backend": "dense"}
    tcnn = timm.create_model("t_resnet50", **options, **CONVOLUTIONAL, **arguments).eval()
    assert {layer.backend for layer in gpsa_layers(tcnn).values()} == {"dense"}
    assert tcnn.load_state_dict(cnn.state_dict(), strict=False).unexpected_keys == []
    assert {layer.qk_dim for layer in gpsa_layers(tcnn).values()} == {5}
    x = random(2, 1, 64, 96, dtype=torch.float32)
    assert tcnn(x).shape == (2, 3)
    assert_same(tcnn(x), cnn(x))


def test_pretrained_weights_are_those_of_the_cnn(tmp_path: Path) -> None:
    cnn = randomise_norms(timm.create_model("resnet50", **SMALL))
    torch.save(cnn.state_dict(), tmp_path / "cnn.pth")
    pretrained: Any = {
        "pretrained": True,
        "pretrained_cfg_overlay": {"file": str(tmp_path / "cnn.pth")},
        **SMALL,
    }
    tcnn = timm.create_model("t_resnet50", **pretrained)
    assert list(gpsa_layers(tcnn)) == ["layer4.0.conv2", "layer4.1.conv2"]
    for name, value in cnn.state_dict().items():
        assert torch.equal(tcnn.state_dict()[name], value), name
    # The number of classes differs from the checkpoint's, as in fine-tuning.
    smaller = timm.create_model("t_resnet50", num_classes=3, **pretrained)
    assert smaller.get_classifier().out_features == 3
    assert torch.equal(
        smaller.get_parameter("layer4.1.conv2.weight"),
        cnn.get_parameter("layer4.1.conv2.weight"),
    )


def test_tags_point_at_the_weights_of_the_cnn() -> None:
    for name in sorted(NAMES):
        base = name.removeprefix("t_")
        tags = timm.list_models(f"{base}.*", pretrained=True)
        assert {f"t_{tag}" for tag in tags} == set(timm.list_models(f"{name}.*", pretrained=True))
        for tag in tags:
            config = get_pretrained_cfg(f"t_{tag}")
            expected = get_pretrained_cfg(tag)
            # timm needs these to download weights and to prepare images for them.
            for key in ("hf_hub_id", "url", "input_size", "mean", "std", "crop_pct"):
                assert getattr(config, key) == getattr(expected, key), (tag, key)
        assert get_pretrained_cfg(name).tag == get_pretrained_cfg(base).tag
    assert get_pretrained_cfg("t_resnet50.a1_in1k").hf_hub_id == "timm/resnet50.a1_in1k"


def test_configuration_names_the_tcnn() -> None:
    tcnn = on_meta("t_resnet50.a1_in1k")
    assert tcnn.pretrained_cfg["architecture"] == "t_resnet50"
    assert tcnn.pretrained_cfg["tag"] == "a1_in1k"
    assert tcnn.default_cfg is tcnn.pretrained_cfg
    assert timm.data.resolve_model_data_config(tcnn)["input_size"] == (3, 224, 224)
    # The CNN's own configuration must stay unchanged.
    assert get_pretrained_cfg("resnet50.a1_in1k").architecture == "resnet50"


@torch.no_grad()
def test_feature_extractor_has_the_unstrided_reductions() -> None:
    model = timm.create_model(
        # The outputs are the stages before and after the removed stride.
        "t_resnet50",
        features_only=True,
        out_indices=(3, 4),
        **SMALL,
    )
    assert model.feature_info.reduction() == [16, 16]
    assert [tuple(f.shape) for f in model(torch.zeros(1, 3, 64, 96))] == [
        (1, 64, 4, 6),
        (1, 64, 4, 6),
    ]


def test_only_the_last_stage_is_converted_where_others_share_its_resolution() -> None:
    # timm then replaces the strides of layer3 and layer4 by dilation.
    model = on_meta("t_resnet50", output_stride=8)
    assert list(gpsa_layers(model)) == [f"layer4.{block}.conv2" for block in range(3)]
