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
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.networks import Chain

DIM, HEADS = 12, 3


class Other(Tensor):
    """A tensor whose attention is not torch's: it is multiplied."""

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
        sharpen(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.stem(x).flatten(2).unflatten(1, (3, HEADS, -1)).mT.movedim(1, 0)
        q = q.as_subclass(type("Mine", (Other,), {"factor": self.factor}))
        return F.scaled_dot_product_attention(q, k, v) if self.how == "fused" else (q @ k.mT).softmax(-1) @ v


IMAGES = torch.randn(3, 3, 24, 40, generator=torch.Generator().manual_seed(0))
HOW = pytest.mark.parametrize("how", ["fused", "softmax"])


@HOW
@pytest.mark.parametrize("factor", [1.5, 1.01])
def test_another_attention_raises(how: str, factor: float) -> None:
    """1 in 100 is enough, where float32 is right to 1 in 10^6."""
    model = Attend(how, factor)
    with tcnn_probe.record(model) as recorder, pytest.raises(ReconstructionError, match="differs from the model's own"):
        model(IMAGES)
    assert recorder.epochs == ()


@HOW
def test_a_subclass_with_torchs_attention_does_not(how: str) -> None:
    check(Attend(how, 1.0), IMAGES)


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


SMALL = {"img_size": (24, 40), "num_classes": 5}
VIT = SMALL | {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3}
SWIN = SMALL | {"patch_size": 4, "embed_dim": 8, "depths": (2,), "num_heads": (2,), "window_size": (2, 5)}


class Torchs(nn.Module):
    """torch's own encoder, with dropout inside the attention."""

    def __init__(self, attn_drop_rate: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 8, 8)
        self.encoder = nn.TransformerEncoderLayer(DIM, HEADS, 17, dropout=attn_drop_rate, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.stem(x).flatten(2).mT)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "swin": lambda **options: timm.create_model("swin_tiny_patch4_window7_224", **SWIN, **options),
    "cait": lambda **options: timm.create_model("cait_xxs24_224", **VIT, **options),
    "siglip": lambda **options: timm.create_model("vit_base_patch16_siglip_224", **VIT, **options),
    "torch": Torchs,
}


def check(model: nn.Module, images: Tensor, **options: Any) -> None:
    with tcnn_probe.record(model, **options) as recorder:
        loss = model(images).square().mean()
        if loss.requires_grad:
            loss.backward()
        recorder.mark(epoch=0)
        assert recorder.dataset.entropy.notnull().any("head").all()
        assert not recorder.unsupported


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_precisions(name: str, dtype: torch.dtype) -> None:
    """The layer's own, and that of autocast."""
    model = sharpen(MODELS[name]())
    with torch.inference_mode(), torch.autocast("cpu", dtype):
        check(model, IMAGES)
    with torch.no_grad():
        check(model.to(dtype), IMAGES.to(dtype))


@pytest.mark.parametrize("name", MODELS)
def test_training_with_dropout(name: str) -> None:
    """Attention is recorded as it is before dropout, and gradients are what they are without a recorder."""
    model = sharpen(MODELS[name](attn_drop_rate=0.4)).train()
    torch.manual_seed(1)
    model(IMAGES).square().mean().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    check(model, IMAGES, when="train")
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is None or torch.equal(parameter.grad, gradient)
