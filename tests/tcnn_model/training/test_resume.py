"""A run that is stopped at any moment, in any way, resumes as if it had not been stopped."""

import contextlib
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tcnn_model.training import loop, session
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tests.tcnn_model.training.runs import (
    assert_same_weights,
    config,
    finish,
    fork,
)

# The settings use the generators of Python (RandAugment, erasing), NumPy (mixup) and torch (drop
# path), and the state of the optimizer, the EMA and the gates.
EVERYTHING: dict[str, Any] = {
    "auto_augment": "rand-m9-mstd0.5-mmax9-inc1",
    "random_erasing": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.2,
    "repeated_augmentation": 3,
    "ema": 0.9,
    # A step has two batches, and a run must not resume between them.
    "accumulate": 2,
    "batch_size": 4,
    "checkpoint_steps": 1,
    # The rate is large, so that a step that is lost or repeated shows in the weights.
    "lr": 1e-2,
}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the last checkpoint of an uninterrupted run,
    which does not depend on the number of checkpoints.
    """
    return finish(config(tmp_path_factory.mktemp("whole"), **EVERYTHING))


# This is not an Exception, as no handler may catch it and clean up: after a power cut none could.
class PowerCut(BaseException):
    pass


def _cut(
    monkeypatch: pytest.MonkeyPatch,
    settings: Config,
    step: int,
    *,
    resume: bool = False,
) -> None:
    """Train until a step of this call is done but its checkpoint is not written, or to the end."""
    steps: list[None] = []
    make_step = loop.Training.make_step

    def counted(self: Any, *arguments: Any) -> None:
        make_step(self, *arguments)
        steps.append(None)
        if len(steps) == step:
            raise PowerCut

    with monkeypatch.context() as patch, contextlib.suppress(PowerCut):
        patch.setattr(loop.Training, "make_step", counted)
        finish(settings, resume=resume)


def _disturb(number: int) -> None:
    """Change the state of the generators, which must not matter."""
    torch.manual_seed(number)
    random.seed(number)


def test_run_that_is_cut_repeatedly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has 2 epochs of 3 steps, converts to a T-CNN after the first,
    and writes a checkpoint after each step.
    """
    further = {
        **EVERYTHING,
        "img_size": 64,
        "reparameterize_at": 1,
        "keep_optimizer": True,
    }
    expected = finish(config(tmp_path / "whole", **further))
    assert [result["epoch"] for result in expected["history"]] == [0, 1, 2]
    settings = config(tmp_path / "cut", **further)
    for number in range(4):
        # Each call loses its second step.
        _cut(monkeypatch, settings, 2, resume=number > 0)
        _disturb(number)
    # The first epoch has three steps, of which each call has kept one.
    assert (Path(settings.out) / "checkpoints" / "epoch-0001.pt").exists()
    assert_same_weights(finish(settings, resume=True), expected)
    assert not (Path(settings.out) / "checkpoints" / "within.pt").exists()


