"""What is no attention between tokens is listed with its reason, and what is beside it is recorded."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import xarray as xr

import tcnn_probe

TINY = {"img_size": (32, 48), "embed_dim": 24, "depth": 2, "num_heads": 3}

# model, options, size; classes of the layers that are listed, a part of the reason, and classes of those recorded
CASES = {
    "xcit": ("xcit_nano_12_p8_224", TINY, (32, 48), {"XCA": "cross-covariance"}, {"ClassAttn": 2}),
    "edgenext": ("edgenext_xx_small", {}, (64, 96), {"CrossCovarianceAttn": "cross-covariance"}, {}),
    "davit": (
        "davit_tiny",
        {"depths": (1, 1), "embed_dims": (32, 64), "num_heads": (2, 4)},
        (64, 96),
        {"ChannelAttention": "between channels"},
        {"WindowAttention": 2},
    ),
    "mobilevitv2": ("mobilevitv2_050", {}, (64, 96), {"LinearSelfAttention": "one context vector"}, {}),
    "poolformer": ("poolformer_s12", {}, (64, 96), {"Pooling": "average pooling"}, {}),
    "efficientformer": ("efficientformer_l1", {}, (224, 224), {"Pooling": "average pooling"}, {"Attention": 1}),
    "efficientvit_mit": ("efficientvit_b0", {}, (64, 96), {"LiteMLA": "ReLU kernel"}, {}),
    "coat": ("coat_tiny", {"img_size": (64, 96)}, (64, 96), {"FactorAttnConvRelPosEnc": "of the keys alone"}, {}),
    "lambda": ("lambda_resnet26t", {}, (64, 96), {"LambdaLayer": "summarised"}, {}),
    "sknet": ("skresnet18", {}, (64, 96), {"SelectiveKernelAttn": "between branches"}, {}),
    "resnest": ("resnest14d", {}, (64, 96), {"SplitAttn": "between branches"}, {}),
    "gcresnet": ("gcresnet50t", {}, (64, 96), {"GlobalContext": "one global context vector"}, {}),
    "swiftformer": ("swiftformer_xs", {}, (64, 96), {"EfficientAdditiveAttention": "one global query"}, {}),
    "efficientvim": ("efficientvim_m1", {}, (128, 192), {"HSMSSD": "state-space"}, {}),
    "bat": (
        "bat_resnext26ts",
        {},
        (256, 256),
        {"BatNonLocalAttn": "no softmax", "BilinearAttnTransform": "no softmax"},
        {},
    ),
    "resnet": ("resnet18", {}, (64, 96), {}, {}),
    "repvit": ("repvit_m0_9", {}, (64, 96), {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_reasons(case: str) -> None:
    name, options, size, listed, recorded = CASES[case]
    model = timm.create_model(name, num_classes=5, **options).eval()
    modules = dict(model.named_modules())

    def classes(layers: object) -> list[str]:
        return [type(modules[layer.split("#")[0]]).__name__ for layer in layers]

    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, *size))
        unsupported, layers = recorder.unsupported, recorder.layers
        if recorded:
            recorder.mark(epoch=0)
            assert recorder.dataset.entropy.notnull().any("head").all()
        else:
            with pytest.raises(RuntimeError, match="nothing to mark: no attention was seen"):
                recorder.mark(epoch=0)

    found = {kind: classes(layers).count(kind) for kind in classes(layers)}
    assert found == recorded
    assert set(classes(unsupported)) == set(listed)
    for layer, reason in unsupported.items():
        assert listed[classes([layer])[0]] in reason
    all_of_them = [layer for layer, module in modules.items() if type(module).__name__ in listed]
    assert list(unsupported) == [layer for layer in all_of_them if layer in unsupported], "in the model's order"
    assert set(unsupported) == set(all_of_them), "none is missing"
    # And no layer that calls itself attention is passed over in silence.
    for layer, module in modules.items():
        if re.search("Attn|Attention", type(module).__name__):
            assert any(other.split("#")[0].startswith(layer) for other in (*unsupported, *layers)), layer


def test_a_softmax_that_weighs_nothing() -> None:
    """A gate that is a softmax, as those of mixtures of experts, multiplies value by value."""

    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.softmax(-1)

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Flatten(2), Gate()).eval()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, 24, 40))
        assert "weighs no values" in recorder.unsupported["2"]
        assert recorder.layers == ()


class Switched(torch.nn.Module):
    """A layer that asks for attention from some forward on, and one that never does and is not always called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.last = torch.nn.Conv2d(3, 4, 8, 8), Attention(), OtherAttention()
        self.last.attends = False
        self.all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(x).flatten(2).mT)
        return self.last(x) if self.all else x


class Attention(torch.nn.Module):
    attends = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) if self.attends else x


class OtherAttention(Attention):
    pass


def test_reasons_are_stored_at_every_mark(tmp_path: Path) -> None:
    """Also by a run that goes on, and no longer of a layer that was recorded after all."""
    model, x = Switched().eval(), torch.randn(2, 3, 24, 40)
    for epoch in range(3):
        model.all = epoch == 1
        with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder, torch.no_grad():
            model(x)
            recorder.mark(epoch=2 * epoch)
            model.all = epoch == 0
            model(x)
            recorder.mark(epoch=2 * epoch + 1)
        stored = xr.open_zarr(tmp_path / "run.zarr").attrs
        assert json.loads(stored["unsupported"]) == {"last": "no softmax between tokens was seen while it ran"}


def test_a_layer_that_asks_for_attention_after_all() -> None:
    model, x = Switched().eval(), torch.randn(2, 3, 24, 40)
    model.all = True
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(x)
        assert list(recorder.unsupported) == ["last"]
        model.last.attends = True
        model(x)
        assert recorder.unsupported == {}
        recorder.mark(epoch=0)
    assert json.loads(recorder.dataset.attrs["unsupported"]) == {}
    assert recorder.dataset.images.values.tolist() == [[4, 2]]


def test_a_product_of_other_matrices_makes_no_attention_of_a_softmax() -> None:
    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul(x.softmax(-1)).mT @ x

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Flatten(2), Gate()).eval()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, 24, 40))
        assert "weighs no values" in recorder.unsupported["2"]
        assert recorder.layers == ()


@pytest.mark.parametrize("multiplied", ["the gated", "the softmax"])
def test_of_products_of_one_shape_the_one_of_the_softmax_counts(multiplied: str) -> None:
    class Gate(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = x.softmax(-1)
            return (x * weights if multiplied == "the gated" else weights) @ x.mT  # (B, 4, 15) both

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Flatten(2), Gate()).eval()
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, 24, 40))
        assert recorder.layers == (() if multiplied == "the gated" else ("2",))
