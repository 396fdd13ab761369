"""Grafit's losses against loops over Eqs. 2.1 to 2.4 in float64, and its training as a run."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_model.training.command import train
from tcnn_model.training.grafit import (
    Grafit,
    GrafitTask,
    instance_loss,
    neighbour_scores,
)
from tcnn_model.training.sources import open_sources
from tests.tcnn_model.training.runs import assert_same_weights, config, finish

GRAFIT: dict[str, Any] = {
    "objective": "grafit", "data": "parity", "ema": 0.9, "repeated_augmentation": 2, "embedding_dim": 8,
}  # fmt: skip


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def by_hand(
    embedding: list[float],
    neighbours: list[tuple[list[float], int]],
    label: int,
    sigma: float,
) -> float:
    """Eqs. 2.2 and 2.3 of one image, without itself among the others."""
    weights = [
        math.exp(cosine(embedding, neighbour) / sigma) for neighbour, _ in neighbours
    ]
    return -math.log(
        sum(w for w, (_, y) in zip(weights, neighbours, strict=True) if y == label)
        / sum(weights)
    )


def instance_by_hand(predictions: Tensor, targets: Tensor) -> float:
    """Eq. 2.1, mean over images."""
    images, views, _ = predictions.shape
    pairs = [(i, j) for i in range(views) for j in range(views) if i != j]
    total = sum(
        cosine(predictions[b, i].tolist(), targets[b, j].tolist())
        for b in range(images)
        for i, j in pairs
    )
    return -total / (views * (views - 1)) / images


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def test_instance_loss_by_hand() -> None:
    predictions = random(5, 3, 7)
    targets = random(5, 3, 7, seed=1)
    # A mean of thirty cosines, none above 1.
    assert instance_loss(predictions, targets).item() == pytest.approx(
        instance_by_hand(predictions, targets), abs=1e-14
    )
    # Views that are alike have a cosine of 1.
    views = predictions[:, :1].expand(5, 3, 7)
    assert instance_loss(views, views).item() == pytest.approx(-1)


def test_neighbour_scores_by_hand() -> None:
    embeddings = random(5, 7)
    memory = random(11, 7, seed=1)
    labels = torch.arange(11) % 3
    # An image that is in the memory must not be its own neighbour.
    itself = torch.arange(11) == torch.tensor([4, 0, 10, 7, 1])[:, None]
    for mask in (None, itself):
        scores = neighbour_scores(
            embeddings, memory, labels, 4, temperature=0.3, itself=mask
        )
        for image in range(5):
            left = [n for n in range(11) if mask is None or not mask[image, n]]
            neighbours = [(memory[n].tolist(), int(labels[n])) for n in left]
            expected = [
                by_hand(embeddings[image].tolist(), neighbours, label, 0.3)
                for label in range(3)
            ]
            assert (-scores[image, :3]).tolist() == pytest.approx(expected, rel=1e-12)
        # The fourth class has no neighbour.
        assert scores[:, 3].tolist() == [math.log(torch.finfo(torch.float64).tiny)] * 5


class Trunk(nn.Linear):
    """The part of timm's models that Grafit needs."""

    head_hidden_size = 5

    def reset_classifier(self, classes: int) -> None:
        assert classes == 0


def grafit(seed: int) -> Grafit:
    torch.manual_seed(seed)
    return Grafit(Trunk(7, 5), 2, 13, dim=3, temperature=0.2).double()


