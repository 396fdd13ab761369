"""Reconstruction raises if the model used another attention,
and never otherwise, in any precision and with dropout.
"""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import ReconstructionError
from tests.tcnn_probe.attention.checking import Family
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.attention.test_transformers import SIZE, vit
from tests.tcnn_probe.attention.test_windows import swin
from tests.tcnn_probe.networks import Chain

DIM, HEADS = 12, 3


class Other(Tensor):
    """Tensor that replaces torch's attention by a multiple of it."""

    factor: float = 1.5

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        is_attention = func in (
            F.scaled_dot_product_attention,
            F.softmax,
            torch.softmax,
            Tensor.softmax,
        )
        return output * cls.factor if is_attention else output


class Attend(nn.Module):
    num_heads = HEADS

    def __init__(self, how: str, factor: float) -> None:
        super().__init__()
        self.how = how
        self.factor = factor
        self.stem = nn.Conv2d(3, 3 * DIM, 8, 8)
        sharpen(self)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.stem(x).flatten(2).unflatten(1, (3, HEADS, -1)).mT.movedim(1, 0)
        # A subclass of the queries suffices for torch to call its __torch_function__.
        q = q.as_subclass(type("Mine", (Other,), {"factor": self.factor}))
        return (
            F.scaled_dot_product_attention(q, k, v)
            if self.how == "fused"
            else (q @ k.mT).softmax(-1) @ v
        )


class Torchs(nn.Module):
    """torch's own encoder, with dropout inside the attention."""

    def __init__(self, attn_drop_rate: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, DIM, 8, 8), nn.BatchNorm2d(DIM))
        self.encoder = nn.TransformerEncoderLayer(
            DIM, HEADS, 17, dropout=attn_drop_rate, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.stem(x).flatten(2).mT)


FAMILIES = [
    swin(),
    vit("cait_xxs24_224"),
    vit("vit_base_patch16_siglip_224"),
    Family("torch", Torchs, SIZE, {}),
]
HOW = pytest.mark.parametrize("how", ["fused", "softmax"])
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)


def check(model: nn.Module, images: Tensor, **options: Any) -> None:
    with tcnn_probe.record(model, **options) as recorder:
        loss = model(images).square().mean()
        if loss.requires_grad:
            loss.backward()
        recorder.mark(epoch=0)
        assert recorder.dataset.entropy.notnull().any("head").all()
        assert not recorder.unsupported


@HOW
@pytest.mark.parametrize("factor", [1.5, 1.01, 1.0])
def test_another_attention_raises(how: str, factor: float) -> None:
    """A deviation of 1 % suffices, as float32 is right to 1e-6;
    a tensor's subclass alone does not raise.
    """
    model = Attend(how, factor)
    images = torch.randn(3, 3, *SIZE)
    if factor == 1:
        check(model, images)
        return
    with (
        tcnn_probe.record(model) as recorder,
        pytest.raises(ReconstructionError, match="differs from the model's own"),
    ):
        model(images)
    assert recorder.epochs == ()


@pytest.mark.parametrize("kind", ["gpsa", "convit"])
def test_a_gated_layer_with_another_output_raises(kind: str) -> None:
    """These layers are measured from their input,
    so their forward must compute the attention that is rebuilt.
    """
    if kind == "gpsa":
        model = Chain()
        x = torch.randn(2, 2, 7, 11)
        layer = "near"
    else:
        model = timm.create_model(
            "convit_tiny",
            depth=1,
            local_up_to_layer=1,
            img_size=32,
            patch_size=8,
            embed_dim=6,
        )
        model = model.eval()
        x = torch.randn(2, 3, 32, 32)
        layer = "blocks.0.attn"
    module = model.get_submodule(layer)
    # The output is a tenth larger than the parameters give.
    module.forward = lambda x: type(module).forward(module, x) * 1.1
    with (
        tcnn_probe.record(model),
        torch.no_grad(),
        pytest.raises(ReconstructionError, match=layer),
    ):
        model(x)


@pytest.mark.study(but=["cait_xxs24_224-torch.float16", "swin-torch.bfloat16"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *zip(FAMILIES, 2 * [torch.bfloat16, torch.float16], strict=True),
        (FAMILIES[1], torch.bfloat16),
    ],
    ids=str,
)
def test_any_precision_is_accepted(family: Family, dtype: torch.dtype) -> None:
    """Precision is lowered by the layer's dtype or by autocast."""
    model = sharpen(family.make())
    images = family.images()
    # Weights stay in float32, but products do not.
    with torch.inference_mode(), torch.autocast("cpu", dtype):
        check(model, images)
    with torch.no_grad():
        check(model.to(dtype), images.to(dtype))


@EACH_FAMILY
def test_training_with_dropout_is_accepted(family: Family) -> None:
    """Attention is recorded before dropout; gradients and buffers are those without a recorder."""
    model = sharpen(family.make(attn_drop_rate=0.4)).train()
    alone = copy.deepcopy(model)
    images = family.images()
    torch.manual_seed(1)
    alone(images).square().mean().backward()
    # Dropout draws the same numbers with and without a recorder, unless the recorder draws some.
    torch.manual_seed(1)
    check(model, images, when="train")
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert expected.grad is None or torch.equal(parameter.grad, expected.grad)
    for buffer, expected in zip(model.buffers(), alone.buffers(), strict=True):
        assert torch.equal(buffer, expected)


class MaskedInFloat32(nn.Module):
    """Attention in float64 with a mask in float32,
    as in EoMT; torch's fused attention is wrong for it.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).mT[:, None].contiguous()
        generator = torch.Generator().manual_seed(3)
        hidden = torch.rand(35, 35, generator=generator) > 0.5
        mask = torch.zeros(35, 35).masked_fill(hidden, -1e9)[None, None]
        return torch.nn.functional.scaled_dot_product_attention(
            tokens, tokens, tokens, attn_mask=mask
        )


def test_a_mask_of_another_dtype_is_named() -> None:
    images = torch.randn(2, 8, 5, 7, dtype=torch.float64)
    with (
        pytest.raises(
            tcnn_probe.ReconstructionError,
            match=r"a mask has another dtype .*torch.float32, torch.float64.*mask.to",
        ),
    ):
        tcnn_probe.attention_maps(MaskedInFloat32(), images)
