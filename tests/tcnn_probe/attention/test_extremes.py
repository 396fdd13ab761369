"""Statistics where numbers end: huge logits, nothing to see, no numbers, half precision."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, Whole, attention_of, grid
from tests.tcnn_probe.attention.checking import expect, recorded

B, HEADS, N, D = 5, 3, 15, 7


class Attend(nn.Module):
    """3 x 5 tokens, after class tokens perhaps."""

    resolution = (3, 5)

    def __init__(
        self, prefix: int = 0, mask: Tensor | None = None, scale: float | None = None, how: str = "fused"
    ) -> None:
        super().__init__()
        self.num_heads, self.num_prefix_tokens = HEADS, prefix
        self.mask, self.scale, self.how = mask, scale, how
        self.eval()

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(q.dtype)
        if self.how == "fused":
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=self.scale)
        logits = q @ k.mT * (self.scale or 1.0)
        if mask is not None:
            logits = logits + (
                mask if mask.is_floating_point() else torch.zeros_like(logits).masked_fill(~mask, -np.inf)
            )
        return logits.softmax(-1) @ k


def tokens(prefix: int = 0, seed: int = 0, size: float = 1.6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (size * torch.randn(B, HEADS, N + prefix, D, generator=generator) for _ in range(2))
    return q, k


def layout(prefix: int = 0) -> Layout:
    places = grid(3, 5, prefix=prefix)
    return Layout(places, places, class_query=prefix > 0)


def check(model: Attend, q: Tensor, k: Tensor) -> xr.Dataset:
    wholes = attention_of(model, q, k)
    ds, _, unsupported = recorded(model, [(q, k)])
    assert not unsupported
    expect(ds, wholes, {"": layout(model.num_prefix_tokens)}, B)
    return ds


HOW = pytest.mark.parametrize("how", ["fused", "softmax"])


@HOW
def test_huge_logits(how: str) -> None:
    """Whole numbers up to +-1000, exact in float32: attention is one key, or shared evenly by a few."""
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randint(-2, 3, (B, HEADS, N, 1), generator=generator).float() for _ in range(2))
    ds = check(Attend(scale=250.0, how=how), q, k)
    assert 0 < float(ds.entropy.max()) < np.log(N)


@HOW
def test_all_attention_on_the_class_token(how: str) -> None:
    """The patches have exp(-300) of it, below float32; where a query looks among them is exact all the same."""
    q, k = tokens(prefix=1)
    mask = torch.zeros(N + 1, N + 1)
    mask[:, 0] = 300
    ds = check(Attend(1, mask, how=how), q, k)
    assert np.allclose(ds.prefix_attention, 1)
    assert float(ds.entropy.max()) < 1e-6


@pytest.mark.parametrize("kind", ["bool", "float"])
@HOW
def test_masked_keys(kind: str, how: str) -> None:
    seen = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(8)) < 0.5
    seen |= torch.eye(N, dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    check(Attend(mask=mask, how=how), *tokens())


def test_rows_that_see_nothing() -> None:
    """They attend to nothing: entropy and distance are 0, as torch's output for them is."""
    q, k = tokens()
    seen = torch.ones(N, N, dtype=torch.bool)
    seen[4] = seen[11] = False
    model, all_seen = Attend(mask=seen), Attend()
    (whole,) = attention_of(all_seen, q, k)
    ds, _, _ = recorded(model, [(q, k)])
    rows = whole.weights.clone()
    rows[:, :, ~seen.any(1)] = 0
    expected = Layout(None, None).expected(Whole("", model, rows), B)["entropy"]
    np.testing.assert_allclose(ds.entropy[0], expected, atol=1e-4)
    assert np.isfinite(ds.attention_distance).all()
    some = [i for i in range(N) if seen[i].any()]
    partial = Layout([place for i, place in enumerate(grid(3, 5)) if i in some], grid(3, 5))
    distance = partial.expected(Whole("", model, whole.weights[:, :, some]), B)["attention_distance"]
    np.testing.assert_allclose(ds.attention_distance[0], distance * len(some) / N, atol=1e-4)


def test_patches_that_see_the_class_token_alone() -> None:
    """All patches are masked for query 3: its row over the grid is empty, and nothing is NaN."""
    seen = torch.ones(N + 1, N + 1, dtype=torch.bool)
    seen[3, 1:] = False
    model, (q, k) = Attend(1, seen), tokens(prefix=1)
    ds, _, _ = recorded(model, [(q, k)])
    (whole,) = attention_of(model, q, k)
    places = [None if i == 3 else place for i, place in enumerate(grid(3, 5, prefix=1))]
    expected = Layout(places, grid(3, 5, prefix=1)).expected(whole, B)
    np.testing.assert_allclose(ds.entropy[0], expected["entropy"], atol=1e-4)
    np.testing.assert_allclose(ds.attention_distance[0], expected["attention_distance"] * (N - 1) / N, atol=1e-4)
    np.testing.assert_allclose(ds.prefix_attention[0], (expected["prefix_attention"] * (N - 1) + 1) / N, atol=1e-4)