@pytest.mark.parametrize("weight", [0.0, 0.6, 1.0])
def test_task_is_the_sum_of_both_losses(weight: float) -> None:
    """4 images of 3 views; two images of an earlier batch are in the memory, one of which comes again."""
    # Other weights than the target's, so that the two cannot be exchanged.
    model = grafit(0).float()
    target = grafit(1).float().eval()
    before = random(2, 3).float()
    old = torch.tensor([9, 4])
    images = random(12, 7, seed=2).float()
    model.memory[old] = before
    model.labels[old] = torch.tensor([1, 0])
    labels = torch.tensor([1, 1, 0, 0])
    numbers = torch.tensor([2, 12, 4, 0])
    result = GrafitTask(model, target, 3, instance_weight=weight)(
        images, torch.stack([labels, numbers], 1).repeat_interleave(3, 0)
    )
    with torch.no_grad():
        ours, goals = (
            network.embed(images).unflatten(0, (4, 3)) for network in (model, target)
        )
        predictions = model.predictor(model.embed(images)).unflatten(0, (4, 3))
    remembered = {9: (before[0].tolist(), 1)}
    for n, (label, number) in enumerate(
        zip(labels.tolist(), numbers.tolist(), strict=True)
    ):
        # The memory keeps half of what it had of an image.
        half = ours[n, 0] / 2 + (before[1] / 2 if number == 4 else 0)
        remembered[number] = half.tolist(), label
        torch.testing.assert_close(model.memory[number], half)
    losses = []
    for n, number in enumerate(numbers.tolist()):
        neighbours = [
            entry for neighbour, entry in remembered.items() if neighbour != number
        ]
        losses.append(by_hand(ours[n, 0].tolist(), neighbours, int(labels[n]), 0.2))
    expected = sum(losses) / 4 + weight * instance_by_hand(predictions, goals)
    # Cosines of at most 1 over a temperature of 0.2, in numerator and denominator.
    terms = sum(map(abs, losses)) / 4 + 1 + 2 / 0.2
    assert result["loss"].item() == pytest.approx(
        expected, abs=16 * torch.finfo(torch.float32).eps * terms
    )
    assert result["targets"].tolist() == labels.tolist()
    assert result["output"].shape == (4, 2)
    result["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    # The target follows as a moving average, never by gradients.
    assert all(parameter.grad is None for parameter in target.parameters())


def test_views_that_are_apart_are_refused() -> None:
    targets = torch.tensor([[0, 3], [0, 3], [1, 4], [1, 5]])
    with pytest.raises(
        ValueError, match="expected 2 views of each image, one after the other"
    ):
        GrafitTask(grafit(0), grafit(0), 2)(random(4, 7), targets)


def test_a_run_interrupted_or_not(tmp_path: Path) -> None:
    """The memory and the target network are in the checkpoint; validation is by neighbours, on coarse labels."""
    complete = finish(config(tmp_path / "whole", **GRAFIT))
    settings = config(tmp_path / "twice", **GRAFIT)
    for result in train(settings, progress=False):
        if result.epoch == 1:
            break
    again = finish(settings, resume=True)
    assert_same_weights(again, complete)
    known = complete["model"]["labels"] >= 0
    assert 12 < known.sum() <= 24  # of 24 images 12 in each of two epochs
    parity = open_sources("parity", "", ("train", "validation"))[0]
    fine = open_sources("digits", "", ("train", "validation"))[0]
    for number in known.nonzero()[:, 0].tolist():
        assert (
            complete["model"]["labels"][number]
            == parity.read(number)[1]
            == fine.read(number)[1] % 2
        )
    assert (complete["model"]["memory"][~known] == 0).all()
    assert complete["history"][-1]["train_loss"] < 20
    assert not torch.equal(
        complete["model"]["trunk.conv1.weight"], complete["ema"]["trunk.conv1.weight"]
    )


@torch.no_grad()
def test_a_refreshed_memory_is_of_the_final_weights() -> None:
    """Eq. 2.3 of an image against embeddings that are all computed with the same weights."""
    model = grafit(0).float().eval()
    images = random(13, 7).float()
    numbers = torch.arange(13)
    labels = torch.arange(13) % 2
    model.remember(numbers, labels, random(13, 3, seed=5).float())
    # Out of order, and in unequal parts: embeddings are stored by number, not by place.
    order = torch.tensor([7, 2, 11, 0, 12, 5, 9, 1, 10, 3, 8, 6, 4])
    for part in (order[:5], order[5:]):
        model.refresh(part, labels[part], images[part])
    embeddings = model.projector(model.trunk(images))
    neighbours = [(embeddings[n].tolist(), int(labels[n])) for n in range(13)]
    image = random(1, 7, seed=3).float()
    (scores,) = model(image).tolist()
    query = model.projector(model.trunk(image))[0].tolist()
    expected = [-by_hand(query, neighbours, label, 0.2) for label in (0, 1)]
    # Cosines of at most 1 are divided by 0.2.
    assert scores == pytest.approx(
        expected, abs=32 * torch.finfo(torch.float32).eps / 0.2
    )


def test_a_linear_projector_is_one_matrix(tmp_path: Path) -> None:
    """Grafit FC."""
    run = finish(config(tmp_path / "fc", **GRAFIT, projector="linear", epochs=2))
    projector = [name for name in run["model"] if name.startswith("projector.")]
    assert projector == ["projector.weight", "projector.bias"]
    assert run["model"]["projector.weight"].shape == (8, 16)


def test_coarse_labels_from_a_file(tmp_path: Path) -> None:
    """A file that says which digits are even trains as the labels of even and odd do."""
    names = ("even", "odd")
    lines = [f"{digit}, {names[digit % 2]}" for digit in (7, 2, 9, 0, 1, 3, 8, 5, 4, 6)]
    # An empty line, and a class that the data does not have, change nothing.
    (tmp_path / "parity.csv").write_text("\n".join([*lines, "", "ten,even"]))
    settings = GRAFIT | {
        "data": "digits",
        "coarse_labels": str(tmp_path / "parity.csv"),
    }
    assert_same_weights(
        finish(config(tmp_path / "file", **settings)),
        finish(config(tmp_path / "parity", **GRAFIT)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0,even\n1,odd,3",
            r"expected lines of class,coarse in .*, got \['1', 'odd', '3'\]",
        ),
        ("0,even\n1,odd", "lacks 8 of 10 classes: 2, 3, 4, 5, 6"),
        ("0,even\n1,odd\n0,even\n1,even", "has two coarse labels of 1"),
        (None, "coarse_labels: cannot read"),
    ],
)
def test_files_of_coarse_labels_that_do_not_fit(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "coarse.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_sources("digits", "", ("train", "validation"), str(path))


def test_settings_that_do_not_fit(tmp_path: Path, refusal: Callable[..., str]) -> None:
    run = tmp_path / "run"
    arguments = f"resnet18 --recipe grafit --out {run} --warmup-epochs 0".split()
    # The recipe takes four views of an image: 6 is no multiple, and 4 are a single image without neighbours.
    for wrong in (
        "--ema 0",
        "--batch-size 6",
        "--batch-size 4",
        "--mixup 0.8",
        "--compile",
        "--reparameterize-at 3",
        "--temperature 0",
    ):
        said = refusal(*arguments, *wrong.split())
        assert "objective: grafit needs ema, got" in said
    said = refusal(*arguments, "--embedding-dim", 0)
    assert "embedding_dim: expected 1 or more, got 0" in said
    assert not run.exists()


def test_an_image_finds_its_class_by_its_neighbours() -> None:
    """Embeddings of two clusters: each image has the label of the other members of its own."""
    model = grafit(0).eval()
    centres = F.normalize(random(2, 3), dim=-1)
    labels = torch.arange(13) % 2
    model.remember(
        torch.arange(13), labels, centres[labels] + 0.01 * random(13, 3, seed=1)
    )
    assert model.scores(centres).argmax(1).tolist() == [0, 1]
    # The memory has seen nothing yet.
    scores = grafit(0).scores(centres)
    lowest = math.log(torch.finfo(torch.float64).tiny)
    assert scores.tolist() == [[lowest] * 2] * 2
