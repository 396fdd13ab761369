"""Errors of add_attention_pool and specialize:
the message gives the reason, and the model stays as it was.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tcnn_model.models  # noqa: F401 (registers PatchConvNets with timm)
from tcnn_model import add_attention_pool, specialize
from tests.tcnn_model.numerics import assert_refused, on_meta, randomise_norms
from tests.tcnn_model.tiny_models import CLASSES, POOL_SIZE, Plain, pooled_cnn, tiny_cnn

_refused = partial(assert_refused, add_attention_pool)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "vit_tiny_patch16_224",
            {"depth": 1},
            r"VisionTransformer pools .*already has attention \(blocks\.0\.attn",
        ),
        (
            "swin_tiny_patch4_window7_224",
            {},
            "SwinTransformer pools .* but attention pooling is for convnets",
        ),
        (
            "resnet50_clip",
            {},
            r"ByobNet pools .*it already has attention \(head, AttentionPool2d\)",
        ),
        (
            "mambaout_femto",
            {},
            "no module of MambaOut pools its last feature map .*may pool in a function",
        ),
        (
            "resnet18",
            {"num_classes": 0, "global_pool": ""},
            "no module of ResNet pools .*made without a pool",
        ),
        # This model ends before the pool.
        ("resnet18", {"features_only": True}, "no module of FeatureListNet pools"),
        (
            "resnet18",
            {"global_pool": "catavgmax"},
            "'catavgmax' gives twice the channels",
        ),
        (
            "patchconvnet_s20",
            {"depth": 1},
            "PatchConvNet pools by attention already: pool",
        ),
    ],
)
def test_models_without_a_pool_to_replace_are_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    _refused(on_meta(name, **options), message)


def test_other_models_and_arguments_are_refused() -> None:
    cnn = tiny_cnn()
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got str 'resnet18'"):
        add_attention_pool("resnet18")  # type: ignore[arg-type]
    headless: Any = tiny_cnn()
    headless.reset_classifier(0)
    _refused(
        headless,
        "tokens for each class need classes, and num_classes is 0",
        per_class=True,
    )
    _refused(pooled_cnn(), "ResNet pools by attention already: global_pool.attention")
    _refused(cnn, "could not run ResNet on an image of 3 x 64 x 64", input_size=(3, 64, 64))


def test_modules_with_hooks_are_refused() -> None:
    # These two modules are replaced, and two modules of a VGG's head, below, are removed.
    for name in ("global_pool.pool", "fc"):
        cnn = tiny_cnn()
        # Backward hooks would be lost as well as forward hooks.
        cnn.get_submodule(name).register_full_backward_hook(lambda *_: None)
        _refused(
            cnn,
            f"{name} carries hooks, which would be lost",
            per_class=True,
            input_size=POOL_SIZE,
        )
    for name in ("pre_logits.fc1", "head.drop"):
        # Before timm 1.0.21 on_meta allocates the model, and the full head of VGG has 120 million
        # weights.
        vgg = on_meta("vgg11", mlp_ratio=0.01)
        vgg.get_submodule(name).register_forward_hook(lambda *_: None)
        _refused(vgg, f"{name} carries hooks, which would be lost")


def test_classifiers_that_have_no_row_per_class_are_refused() -> None:
    cnn: Any = randomise_norms(tiny_cnn())
    cnn.fc = nn.Sequential(cnn.fc)
    _refused(
        cnn,
        "expected a classifier that is a Linear or a 1 x 1 convolution, got Sequential",
        per_class=True,
        input_size=POOL_SIZE,
    )
    pruned: Any = tiny_cnn()
    # torch refuses to copy tensors that are not leaves.
    prune.l1_unstructured(pruned.fc, "weight", 0.5)
    _refused(
        pruned,
        "cannot copy ResNet: fc.weight is computed from other tensors",
        per_class=True,
        input_size=POOL_SIZE,
    )


def test_the_pool_of_an_earlier_layer_is_refused() -> None:
    class Squeezed(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.trunk[0](x)
            # The pool of this squeeze pools a feature map, but not the last one.
            return self.classifier(self.trunk[1](x * self.pool(x)).mean((2, 3)))

    _refused(Squeezed(), "no module of Squeezed pools its last feature map")


@pytest.mark.parametrize("name", ["resnet10t", "densenet121", "mobilenetv3_small_050"])
def test_images_whose_last_feature_map_is_one_pixel_are_refused(name: str) -> None:
    """Another pool, such as that of a shortcut, would be taken for the last one."""
    message = "image is too small to tell pools apart: .*global_pool.* works on 1 x 1"
    _refused(on_meta(name), message, input_size=(3, 32, 32))


def test_models_that_cannot_be_specialized_are_refused() -> None:
    refused = partial(assert_refused, specialize)
    refused(tiny_cnn(), "expected a model with one AttentionPool2d, got ResNet with 0")
    refused(
        pooled_cnn(per_class=True),
        f"global_pool.attention has a token for each of {CLASSES} classes",
    )
    hooked = pooled_cnn()
    hooked.fc.register_forward_hook(lambda *_: None)
    refused(hooked, "fc carries hooks, which would be lost")
    headless = pooled_cnn()
    headless.reset_classifier(0)
    refused(
        headless,
        "expected a classifier that is a Linear or a 1 x 1 convolution, got Identity",
    )
