"""Statistics of softmax attention against loops in float64:
the kernel, its reference, and fused attention.

The rounding error of a logit is eps times its absolute terms, sum_d |scale q_d k_d| + |mask|. So is
that of the largest logit, which is subtracted. The relative error of a weight A_j is the sum of
both and of their mean over the row; the error of a sum over A_j is the same sum of absolute values.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tcnn_model.kernels import TokenGrid, reference
from tests.tcnn_model.dense import DEVICE
from tests.tcnn_model.kernels.fused import fused_statistics
from tests.tcnn_model.numerics import assert_rounding, random

pytestmark = pytest.mark.numerical

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


def _distance(query: int, key: int) -> float:
    """Return the distance between a query and a key;
    a class token lies on the first cell of the grid.
    """
    return math.dist(_position(query, QUERIES), _position(key, KEYS))


def _position(token: int, grid: TokenGrid) -> tuple[float, float]:
    cell = max(0, token - grid.prefix)
    row, column = divmod(cell, grid.width)
    spacing_y, spacing_x = grid.spacing
    origin_y, origin_x = grid.origin
    return row * spacing_y + origin_y, column * spacing_x + origin_x


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = logits.max()
    if largest == -math.inf:
        return np.zeros(len(logits))
    weights = np.exp(logits - largest)
    return weights / weights.sum()


def by_hand(case: Case) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the exact statistics and the sums of their absolute terms, query by query."""
    logits, size = (x.cpu().numpy() for x in case.logits())
    # Each statistic has two arrays: exact values, and sums of absolute terms.
    shape = (2, ROWS, HEADS, N_QUERY)
    names = ["largest", "log_sum_exp", "expected_logit", "prefix", "distance"]
    sums = {name: np.zeros(shape) for name in names}
    sums["received"] = np.zeros((2, ROWS, HEADS, N_KEY))
    for row, head, query in np.ndindex(ROWS, HEADS, N_QUERY):
        at = (row, head, query)
        numbers = _of_query(query, logits[at], size[at])
        for name, (value, terms) in numbers.items():
            # The attention that a key receives is summed over queries.
            where = (row, head) if name == "received" else at
            values, sizes = sums[name]
            values[where] += value
            sizes[where] += terms
    return {name: torch.from_numpy(arrays).to(DEVICE).unbind(0) for name, arrays in sums.items()}


def _of_query(query: int, s: NDArray[np.float64], size: NDArray[np.float64]) -> dict[str, Any]:
    """Return the statistics of one query, each with the sum of its absolute terms."""
    largest = s.max()
    attention = _softmax(s)
    # A query that sees no key has no attention.
    if largest == -math.inf:
        names = ("log_sum_exp", "expected_logit", "prefix", "distance")
        nothing = dict.fromkeys(names, (0.0, 0.0))
        return nothing | {"largest": (largest, 1.0), "received": (attention, attention)}
    largest_size = size.max()
    below = np.maximum(s - largest, -1e4)  # exp(-1e4) is 0 in float64
    # The errors are those of a logit relative to the largest one, of the weights, and of their
    # mean.
    shift = size + largest_size + abs(below)
    mean_shift = attention @ shift
    rounded = attention * (1 + shift + mean_shift)
    terms = rounded @ abs(below)
    log_sum = math.log(np.exp(below).sum())

    # The distance is a mean over the keys on the grid only.
    prefix = KEYS.prefix
    on_grid = _softmax(s[prefix:])
    lengths = np.array([_distance(query, key) for key in range(prefix, N_KEY)])
    grid_shift = shift[prefix:] + on_grid @ shift[prefix:]
    far = on_grid * lengths
    return {
        "largest": (largest, largest_size + abs(largest)),
        "log_sum_exp": (log_sum, 1 + mean_shift + abs(log_sum)),
        "expected_logit": (attention @ below, terms + mean_shift),
        "prefix": (attention[:prefix].sum(), rounded[:prefix].sum()),
        "distance": (far.sum(), far @ (1 + grid_shift)),
        "received": (attention, rounded),
    }


def assert_statistics(measured: Any, case: Case, dtype: torch.dtype) -> None:
    """Assert that the error of each statistic is at most 2 eps sum|terms|;
    the largest seen was 0.9.
    """
    for name, (exact, terms) in by_hand(case).items():
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_reference_equals_loops(form: str, dtype: torch.dtype) -> None:
    case = Case.of(form, dtype)
    options = {"queries": QUERIES, "keys": KEYS, "received": True}
    measured = reference.attention_statistics(case.query, case.key, SCALE, case.mask, **options)
    assert_statistics(measured, case, dtype)


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
def test_kernel_equals_loops(form: str, dtype: torch.dtype) -> None:
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


# On a GPU fused attention has no float64.
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32][torch.cuda.is_available() :], ids=str
)
def test_fused_attention_equals_loops(dtype: torch.dtype) -> None:
    """Statistics include distances along the axes; the largest error seen was 0.1 of the bound."""
    case = Case.of("plain", dtype)
    # A constant in all keys changes no weight, and would cost digits unless keys are centred.
    key = case.key + 3
    measured = fused_statistics(case.query, key, SCALE, queries=QUERIES, keys=KEYS)
    case = case._replace(key=key)
    logits, size = case.logits()
    attention = logits.softmax(-1)
    entropy = -(attention * attention.log()).sum(-1)
    log_sum_exp = logits.logsumexp(-1)
    # The errors are those of a logit, of the largest logit, and of the weights.
    shift = 2 * size.amax(-1, keepdim=True) + 1
    rounded = attention * (1 + 2 * shift)

    # Distances are means over the keys on the grid.
    prefix = KEYS.prefix
    on_grid = logits[..., prefix:].softmax(-1)
    query_y, query_x = QUERIES.positions(N_QUERY, torch.float64, DEVICE)
    key_y, key_x = KEYS.positions(N_KEY, torch.float64, DEVICE)
    dy = key_y[prefix:] - query_y[:, None]
    dx = key_x[prefix:] - query_x[:, None]
    squared = on_grid * (dy.square() + dx.square())
    manhattan = on_grid * (dy.abs() + dx.abs())

    # The largest terms are those of q . (A K), from which the keys' mean has been subtracted.
    wide_key = key.double()
    centred = wide_key - wide_key.mean(-2, keepdim=True)
    mean_key = rounded @ centred.abs()
    product = SCALE * (case.query.double().abs() * mean_key).sum(-1)
    log_terms = shift[..., 0] + log_sum_exp.abs()
    expected = {
        "log_sum_exp": (log_sum_exp, log_terms),
        "entropy": (entropy, product + log_terms),
        "prefix": (attention[..., :prefix].sum(-1), rounded[..., :prefix].sum(-1)),
        "squared_distance": (squared.sum(-1), None),
        "manhattan_distance": (manhattan.sum(-1), None),
        "received": (attention.sum(-2), rounded.sum(-2)),
    }
    for name, (exact, terms) in expected.items():
        # Weights on the grid have at most twice the errors of the others: in the sum, and in the
        # normaliser.
        bound = exact * (2 + 4 * shift[..., 0]) if terms is None else terms
        assert_rounding(getattr(measured, name), exact, bound, 1, dtype, name)