def test_a_broken_image_is_counted() -> None:
    q, k = tokens()
    q[2] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        ds, _, _ = recorded(Attend(), [(q, k)])
    assert int(ds.nonfinite_images[0]) == 1
    assert int(ds.images[0]) == B
    assert np.isnan(ds.entropy).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@HOW
def test_dtypes(dtype: torch.dtype, how: str) -> None:
    """Attention of queries and keys as they are; the softmax of logits in half precision is that of rounded logits."""
    q, k = (x.to(dtype) for x in tokens(size=1.2))
    model = Attend(how=how, scale=0.5)
    if how == "fused" or dtype == torch.float64:
        check(model, q, k)
        return
    rounded = (q @ k.mT * 0.5).double().softmax(-1)
    ds, _, _ = recorded(model, [(q, k)])
    expect(ds, [Whole("", model, rounded)], {"": layout()}, B)


def test_strides() -> None:
    """Queries and keys that are no contiguous tensors."""
    q, k = tokens()
    q = q.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    k = k.repeat_interleave(2, -1)[..., ::2]
    assert not q.is_contiguous()
    assert not k.is_contiguous()
    check(Attend(), q, k)


@HOW
def test_autocast(how: str) -> None:
    """Attention is computed of queries and keys rounded to bfloat16, and so it is recorded."""
    q, k = tokens()
    model = Attend(how=how, scale=0.5)
    rounded = q.bfloat16(), k.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        ds, _, _ = recorded(model, [(q, k)])
        logits = (q @ k.mT * 0.5).double()
    weights = logits.softmax(-1) if how == "softmax" else attention_of(model, *rounded)[0].weights
    expect(ds, [Whole("", model, weights)], {"": layout()}, B)


@HOW
def test_inference_mode(how: str) -> None:
    q, k = tokens()
    model = Attend(how=how)
    (whole,) = attention_of(model, q, k)
    with torch.inference_mode():
        ds, _, _ = recorded(model, [(q.clone(), k.clone())])
    expect(ds, [whole], {"": layout()}, B)


def test_more_tokens_than_a_block_holds() -> None:
    """Rows in parts: 2^18 logits at a time, of 23 x 41 tokens and 3 heads."""
    model = Attend()
    model.resolution = (23, 41)
    generator = torch.Generator().manual_seed(9)
    q, k = (1.6 * torch.randn(2, HEADS, 943, D, generator=generator) for _ in range(2))
    assert 943 * 943 * HEADS > 2**18
    (whole,) = attention_of(model, q, k)
    ds, _, _ = recorded(model, [(q, k)])
    weights = whole.weights.numpy()
    places = np.array(grid(23, 41))
    far = np.hypot(*(places[:, None] - places[None]).transpose(2, 0, 1))
    entropy = -(weights * np.log(weights)).sum(-1).mean((0, 2))
    np.testing.assert_allclose(ds.entropy[0], entropy, atol=1e-4)
    np.testing.assert_allclose(ds.attention_distance[0], (weights * far).sum(-1).mean((0, 2)), atol=1e-4)


@HOW
def test_maps(how: str) -> None:
    """Of images 1 and 3, which come in different batches; but for the class token's in float16, to 5e-4 of them."""
    q, k = tokens(prefix=1)
    model = Attend(1, how=how)
    weights = attention_of(model, q, k)[0].weights.numpy()[[1, 3]]
    with warnings.catch_warnings(), tcnn_probe.record(model, images=[1, 3]) as recorder, torch.no_grad():
        model(q[:2], k[:2])
        model(q[2:], k[2:])
        recorder.mark(epoch=0)
        (group,) = recorder.tree["maps"].children.values()
        maps = group.to_dataset().isel(epoch=0, layer=0).load()
    expected = {
        "attention_received": weights[..., 1:].mean(-2),
        "center_attention": weights[:, :, 1 + 1 * 5 + 2, 1:],
        "class_attention": weights[:, :, 0, 1:],
    }
    assert list(maps.image.values) == [1, 3]
    for name, value in expected.items():
        assert maps[name].dtype == (np.float32 if name == "class_attention" else np.float16)
        np.testing.assert_allclose(maps[name].values, value.reshape(2, HEADS, 3, 5), rtol=1e-3, atol=1e-6)
