"""Gated attention from the paper's equations in float64: slow, with every N x N tensor formed."""

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
    """Sizes of a gated attention, and its gates and v_pos unless they are random."""

    y: Axis
    x: Axis
    heads: int
    dim: int
    channels: int
    shared: bool = True
    batch: int = 1
    gate: tuple[float, ...] | None = None
    v_pos: tuple[tuple[float, float, float], ...] | None = None
    sharpness: float = 1.0  # of the queries

    def inputs(self, dtype: torch.dtype = torch.float64) -> Tensors:
        """Make the five arguments by name, leaves that require gradients; position in float64."""
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
        tensors = {
            "query": self.sharpness
            * random(self.batch, self.heads, n_q, self.dim, seed=1, dtype=dtype),
            "key": random(self.batch, self.heads, n_k, self.dim, seed=2, dtype=dtype),
            "values": random(
                self.batch,
                1 if self.shared else self.heads,
                n_k,
                self.channels,
                seed=3,
                dtype=dtype,
            ),
            "position": position,
            "gate": gate.to(torch.promote_types(dtype, torch.float32)),
        }
        return {
            name: tensor.to(DEVICE).requires_grad_() for name, tensor in tensors.items()
        }


# Content attention to a single key, logits of a few hundred; positions far outside the map, on an edge, and uniform.
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
    """A, C and P of Eq. (7) over the extended grid, N_key = y.keys * x.keys; C is zero on the padding."""

    mixed: Tensor  # (B, heads, N_query, N_key)
    content: Tensor  # (B, heads, N_query, N_key)
    positional: Tensor  # (heads, N_query, N_key)
    logits: Tensor  # of content, (B, heads, N_query, H * W)
    offset: Tensor  # from query to key as (dy, dx), (N_query, N_key, 2)
    real: Tensor  # mask of the keys that are pixels of the image, (N_key,)


def attention(tensors: Tensors, y: Axis, x: Axis) -> Attention:
    """Compute the attention by its definition, in float64."""
    query, key, _, position, gate = (tensors[name].double() for name in NAMES)
    keys = [
        (j, i)
        for j in range(-y.before, y.length + y.after)
        for i in range(-x.before, x.length + x.after)
    ]
    rows, columns = (
        [a.first_query + n * a.stride for n in range(a.queries)] for a in (y, x)
    )
    offset = torch.tensor(
        [[(j - b, i - a) for j, i in keys] for b in rows for a in columns]
    ).to(query)
    real = torch.tensor(
        [0 <= j < y.length and 0 <= i < x.length for j, i in keys], device=query.device
    )
    positional = torch.softmax(
        torch.einsum("hr,qkr->hqk", position, _r(offset)), dim=-1
    )
    logits = torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5
    # Keys on the padding get no content attention.
    content = logits.new_zeros(*logits.shape[:3], len(real))
    content[..., real] = torch.softmax(logits, -1)
    share = gate[:, None, None]
    return Attention(
        (1 - share) * content + share * positional,
        content,
        positional,
        logits,
        offset,
        real,
    )


def _r(offset: Tensor) -> Tensor:
    """Return the papers' r = (||delta||^2, delta_1, delta_2), (N_query, N_key, 3)."""
    return torch.cat((offset.square().sum(-1, keepdim=True), offset), dim=-1)


def apply(tensors: Tensors, y: Axis, x: Axis) -> Tensor:
    """Compute the output, (B, heads, N_query, C)."""
    parts = attention(tensors, y, x)
    return parts.mixed[..., parts.real] @ tensors["values"].double()


