"""Gated attention from the paper's equations in float64, slowly, with all N x N tensors."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcnn_model import AttentionStatistics, Axis
from tests.tcnn_model.numerics import assert_rounding, random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("query", "key", "values", "position", "gate")
MEASURED = (
    "log_sum_exp",
    "entropy",
    "content_entropy",
    "positional_entropy",
    "attention_distance",
    "received",
)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes of a gated attention; gates and v_pos are random by default."""

    y: Axis
    x: Axis
    heads: int
    dim: int
    channels: int
    shared: bool = True
    batch: int = 1
    gate: tuple[float, ...] | None = None
    v_pos: tuple[tuple[float, float, float], ...] | None = None
    sharpness: float = 1.0  # factor on the queries

    def inputs(self, dtype: torch.dtype = torch.float64) -> Tensors:
        """Return the five arguments by name, as leaves
        that require gradients; position is in float64.
        """
        n_q = self.y.queries * self.x.queries
        n_k = self.y.length * self.x.length
        alpha = 0.1 + random(self.heads, 1, seed=4).abs()
        center = 2 * random(self.heads, 2, seed=5)
        position = torch.cat((-alpha, 2 * alpha * center), dim=1)
        gate = torch.sigmoid(random(self.heads, seed=6))
        if self.v_pos is not None:
            position = torch.tensor(self.v_pos, dtype=torch.float64)
        if self.gate is not None:
            gate = torch.tensor(self.gate, dtype=torch.float64)
        query = random(self.batch, self.heads, n_q, self.dim, seed=1, dtype=dtype)
        key = random(self.batch, self.heads, n_k, self.dim, seed=2, dtype=dtype)
        value_heads = 1 if self.shared else self.heads
        values = random(self.batch, value_heads, n_k, self.channels, seed=3, dtype=dtype)
        tensors = {
            "query": self.sharpness * query,
            "key": key,
            "values": values,
            "position": position,
            "gate": gate.to(torch.promote_types(dtype, torch.float32)),
        }
        return {name: tensor.to(DEVICE).requires_grad_() for name, tensor in tensors.items()}


# Content attention goes to a single key, with logits of a few hundred; positional attention is
# centred far outside the map or between two pixels, or is uniform.
_FAR = ((-40.3, 80.6 * 301.7, -80.6 * 299.3), (-20.7, 41.4 * 1.5, 0.0), (0.0, 0.0, 0.0))
_GATES = {
    "content": (0.0, 0.0, 0.0),
    "positional": (1.0, 1.0, 1.0),
    "both": (0.999999, 1e-7, 0.5),
}
EXTREMES = {
    name: Case(
        Axis(3, 2, 1, 3),
        Axis(7, 2, 2, 3),
        3,
        2,
        5,
        gate=gate,
        v_pos=_FAR,
        sharpness=30.0,
    )
    for name, gate in _GATES.items()
}


class Attention(NamedTuple):
    """A, C and P of Eq. (7) over the extended grid,
    N_key = y.keys * x.keys; C is zero on the padding.
    """

    mixed: Tensor  # (B, heads, N_query, N_key)
    content: Tensor  # (B, heads, N_query, N_key)
    positional: Tensor  # (heads, N_query, N_key)
    logits: Tensor  # content logits, (B, heads, N_query, H * W)
    offset: Tensor  # (dy, dx) from query to key, (N_query, N_key, 2)
    real: Tensor  # whether a key is a pixel of the image, (N_key,)


