"""Statistics at the limits of number formats:
half precision, autocast, hidden keys and large logits.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tcnn_probe.attention.bruteforce import ReferenceAttention, attention_of, grid
from tests.tcnn_probe.attention.checking import TOLERANCE, expect, recorded, same

pytestmark = pytest.mark.numerical

B, HEADS, N, D = 4, 3, 15, 7


class Attend(nn.Module):
    """Attention of 3 x 5 tokens, fused or by a softmax."""

    num_heads = HEADS
    resolution = (3, 5)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.eval()

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        if self.how == "fused":
            return F.scaled_dot_product_attention(q, k, k, scale=0.5)
        return (q @ k.mT * 0.5).softmax(-1) @ k


def tokens(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    q, k = (
        # Logits are about 3, so that attention is neither uniform nor one-hot.
        1.6 * torch.randn(B, HEADS, N, D, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 1)
    )
    return q.to(dtype), k.to(dtype)


def check(
    model: Attend, q: Tensor, k: Tensor, logits: Tensor, tolerance: float = TOLERANCE
) -> None:
    ds, _, _ = recorded(model, [(q, k)])
    logits = logits.double()
    reference = ReferenceAttention("", model, logits.softmax(-1), logits)
    expect(ds, [reference], {"": same(grid(3, 5))}, B, tolerance)


def rounding(q: Tensor, k: Tensor) -> float:
    """Return the error of statistics up to 6,
    from logits that are sums of 0.5 q_d k_d with an error of a few eps.
    """
    return (
        4
        * torch.finfo(torch.float32).eps
        * float((q.float().abs() @ k.float().abs().mT).max())
        * 0.5
        * 6
    )


HOW = pytest.mark.parametrize("how", ["fused", "softmax"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@HOW
def test_statistics_in_any_dtype(dtype: torch.dtype, how: str) -> None:
    """Statistics are those of the given queries and keys;
    without fusion, half precision rounds the logits.
    """
    q, k = tokens(dtype)
    model = Attend(how)
    logits = attention_of(model, q, k)[0].logits if how == "fused" else q @ k.mT * 0.5
    check(model, q, k, logits, rounding(q, k))


@HOW
def test_statistics_under_autocast(how: str) -> None:
    """Attention is computed and recorded from queries and keys rounded to bfloat16."""
    q, k = tokens(torch.float32)
    model = Attend(how)
    with torch.autocast("cpu", torch.bfloat16):
        logits = q @ k.mT * 0.5
    if how == "fused":
        logits = attention_of(model, q.bfloat16(), k.bfloat16())[0].logits
    with torch.autocast("cpu", torch.bfloat16):
        check(model, q, k, logits, rounding(q, k))


class Hidden(nn.Module):
    """Attention of 3 x 5 tokens behind two others, given exactly by a mask."""

    num_heads = HEADS
    num_prefix_tokens = 2
    resolution = (3, 5)

    def __init__(self) -> None:
        super().__init__()
        # Special tokens are parameters, like class tokens: as further patches of the image, they
        # would contradict the grid.
        self.special = nn.Parameter(torch.randn(1, 1, 2, D))
        # All keys are hidden alike.
        self.mask = torch.full((17, 17), torch.finfo(torch.float32).min)
        # Models in half precision hide keys like this.
        self.mask[0] = torch.tensor([-65408.0] * 2 + [-torch.inf] * 15)
        # Differences between these large logits are still exact in float32.
        self.mask[8] = torch.arange(17) % 3 + 2.0**20
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        special = self.special.expand(*x.shape[:2], -1, -1)
        x = torch.cat([special, x[:, :, 2:]], 2)
        return F.scaled_dot_product_attention(0 * x, x, x, attn_mask=self.mask.to(x.dtype))


def test_class_tokens_beside_hidden_keys_or_large_logits() -> None:
    """The tokens before the grid cost the grid no precision."""
    model = Hidden()
    x = torch.randn(B, HEADS, 17, D)
    ds, _, _ = recorded(model, [(x,)])
    logits = model.mask.double().expand(B, HEADS, 17, 17)
    reference = ReferenceAttention("", model, logits.softmax(-1), logits)
    expect(
        ds,
        [reference],
        {"": same(grid(3, 5, prefix=2))},
        B,
        64 * torch.finfo(torch.float32).eps,
    )


@HOW
def test_inference_mode_and_strides(how: str) -> None:
    q, k = tokens()
    model = Attend(how)
    (reference,) = attention_of(model, q, k)
    # The numbers are the same, with axes in another order in memory.
    q = q.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    # The numbers are the same, with gaps between them.
    k = k.repeat_interleave(2, -1)[..., ::2]
    assert not q.is_contiguous()
    assert not k.is_contiguous()
    with torch.inference_mode():
        check(model, q.view_as(q), k.view_as(k), reference.logits)
