"""Models and arguments that cannot be converted:
the message gives the reason, and the model stays as it was.
"""

import re
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import prune

from tcnn_model import gpsa_layers, reparameterize
from tests.tcnn_model.families import build
from tests.tcnn_model.numerics import assert_refused, on_meta

_refused = partial(assert_refused, reparameterize)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # The reasons are: no convolutions; none in the last stage; layers that need the smaller
        # grid, after a convolution or after a pool; computed weights.
        (
            "vit_tiny_patch16_224",
            "no convolution to reparameterize: the last stage of VisionTransformer",
        ),
        (
            "botnet26t_256",
            "no convolution to reparameterize: the last stage of ByobNet .* of 8 in the model",
        ),
        (
            "efficientformer_l1",
            "stages.3.downsample.conv at stride 1 the network no longer runs .*use stride='keep'",
        ),
        (
            "coatnet_nano_cc_224",
            r"stages\.3\.blocks\.0\.down\.pool, .*at stride 1 the network no longer runs",
        ),
        (
            "efficientnet_cc_b0_4e",
            r"no convolution to reparameterize: .*blocks\.5\.0\.conv_dw \(CondConv2d\)",
        ),
    ],
)
def test_models_that_cannot_be_converted(name: str, message: str) -> None:
    # The meta device suffices, as a refusal depends on structure alone; these models have full
    # size.
    _refused(on_meta(name, num_classes=3), message)


def test_model_that_cannot_be_unstrided_can_keep_its_stride() -> None:
    hrnet = on_meta("hrnet_w18_small", num_classes=3)
    _refused(hrnet, "use stride='keep'")
    assert len(gpsa_layers(reparameterize(hrnet, stride="keep", inplace=True))) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layers": "layer5", "inplace": False},
            "no k x k convolutions match 'layer5'",
        ),
        (
            {"layers": "layer4.*.conv7"},
            r"no k x k convolutions match 'layer4\.\*\.conv7'",
        ),
        ({"layers": ["layer4.0.conv1", "fc"]}, "no k x k convolutions match 'fc'"),
        ({"layers": "layer4.0.downsample.*"}, "no k x k convolutions match"),  # 1 x 1
        (
            {"layers": lambda name, conv: False},
            "the predicate chose none of the 17 k x k convolutions",
        ),
        ({"layers": []}, "layers is empty"),
        ({"stride": "half"}, "expected stride='unit' or 'keep', got 'half'"),
        (
            {"locality_strength": 0.0},
            "'layer4.0.conv1': locality_strength must be positive",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    cnn = timm.create_model("resnet18", channels=(8, 8, 16, 16), num_classes=3)
    _refused(cnn, message, **arguments)
    assert gpsa_layers(cnn) == {}


def test_bad_image_sizes_are_refused() -> None:
    cnn = build("resnet18")
    # This tensor does not move with the model, but no operation uses it.
    cnn.note = torch.zeros(3)
    _refused(
        cnn,
        "could not run ResNet on an image of 5 x 64 x 64: pass the input_size",
        input_size=(5, 64, 64),
    )
    _refused(cnn, "too small to tell stages apart: .* works on 1 x 1", input_size=(3, 32, 32))


def test_a_second_conversion_needs_layers() -> None:
    tcnn = reparameterize(build("resnet18"))
    _refused(tcnn, "already reparameterized .*name further convolutions with layers=")
    assert len(gpsa_layers(reparameterize(tcnn, layers="layer3"))) == 2 * len(gpsa_layers(tcnn))


def test_a_layer_of_the_classifier_is_refused() -> None:
    message = r"not used by the model's feature extractor.*\['pre_logits\.fc1'\]"
    _refused(build("vgg11_bn"), message, layers="pre_logits.fc1")


def test_a_convolution_with_hooks_is_refused() -> None:
    cnn = build("resnet18")
    # torch keeps each kind of hook in a separate dict of the module.
    for attach in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
    ):
        handle = getattr(cnn.get_submodule("layer4.1.conv2"), attach)(lambda *_: None)
        _refused(
            cnn,
            r"cannot reparameterize 'layer4\.1\.conv2': it carries hooks.*remove them first",
        )
        handle.remove()
    assert len(gpsa_layers(reparameterize(cnn))) == 4


def test_a_convolution_with_a_computed_weight_is_refused() -> None:
    cnn = build("resnet18")
    nn.utils.parametrizations.weight_norm(cnn.get_submodule("layer4.1.conv2"))
    _refused(cnn, r"cannot reparameterize 'layer4\.1\.conv2'.*(?i:parametrized)")


def test_a_model_that_does_not_run_on_images_is_refused() -> None:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(7, 5),
        nn.Unflatten(1, (5, 1, 1)),
        nn.Conv2d(5, 3, 3, padding=1),
    )
    _refused(
        model,
        r"could not run Sequential on an image of 5 x 224 x 224: "
        r"pass the input_size=\(C, H, W\).*RuntimeError: ",
    )


class _Normalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cnn = build("resnet18")
        self.mean = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cnn(x - self.mean)


def test_a_tensor_that_does_not_move_with_the_model_is_refused() -> None:
    model = _Normalising()
    _refused(
        model,
        "mean is a tensor that is neither a parameter nor a buffer.*register_buffer",
    )
    mean = model.mean
    del model.mean
    model.register_buffer("mean", mean)
    assert len(gpsa_layers(reparameterize(model))) == 4


def test_a_pruned_model_is_refused() -> None:
    cnn = build("resnet18")
    prune.random_unstructured(cnn.get_submodule("layer1.0.conv1"), "weight", amount=0.5)
    with pytest.raises(
        ValueError,
        match=r"cannot copy ResNet: layer1\.0\.conv1\.weight is .*prune\.remove",
    ):
        reparameterize(cnn)
    prune.remove(cnn.get_submodule("layer1.0.conv1"), "weight")
    assert len(gpsa_layers(reparameterize(cnn))) == 4


def test_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str 'resnet18'"):
        reparameterize("resnet18")  # type: ignore[arg-type]
    cnn: Any = build("resnet18")
    for layers in (3, [3], b"layer4"):
        message = (
            "expected layers to be None, a name, a collection of names or a predicate, got "
            f"{layers!r}"
        )
        with pytest.raises(TypeError, match=re.escape(message)):
            reparameterize(cnn, layers=layers)  # type: ignore[arg-type]
