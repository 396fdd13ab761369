"""Losses of students against sums in float64,
their second token, and the check that ends the study.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

import distillation
from common import stepwise


def log_softmax(row: list[float], temperature: float) -> list[float]:
    scaled = [value / temperature for value in row]
    total = math.log(sum(math.exp(value) for value in scaled))
    return [value - total for value in scaled]


def cross_entropy(rows: list[list[float]], labels: list[int]) -> float:
    terms = [-log_softmax(row, 1.0)[label] for row, label in zip(rows, labels, strict=True)]
    return sum(terms) / len(terms)


def test_losses_are_those_of_the_thesis() -> None:
    torch.manual_seed(0)
    images, classes = 5, 7
    of_class, of_token, taught = 3 * torch.randn(3, images, classes).double()
    labels = torch.tensor([0, 3, 6, 1, 1])
    by_labels = cross_entropy(of_class.tolist(), labels.tolist())

    # Eq. 3.2 with lambda = 0.1 and tau = 3.
    divergence = 0.0
    for ours, taught_row in zip(of_class.tolist(), taught.tolist(), strict=True):
        log_p, log_q = log_softmax(taught_row, 3.0), log_softmax(ours, 3.0)
        divergence += sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True))
    expected = 0.9 * by_labels + 0.1 * 9 * divergence / images
    loss = distillation.loss_of(of_class, labels, taught, soft=True)
    # Both losses are sums of some hundred terms.
    assert float(loss) == pytest.approx(expected, rel=1e-13)

    # Eq. 3.3: each token has its own target.
    decided = [max(range(classes), key=row.__getitem__) for row in taught.tolist()]
    expected = (by_labels + cross_entropy(of_token.tolist(), decided)) / 2
    loss = distillation.loss_of((of_class, of_token), labels, taught, soft=False)
    assert float(loss) == pytest.approx(expected, rel=1e-13)


def test_students_with_a_second_token_start_with_the_same_weights() -> None:
    torch.manual_seed(0)
    model = distillation.small_vit()
    distilled = distillation.with_distillation_token(model)
    ours = model.state_dict()
    distilled_state = distilled.state_dict()
    assert set(distilled_state) - set(ours) == {
        "dist_token",
        "head_dist.weight",
        "head_dist.bias",
    }
    for name, value in ours.items():
        if name != "pos_embed":
            torch.testing.assert_close(distilled_state[name], value, rtol=0, atol=0)
    # timm's order: class token, distillation token, patches.
    places = distilled_state["pos_embed"][0]
    expected = ours["pos_embed"][0]
    assert len(places) == 18
    torch.testing.assert_close(places[2:], expected[1:], rtol=0, atol=0)


def test_the_second_token_learns_from_the_teacher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A teacher names one class for every image:
    the distillation token learns it, and the class token the labels.
    """
    images = torch.randn(96, 1, 8, 8)
    labels = torch.zeros(96, dtype=torch.long)
    monkeypatch.setattr(stepwise, "plain_digits", lambda training: (images, labels))
    monkeypatch.setattr(stepwise, "LR", 0.02)

    def teacher(batch: torch.Tensor) -> torch.Tensor:
        return 20.0 * torch.eye(10)[[4] * len(batch)]

    torch.manual_seed(0)
    student: Any = distillation.with_distillation_token(distillation.small_vit())
    distillation.learn_from(teacher, student, epochs=4, seed=0, soft=False)  # type: ignore[arg-type]
    student.set_distilled_training(True)
    with torch.no_grad():
        of_class, of_token = student.train()(images[:9])
    assert set(of_class.argmax(1).tolist()) == {0}
    assert set(of_token.argmax(1).tolist()) == {4}


def results(token: float = 0.1, top1: float = 0.8, teacher: float = 0.9) -> xr.Dataset:
    """Return results for three seeds and four kinds of students with two heads."""
    arms = list(distillation.TEACHERS)
    noise = 0.01 * np.array([-1.0, 0.0, 1.0])
    shares = np.broadcast_to(np.array([0.3, 0.2, token, 0.25])[:, None], (4, 3)) + 0.0
    shares[2] += noise
    heads = np.broadcast_to(np.arange(4.0)[:, None, None, None], (4, 3, 1, 2)) / 10
    dims = ("arm", "seed", "layer", "head")
    return xr.Dataset(
        {
            "top1": (dims[:2], np.full((4, 3), top1)),
            "disagreement": (
                ("arm", "seed", "teacher"),
                np.stack([shares, shares], -1),
            ),
            "teacher_top1": (("seed", "teacher"), np.full((3, 2), teacher)),
            "equivariance": (dims, heads),
            "distance": (dims, 1 - heads),
            "head_type": (dims, np.full((4, 3, 1, 2), "mixed", object)),
        },
        {"arm": arms, "teacher": ["CNN", "transformer"], "seed": range(3)},
    )
