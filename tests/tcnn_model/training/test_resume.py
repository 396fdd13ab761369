"""A run that was stopped at any moment, in any way, goes on as if it had not been."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnn_model.training import loop, session
from tcnn_model.training.command import main, train
from tcnn_model.training.config import Config
from tests.tcnn_model.training.runs import assert_same_weights, config, finish, fork, last_checkpoint

# Python's generator (RandAugment, erasing), NumPy's (mixup) and torch's (drop path); optimizer, EMA and gates' state.
EVERYTHING: dict[str, Any] = {
    "auto_augment": "rand-m9-mstd0.5-mmax9-inc1",
    "random_erasing": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "drop_path": 0.2,
    "repeated_augmentation": 3,
    "ema": 0.9,
    "accumulate": 2,
    "batch_size": 4,
    "checkpoint_steps": 1,
    "lr": 1e-2,
}


class PowerCut(BaseException):
    pass


def _cut(monkeypatch: pytest.MonkeyPatch, settings: Config, step: int, *, resume: bool = False) -> int:
    """Train until a step of this call has been made, perhaps within the writing of its checkpoint; steps made."""
    made = []

    def counted(self: Any, *arguments: Any) -> None:
        make_step(self, *arguments)
        made.append(None)
        if len(made) == step:
            raise PowerCut

    make_step = loop.Training.make_step
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "make_step", counted)
        try:
            finish(settings, resume=resume)
        except PowerCut:
            pass
    return len(made)


@pytest.mark.parametrize("every", [1, None])
def test_run_cut_at_every_step(every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 epochs of 3 steps, the T-CNN made after the first; also of a copy that has no checkpoints within epochs."""
    further = {**EVERYTHING, "checkpoint_steps": every, "img_size": 64, "reparameterize_at": 1, "keep_optimizer": True}
    expected = finish(config(tmp_path / "whole", **further))
    assert [result["epoch"] for result in expected["history"]] == [0, 1, 2]
    for step in (2, 4) if every is None else (1, 3, 5):
        settings = config(tmp_path / f"cut-{step}", **further)
        assert _cut(monkeypatch, settings, step) == step
        torch.manual_seed(step)
        random.seed(step)
        assert_same_weights(finish(settings, resume=True), expected)
        assert not (Path(settings.out) / "checkpoints" / "within.pt").exists()


def test_killed_processes_with_workers(tmp_path: Path) -> None:
    """A process and those that load its images are killed at random moments until one comes to its end."""
    settings = config(tmp_path / "killed", **EVERYTHING, workers=1)
    expected = finish(config(tmp_path / "whole", **EVERYTHING))
    generator, kills = random.Random(0), 0
    while True:
        begun = (tmp_path / "killed" / "config.toml").exists()
        process = fork(lambda begun=begun: finish(settings, resume=begun))  # type: ignore[misc]
        allowed = generator.uniform(0.2, 0.6) * (1 + kills / 2)
        end = time.monotonic() + allowed
        while (ended := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
        if ended[0]:
            assert ended[1] == 0
            break
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1
    assert kills
    assert_same_weights(last_checkpoint(settings), expected)


def test_sigterm_writes_a_checkpoint_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**EVERYTHING, "checkpoint_steps": None}
    expected = finish(config(tmp_path / "whole", **options))
    settings = config(tmp_path / "stopped", **options)
    before, make_step = signal.getsignal(signal.SIGTERM), loop.Training.make_step

    def asked_to_stop(self: Any, *arguments: Any) -> None:
        make_step(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "make_step", asked_to_stop)
        patch.setattr("tcnn_model.training.command.parse", lambda _: (settings, False))
        assert main([]) == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped in epoch 1, after step 1; go on with: tcnn-finetune --resume" in capsys.readouterr().err
    assert torch.load(tmp_path / "stopped/checkpoints/within.pt", weights_only=True)["step"] == 1
    assert main(["--resume", "--out", settings.out]) == 0
    assert_same_weights(last_checkpoint(settings), expected)
    assert f"its weights: {tmp_path / 'stopped' / 'best.pt'}" in capsys.readouterr().err


def test_loss_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path / "run", epochs=3, checkpoint_steps=1)
    criterion = "tcnn_model.training.build.create_criterion"
    calls: list[None] = []

    def breaks(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return scores.sum() * (float("nan") if len(calls) == 5 else 1e-3)

    monkeypatch.setattr(criterion, lambda *_, **__: breaks)
    with pytest.raises(loop.NonFiniteLossError, match=r"the loss is nan in epoch 2, step 2; the batch is in .*-0\.pt"):
        finish(settings)
    batch = torch.load(tmp_path / "run" / "nonfinite-0.pt", weights_only=True)
    assert (batch["images"].shape, batch["targets"].shape) == ((8, 3, 32, 32), (8,))
    kept = torch.load(tmp_path / "run/checkpoints/within.pt", weights_only=True)
    assert (kept["epoch"], kept["step"]) == (2, 1)
    assert all(value.isfinite().all() for value in kept["model"].values())


def test_files_of_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=4, keep=2)
    expected = finish(settings)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [
        "best.pt",
        "config.toml",
        "epoch-0003.pt",
        "epoch-0004.pt",
        "epochs.csv",
    ]
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert best["epoch"] == max(expected["history"], key=lambda result: (result["top1"], result["epoch"]))["epoch"]
    again = config(tmp_path / "again", weights=str(tmp_path / "best.pt"))
    first = next(train(again, progress=False))
    assert first.top1 == max(result["top1"] for result in expected["history"])


def test_resume_with_other_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(config(tmp_path / "run"))
    assert main(["--resume", "--out", str(tmp_path / "run"), "--lr", "1"]) == 2
    assert "of a run with other settings (lr: 0.0001 there, 1.0 now)" in capsys.readouterr().err
    assert main(["resnet18", "--out", str(tmp_path / "run")]) == 2
    assert "holds a run already: --resume goes on with it" in capsys.readouterr().err
    assert "workers" in session.FREE
