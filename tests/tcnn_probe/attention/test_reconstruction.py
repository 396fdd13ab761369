"""Attention that is not what the model used raises; what it did use never does, in any precision or under dropout."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import ReconstructionError
from tcnn_probe.recording import collector
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.networks import Chain

DIM, HEADS = 12, 3


class Other(Tensor):
    """A tensor whose attention is not torch's: it is multiplied, or that of other keys."""

    factor: float = 1.5

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        asked = func in (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax)
        return output * cls.factor if asked else output


class Attend(nn.Module):
    num_heads = HEADS

    def __init__(self, how: str, factor: float) -> None:
        super().__init__()
        self.how, self.factor, self.stem = how, factor, nn.Conv2d(3, 3 * DIM, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.stem(x).flatten(2).unflatten(1, (3, HEADS, -1)).mT.movedim(1, 0)
        q = q.as_subclass(type("Mine", (Other,), {"factor": self.factor}))
        if self.how == "fused":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("how", ["fused", "softmax"])
def test_another_attention_raises(how: str) -> None:
    model = sharpen(Attend(how, 1.5))
    with tcnn_probe.record(model) as recorder, pytest.raises(ReconstructionError, match="differs from the model's own"):
        model(torch.randn(2, 3, 24, 40))
    assert recorder.epochs == ()


@pytest.mark.parametrize("how", ["fused", "softmax"])
def test_a_subclass_with_torchs_attention_does_not(how: str) -> None:
    model = sharpen(Attend(how, 1.0))
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        model(torch.randn(2, 3, 24, 40))
        recorder.mark(epoch=0)
        assert recorder.dataset.entropy.notnull().all()


@pytest.mark.parametrize("how", ["fused", "softmax"])
def test_a_slight_difference_in_float32_raises(how: str) -> None:
    """1 in 100, where float32 is right to 1 in 10^6."""
    model = sharpen(Attend(how, 1.01))
    with tcnn_probe.record(model), torch.no_grad(), pytest.raises(ReconstructionError):
        model(torch.randn(2, 3, 24, 40))


def _vit(**options: Any) -> nn.Module:
    small = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_tiny_patch16_224", **small, **options)


def _swin(**options: Any) -> nn.Module:
    small = {
        "img_size": (24, 40),
        "patch_size": 4,
        "embed_dim": 8,
        "depths": (2,),
        "num_heads": (2,),
        "window_size": (2, 5),
    }
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **small, **options)


def _cait(**options: Any) -> nn.Module:
    small = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model("cait_xxs24_224", **small, **options)


def _siglip(**options: Any) -> nn.Module:
    small = {"img_size": (24, 40), "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return timm.create_model("vit_base_patch16_siglip_224", **small, **options)


class Torchs(nn.Module):
    """torch's own encoder, with dropout inside the attention."""

    def __init__(self, attn_drop_rate: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 8, 8)
        self.encoder = nn.TransformerEncoderLayer(DIM, HEADS, 17, dropout=attn_drop_rate, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.stem(x).flatten(2).mT)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": _vit,
    "swin": _swin,
    "cait": _cait,
    "siglip": _siglip,
    "torch": Torchs,
}


def check(model: nn.Module, images: Tensor, **options: Any) -> None:
    with tcnn_probe.record(model, **options) as recorder:
        model(images)
        recorder.mark(epoch=0)
        assert recorder.dataset.entropy.notnull().any("head").all()
        assert not recorder.unsupported


def images(seed: int = 0) -> Tensor:
    return torch.randn(3, 3, 24, 40, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        check(sharpen(MODELS[name]()).to(dtype), images().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str, dtype: torch.dtype) -> None:
    with torch.no_grad(), torch.autocast("cpu", dtype):
        check(sharpen(MODELS[name]()), images())


@pytest.mark.parametrize("name", MODELS)
def test_training_with_dropout(name: str) -> None:
    """Attention is recorded as it is before dropout, and gradients are what they are without a recorder."""
    model = sharpen(MODELS[name](attn_drop_rate=0.4)).train()
    torch.manual_seed(1)
    _loss(model(images())).backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    with tcnn_probe.record(model, when="train") as recorder:
        _loss(model(images())).backward()
        recorder.mark(epoch=0)
        assert recorder.dataset.entropy.notnull().any("head").all()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_inference_mode(name: str) -> None:
    with torch.inference_mode():
        check(sharpen(MODELS[name]()), images())


@pytest.mark.parametrize("kind", ["gpsa", "convit"])
def test_a_gated_layer_with_another_output_raises(kind: str) -> None:
    """These layers are measured from their input, so it is their own forward that has to be the one rebuilt."""
    if kind == "gpsa":
        model, x, layer = Chain(), torch.randn(2, 2, 7, 11), "near"
    else:
        model = timm.create_model("convit_tiny", depth=1, local_up_to_layer=1, img_size=32, patch_size=8, embed_dim=6)
        model, x, layer = model.eval(), torch.randn(2, 3, 32, 32), "blocks.0.attn"
    module = model.get_submodule(layer)
    module.forward = lambda x: type(module).forward(module, x) * 1.1
    with tcnn_probe.record(model), torch.no_grad(), pytest.raises(ReconstructionError, match=layer):
        model(x)


def test_each_layer_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the result waits for the device."""
    model, checked, discrepancy = sharpen(Attend("fused", 1.0)), [], collector.discrepancy
    monkeypatch.setattr(collector, "discrepancy", lambda *args: checked.append(args) or discrepancy(*args))
    with tcnn_probe.record(model) as recorder, torch.no_grad():
        for epoch in range(2):
            for _ in range(3):
                model(torch.randn(2, 3, 24, 40))
            recorder.mark(epoch=epoch)
    assert len(checked) == 1
