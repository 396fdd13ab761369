"""Statistics where numbers end: huge logits, nothing to see, no numbers, half precision."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.attention.bruteforce import Layout, Whole, attention_of, grid
from tests.tcnn_probe.attention.checking import TOLERANCE, expect, recorded

pytestmark = pytest.mark.numerical

B, HEADS, N, D = 4, 3, 15, 7


class Attend(nn.Module):
    """3 x 5 tokens, after class tokens perhaps."""

    resolution = (3, 5)

    def __init__(self, how: str, prefix: int = 0, mask: Tensor | None = None, scale: float = 0.5) -> None:
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
        logits = q @ k.mT * self.scale
        if mask is not None:
            logits = logits + mask if mask.is_floating_point() else logits.masked_fill(~mask, -torch.inf)
        return logits.softmax(-1) @ k


def tokens(prefix: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (1.6 * torch.randn(B, HEADS, N + prefix, D, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype)


def layout(prefix: int = 0) -> Layout:
    places = grid(3, 5, prefix=prefix)
    return Layout(places, places, class_query=prefix > 0)


def check(model: Attend, q: Tensor, k: Tensor, weights: Tensor | None = None, tolerance: float = TOLERANCE) -> None:
    """Against attention of the copy in float64, or (``weights``) of what is not known to the copy."""
    wholes = attention_of(model, q, k) if weights is None else [Whole("", model, weights.double())]
    ds, _, _ = recorded(model, [(q, k)])
    expect(ds, wholes, {"": layout(model.num_prefix_tokens)}, B, tolerance)


def rounding(q: Tensor, k: Tensor) -> float:
    """Logits, sums of scale q_d k_d, are known to a few eps of the sum of absolute values; so is all that follows."""
    return 4 * torch.finfo(torch.float32).eps * float((q.abs() @ k.abs().mT).max()) * 0.5 * max(np.log(N), 6)


HOW = pytest.mark.parametrize("how", ["fused", "softmax"])


@HOW
def test_huge_logits(how: str) -> None:
    """Whole numbers up to +-1000, exact in float32: attention is one key, or shared evenly by a few."""
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randint(-2, 3, (B, HEADS, N, 1), generator=generator).float() for _ in range(2))
    check(Attend(how, scale=250.0), q, k, tolerance=N * torch.finfo(torch.float32).eps * 6)  # a sum of N terms up to 6


@HOW
def test_all_attention_on_the_class_token(how: str) -> None:
    """The patches have exp(-300) of it, below float32; where a query looks among them is exact all the same."""
    mask = torch.zeros(N + 1, N + 1)
    mask[:, 0] = 300
    q, k = tokens(1, torch.float32)
    check(Attend(how, 1, mask), q, k, tolerance=rounding(q, k))


@pytest.mark.parametrize("kind", ["bool", "float"])
@HOW
def test_masked_keys(kind: str, how: str) -> None:
    seen = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(8)) < 0.5
    seen |= torch.eye(N, dtype=torch.bool)
    mask = seen if kind == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    check(Attend(how, mask=mask), *tokens())


@pytest.mark.parametrize("prefix", [0, 1])
def test_rows_that_see_nothing(prefix: int) -> None:
    """Queries 4 and 11 see nothing, or the class token alone: entropy and distance of their patches are 0."""
    seen = torch.ones(N + prefix, N + prefix, dtype=torch.bool)
    seen[4, prefix:] = seen[11, prefix:] = False
    model, (q, k) = Attend("fused", prefix, seen), tokens(prefix)
    (whole,) = attention_of(model, q, k)
    ds, _, _ = recorded(model, [(q, k)])
    some = [None if i in (4, 11) else place for i, place in enumerate(grid(3, 5, prefix=prefix))]
    expected = Layout(some, grid(3, 5, prefix=prefix)).expected(whole, B)
    left = (N - 2) / N
    expected["attention_distance"] *= left
    if prefix:
        expected["prefix_attention"] = expected["prefix_attention"] * left + 2 / N
    for name, value in expected.items():
        np.testing.assert_allclose(ds[name][0], value, rtol=0, atol=TOLERANCE)


def test_a_broken_image_is_counted() -> None:
    q, k = tokens()
    q[2] = torch.nan
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        ds, _, _ = recorded(Attend("fused"), [(q, k)])
    assert int(ds.nonfinite_images[0]) == 1
    assert int(ds.images[0]) == B
    assert np.isnan(ds.entropy).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@HOW
def test_dtypes(dtype: torch.dtype, how: str) -> None:
    """Attention of queries and keys as they are; the softmax of logits in half precision is that of rounded logits."""
    q, k = tokens(dtype=dtype)
    weights = None if how == "fused" else (q @ k.mT * 0.5).double().softmax(-1)
    check(Attend(how), q, k, weights, rounding(q.float(), k.float()))


@HOW
def test_autocast(how: str) -> None:
    """Attention is computed of queries and keys rounded to bfloat16, and so it is recorded."""
    q, k = tokens(dtype=torch.float32)
    model = Attend(how)
    with torch.autocast("cpu", torch.bfloat16):
        logits = (q @ k.mT * 0.5).double()
    weights = logits.softmax(-1) if how == "softmax" else attention_of(model, q.bfloat16(), k.bfloat16())[0].weights
    with torch.autocast("cpu", torch.bfloat16):
        check(model, q, k, weights, rounding(q, k))


@HOW
def test_inference_mode_and_strides(how: str) -> None:
    q, k = tokens()
    (whole,) = attention_of(Attend(how), q, k)
    q = q.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    k = k.repeat_interleave(2, -1)[..., ::2]
    assert not q.is_contiguous()
    assert not k.is_contiguous()
    with torch.inference_mode():
        check(Attend(how), q.clone(), k[:], whole.weights)


@HOW
def test_maps(how: str) -> None:
    """Of images 1 and 3, which come in different batches; all but the class token's are kept in float16."""
    (q, k), model = tokens(prefix=1), Attend(how, 1)
    weights = attention_of(model, q, k)[0].weights.numpy()[[1, 3]]
    with tcnn_probe.record(model, images=[1, 3]) as recorder, torch.no_grad():
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
        kept = np.float32 if name == "class_attention" else np.float16
        assert maps[name].dtype == kept
        half = np.finfo(kept).eps / 2, np.finfo(kept).smallest_subnormal  # of the last digit
        np.testing.assert_allclose(maps[name], value.reshape(2, HEADS, 3, 5), rtol=half[0], atol=half[1])
