"""Ablations of every mode on a chain of GPSA layers and on a ViT,
and all state that an ablation could change.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tests.tcnn_probe.contracts.helpers import Trace, clean, vit
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.networks import Chain

__all__ = ["CASES", "OF_VIT", "State", "chain_images", "other_chain"]

OF_VIT: dict[str, Any] = {"heads": {"blocks.1.attn": [0, 2]}}


def chain_images(count: int = 3) -> Tensor:
    # Sides are unequal primes, so that exchanged axes would show.
    return torch.randn(count, 2, 7, 11, generator=torch.Generator().manual_seed(1))


def other_chain() -> Chain:
    source = Chain()
    with torch.no_grad():
        for parameter in source.parameters():
            # Every parameter differs, by enough to show in every head.
            parameter.mul_(1.2)
    return source


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "zero": (Chain, chain_images, {"heads": {"near": [1, 3]}}),
    "mean": (
        Chain,
        chain_images,
        {"heads": {"near": [1, 3], "far": 7}, "mode": "mean"},
    ),
    "images": (
        Chain,
        chain_images,
        {"heads": "far", "mode": "mean", "images": chain_images(5)},
    ),
    "static": (
        Chain,
        chain_images,
        {
            "heads": {"near": [1, 3]},
            "mode": "static",
            "images": chain_images(5).flip(0),
        },
    ),
    "positional": (Chain, chain_images, {"mode": "positional"}),
    "replaced": (
        Chain,
        chain_images,
        {"heads": {"near": [1]}, "mode": "replaced", "source": other_chain()},
    ),
    "zero, vit": (vit, vit_images, {}),
    "images, vit": (
        vit,
        vit_images,
        {"heads": "blocks.1.attn", "mode": "mean", "images": vit_images(5)},
    ),
    "convolutional": (
        Chain,
        chain_images,
        {
            "heads": {"near": [1, 3]},
            "mode": "convolutional",
            "images": chain_images(5).flip(0),
        },
    ),
    "salient": (
        Chain,
        chain_images,
        {
            "heads": {"near": [1, 3]},
            "mode": "salient",
            "images": chain_images(5).flip(0),
        },
    ),
    "local, vit": (
        vit,
        vit_images,
        {"heads": {"blocks.0.attn": [0, 2]}, "mode": "local", "radius": 1},
    ),
    "shuffled, vit": (
        vit,
        vit_images,
        {**OF_VIT, "mode": "shuffled", "images": vit_images(4)},
    ),
    "replaced, vit": (
        vit,
        vit_images,
        {**OF_VIT, "mode": "replaced", "source": vit(seed=3)},
    ),
}


class State:
    """State of a model, with the identity of its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace(model)
        self.parameters = [(name, id(p)) for name, p in model.named_parameters()]
        self.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        # An ablation must not draw random numbers from the user's generator.
        self.random = torch.random.get_rng_state()

    def check(self, model: nn.Module) -> None:
        now = State(model)
        assert now.trace == self.trace
        assert now.parameters == self.parameters
        # Equal bit for bit, as a remainder of an ablation could show in any digit.
        torch.testing.assert_close(now.gradients, self.gradients, rtol=0, atol=0)
        assert torch.equal(now.random, self.random)
        assert clean()