def measure(tensors: Tensors, y: Axis, x: Axis) -> Tensors:
    """Compute every statistic by its definition."""
    parts = attention(tensors, y, x)
    return {
        "log_sum_exp": parts.logits.logsumexp(-1),
        "entropy": torch.special.entr(parts.mixed).sum(-1),
        "content_entropy": torch.special.entr(parts.content).sum(-1),
        "positional_entropy": torch.special.entr(parts.positional).sum(-1),
        "attention_distance": (parts.mixed * parts.offset.norm(dim=-1)).sum(-1),
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
    """Return the sum of the absolute values of the terms of the output, of each gradient and of each statistic.

    A logit is rounded by eps times its terms, and its softmax by that share of itself: so each weight counts 1 + those
    terms times. ``1 - gate`` is a sum of two terms as well. All in float64.

    Args:
        tensors: The five arguments by name.
        y: Vertical axis.
        x: Horizontal axis.
        upstream: Gradient of the output.
        sizes: Sums of the absolute values of the terms of queries and keys, if these are computed themselves.
    """
    query, key, values, position, gate = (
        tensors[name].detach().double() for name in NAMES
    )
    parts = attention(tensors, y, x)
    scale = query.shape[-1] ** -0.5
    upstream = upstream.double().abs()
    real = parts.real
    share = gate[:, None, None]
    r = _r(parts.offset)
    of_query, of_key = (query.abs(), key.abs()) if sizes is None else sizes
    size = scale * of_query @ of_key.mT
    content = parts.content[..., real]
    rounded = torch.zeros_like(parts.content)
    rounded[..., real] = content * (1 + size + (content * size).sum(-1, keepdim=True))
    positional = parts.positional * (1 + _positional_size(position, parts))
    # Absolute values of the terms of (1 - g) C + g P.
    mixed = (1 + share) * rounded + share * positional

    grad = upstream @ values.abs().mT  # of A, on real keys
    inner = rounded[..., real]
    # The softmax's backward C (dC - sum C dC), in absolute values.
    grad_logits = (1 + share) * inner * (grad + (inner * grad).sum(-1, keepdim=True))
    mean_r = torch.einsum("hqk,qkr->hqr", positional, r.abs())
    reach = r[:, real].abs() + mean_r[:, :, None]  # (heads, N_query, H * W, 3)
    weighted = (positional[..., real] * grad).sum(0)
    log_c, log_p, log_a = (
        part.clamp(min=1e-300).log().abs()
        for part in (parts.content, parts.positional, parts.mixed)
    )
    return {
        "output": mixed[..., real] @ values.abs(),
        "query": scale * grad_logits @ key.abs(),
        "key": scale * grad_logits.mT @ query.abs(),
        "values": (mixed[..., real].mT @ upstream).sum_to_size(values.shape),
        "position": gate[:, None] * torch.einsum("hqk,hqkr->hr", weighted, reach),
        "gate": ((inner + positional[..., real]) * grad).sum((0, 2, 3)),
        "log_sum_exp": size.amax(-1) + parts.logits.logsumexp(-1).abs(),
        "entropy": (mixed * (1 + log_a)).sum(-1),
        "content_entropy": (rounded * (1 + log_c)).sum(-1),
        "positional_entropy": (positional * (1 + log_p)).sum(-1),
        "attention_distance": (mixed * parts.offset.norm(dim=-1)).sum(-1),
        "received": mixed[..., real].sum(-2),
    }


def _positional_size(position: Tensor, parts: Attention) -> Tensor:
    """Sum the terms of the positional logits, counted from each query's best key, and of their normaliser."""
    logits = torch.einsum("hr,qkr->hqk", position, _r(parts.offset))
    best = logits.argmax(-1)  # (heads, N_query)
    best_offset = parts.offset[torch.arange(len(parts.offset)), best][:, :, None]
    away = parts.offset - best_offset  # (heads, N_query, N_key, 2)
    curvature = position[:, None, None, :1]
    linear = position[:, None, None, 1:]
    slope = 2 * curvature * best_offset + linear
    return (curvature.abs() * away.square() + (slope * away).abs()).sum(
        -1
    ) - parts.positional.amax(-1, True).log()


def gradients(output: Tensor, tensors: Tensors, upstream: Tensor) -> Tensors:
    """Return the gradients of all tensors, by name."""
    return dict(
        zip(
            tensors,
            torch.autograd.grad(output, tuple(tensors.values()), upstream.to(output)),
            strict=True,
        )
    )


def assert_as_the_equations(
    function: Callable[..., tuple[Tensor, AttentionStatistics | None]],
    tensors: Tensors,
    y: Axis,
    x: Axis,
    c: float = 8,
) -> None:
    """Assert that output, statistics and gradients are at most c eps sum|terms| from the equations in float64.

    Rounding was seen to reach c = 2, in float64, where it is partly that of the equations themselves. Statistics are in
    float32 at least, gradients have the rounding of the queries.
    """
    dtype = tensors["query"].dtype
    output, statistics = function(*tensors.values(), y=y, x=x, statistics=True)
    assert output.dtype == dtype
    assert output.requires_grad == torch.is_grad_enabled()
    exact_tensors = {
        name: tensor.detach().double().requires_grad_()
        for name, tensor in tensors.items()
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
            assert_rounding(
                gradient, expected[name], bounds[name], c, dtype, f"gradient of {name}"
            )
    wide: Any = torch.promote_types(dtype, torch.float32)
    for name, exact_statistic in measure(exact_tensors, y, x).items():
        actual = getattr(statistics, name)
        assert actual.dtype == wide
        assert not actual.requires_grad
        assert_rounding(actual, exact_statistic, bounds[name], c, wide, name)