def attention(tensors: Tensors, y: Axis, x: Axis) -> Attention:
    """Compute the attention from its definition, in float64."""
    query, key, _, position, gate = (tensors[name].double() for name in NAMES)
    # These are the pixels (y, x) of the queries and of the keys, which include the padding.
    rows, columns = ([a.first_query + n * a.stride for n in range(a.queries)] for a in (y, x))
    key_rows, key_columns = (range(-a.before, a.length + a.after) for a in (y, x))
    queries = torch.tensor([*itertools.product(rows, columns)]).to(query)
    keys = torch.tensor([*itertools.product(key_rows, key_columns)]).to(query)
    offset = keys - queries[:, None]
    beyond = keys.new_tensor([y.length, x.length])
    real = ((keys >= 0) & (keys < beyond)).all(-1)

    # Eq. (4).
    position_logits = torch.einsum("hr,qkr->hqk", position, _r(offset))
    positional = torch.softmax(position_logits, dim=-1)

    # Keys on the padding get no content attention.
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    content = logits.new_zeros(*logits.shape[:3], len(real))
    content[..., real] = torch.softmax(logits, -1)

    # Eq. (7).
    share = gate[:, None, None]
    mixed = (1 - share) * content + share * positional
    return Attention(mixed, content, positional, logits, offset, real)


def _r(offset: Tensor) -> Tensor:
    """Return the papers' r = (||delta||^2, delta_1, delta_2), (N_query, N_key, 3)."""
    return torch.cat((offset.square().sum(-1, keepdim=True), offset), dim=-1)


def apply(tensors: Tensors, y: Axis, x: Axis) -> Tensor:
    """Compute the output, (B, heads, N_query, C)."""
    parts = attention(tensors, y, x)
    return parts.mixed[..., parts.real] @ tensors["values"].double()


def measure(tensors: Tensors, y: Axis, x: Axis) -> Tensors:
    """Compute every statistic from its definition."""
    parts = attention(tensors, y, x)
    lengths = parts.offset.norm(dim=-1)
    return {
        "log_sum_exp": parts.logits.logsumexp(-1),
        "entropy": torch.special.entr(parts.mixed).sum(-1),
        "content_entropy": torch.special.entr(parts.content).sum(-1),
        "positional_entropy": torch.special.entr(parts.positional).sum(-1),
        "attention_distance": (parts.mixed * lengths).sum(-1),
        "received": parts.mixed[..., parts.real].sum(-2),
    }


@torch.no_grad()
def terms(
    tensors: Tensors,
    y: Axis,
    x: Axis,
    upstream: Tensor,
    sizes: tuple[Tensor, Tensor] | None = None,
) -> Tensors:
    """Return the sums of absolute terms of the output,
    of each gradient and of each statistic, in float64.

    The rounding error of a logit is eps times the sum of its absolute terms, and that is the
    relative error of its exponential: so each weight counts 1 + that sum times. ``1 - gate`` counts
    as a sum of two terms.

    Args:
        tensors: The five arguments by name.
        y: Vertical axis.
        x: Horizontal axis.
        upstream: Gradient of the output.
        sizes: Sums of the absolute terms of queries and keys, if these are results of a matrix
            product themselves.
    """
    query, key, values, position, gate = (tensors[name].detach().double() for name in NAMES)
    parts = attention(tensors, y, x)
    scale = query.shape[-1] ** -0.5
    upstream = upstream.double().abs()
    real = parts.real
    share = gate[:, None, None]
    r = _r(parts.offset)
    of_query, of_key = (query.abs(), key.abs()) if sizes is None else sizes
    size = scale * of_query @ of_key.mT
    content = parts.content[..., real]
    # A weight has the error of its own logit, and that of its normaliser, a mean over the logits.
    mean_size = (content * size).sum(-1, keepdim=True)
    rounded = torch.zeros_like(parts.content)
    rounded[..., real] = content * (1 + size + mean_size)
    positional = parts.positional * (1 + _positional_size(position, parts))
    # These are the absolute terms of (1 - g) C + g P.
    mixed = (1 + share) * rounded + share * positional

    grad = upstream @ values.abs().mT  # gradient of A, on real keys
    inner = rounded[..., real]
    # The backward of the softmax is C (dC - sum C dC), here with absolute values.
    mean_grad = (inner * grad).sum(-1, keepdim=True)
    grad_logits = (1 + share) * inner * (grad + mean_grad)
    # The gradient of P by v_pos has the same form, with r in place of the logits' gradient.
    mean_r = torch.einsum("hqk,qkr->hqr", positional, r.abs())
    reach = r[:, real].abs() + mean_r[:, :, None]  # (heads, N_query, H * W, 3)
    real_positional = positional[..., real]
    weighted = (real_positional * grad).sum(0)
    real_mixed = mixed[..., real]
    lengths = parts.offset.norm(dim=-1)
    # A weight of 0 contributes no entropy, so its logarithm is replaced by a finite number.
    log_c, log_p, log_a = (
        part.clamp(min=1e-300).log().abs()
        for part in (parts.content, parts.positional, parts.mixed)
    )
    return {
        "output": real_mixed @ values.abs(),
        "query": scale * grad_logits @ key.abs(),
        "key": scale * grad_logits.mT @ query.abs(),
        "values": (real_mixed.mT @ upstream).sum_to_size(values.shape),
        "position": gate[:, None] * torch.einsum("hqk,hqkr->hr", weighted, reach),
        "gate": ((inner + real_positional) * grad).sum((0, 2, 3)),
        "log_sum_exp": size.amax(-1) + parts.logits.logsumexp(-1).abs(),
        "entropy": (mixed * (1 + log_a)).sum(-1),
        "content_entropy": (rounded * (1 + log_c)).sum(-1),
        "positional_entropy": (positional * (1 + log_p)).sum(-1),
        "attention_distance": (mixed * lengths).sum(-1),
        "received": real_mixed.sum(-2),
    }


