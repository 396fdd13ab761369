"""Alpha of some heads kept through training, and everything else left to it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import tcnn_probe
from tests.tcnn_probe.networks import Chain


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(2, 2, 7, 11, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).sum().backward()
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("strength", [None, 6.0])
def test_frozen_heads_stay_to_the_bit(make: Callable[[nn.Module], Any], strength: float | None) -> None:
    """Whatever momentum the optimizer has of earlier steps, and in every state_dict that is saved meanwhile."""
    model = Chain()
    optimizer = make(model)
    train(model, optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    frozen, free = [0, 4, 7], [1, 2, 3, 5, 6, 8]
    with tcnn_probe.ablate(model, {"near": frozen}, "frozen", locality_strength=strength):
        assert model.near.raw_locality.grad is not None
        for _ in range(3):
            train(model, optimizer, steps=1)
            assert torch.equal(model.state_dict()["near.raw_locality"][frozen], before["near.raw_locality"][frozen])
            assert (model.near.raw_locality.grad[frozen] == 0).all()
    assert not _global_optimizer_post_hooks
    after = dict(model.named_parameters())
    assert torch.equal(after["near.raw_locality"][frozen], before["near.raw_locality"][frozen])
    assert (after["near.raw_locality"] != before["near.raw_locality"])[free].all()
    for name in after.keys() - {"near.raw_locality"}:
        assert (after[name] != before[name]).any(), name
    train(model, optimizer, steps=1)
    assert (model.near.raw_locality != before["near.raw_locality"]).all()


def test_others_train_as_if_frozen_heads_were_constants() -> None:
    """Without momentum or decay: the same as with a gradient masked by hand."""
    model, twin = Chain(), Chain()
    frozen = [0, 4, 7]
    twin.near.raw_locality.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor(frozen), 0))
    plain: Callable[[nn.Module], Any] = lambda m: torch.optim.SGD(m.parameters(), lr=0.01)  # noqa: E731
    train(twin, plain(twin))
    with tcnn_probe.ablate(model, {"near": frozen}, "frozen"):
        train(model, plain(model))
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


def test_a_strength_of_ones_own() -> None:
    model, x = Chain(), torch.randn(2, 2, 7, 11)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        plain = model(x)
        alpha = torch.tensor(2.5)
        twin.near.raw_locality[[1, 2]] = alpha + torch.log(-torch.expm1(-5 * alpha)) / 5
        expected = twin(x)
        with tcnn_probe.ablate(model, {"near": [1, 2]}, "frozen", locality_strength=2.5):
            torch.testing.assert_close(model(x), expected)
            with tcnn_probe.ablate(model, {"near": [1, 2]}, "frozen", locality_strength=30.0):
                assert not torch.allclose(model(x), expected, atol=1e-4)
            torch.testing.assert_close(model(x), expected)
        assert torch.equal(model(x), plain)
    assert torch.equal(model.near.raw_locality, Chain().near.raw_locality)


def test_what_is_written_meanwhile_is_undone_at_the_end() -> None:
    model = Chain()
    kept = model.near.raw_locality.detach().clone()
    with pytest.raises(ZeroDivisionError), tcnn_probe.ablate(model, {"near": [3]}, "frozen"):  # noqa: PT012
        with torch.no_grad():
            model.near.raw_locality += 1
        raise ZeroDivisionError
    moved = [0, 1, 2, 4, 5, 6, 7, 8]
    assert torch.equal(model.near.raw_locality[3], kept[3])
    assert torch.equal(model.near.raw_locality[moved], kept[moved] + 1)


def test_a_backward_after_the_end() -> None:
    """Putting back what is as it was touches nothing that a gradient needs."""
    model, x = Chain(), torch.randn(2, 2, 7, 11)

    def output() -> Tensor:
        return model(x).sum()

    before = output()
    with tcnn_probe.ablate(model, "near", "frozen"):
        inside = output()
    (before + inside).backward()
    assert model.near.raw_locality.grad is not None
