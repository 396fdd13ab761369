"""stride="keep" at large locality and gating: the very function of the CNN, for each family of convnets."""

import pytest
import torch

from tcnn_model import reparameterize
from tests.tcnn_model.families import build
from tests.tcnn_model.helpers import CONVOLUTIONAL, SHARP, assert_every_layer_counts, random, relative_error

FAMILIES = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet50d",
    "resnetrs50",
    "wide_resnet50_2",
    "seresnet50",
    "ecaresnet50d",
    "resnet50_gn",
    "resnetaa50",
    "resnetblur50",
    "vgg16_bn",
    "densenet121",
    "darknet53",
    "cspresnet50",
    "dla34",
    "resnetv2_50",
    "resnetv2_50d_gn",
    "resnext50_32x4d",
    "regnetx_032",
    "regnety_032",
    "efficientnet_b0",
    "tf_efficientnetv2_s",
    "mobilenetv3_large_100",
    "convnext_tiny",
    "resnetv2_50x1_bit",
    "nf_resnet50",
    "res2net50_26w_4s",
    "skresnet50",
    "resnest50d",
    "repvgg_b0",
    "hrnet_w18",
    "xception41",
    "ghostnet_100",
)
GRIDS = ((64, 64), (64, 96))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_keep_is_the_same_function(name: str) -> None:
    cnn = build(name)
    tcnn = reparameterize(cnn, stride="keep", **CONVOLUTIONAL)
    for grid in GRIDS:
        x = random(2, 3, *grid, dtype=torch.float32)
        assert relative_error(tcnn(x), cnn(x)) < 1e-4
    assert_every_layer_counts(tcnn, x[:1])

    cnn.double()
    tcnn = reparameterize(cnn, stride="keep", **SHARP)
    for grid in GRIDS:
        x = random(1, 3, *grid)
        assert relative_error(tcnn(x), cnn(x)) < 1e-8
        assert relative_error(tcnn.forward_features(x), cnn.forward_features(x)) < 1e-8


@torch.no_grad()
def test_start_of_fine_tuning_is_another_function() -> None:
    cnn = build("resnet18")
    x = random(2, 3, 64, 96, dtype=torch.float32)
    assert relative_error(reparameterize(cnn, stride="keep")(x), cnn(x)) > 0.01