def test_run_that_is_cut_within_an_epoch_repeats_the_epoch(
    complete: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are no checkpoints within epochs, so that the last checkpoint is that of an epoch.
    settings = config(tmp_path / "cut", **{**EVERYTHING, "checkpoint_steps": None})
    # An epoch has three steps, so the fifth is in the middle of the second epoch.
    _cut(monkeypatch, settings, 5)
    _disturb(1)
    assert_same_weights(finish(settings, resume=True), complete)


def test_killed_process_with_workers_resumes(complete: dict[str, Any], tmp_path: Path) -> None:
    """The process and its workers are killed at random moments after new checkpoints."""
    settings = config(tmp_path / "killed", **EVERYTHING, workers=1)
    generator = random.Random(0)
    for kill in range(2):
        before = _written(settings)
        process = fork(lambda resume=kill > 0: finish(settings, resume=resume))  # type: ignore[misc]
        while _written(settings) == before:
            assert os.waitpid(process, os.WNOHANG) == (0, 0)
            time.sleep(0.002)
        # The delay is up to a tenth of a second: the kill comes within a step, or while a
        # checkpoint is written.
        time.sleep(generator.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert_same_weights(finish(settings, resume=True), complete)


def _written(settings: Config) -> set[tuple[str, int]]:
    """Return the names and times of checkpoints."""
    checkpoints = set()
    for path in Path(settings.out).glob("checkpoints/*.pt"):
        with contextlib.suppress(FileNotFoundError):
            checkpoints.add((path.name, path.stat().st_mtime_ns))
    return checkpoints


def test_nonfinite_loss_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "run", epochs=3, checkpoint_steps=1)
    criterion = "tcnn_model.training.build.create_criterion"
    calls: list[None] = []

    def breaks(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        # An epoch has three steps, so the fifth loss is that of step 2 of epoch 2.
        return scores.sum() * (float("nan") if len(calls) == 5 else 1e-3)

    monkeypatch.setattr(criterion, lambda *_, **__: breaks)
    with pytest.raises(
        loop.NonFiniteLossError,
        match=r"the loss is nan in epoch 2, step 2; the batch is in .*-0\.pt",
    ):
        finish(settings)
    batch = torch.load(tmp_path / "run" / "nonfinite-0.pt", weights_only=True)
    assert batch["images"].shape == (8, 3, 32, 32)
    assert batch["targets"].shape == (8,)
    saved = torch.load(tmp_path / "run/checkpoints/within.pt", weights_only=True)
    # The checkpoint is that of the step before, from which the run can continue.
    assert saved["epoch"] == 2
    assert saved["step"] == 1
    assert all(value.isfinite().all() for value in saved["model"].values())


def test_files_that_a_run_leaves(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=4, keep=2)
    expected = finish(settings)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
        ".lock",
        "best.pt",
        "classes.csv",
        "config.toml",
        "epoch-0003.pt",
        "epoch-0004.pt",
        "epochs.csv",
    ]
    # This is the rate of the last of 12 steps.
    rate = 1e-4 * (1 + math.cos(math.pi * 11 / 12)) / 2
    assert expected["history"][-1]["lr"] == pytest.approx(rate)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert (
        best["epoch"]
        == max(expected["history"], key=lambda result: (result["top1"], result["epoch"]))["epoch"]
    )
    # The best weights reach the best accuracy again.
    again = config(tmp_path / "again", weights=str(tmp_path / "best.pt"))
    first = next(train(again, progress=False))
    assert first.top1 == max(result["top1"] for result in expected["history"])


def test_tensorboard_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    """Each epoch is logged once, without NaN, also by a resumed run; a missing package is named."""
    shown: dict[tuple[str, int], float] = {}

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert folder == str(tmp_path / "run" / "tensorboard")
            assert purge_step == 0
            shown.clear()

        def add_scalar(self, name: str, value: float, step: int) -> None:
            assert shown.setdefault((name, step), value) is value

        def flush(self) -> None: ...

        close = flush

    module = "torch.utils.tensorboard"
    # A stand-in replaces the package, which is optional.
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(SummaryWriter=Writer))
    settings = config(tmp_path / "run", tensorboard=True, epochs=2)
    _cut(monkeypatch, settings, 5)
    history = finish(settings, resume=True)["history"]
    losses = {step: value for (name, step), value in shown.items() if name == "train_loss"}
    assert losses == {step: history[step]["train_loss"] for step in (1, 2)}
    monkeypatch.setitem(sys.modules, module, None)
    out = tmp_path / "other"
    said = refusal("resnet18", "--tensorboard", "--limit", 64, "--out", out)
    assert "--tensorboard needs the package tensorboard: pip install" in said


def test_resume_with_other_settings_is_refused(tmp_path: Path, refusal: Callable[..., str]) -> None:
    finish(config(tmp_path / "run"))
    message = "belongs to a run with other settings (lr: 0.0001 there, 1.0 now)"
    assert message in refusal("--resume", "--out", tmp_path / "run", "--lr", 1)
    message = "already holds a run: --resume continues it"
    assert message in refusal("resnet18", "--out", tmp_path / "run")
    # Another machine may have another number of cores, which changes no result.
    assert "workers" in session.FREE


def _colours(root: Path, names: tuple[str, ...]) -> None:
    """Write images of one colour for each class, the first of them black."""
    for split in ("train", "val"):
        for number, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for image in range(8):
                Image.new("RGB", (32, 32), (60 * number,) * 3).save(
                    root / split / name / f"{image}.png"
                )


@pytest.mark.parametrize(
    ("renamed", "message"),
    [
        ({"dog": "1"}, "label 0 was '10' and is '1' now"),
        ({"dog": "zebra"}, "label 2 was 'dog' and is 'zebra' now"),
    ],
)
def test_a_run_is_not_continued_with_other_classes(
    renamed: dict[str, str], message: str, tmp_path: Path
) -> None:
    _colours(tmp_path / "data", ("10", "2", "dog"))
    settings = config(
        tmp_path / "run",
        data=str(tmp_path / "data"),
        epochs=2,
        limit=None,
    )
    training = train(settings, progress=False)
    next(training)
    training.close()
    for name in ("best.pt", "checkpoints/epoch-0000.pt"):
        saved = torch.load(tmp_path / "run" / name, weights_only=True)
        assert saved["classes"] == ["10", "2", "dog"]
    table = (tmp_path / "run" / "classes.csv").read_text()
    assert table.split() == ["label,class", "0,10", "1,2", "2,dog"]
    for split in ("train", "val"):
        for old, new in renamed.items():
            (tmp_path / "data" / split / old).rename(tmp_path / "data" / split / new)
    with pytest.raises(ValueError, match=f"other classes than the data: {message}"):
        finish(settings, resume=True)
