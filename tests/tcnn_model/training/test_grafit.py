"""Grafit: its losses against loops over Eqs. 2.1 to 2.4 in float64, and its runs."""

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
    "objective": "grafit", "data": "parity", "ema": 0.9, "repeated_augmentation": 2,
    "embedding_dim": 8,
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
    """Return Eqs. 2.2 and 2.3 for one image, which is not among its neighbours."""
    weights = [math.exp(cosine(embedding, neighbour) / sigma) for neighbour, _ in neighbours]
    return -math.log(
        sum(w for w, (_, y) in zip(weights, neighbours, strict=True) if y == label) / sum(weights)
    )


def instance_by_hand(predictions: Tensor, targets: Tensor) -> float:
    """Return Eq. 2.1 as a mean over images."""
    images, views, _ = predictions.shape
    pairs = [(i, j) for i in range(views) for j in range(views) if i != j]
    total = sum(
        cosine(predictions[b, i].tolist(), targets[b, j].tolist())
        for b in range(images)
        for i, j in pairs
    )
    return -total / (views * (views - 1)) / images


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_instance_loss_by_hand() -> None:
    predictions = random(5, 3, 7)
    targets = random(5, 3, 7, seed=1)
    # The loss is a mean of thirty cosines, none of which exceeds 1.
    assert instance_loss(predictions, targets).item() == pytest.approx(
        instance_by_hand(predictions, targets), abs=1e-14
    )
    # Equal views have a cosine of 1.
    views = predictions[:, :1].expand(5, 3, 7)
    assert instance_loss(views, views).item() == pytest.approx(-1)


def test_neighbour_scores_by_hand() -> None:
    embeddings = random(5, 7)
    memory = random(11, 7, seed=1)
    labels = torch.arange(11) % 3
    # An image in the memory must not be its own neighbour.
    itself = torch.arange(11) == torch.tensor([4, 0, 10, 7, 1])[:, None]
    for mask in (None, itself):
        scores = neighbour_scores(embeddings, memory, labels, 4, temperature=0.3, itself=mask)
        for image in range(5):
            left = [n for n in range(11) if mask is None or not mask[image, n]]
            neighbours = [(memory[n].tolist(), int(labels[n])) for n in left]
            expected = [
                by_hand(embeddings[image].tolist(), neighbours, label, 0.3) for label in range(3)
            ]
            assert (-scores[image, :3]).tolist() == pytest.approx(expected, rel=1e-12)
        # No neighbour belongs to the fourth class.
        assert scores[:, 3].tolist() == [math.log(torch.finfo(torch.float64).tiny)] * 5


class Trunk(nn.Linear):
    """Part of timm's interface that Grafit needs."""

    head_hidden_size = 5

    def reset_classifier(self, classes: int) -> None:
        assert classes == 0


def grafit(seed: int) -> Grafit:
    torch.manual_seed(seed)
    return Grafit(Trunk(7, 5), 2, 13, dim=3, temperature=0.2).double()