def _positional_size(position: Tensor, parts: Attention) -> Tensor:
    """Sum the absolute terms of the positional logits,
    relative to each query's best key, and of their normaliser.
    """
    logits = torch.einsum("hr,qkr->hqk", position, _r(parts.offset))
    best = logits.argmax(-1)  # (heads, N_query)
    best_offset = parts.offset[torch.arange(len(parts.offset)), best][:, :, None]
    away = parts.offset - best_offset  # (heads, N_query, N_key, 2)
    curvature = position[:, None, None, :1]
    linear = position[:, None, None, 1:]
    slope = 2 * curvature * best_offset + linear
    size = curvature.abs() * away.square() + (slope * away).abs()
    # Relative to the best key, whose logit is 0, the normaliser is -log of its weight.
    normaliser = -parts.positional.amax(-1, True).log()
    return size.sum(-1) + normaliser


def gradients(output: Tensor, tensors: Tensors, upstream: Tensor) -> Tensors:
    """Return the gradients of all tensors, by name."""
    inputs = tuple(tensors.values())
    by_input = torch.autograd.grad(output, inputs, upstream.to(output))
    return dict(zip(tensors, by_input, strict=True))


def assert_as_the_equations(
    function: Callable[..., tuple[Tensor, AttentionStatistics | None]],
    tensors: Tensors,
    y: Axis,
    x: Axis,
    c: float = 8,
) -> None:
    """Assert that output, statistics and gradients are at most c eps sum|terms|
    from the equations in float64.

    The largest c seen was 2, in float64, where part of the error is that of the equations
    themselves. Statistics have the rounding of float32 at least, gradients that of the queries'
    dtype.
    """
    dtype = tensors["query"].dtype
    output, statistics = function(*tensors.values(), y=y, x=x, statistics=True)
    assert output.dtype == dtype
    assert output.requires_grad == torch.is_grad_enabled()
    exact_tensors = {
        name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()
    }
    with torch.enable_grad():
        exact = apply(exact_tensors, y, x)
    upstream = random(*exact.shape, seed=7, dtype=dtype).to(DEVICE)
    bounds = terms(tensors, y, x, upstream)
    assert_rounding(output, exact, bounds["output"], c, dtype, "output")
    if output.requires_grad:
        expected = gradients(exact, exact_tensors, upstream)
        for name, gradient in gradients(output, tensors, upstream).items():
            assert gradient.dtype == tensors[name].dtype
            assert_rounding(gradient, expected[name], bounds[name], c, dtype, f"gradient of {name}")
    wide: Any = torch.promote_types(dtype, torch.float32)
    for name, exact_statistic in measure(exact_tensors, y, x).items():
        actual = getattr(statistics, name)
        assert actual.dtype == wide
        assert not actual.requires_grad
        assert_rounding(actual, exact_statistic, bounds[name], c, wide, name)
