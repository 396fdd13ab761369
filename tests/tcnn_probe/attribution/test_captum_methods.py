"""captum's methods, as they are called here, on models with known attributions."""

import itertools
from typing import Any

import captum.attr
import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import tcnn_probe
from tests.tcnn_probe.attribution.models import (
    CONVOLVED,
    Linear,
    OneBlock,
    bilinear,
    bright,
    nearest,
    patchconvnet,
    transformer,
)

pytestmark = pytest.mark.numerical


def images(count: int = 3) -> Tensor:
    return torch.randn(
        count, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def contributions(model: Linear, x: Tensor, target: list[int]) -> np.ndarray:
    """Compute w x of each pixel in a loop, summed over channels."""
    return np.stack(
        [
            (model.weight[k] * image).sum(0).detach().numpy()
            for k, image in zip(target, x, strict=True)
        ]
    )


@pytest.mark.parametrize("method", ["input_x_gradient", "integrated_gradients"])
def test_attribution_of_a_linear_model_is_its_contributions(method: str) -> None:
    model, x = Linear(), images()
    by_hand = contributions(model, x, [2, 0, 1])
    maps = tcnn_probe.saliency(model, x, [2, 0, 1], method)
    np.testing.assert_allclose(maps, by_hand, atol=1e-12)
    assert (by_hand < 0).any()
    absolute = tcnn_probe.saliency(model, x, [2, 0, 1], method, absolute=True)
    np.testing.assert_allclose(absolute, abs(by_hand), atol=1e-12)


@pytest.mark.parametrize("baseline", [0.7, torch.linspace(-1, 1, 2 * 7 * 11).reshape(2, 7, 11)])
@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion"])
def test_baseline_is_subtracted(method: str, baseline: float | Tensor) -> None:
    model, x = Linear(), images()
    options = {"window": 1, "stride": 1} if method == "occlusion" else {}
    maps = tcnn_probe.saliency(model, x, 1, method, baseline=baseline, batch_size=2, **options)
    # captum computes the weights of steps in float32, whatever the dtype of the model.
    np.testing.assert_allclose(maps, contributions(model, x - baseline, [1, 1, 1]), atol=1e-6)


GAUSS_LEGENDRE = {  # points from 0 to 1, and their weights
    2: ((0.5 - 3**0.5 / 6, 0.5 + 3**0.5 / 6), (1 / 2, 1 / 2)),
    3: ((0.5 - 15**0.5 / 10, 0.5, 0.5 + 15**0.5 / 10), (5 / 18, 4 / 9, 5 / 18)),
}


@pytest.mark.parametrize("steps", GAUSS_LEGENDRE)
def test_integrated_gradients_are_the_sum_over_few_points(steps: int) -> None:
    """Integrated gradients of sum w tanh(x) + b equal the weighted sum of gradients by hand."""
    linear = Linear()
    x = images()
    total = np.zeros(x.shape)
    for point, weight in zip(*GAUSS_LEGENDRE[steps], strict=True):
        # The points lie between the baseline, 0.3, and the image.
        at = 0.3 + point * (x.numpy() - 0.3)
        total += weight * linear.weight[1].detach().numpy() * (1 - np.tanh(at) ** 2)
    by_hand = ((x.numpy() - 0.3) * total).sum(1)
    model = nn.Sequential(nn.Tanh(), linear)
    # "method" is an argument of captum, and of saliency.
    options = {"n_steps": steps, "baseline": 0.3, "method": "gausslegendre"}
    maps = tcnn_probe.saliency(
        model, x, 1, ["IntegratedGradients"], IntegratedGradients=options
    ).IntegratedGradients
    # Captum's weights are in float32.
    np.testing.assert_allclose(maps, by_hand, atol=1e-6)


def windows(side: int, window: int, stride: int) -> list[range]:
    """Return the windows along one side, of which the last are cut off by the border."""
    # As in captum, the last window begins within the image and may end beyond it.
    starts = range(0, side - window + stride, stride)
    return [range(start, min(start + window, side)) for start in starts]


@pytest.mark.parametrize(
    ("window", "stride", "used"),
    [(None, None, ((1, 1), (1, 1))), ((3, 4), (2, 1), ((3, 4), (2, 1)))],
)
def test_occlusion_of_linear_model(
    window: object, stride: object, used: tuple[tuple[int, int], ...]
) -> None:
    model = Linear()
    x = images(2)
    by_pixel = contributions(model, x, [2, 2])
    total = np.zeros((2, 7, 11))
    times = np.zeros((7, 11))
    for rows, columns in itertools.product(
        windows(7, used[0][0], used[1][0]), windows(11, used[0][1], used[1][1])
    ):
        places = np.ix_(rows, columns)
        # Each pixel gets the mean over the windows that cover it.
        times[places] += 1
        for image in range(2):
            total[image][places] += by_pixel[image][places].sum()
    maps = tcnn_probe.saliency(model, x, 2, "occlusion", window=window, stride=stride)
    np.testing.assert_allclose(maps, total / times, atol=1e-6)


def test_default_window_is_an_eighth_of_the_side_in_steps_of_half_a_window() -> None:
    tall = nn.Sequential(nn.AvgPool2d((5, 1)), Linear())
    x = torch.randn(1, 2, 35, 11, dtype=torch.float64)
    stated = tcnn_probe.saliency(tall, x, 0, "occlusion", window=(4, 1), stride=(2, 1))
    np.testing.assert_array_equal(tcnn_probe.saliency(tall, x, 0, "occlusion"), stated)


def grad_cam(
    model: nn.Module,
    layer: nn.Module,
    x: Tensor,
    target: list[int],
    as_maps: Any = lambda x: x,
) -> np.ndarray:
    """Compute Eqs. 1 and 2 of the paper by hand;
    ``as_maps`` turns the layer's output into feature maps.
    """
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(
        # The output is copied before the next ReLU overwrites it.
        lambda module, inputs, output: outputs.append(output.clone()) or outputs[0]
    )
    scores = model(x)
    handle.remove()
    maps = []
    for image, k in enumerate(target):
        (gradient,) = torch.autograd.grad(scores[image, k], outputs[0], retain_graph=True)
        weights = as_maps(gradient)[image].mean((1, 2))
        maps.append((weights[:, None, None] * as_maps(outputs[0])[image]).sum(0).detach().numpy())
    return np.stack(maps)


@pytest.mark.parametrize(("layer", "default"), [("layer4", True), ("layer3.0.conv1", False)])
def test_gradcam_by_hand(layer: str, default: bool) -> None:
    """Grad-CAM equals the paper's equations, even if ReLUs work in place."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=5).eval().double()
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    by_hand = grad_cam(model, model.get_submodule(layer), x, [4, 1])
    assert (by_hand < 0).any()
    options = {} if default else {"layer": layer}
    maps = tcnn_probe.saliency(model, x, [4, 1], "gradcam", **options)
    assert maps.attrs["layer"] == layer
    np.testing.assert_allclose(maps, bilinear(by_hand.clip(0), 64, 96, first=0), atol=1e-12)
    signed = tcnn_probe.saliency(
        model,
        x,
        [4, 1],
        "gradcam",
        **options,
        relu_attributions=False,
        interpolation="nearest",
    )
    np.testing.assert_allclose(signed, nearest(by_hand, 64, 96, first=0), atol=1e-12)


@pytest.mark.parametrize(
    ("make", "size", "layer"),
    [
        (
            lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
            (3, 64, 96),
            "norm_pre",
        ),
        (
            lambda: timm.create_model("test_resnet"),
            (3, 32, 32),
            "layer3",
        ),  # the last stage has a single pixel
        (patchconvnet, (3, *CONVOLVED), "blocks"),
        (OneBlock, (2, 12, 20), "act"),
    ],
    ids=["convnext", "resnet", "patchconvnet", "one block"],
)
def test_default_layer_of_gradcam(make: Any, size: tuple[int, ...], layer: str) -> None:
    maps = tcnn_probe.saliency(make(), torch.rand(1, *size), 1, method="gradcam")
    assert maps.attrs["layer"] == layer


class Adapted(nn.Module):
    """Layer as peft adapts it."""

    __module__ = "peft.tuners.lora.layer"

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x)


@pytest.mark.parametrize("adapt", [Adapted, weight_norm])
def test_an_adapted_projection_is_no_block(adapt: Any) -> None:
    model = transformer("deit_tiny_patch16_224", depth=2)
    model.blocks[1].attn.qkv = adapt(model.blocks[1].attn.qkv)
    maps = tcnn_probe.saliency(model, torch.rand(1, 3, 24, 40), 1, method="gradcam")
    assert maps.attrs["layer"] == "blocks.0"


# Windows of 7 x 7 on 14 x 21 and then 7 x 10 tokens: the last ones are padded.
SWIN: dict[str, Any] = {
    "img_size": (56, 84),
    "depths": (1, 1),
    "embed_dim": 16,
    "num_heads": (1, 2),
}
# Model, size of images, its layer, and maps of its tokens.
TOKENS: dict[str, tuple[Any, tuple[int, int], str, Any]] = {
    "class token": (
        # The patches of the last block do not reach the class token any more, so the layer is the
        # block before.
        lambda: transformer("deit_tiny_patch16_224", depth=3), (24, 40), "blocks.1",
        lambda x: x[:, 1:].unflatten(1, (3, 5)),
    ),
    "mean of patches": (
        lambda: transformer("vit_small_patch16_224", class_token=False, global_pool="avg"),
        (24, 40), "blocks",
        lambda x: x.unflatten(1, (3, 5)),
    ),
    "cait": (
        lambda: transformer("cait_xxs24_224"), (24, 40), "blocks",
        lambda x: x.unflatten(1, (3, 5)),
    ),
    "swin": (
        lambda: timm.create_model("swin_tiny_patch4_window7_224", **SWIN), (56, 84), "layers",
        lambda x: x,
    ),
    "mixer": (
        lambda: timm.models.mlp_mixer.MlpMixer(5, 64, num_blocks=1, embed_dim=8), (64, 64),
        "blocks",
        lambda x: x.unflatten(1, (4, 4)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOKENS)
def test_gradcam_of_tokens_by_hand(name: str) -> None:
    make, size, layer, as_maps = TOKENS[name]
    model = make().eval().double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    for p in model.parameters():
        p.data.add_(0.05 * torch.randn_like(p))
    by_hand = grad_cam(
        model,
        model.get_submodule(layer),
        x,
        [4, 1],
        lambda x: as_maps(x).movedim(-1, 1),
    )
    # This is ten thousand times the tolerance below.
    assert abs(by_hand).max() > 1e-6
    maps = tcnn_probe.saliency(model, x, [4, 1], "gradcam", relu_attributions=False)
    assert maps.attrs["layer"] == layer
    np.testing.assert_allclose(maps, bilinear(by_hand, *size), atol=1e-10)
    by_name = tcnn_probe.saliency(model, x, [4, 1], "LayerGradCam", layer=layer)
    np.testing.assert_array_equal(by_name, maps)
    assert not any(module._forward_hooks for module in model.modules())


class Lost(nn.Module):
    """Model whose tokens lie on no grid."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        # 17 is prime, so that no grid has this number of cells.
        return self.mix(x.flatten(1)[:, :102].unflatten(1, (17, 6))).mean(1)


@pytest.mark.parametrize(
    ("make", "size", "layer", "message"),
    [
        (
            Lost,
            (3, 24, 40),
            None,
            r"works on tokens \('mix'\), whose grid is not known: .*layer=",
        ),
        (
            Lost,
            (3, 24, 40),
            "mix",
            r"expected a layer .* tokens on a known grid; 'mix' gives shape",
        ),
        (Linear, (2, 7, 11), "layer5", "no layer 'layer5'; model.named_modules"),
        (Linear, (2, 7, 11), None, "no layer gives a feature map"),
    ],
    ids=["no grid", "no grid, named", "no such layer", "no feature map"],
)
def test_gradcam_without_a_feature_map_is_refused(
    make: Any, size: tuple[int, ...], layer: str | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.saliency(make(), torch.randn(1, *size), method="gradcam", layer=layer)


@pytest.mark.parametrize(
    ("method", "options", "of_weights"),
    [
        # captum's default takes absolute values before it sums over channels.
        ("Saliency", {}, lambda w: w.abs().sum(0)),
        ("Saliency", {"abs": False, "absolute": True}, lambda w: w.sum(0).abs()),
        (captum.attr.Saliency, {"abs": False}, lambda w: w.sum(0)),
        ("Deconvolution", {}, lambda w: w.sum(0)),
        ("NeuronGradient", {"layer": "1", "neuron_selector": (1,)}, lambda w: w.sum(0)),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting backward hooks on ReLU activations")
def test_any_class_of_captum(method: Any, options: dict[str, Any], of_weights: Any) -> None:
    """The gradient of a linear model is its weights."""
    model = nn.Sequential(nn.Identity(), Linear())
    x = images()
    maps = tcnn_probe.saliency(model, x, 1, method, **options)
    by_hand = of_weights(model[1].weight[1]).detach()
    np.testing.assert_allclose(maps, by_hand.expand(3, -1, -1), atol=1e-12)
    name = method if isinstance(method, str) else method.__name__
    assert maps.attrs["method"] == name
    assert maps.attrs["source"] == f"captum's {name}"


@pytest.mark.parametrize("method", ["DeepLift", "GradientShap", "GuidedGradCam", "FeatureAblation"])
@pytest.mark.filterwarnings("ignore:Setting ")
def test_classes_of_every_kind_run(method: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    x = torch.randn(3, 3, 11, 13)
    # The mask has four features of rows of pixels; one per pixel would take 143 forwards.
    squares = torch.arange(11 * 13).view(1, 1, 11, 13) // 40
    options = {"feature_mask": squares} if method == "FeatureAblation" else {}
    maps = tcnn_probe.saliency(model, x, 2, method, batch_size=2, **options)
    assert maps.shape == (3, 11, 13)
    assert np.isfinite(maps).all()
    assert (maps != 0).any(("y", "x")).all()


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        (
            "occlusion",
            {"window": (8, 3)},
            AssertionError,
            r"Sliding window dimensions \(2, 8, 3\) cannot exceed",
        ),
        (
            "occlusion",
            {"window": 3, "stride": 4},
            AssertionError,
            r"Stride dimension \(2, 4, 4\) cannot be larger than",
        ),
        (
            "occlusion",
            {"baseline": torch.zeros(3, 7, 11)},
            ValueError,
            r"to \(2, 7, 11\), got shape \(3, 7, 11\)",
        ),
        (
            "occlusion",
            {"baseline": torch.zeros(3, 2, 7, 11)},
            ValueError,
            "broadcasts to",
        ),
        (
            "occlusion",
            {"steps": 3},
            TypeError,
            r"no option 'steps' here; it has \['absolute', 'baseline', 'stride', '",
        ),
        (
            "input_x_gradient",
            {"baseline": 0.0},
            TypeError,
            r"InputXGradient has no option 'baseline' here",
        ),
        ("NoiseTunnel", {}, ValueError, "one of .*'occlusion'.* got 'NoiseTunnel'"),
    ],
)
def test_bad_options_are_refused(
    method: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.saliency(Linear(), images(), method=method, **options)


def test_bad_interpolation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"interpolation='bilinear' or 'nearest', got 'bicubic'"):
        tcnn_probe.saliency(OneBlock(), bright(), method="gradcam", interpolation="bicubic")
