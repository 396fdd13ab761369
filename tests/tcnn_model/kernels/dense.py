"""The slow way, from the paper's equations: every N x N tensor formed, one pixel offset at a time."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tcnn_model.gpsa.positional import Axis

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAMES = ("q", "k", "v", "position", "gate")
MEASURED = ("log_sum_exp", "entropy", "content_entropy", "attention_distance", "positional_entropy", "received")


@dataclass(frozen=True)
class Case:
    y: Axis
    x: Axis
    heads: int
    dim: int
    channels: int
    shared: bool = True
    batch: int = 1
    gate: tuple[float, ...] | None = None
    v_pos: tuple[tuple[float, float, float], ...] | None = None
    name: str = field(default="", compare=False)

    def inputs(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random q, k, v, position, gate, leaves that want a gradient; position in float64."""
        generator = torch.Generator().manual_seed(self.dim)
        n_q, n_k = self.y.queries * self.x.queries, self.y.length * self.x.length

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        alpha, center = 0.1 + normal(self.heads, 1).abs(), 2 * normal(self.heads, 2)
        position = torch.cat((-alpha, 2 * alpha * center), dim=1)
        gate = torch.sigmoid(normal(self.heads))
        if self.v_pos is not None:
            position = torch.tensor(self.v_pos, dtype=torch.float64)
        if self.gate is not None:
            gate = torch.tensor(self.gate, dtype=torch.float64)
        tensors = {
            "q": normal(self.batch, self.heads, n_q, self.dim).to(dtype),
            "k": normal(self.batch, self.heads, n_k, self.dim).to(dtype),
            "v": normal(self.batch, 1 if self.shared else self.heads, n_k, self.channels).to(dtype),
            "position": position,
            "gate": gate if dtype == torch.float64 else gate.float(),
        }
        return {name: tensor.to(DEVICE).requires_grad_() for name, tensor in tensors.items()}


def attention(
    q: Tensor, k: Tensor, position: Tensor, gate: Tensor, y: Axis, x: Axis, wide: torch.dtype = torch.float64
) -> dict[str, Any]:
    """A and P (``wide``) over the extended grid, C, the distances, and which keys are real."""
    queries = [(float(i), float(j)) for i in y.query_positions(gate) for j in x.query_positions(gate)]
    keys = [(float(i), float(j)) for i in y.key_positions(gate) for j in x.key_positions(gate)]
    offset = torch.tensor([[(kj - qj, ki - qi) for kj, ki in keys] for qj, qi in queries], dtype=torch.float64)
    offset = offset.to(q.device)
    real = torch.tensor([0 <= j < y.length and 0 <= i < x.length for j, i in keys], device=q.device)
    relative = torch.cat(((offset**2).sum(-1, keepdim=True), offset), dim=-1)
    p = torch.softmax(torch.einsum("hr,qkr->hqk", position.to(wide), relative.to(wide)), dim=-1)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    c = torch.softmax(logits, dim=-1)
    share = gate[:, None, None]
    positional = (share * p).to(q.dtype)
    a = positional.expand(len(q), *positional.shape).clone()
    a[..., real] = a[..., real] + (1 - share).to(q.dtype) * c
    return {"a": a, "c": c, "p": p, "distance": offset.norm(dim=-1), "real": real, "logits": logits}


def apply(tensors: dict[str, Tensor], y: Axis, x: Axis, wide: torch.dtype = torch.float64) -> Tensor:
    """Out (B, heads, N_q, C)."""
    q, k, v, position, gate = (tensors[name] for name in NAMES)
    seen = attention(q, k, position, gate, y, x, wide)
    return seen["a"][..., seen["real"]] @ v


def measure(tensors: dict[str, Tensor], y: Axis, x: Axis) -> dict[str, Tensor]:
    """Every statistic, by its definition."""
    q, k, _, position, gate = (tensors[name] for name in NAMES)
    seen = attention(q, k, position, gate, y, x)
    return {
        "log_sum_exp": seen["logits"].logsumexp(-1),
        "entropy": -torch.xlogy(seen["a"], seen["a"]).sum(-1),
        "content_entropy": -torch.xlogy(seen["c"], seen["c"]).sum(-1),
        "attention_distance": (seen["a"] * seen["distance"].to(q.dtype)).sum(-1),
        "positional_entropy": -torch.xlogy(seen["p"], seen["p"]).sum(-1),
        "received": seen["a"][..., seen["real"]].sum(-2),
    }


def pytorch_gradients(out: Tensor, tensors: dict[str, Tensor], y: Axis, x: Axis) -> dict[str, Tensor]:
    """Of ``out``; but that of position through a positional softmax in float32, since the kernels sum it in float32."""
    wide = torch.promote_types(out.dtype, torch.float32)
    through_wide = gradients(apply(tensors, y, x, wide), tensors)
    return {**gradients(out, tensors), "position": through_wide["position"]}


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers in float64, leaves again."""
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def gradients(out: Tensor, tensors: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Of a random projection of ``out``, the same for every dtype up to its rounding to that of ``out``."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(out.device)
    return dict(
        zip(tensors, torch.autograd.grad((out * weight.to(out.dtype)).sum(), tuple(tensors.values())), strict=True)
    )


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference over the largest absolute value expected."""
    assert actual.shape == exact.shape
    exact = exact.detach()
    scale = exact.abs().max().clamp(min=1e-30)
    return float((actual.detach().double() - exact).abs().max() / scale)


def assert_as_good_as_pytorch(actual: Tensor, pytorch: Tensor, exact: Tensor, factor: float, what: str) -> None:
    """No further from float64 than ``factor`` times PyTorch at the same dtype, plus one rounding."""
    assert bool(actual.isfinite().all()), what
    own, ours = error(pytorch, exact), error(actual, exact)
    # The judge is float64 itself, and cannot tell PyTorch's own error there.
    rounding = 1e-13 if actual.dtype == torch.float64 else torch.finfo(actual.dtype).eps
    assert ours <= factor * own + rounding, f"{what}: error {ours:.2e}, PyTorch's own {own:.2e}"
