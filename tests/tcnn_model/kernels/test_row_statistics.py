"""Statistics of softmax attention against their equations in float64:
the kernel and its reference.

The rounding error of a logit is eps times its absolute terms, sum_d |scale q_d k_d| + |mask|. So is
that of the largest logit, which is subtracted. The relative error of a weight A_j is the sum of
both and of their mean over the row; the error of a sum over A_j is the same sum of absolute values.
"""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tcnn_model.kernels import TokenGrid, reference
from tests.tcnn_model.dense import DEVICE
from tests.tcnn_model.numerics import assert_rounding, random

ROWS, HEADS, DIM = 2, 2, 5
QUERIES = TokenGrid(1, 5, (2.0, 1.0), (0.5, 0.0))  # followed by a grid of 3 x 5
KEYS = TokenGrid(2, 3, (1.0, 2.0), (0.0, 0.25))  # followed by a grid of 7 x 3
N_QUERY, N_KEY = 1 + 3 * 5, 2 + 7 * 3
SCALE = 0.7
FORMS = ["plain", "added", "hidden", "lowered", "swallowed"]


class Case(NamedTuple):
    query: Tensor
    key: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, form: str, dtype: torch.dtype) -> "Case":
        """Return queries, keys and mask."""
        # A standard deviation of 2 keeps attention far from uniform.
        query = random(ROWS, HEADS, N_QUERY, DIM, seed=1, dtype=dtype) * 2
        key = random(ROWS, HEADS, N_KEY, DIM, seed=2, dtype=dtype) * 2
        mask = None
        if form == "added":
            mask = random(HEADS, N_QUERY, N_KEY, seed=3, dtype=dtype)
        if form == "swallowed":  # all weights but the first underflow in float32
            mask = torch.zeros(N_QUERY, N_KEY, dtype=dtype)
            mask[:, 0] = 300
        if form in ("hidden", "lowered"):
            mask = random(ROWS, 1, N_QUERY, N_KEY, seed=3) > -0.5
            mask[:, :, 3] = False  # this query sees no key
            mask[:, :, 5, KEYS.prefix :] = False  # this query sees no patch
            mask[:, :, 7, : KEYS.prefix] = False  # this query sees no class token
        # Many models hide keys so; a row with all keys lowered is uniform.
        if form == "lowered":
            lowest = torch.finfo(dtype).min
            mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)
        tensors = [query, key, mask]
        return cls(*(x if x is None else x.to(DEVICE) for x in tensors))

    def logits(self) -> tuple[Tensor, Tensor]:
        """Return the logits and the sums of their absolute terms, in float64."""
        query = self.query.double()
        key = self.key.double()
        logits = SCALE * query @ key.mT
        size = SCALE * query.abs() @ key.abs().mT
        if self.mask is None:
            return logits, size
        mask = self.mask.expand(logits.shape)
        if mask.dtype == torch.bool:
            return logits.masked_fill(~mask, -torch.inf), size
        lowered = mask == torch.finfo(mask.dtype).min
        # This mask is so low that the products are lost in rounding: all lowered logits are equal.
        logits = torch.where(lowered, mask.double(), logits + mask)
        return logits, torch.where(lowered, 0, size + mask.abs())