@pytest.mark.parametrize("weight", [0.0, 0.6, 1.0])
def test_task_is_the_sum_of_both_losses(weight: float) -> None:
    """There are 4 images with 3 views; the memory holds two images
    of an earlier batch, one of which comes again.
    """
    # The target has other weights than the model, so that exchanging the two would show.
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
        ours, goals = (network.embed(images).unflatten(0, (4, 3)) for network in (model, target))
        predictions = model.predictor(model.embed(images)).unflatten(0, (4, 3))
    remembered = {9: (before[0].tolist(), 1)}
    for n, (label, number) in enumerate(zip(labels.tolist(), numbers.tolist(), strict=True)):
        # The new entry is half the embedding, plus half the old entry if there is one.
        half = ours[n, 0] / 2 + (before[1] / 2 if number == 4 else 0)
        remembered[number] = half.tolist(), label
        torch.testing.assert_close(model.memory[number], half)
    losses = []
    for n, number in enumerate(numbers.tolist()):
        neighbours = [entry for neighbour, entry in remembered.items() if neighbour != number]
        losses.append(by_hand(ours[n, 0].tolist(), neighbours, int(labels[n]), 0.2))
    expected = sum(losses) / 4 + weight * instance_by_hand(predictions, goals)
    # Cosines of at most 1 are divided by a temperature of 0.2, in numerator and denominator.
    terms = sum(map(abs, losses)) / 4 + 1 + 2 / 0.2
    assert result["loss"].item() == pytest.approx(
        expected, abs=16 * torch.finfo(torch.float32).eps * terms
    )
    assert result["targets"].tolist() == labels.tolist()
    assert result["output"].shape == (4, 2)
    result["loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    # The target is a moving average and gets no gradients.
    assert all(parameter.grad is None for parameter in target.parameters())


def test_views_of_an_image_must_be_adjacent() -> None:
    targets = torch.tensor([[0, 3], [0, 3], [1, 4], [1, 5]])
    with pytest.raises(ValueError, match="expected 2 views of each image, one after the other"):
        GrafitTask(grafit(0), grafit(0), 2)(random(4, 7), targets)


@pytest.mark.study
def test_an_interrupted_run_resumes_to_the_same_weights(tmp_path: Path) -> None:
    """The checkpoint holds the memory and the target network;
    validation uses neighbours, with coarse labels.
    """
    complete = finish(config(tmp_path / "whole", **GRAFIT))
    settings = config(tmp_path / "twice", **GRAFIT)
    for result in train(settings, progress=False):
        if result.epoch == 1:
            break
    again = finish(settings, resume=True)
    assert_same_weights(again, complete)
    known = complete["model"]["labels"] >= 0
    assert 12 < known.sum() <= 24  # each of two epochs sees 12 of the 24 images
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
def test_a_refreshed_memory_uses_the_final_weights() -> None:
    """Eq. 2.3 is computed with embeddings that all come from the same weights."""
    model = grafit(0).float().eval()
    images = random(13, 7).float()
    numbers = torch.arange(13)
    labels = torch.arange(13) % 2
    model.remember(numbers, labels, random(13, 3, seed=5).float())
    # Images come out of order and in unequal parts, as embeddings are stored by the images'
    # numbers.
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
    assert scores == pytest.approx(expected, abs=32 * torch.finfo(torch.float32).eps / 0.2)


def test_a_linear_projector_is_one_matrix(tmp_path: Path) -> None:
    """Grafit FC has a linear projector."""
    run = finish(config(tmp_path / "fc", **GRAFIT, projector="linear", epochs=2))
    projector = [name for name in run["model"] if name.startswith("projector.")]
    assert projector == ["projector.weight", "projector.bias"]
    assert run["model"]["projector.weight"].shape == (8, 16)


@pytest.mark.study
def test_coarse_labels_are_read_from_a_file(tmp_path: Path) -> None:
    """A file that says which digits are even trains like the built-in labels of even and odd."""
    names = ("even", "odd")
    lines = [f"{digit}, {names[digit % 2]}" for digit in (7, 2, 9, 0, 1, 3, 8, 5, 4, 6)]
    # An empty line, or a class that the data do not have, changes nothing.
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
def test_files_of_coarse_labels_that_do_not_fit_are_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "coarse.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_sources("digits", "", ("train", "validation"), str(path))


def test_settings_that_do_not_fit_are_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    run = tmp_path / "run"
    arguments = f"resnet18 --recipe grafit --out {run} --warmup-epochs 0".split()
    # The recipe takes four views of an image: 6 is not a multiple of 4, and 4 leaves a single image
    # without neighbours.
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
    """Embeddings form two clusters, and each image gets the label
    of the other members of its cluster.
    """
    model = grafit(0).eval()
    centres = F.normalize(random(2, 3), dim=-1)
    labels = torch.arange(13) % 2
    model.remember(torch.arange(13), labels, centres[labels] + 0.01 * random(13, 3, seed=1))
    assert model.scores(centres).argmax(1).tolist() == [0, 1]
    # This memory is empty.
    scores = grafit(0).scores(centres)
    lowest = math.log(torch.finfo(torch.float64).tiny)
    assert scores.tolist() == [[lowest] * 2] * 2
