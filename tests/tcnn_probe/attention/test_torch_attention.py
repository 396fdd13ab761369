"""torch's own multi-head attention and functions,
in a user's models: statistics equal brute force.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, grid
from tests.tcnn_probe.attention.checking import check, same
from tests.tcnn_probe.attention.sharpen import sharpen

pytestmark = pytest.mark.numerical

B, HEADS, N, DIM = 5, 3, 15, 12
GENERATOR = torch.Generator().manual_seed(2)
PICTURES = torch.randn(B, 3, 12, 20, generator=GENERATOR)


def of_heads(weights: Tensor, images: int) -> Tensor:
    """Reshape (B * heads, N, N), (B, heads, N, N)
    or (B, groups, heads, N, N) to (B, 1, heads, N, N).
    """
    if weights.ndim == 5:
        weights = weights.flatten(1, 2)
    return weights.unflatten(0, (images, -1))[:, None] if weights.ndim == 3 else weights[:, None]


OWN = same(grid(3, 5), arrange=of_heads)
NOWHERE = Layout(None, None, arrange=of_heads)


class Patches(nn.Module):
    """Model that passes 3 x 5 patches (B, N, d) to a layer in some way."""

    def __init__(self, attend: nn.Module, way: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 4, 4)
        self.attend = attend
        self.way = way
        sharpen(self, 2.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.attend, F.layer_norm(self.stem(x).flatten(2).mT, (DIM,)))


padding = torch.zeros(B, N, dtype=torch.bool)
# The last keys of all images are hidden, and one more of a single image, so that masks differ
# between images.
padding[:, 12:] = True
padding[1, 3] = True
hidden = torch.rand(N, N, generator=GENERATOR) < 0.4
# Each query sees at least one key.
hidden.fill_diagonal_(False)
bias = torch.randn(N, N, generator=GENERATOR, dtype=torch.float64)

# options of the layer and of its call
CALLS = {
    "plain": ({}, {}),
    "padding": ({}, {"key_padding_mask": padding}),
    "bool": ({}, {"attn_mask": hidden}),
    "float": ({}, {"attn_mask": bias}),
    "both": (
        {},
        {
            "attn_mask": bias.expand(B * HEADS, N, N),
            "key_padding_mask": padding.double() * -3,
        },
    ),
    # These 16 keys are not a class token and 3 x 5 patches. No mask hides the layer's own key.
    "key of the layer's own": ({"add_bias_kv": True}, {"key_padding_mask": padding}),
    "key of zeros": ({"add_zero_attn": True}, {"attn_mask": hidden}),
}


@pytest.mark.parametrize(
    ("name", "batch_first"), [*((name, True) for name in CALLS), ("both", False)]
)
def test_multihead_attention_equals_brute_force(name: str, batch_first: bool) -> None:
    options, call = CALLS[name]

    def attend(layer: nn.Module, x: Tensor) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        return layer(x, x, x, need_weights=not batch_first, **call)[0]

    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first, **options)
    check(Patches(layer, attend), PICTURES, {"attend": NOWHERE if options else OWN})


def of_other_width(layer: nn.Module, x: Tensor) -> Any:
    return layer(x, x[:, :11, :7], x[:, :11, :7])


def with_class_token(layer: nn.Module, x: Tensor) -> Any:
    """Prepend a class token, then call MultiheadAttention, as torchvision does."""
    x = torch.cat([torch.zeros_like(x[:, :1]), x], 1)
    return layer(x, x, x)


def without_batch(layer: nn.Module, x: Tensor) -> Any:
    return layer(x[0], x[0], x[0])


@pytest.mark.parametrize(
    ("way", "layout", "images", "options"),
    [
        (of_other_width, NOWHERE, B, {"kdim": 7, "vdim": 7, "bias": False}),
        (with_class_token, same(grid(3, 5, prefix=1), arrange=of_heads), B, {}),
        (without_batch, OWN, 1, {}),
    ],
    ids=["other width", "class token", "no batch"],
)
def test_layouts_of_tokens_in_models(
    way: Callable[[nn.Module, Tensor], Any], layout: Layout, images: int, options: Any
) -> None:
    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=True, **options)
    check(Patches(layer, way), PICTURES[:images], {"attend": layout})


def test_features_with_the_sequence_first() -> None:
    """Features have shape (N, B, d), with 2 tokens of 4 images."""

    class Encoder(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x, x, x)

    check(
        sharpen(Encoder(DIM, HEADS), 2.2),
        torch.randn(2, 4, DIM),
        {"": NOWHERE},
        images=4,
    )


def encoder(*, norm_first: bool = False) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 17, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_equals_brute_force(norm_first: bool) -> None:
    layouts = {f"attend.layers.{i}.self_attn": OWN for i in range(2)}
    check(Patches(encoder(norm_first=norm_first), nn.Module.__call__), PICTURES, layouts)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_recording_disables_the_fast_path_of_an_encoder(padded: bool) -> None:
    """torch computes a layer in eval mode in one kernel,
    with 0 at padding; a recorded layer uses the ordinary path.
    """
    model = encoder()
    x = torch.randn(2, 7, DIM)
    mask = torch.arange(7) > torch.tensor([[6], [4]]) if padded else None
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=mask)
        with tcnn_probe.record(model):
            output = model(x, src_key_padding_mask=mask)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(output, model(x, src_key_padding_mask=mask))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    tokens = slice(None) if mask is None else ~mask
    # The same terms are added up in another order.
    torch.testing.assert_close(output[tokens], fast[tokens], rtol=1e-3, atol=1e-3)


class Own(nn.Module):
    """Model with projections and the user's own attention function."""

    def __init__(
        self, way: Callable[[Tensor, Tensor, Tensor], Tensor], heads: int, kv_heads: int
    ) -> None:
        super().__init__()
        self.way = way
        self.num_heads = heads
        self.kv_heads = kv_heads
        self.q = nn.Linear(DIM, heads * 4)
        self.kv = nn.Linear(DIM, kv_heads * 4 * 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, 4)).permute(2, 0, 3, 1, 4)
        return self.way(q, k, v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return torch.bmm(F.softmax(torch.bmm(q, k.mT), dim=2), v)


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum(
        "bhij,bhjd->bhid", torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1), v
    )


