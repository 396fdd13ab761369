"""torch's own multi-head attention and functions, in models of one's own: what is recorded equals brute force."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, attention_of, grid
from tests.tcnn_probe.attention.checking import expect, recorded
from tests.tcnn_probe.attention.sharpen import sharpen

B, HEADS, N, DIM = 5, 3, 15, 12
PATCHES = grid(3, 5)


def pictures() -> Tensor:
    return torch.randn(B, 3, 12, 20, generator=torch.Generator().manual_seed(2))


class Patches(nn.Module):
    """3 x 5 patches, (B, N, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, DIM, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.stem(x).flatten(2).mT, (DIM,))


class Multihead(Patches):
    """nn.MultiheadAttention in any of its ways."""

    def __init__(self, *, batch_first: bool = True, call: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first, **options)
        self.batch_first, self.call = batch_first, call or {}

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        tokens = x if self.batch_first else x.transpose(0, 1)
        call = {k: v.to(x) if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in self.call.items()}
        return self.attend(tokens, tokens, tokens, **call)[0]


def check(model: nn.Module, layout: Layout, layers: int = 1, splits: tuple[int, ...] = (2, 3)) -> None:
    sharpen(model, 2.2)
    wholes = attention_of(model, pictures())
    assert len(wholes) == layers
    ds, names, unsupported = recorded(model, pictures().split(splits))
    assert len(names) == layers
    assert not unsupported
    expect(ds, wholes, {whole.layer: layout for whole in wholes}, B)


def of_heads(weights: Tensor, images: int) -> Tensor:
    """(B * heads, N, N) or (B, heads, N, N) to (B, 1, heads, N, N)."""
    return weights.unflatten(0, (images, -1))[:, None] if weights.ndim == 3 else weights[:, None]


OWN = Layout(PATCHES, PATCHES, arrange=of_heads)
padding = torch.zeros(B, N, dtype=torch.bool)
padding[1:, 11:] = True
some = torch.rand(N, N, generator=torch.Generator().manual_seed(3)) < 0.3
some.fill_diagonal_(False)
bias = torch.randn(N, N, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"key_padding_mask": padding},
        {"attn_mask": some},
        {"attn_mask": bias},
        {"attn_mask": bias.expand(B * HEADS, N, N), "key_padding_mask": padding.float() * -3},
    ],
    ids=["plain", "padding", "bool", "float", "both"],
)
def test_multihead(batch_first: bool, need_weights: bool, call: dict[str, Tensor]) -> None:
    splits = (B,) if "key_padding_mask" in call else (2, 3)
    check(Multihead(batch_first=batch_first, call=call | {"need_weights": need_weights}), OWN, splits=splits)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_keys_that_are_no_tokens_come_last(options: dict[str, bool], need_weights: bool) -> None:
    """16 keys are no class token and 3 x 5 patches here."""
    check(Multihead(call={"need_weights": need_weights}, **options), Layout(None, None, arrange=of_heads))


def test_keys_of_another_size() -> None:
    class Cross(Patches):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Linear(7, DIM)
            self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=True, kdim=7, vdim=7, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return self.attend(x, x[:, :11, :7], x[:, :11, :7])[0]

    check(Cross(), Layout(None, None, arrange=of_heads))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder(norm_first: bool, batch_first: bool) -> None:
    """In eval mode torch would compute a whole layer in one piece; while it is recorded it does not."""

    class Encoder(Patches):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(DIM, HEADS, 17, batch_first=batch_first, norm_first=norm_first)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return self.encoder(x) if batch_first else self.encoder(x.transpose(0, 1))

    model = Encoder()
    check(model, OWN, layers=2)
    with torch.no_grad():
        in_one_piece = model(pictures())
        with tcnn_probe.record(model):
            torch.testing.assert_close(model(pictures()), in_one_piece)


def test_encoder_with_padding() -> None:
    """Recorded forwards are those without torch's fast path, which sets what is padding to 0."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 17, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 7, DIM)
    padding = torch.arange(7) > torch.tensor([[6], [4]])
    with torch.no_grad():
        fast = model(x, src_key_padding_mask=padding)
        with tcnn_probe.record(model):
            recorded = model(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(model(x, src_key_padding_mask=padding), recorded)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(recorded[~padding], fast[~padding])


def test_class_token() -> None:
    """As torchvision has it: concatenated, then MultiheadAttention."""

    class ViT(Multihead):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, DIM))

        def forward(self, x: Tensor) -> Tensor:
            x = Patches.forward(self, x)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
            return self.attend(x, x, x, need_weights=False)[0]

    tokens = grid(3, 5, prefix=1)
    check(ViT(), Layout(tokens, tokens, class_query=True, arrange=of_heads))


class Own(Patches):
    """Projections, and an attention of one's own."""

    def __init__(self, way: str, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.way, self.kv_heads = way, kv_heads
        self.num_heads = 12 if kv_heads != HEADS else HEADS
        self.q, self.kv = nn.Linear(DIM, self.num_heads * 4), nn.Linear(DIM, kv_heads * 4 * 2)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        q = self.q(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, 4)).permute(2, 0, 3, 1, 4)
        mask = some.logical_not() if self.way == "bool" else bias.to(q.dtype) if self.way == "float" else None
        if self.way in ("softmax", "functional", "module", "einsum", "bmm", "transposed"):
            return self._by_hand(q, k, v)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=self.way == "causal",
            scale=0.9 if self.way == "scale" else None,
            enable_gqa=self.kv_heads != HEADS,
        )

    def _by_hand(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.way == "einsum":
            weights = torch.softmax(torch.einsum("bhid,bhjd->bhij", q, k), -1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        if self.way == "bmm":
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            return torch.bmm(F.softmax(torch.bmm(q, k.mT), dim=2), v)
        if self.way == "transposed":
            return v.mT @ (q @ k.mT).softmax(-1).mT
        logits = torch.matmul(q, k.mT)
        if self.way == "module":
            return nn.Softmax(dim=-1)(logits) @ v
        return (F.softmax(logits, dim=-1) if self.way == "functional" else logits.softmax(dim=-1)).matmul(v)


WAYS = ("plain", "bool", "float", "scale", "softmax", "functional", "module", "einsum", "bmm", "transposed")


@pytest.mark.parametrize("way", WAYS)
def test_functions(way: str) -> None:
    check(Own(way), OWN)


def test_causal() -> None:
    """A sequence's mask: whatever its length, it is no image."""
    check(Own("causal"), Layout(None, None, arrange=of_heads))


def test_grouped_queries() -> None:
    check(Own("plain", kv_heads=4), OWN)


def test_fewer_dimensions() -> None:
    """One image without a batch axis."""

    class Alone(Patches):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.MultiheadAttention(DIM, HEADS)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)[0]
            return self.attend(x, x, x)[0]

    model = sharpen(Alone(), 2.2)
    (whole,) = attention_of(model, pictures()[:1])
    ds, _, _ = recorded(model, [pictures()[:1]])
    expect(ds, [whole], {"attend": Layout(PATCHES, PATCHES, arrange=of_heads)}, 1)
    assert np.isfinite(ds.entropy.sel(layer="attend")).all()


@pytest.mark.parametrize("padded", [False, True])
def test_output_of_an_encoder_is_that_without_the_fast_path(padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(3, 7, 24)
    mask = torch.arange(7) > torch.tensor([[6], [4], [5]]) if padded else None
    with torch.no_grad():
        with tcnn_probe.record(model):
            output = model(x, src_key_padding_mask=mask)
        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(output, model(x, src_key_padding_mask=mask))
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
