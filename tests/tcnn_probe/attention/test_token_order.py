"""Orders of tokens that are known are measured, and a model is left as it was."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.token_order import (
    Claim,
    measure_token_places,
    objection_to_order,
    raster_objections,
)

pytestmark = pytest.mark.numerical

ROWS, COLUMNS, PATCH = 5, 7, 4
IMAGE = torch.Size((3, ROWS * PATCH, COLUMNS * PATCH))
TOKENS = Tokens(0, ROWS, COLUMNS)
RASTER = np.arange(ROWS * COLUMNS)
ORDERS = {
    "raster": RASTER,
    "columns": RASTER.reshape(ROWS, COLUMNS).T.ravel(),
    "backwards": RASTER[::-1].copy(),
    "shuffled": np.random.default_rng(0).permutation(ROWS * COLUMNS),
    "two tokens exchanged in each row": RASTER.reshape(ROWS, COLUMNS)[
        :, [1, 0, 2, 6, 4, 5, 3]
    ].ravel(),
}


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q / 2) @ k.transpose(-2, -1) + 0.1).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("bhlk,bhtk->bhlt", [q, k])
    return torch.einsum("bhlt,bhtv->bhlv", [logits.softmax(dim=-1), v])


def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With heads as a part of the batch."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.mT), -1), v).unflatten(0, (-1, 3))


class Attend(nn.Module):
    num_heads = 3

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(12, 36), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Ordered(nn.Module):
    """Patches in some order behind a class token, and two layers without a residual."""

    def __init__(
        self,
        order: np.ndarray,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = fused,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 12, PATCH, PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, 12))
        self.norm = nn.LayerNorm(12)
        self.blocks = nn.ModuleList([Attend(attend), Attend(attend)])
        self.order = torch.from_numpy(order)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT[:, self.order]
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(self.norm(x))
        return x


@pytest.mark.parametrize("attend", [fused, unfused, by_einsum, merged])
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_found_where_they_are(
    order: str, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    model = Ordered(ORDERS[order], attend).eval()
    places = measure_token_places(model, torch.randn(IMAGE), disturbances=3)
    assert list(places) == ["blocks.0", "blocks.1"]
    centers = np.stack(np.unravel_index(ORDERS[order], (ROWS, COLUMNS)), -1) + 0.5
    for measured in places.values():
        for side in (measured.queries, measured.keys):
            assert side.shape == (1, 1 + ROWS * COLUMNS, 2)
            assert side[:, 0].isnan().all(), "the class token is no part of the image"
            found = side[0, 1:].numpy() * (ROWS, COLUMNS)
            assert np.abs(found - centers).max() < 0.5, (
                "inside of its own patch, so in the right one"
            )
        objection = objection_to_order(measured.keys, Tokens(1, ROWS, COLUMNS))
        assert bool(objection) == (order != "raster"), objection


def test_places_of_a_model_that_takes_more_than_images() -> None:
    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Ordered(RASTER)

        def forward(self, x: Tensor, factor: float) -> Tensor:
            return self.model(x * factor)

    model = Conditioned().eval()
    places = measure_token_places(
        model, torch.randn(IMAGE), lambda images: model(images, factor=0.5)
    )
    assert list(places) == ["model.blocks.0", "model.blocks.1"]


def claims(model: nn.Module, image: Tensor) -> dict[str, Claim]:
    """Grids as the stream takes them to be."""
    seen: dict[str, Claim] = {}

    def look(attention: Attention) -> None:
        behind = [(stream.around(count) or (0, 0))[1] for count in attention.shape[2:]]
        seen[attention.name] = Claim(
            attention.layout, attention.cut, (behind[0], behind[1])
        )

    with tcnn_probe.attention_stream(model, look) as stream, torch.no_grad():
        model(image[None])
    return seen


TINY = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 24,
    "patch_size": 8,
}
DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_queries": 24,
}


def transformers_model(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(
        getattr(transformers, name.replace("Model", "Config"))(**options)
    ).eval()


def test_shuffled_tokens_of_a_masked_autoencoder() -> None:
    torch.manual_seed(0)
    model, image = (
        transformers_model("ViTMAEModel", **TINY, image_size=32, mask_ratio=0.0),
        torch.randn(3, 32, 32),
    )
    found = raster_objections(model, image, claims(model, image))
    assert list(found) == ["layers.0.attention", "layers.1.attention"]
    assert all(
        "their order is random" in side for both in found.values() for side in both
    )


@pytest.mark.parametrize(
    "options", [{}, {"attn_implementation": "eager"}], ids=["fused", "unfused"]
)
def test_object_queries_as_many_as_cells(options: dict[str, str]) -> None:
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    sizes = {
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
    }
    backbone = transformers.ResNetConfig(**sizes)
    model = transformers_model("DetrModel", **DETR, backbone_config=backbone, **options)
    image = torch.randn(3, 128, 192)
    found = raster_objections(model, image, claims(model, image))
    no_image = "the tokens do not depend on the image"
    for layer in ("decoder.layers.0", "decoder.layers.1"):
        assert found[f"{layer}.self_attn"] == (no_image, no_image)
        assert found[f"{layer}.encoder_attn"] == (no_image, "")
    assert not [name for name in found if name.startswith("encoder")]


def test_mask_units_without_their_record(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options = {
        "embed_dim": 12,
        "image_size": [64, 64],
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 8],
    }
    model, image = transformers_model("HieraModel", **options), torch.randn(3, 64, 64)
    layer = "encoder.stages.2.layers.1.attn"  # 4 x 4 tokens in units of 2 x 2
    found = raster_objections(
        model, image, {layer: Claim(Layout(Tokens(0, 4, 4), Tokens(0, 4, 4)))}
    )
    assert all("not in raster order" in side for side in found[layer])
    after = "encoder.stages.3.layers.0.attn"
    queries = measure_token_places(model, image)[after].queries
    assert objection_to_order(queries, Tokens(0, 2, 2)) == "", (
        "pooled until a unit is a token"
    )


RIGHT = {
    "class and registers": (
        "vit_small_patch14_reg4_dinov2",
        {"img_size": (42, 70), "depth": 2},
        (42, 70),
    ),
    "shifted windows": (
        "swin_tiny_patch4_window7_224",
        {"img_size": (60, 84), "window_size": 5, "depths": (2, 2)},
        (60, 84),
    ),
    "spread windows": ("mobilevit_xxs", {}, (64, 96)),
    "pooled queries": ("mvitv2_tiny", {"img_size": (64, 64)}, (64, 64)),
    "strided queries without a residual": ("levit_128s", {}, (224, 224)),
    "reduced keys": ("pvt_v2_b0", {}, (64, 96)),
    "halos": ("halonet26t", {}, (256, 256)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_raster_order_is_confirmed(case: str) -> None:
    torch.manual_seed(0)
    name, options, size = RIGHT[case]
    model, image = (
        timm.create_model(name, num_classes=5, **options).eval(),
        torch.randn(3, *size),
    )
    claimed = claims(model, image)
    assert any(claim.layout.keys for claim in claimed.values())
    assert raster_objections(model, image, claimed) == {}
    assert measure_token_places(model, image).keys() == claimed.keys(), (
        "all were followed"
    )


def test_half_precision() -> None:
    torch.manual_seed(0)
    model, image = (
        Ordered(ORDERS["raster"]).eval().bfloat16(),
        torch.randn(IMAGE, dtype=torch.bfloat16),
    )
    places = measure_token_places(model, image, disturbances=3)
    assert [
        objection_to_order(one.keys, Tokens(1, ROWS, COLUMNS))
        for one in places.values()
    ] == ["", ""]


class Drawing(nn.Module):
    """A layer that draws random numbers in eval mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand(1)


def test_no_trace_is_left() -> None:
    model = nn.Sequential(Drawing(), timm.create_model("levit_128s", num_classes=5))
    model.train()
    heard: list[str] = []
    model[1].head.register_forward_hook(lambda *_: heard.append("hook"))
    before = copy.deepcopy(model.state_dict())
    attributes = [set(vars(module)) for module in model.modules()]
    hooks = [
        list(module._forward_hooks) + list(module._forward_pre_hooks)
        for module in model.modules()
    ]
    random = torch.get_rng_state()
    with tcnn_probe.record(model, when="always") as recorder:
        measure_token_places(
            model, torch.randn(3, 224, 224, generator=torch.Generator().manual_seed(0))
        )
        assert recorder.layers == ()
    assert heard == []
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert [
        list(module._forward_hooks) + list(module._forward_pre_hooks)
        for module in model.modules()
    ] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_fails_is_left_as_it_was() -> None:
    model = Ordered(RASTER)
    with pytest.raises(RuntimeError):
        measure_token_places(model, torch.randn(2, 9, 9))
    assert not [
        module
        for module in model.modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    assert model.training