def _positions(count: int, grid: TokenGrid) -> Tensor:
    """Return the positions of tokens, (count, 2);
    class tokens lie on the first cell of the grid.
    """
    cell = (torch.arange(count, dtype=torch.float64) - grid.prefix).clamp(min=0)
    place = torch.stack([cell // grid.width, cell % grid.width], 1)
    return place * torch.tensor(grid.spacing) + torch.tensor(grid.origin)


def _softmax(logits: Tensor) -> Tensor:
    """Return the weights of queries, which are zero if a query sees no key."""
    return torch.softmax(logits, -1).nan_to_num(0)


def by_equations(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the exact statistics and the sums of their absolute terms."""
    logits, size = case.logits()
    largest = logits.amax(-1)
    sees = largest > -torch.inf
    attention = _softmax(logits)
    largest_size = size.amax(-1)
    # exp(-1e4) is 0 in float64.
    below = (logits - largest[..., None]).nan_to_num(0).clamp(min=-1e4)
    # The errors are those of a logit relative to the largest one, of the weights, and of their
    # mean.
    shift = size + largest_size[..., None] + below.abs()
    mean_shift = (attention * shift).sum(-1)
    rounded = attention * (1 + shift + mean_shift[..., None])
    log_sum = below.exp().sum(-1).log()

    # The distance is a mean over the keys on the grid only.
    prefix = KEYS.prefix
    on_grid = _softmax(logits[..., prefix:])
    offsets = _positions(N_KEY, KEYS)[prefix:] - _positions(N_QUERY, QUERIES)[:, None]
    far = on_grid * offsets.norm(dim=-1).to(DEVICE)
    mean_grid_shift = (on_grid * shift[..., prefix:]).sum(-1, keepdim=True)
    grid_shift = shift[..., prefix:] + mean_grid_shift
    of_queries = {
        "log_sum_exp": (log_sum, 1 + mean_shift + log_sum.abs()),
        "expected_logit": (
            (attention * below).sum(-1),
            (rounded * below.abs()).sum(-1) + mean_shift,
        ),
        "prefix": (attention[..., :prefix].sum(-1), rounded[..., :prefix].sum(-1)),
        "distance": (far.sum(-1), (far * (1 + grid_shift)).sum(-1)),
    }
    # A query that sees no key has no attention.
    expected = {name: (exact * sees, terms * sees) for name, (exact, terms) in of_queries.items()}
    return expected | {
        "largest": (largest, largest_size + largest.abs().where(sees, 1)),
        "received": (attention.sum(-2), rounded.sum(-2)),
    }


def assert_statistics(measured: Any, case: Case, dtype: torch.dtype) -> None:
    """Assert that the error of each statistic is at most 2 eps sum|terms|;
    the largest seen was 0.9.
    """
    for name, (exact, terms) in by_equations(case).items():
        actual = getattr(measured, name)
        assert actual.dtype == dtype, name
        # The largest logit of a query that sees no key is -inf, from which no difference can be
        # computed.
        hidden = exact == -torch.inf
        assert torch.equal(actual == -torch.inf, hidden), name
        actual = actual.masked_fill(hidden, 0)
        exact = exact.masked_fill(hidden, 0)
        # Weights below the smallest normal number of the dtype may be 0.
        terms = terms + torch.finfo(dtype).tiny / torch.finfo(dtype).eps
        assert_rounding(actual, exact, terms, 2, dtype, name)


@pytest.mark.numerical  # not of the kernel, whose interpreter uses NumPy
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_reference_equals_the_equations(form: str, dtype: torch.dtype) -> None:
    case = Case.of(form, dtype)
    options = {"queries": QUERIES, "keys": KEYS, "received": True}
    measured = reference.attention_statistics(case.query, case.key, SCALE, case.mask, **options)
    assert_statistics(measured, case, dtype)


@pytest.mark.study(but=["plain-torch.bfloat16", "hidden-torch.float32"])
@pytest.mark.usefixtures("small_blocks", "nan_memory")
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("plain", torch.float64),
        ("plain", torch.bfloat16),
        ("added", torch.float64),
        ("hidden", torch.float32),
        ("lowered", torch.float32),
        ("swallowed", torch.float32),
    ],
    ids=str,
)
def test_kernel_equals_the_equations(form: str, dtype: torch.dtype) -> None:
    from tcnn_model.kernels import attention_statistics

    case = Case.of(form, dtype)
    options = {"queries": QUERIES, "keys": KEYS, "received": True}
    measured = attention_statistics(case.query, case.key, SCALE, case.mask, **options)
    assert_statistics(measured, case, torch.promote_types(dtype, torch.float32))


@pytest.mark.usefixtures("nan_memory")
def test_kernel_with_the_blocks_of_the_gpu_and_without_grids() -> None:
    """Queries and keys are views of a model's projection (rows, N, heads, 3, d);
    some rows have a single query.
    """
    from tcnn_model.kernels import attention_statistics

    qkv = random(1, 71, 2, 3, 8, dtype=torch.bfloat16).to(DEVICE)
    query, key, _ = qkv.permute(3, 0, 2, 1, 4).unbind(0)
    wide_key = key.double()
    for part in (query, query[:, :, :1]):
        measured = attention_statistics(part, key, 0.3)
        wide_query = part.double()
        exact = reference.attention_statistics(wide_query, wide_key, 0.3)
        # The errors of a logit and of the largest logit are each 0.3 times the products.
        terms = 1 + 0.6 * wide_query.abs() @ wide_key.abs().mT
        bound = terms.amax(-1) * (2 + exact.log_sum_exp - exact.expected_logit)
        for name in ("largest", "log_sum_exp", "expected_logit", "prefix"):
            actual = getattr(measured, name)
            expected = getattr(exact, name)
            assert_rounding(actual, expected, bound, 2, torch.float32, name)
        assert measured.distance is None
        assert measured.received is None


@pytest.mark.usefixtures("small_blocks")
def test_nan_in_a_key_shows_in_the_statistics() -> None:
    """A maximum ignores NaN, but a sum does not."""
    from tcnn_model.kernels import attention_statistics

    case = Case.of("plain", torch.float64)
    case.key[0, 1, 5] = torch.nan
    measured = attention_statistics(case.query[:1], case.key[:1], SCALE)
    for statistic in (measured.largest, measured.entropy):
        first_head, second_head = statistic[0].isnan()
        assert not first_head.any()
        assert second_head.all()