def in_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with queries (B, groups, heads of a group, N, d),
    and keys and values (B, groups, N, d).
    """
    q = q.unflatten(1, (k.shape[1], -1))
    weights = torch.einsum("bghid,bgjd->bghij", q, k).softmax(-1)
    return torch.einsum("bghij,bgjd->bghid", weights, v)


def in_groups_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (k.shape[1], -1))
    return F.scaled_dot_product_attention(q, k[:, :, None], v[:, :, None])


def fused(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


# A causal mask means a sequence, which is not an image at any length.
WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bool": fused(attn_mask=~hidden),
    "float": fused(attn_mask=bias),
    "scale": fused(scale=0.9),
    "causal": fused(is_causal=True),
    "grouped queries": fused(enable_gqa=True),
    "grouped queries, on axes of their own": in_groups,
    "grouped queries, on axes of their own, fused": in_groups_fused,
    "queries of one image": lambda q, k, v: F.scaled_dot_product_attention(q[:1], k, v),
    "keys of one image": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1]),
    "softmax": lambda q, k, v: (q @ k.mT).softmax(dim=-1) @ v,
    "functional": lambda q, k, v: F.softmax(torch.matmul(q, k.mT), dim=-1).matmul(v),
    "module": lambda q, k, v: nn.Softmax(dim=-1)(q @ k.mT) @ v,
    "transposed": lambda q, k, v: v.mT @ (q @ k.mT).softmax(-1).mT,
    "einsum": einsum,
    "bmm": bmm,
}


@pytest.mark.study(but=["module", "functional", "causal", "grouped queries", "einsum"])
@pytest.mark.parametrize("way", WAYS)
def test_functions_equal_brute_force(way: str) -> None:
    heads, kv_heads = (12, 4) if way.startswith("grouped") else (HEADS, HEADS)
    model = Patches(Own(WAYS[way], heads, kv_heads), nn.Module.__call__)
    check(model, PICTURES, {"attend": NOWHERE if way == "causal" else OWN})


@pytest.mark.parametrize("way", [in_groups, in_groups_fused])
def test_a_head_of_a_group_is_ablated(way: Callable[..., Tensor]) -> None:
    model = Patches(Own(way, 12, 4), nn.Module.__call__)
    with torch.no_grad():
        expected = model(PICTURES)
        expected[:, 2, 1] = 0  # the eighth of twelve heads, in groups of three
        with tcnn_probe.ablate(model, {"attend": [7]}):
            assert torch.equal(model(PICTURES), expected)


@pytest.mark.parametrize("heads", [None, 3])
def test_one_head_without_a_batch_axis(heads: int | None) -> None:
    class Alone(nn.Module):
        num_heads = heads

        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query, key, key)

    layout = Layout(None, None, arrange=lambda weights, images: weights.expand(1, 1, 1, 7, 11))
    check(
        Alone().eval(),
        (torch.randn(7, DIM), torch.randn(11, DIM)),
        {"": layout},
        images=1,
    )
