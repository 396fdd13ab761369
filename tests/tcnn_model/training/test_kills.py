"""A run that is killed, stopped or out of disk space:
its files remain consistent, and none is left over.
"""

import csv
import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tcnn_model.training import checkpoint, loop
from tcnn_model.training.command import main, train
from tcnn_model.training.config import Config
from tests.tcnn_model.training.runs import (
    assert_same_weights,
    config,
    finish,
    fork,
    last_checkpoint,
)

# Each of the two epochs has one step, after which a checkpoint is written.
SHORT: dict[str, Any] = {"limit": 8, "checkpoint_steps": 1, "lr": 1e-2}
# Accuracies by epoch are scripted, as models this small learn nothing in two epochs: the best
# weights change in epoch 1, and again in epoch 2, which is as good.
ACCURACIES = [0.25, 0.5, 0.5]


@pytest.fixture(autouse=True)
def _scripted_accuracies(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(self: loop.Training, *_: object) -> tuple[float, float]:
        epoch = len(self.history) if self.step or not self.history else self.history[-1].epoch
        return 1.0, ACCURACIES[min(epoch, 2)]

    monkeypatch.setattr(loop.Training, "validate", validate)


def _kill_at_change(number: int, settings: Config) -> None:
    """Train, and kill this process before a change of a file."""
    changes = iter(range(10**6))

    def killing(change: Callable[..., None]) -> Callable[..., None]:
        def changed(*names: Any, **options: Any) -> None:
            if next(changes) == number:
                # As after SIGKILL, neither finally blocks nor exit handlers run.
                os._exit(9)
            change(*names, **options)

        return changed

    # The patch is never undone, as this process is a fork that ends with the run.
    for name in ("replace", "unlink", "remove"):
        setattr(os, name, killing(getattr(os, name)))
    finish(settings)


def _files(run: Path) -> list[str]:
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def test_files_are_consistent_after_a_kill_at_any_change(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run is killed before each replacement or removal of a file,
    when the file beside it is written, and then resumed to its end.
    """
    one_epoch = {**SHORT, "epochs": 1, "warmup_epochs": 0, "keep": 1}
    complete = finish(config(tmp_path / "whole", **one_epoch))
    expected_files = _files(tmp_path / "whole")
    kills = 0
    while True:
        settings = config(tmp_path / f"killed-{kills}", **one_epoch)
        process = fork(partial(_kill_at_change, kills, settings))
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status == 0:
            break
        assert status == 9
        kills += 1
        run = Path(settings.out)
        resume = (run / "config.toml").exists()
        capfd.readouterr()
        # Without checkpoints within epochs, a partial one would not be written anew.
        resumed = replace(settings, checkpoint_steps=None)
        assert_same_weights(finish(resumed, resume=resume), complete)
        assert _files(run) == expected_files, kills
        rows = list(csv.DictReader((run / "epochs.csv").read_text().splitlines()))
        assert [(int(row["epoch"]), float(row["top1"])) for row in rows] == [
            (0, 0.25),
            (1, 0.5),
        ]
        best = torch.load(run / "best.pt", weights_only=True)
        assert best["epoch"] == 1
        assert all(
            torch.equal(best["state_dict"][name], value)
            for name, value in complete["model"].items()
        )
        assert "best in epoch 1: 0.5000" in capfd.readouterr().err
    # Such a run replaces or removes at least nine files; with fewer kills, a change was not seen.
    assert kills >= 9


def test_later_of_two_equal_epochs_is_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are kept, and its number is printed."""
    finish(config(tmp_path, **SHORT))
    assert torch.load(tmp_path / "best.pt", weights_only=True)["epoch"] == 2
    assert "best in epoch 2: 0.5000" in capsys.readouterr().err


def test_checkpoints_are_sorted_by_number(tmp_path: Path) -> None:
    """Numbers have four or five digits, and one file only looks like a checkpoint."""
    # In alphabetical order, epoch-10000 would precede epoch-9999.
    settings = config(tmp_path, **{**SHORT, "epochs": 10_001, "keep": 2})
    run = train(settings, progress=False)
    next(run)
    run.close()
    folder = tmp_path / "checkpoints"
    first = folder / "epoch-0000.pt"
    state = torch.load(first, weights_only=True)
    history = [{**state["history"][0], "epoch": epoch} for epoch in range(10_000)]
    torch.save({**state, "epoch": 10_000, "history": history}, folder / "epoch-9999.pt")
    first.rename(folder / "epoch-x.pt")
    finish(settings, resume=True)
    assert sorted(path.name for path in folder.iterdir()) == [
        "epoch-10000.pt",
        "epoch-10001.pt",
        "epoch-x.pt",
    ]
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 1 + 10_002


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    """A run refuses a checkpoint with a single flipped bit in a weight."""
    settings = config(tmp_path, **SHORT)
    finish(settings)
    path = tmp_path / "checkpoints" / "epoch-0002.pt"
    content = path.read_bytes()
    weights = last_checkpoint(settings)["model"]["fc.weight"].numpy().tobytes()
    place = content.index(weights)
    # The step is a prime, so that all eight bits of a byte and all four bytes of a number have
    # their turn.
    for bit in range(0, 8 * len(weights), 997):
        damaged = bytearray(content)
        damaged[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError,
            match=r"epoch-0002\.pt is damaged, or is not a checkpoint .*the checksum of",
        ):
            finish(settings, resume=True)


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_failed_checkpoint_leaves_nothing_behind(
    failure: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The disk is full, or Ctrl-C comes, in the middle of the third file."""
    settings = config(tmp_path, **SHORT)
    save = torch.save
    calls = []

    class Failing:
        def __init__(self, file: Any) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            # Part of the file has been written.
            if len(calls) == 3 and self.file.tell() > 1000:
                raise failure
            return self.file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    def failing(state: Any, file: Any) -> None:
        calls.append(None)
        save(state, Failing(file))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", failing)
        patch.setattr("tcnn_model.training.command.parse", lambda _: (settings, False))
        status = main([])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    if isinstance(failure, OSError):
        assert status == 2
        assert said.endswith("No space left on device")
        assert said.startswith(f"tcnn-finetune: cannot write {tmp_path}")
    else:
        assert status == 130
        resume = f"tcnn-finetune --resume --out {tmp_path}"
        assert said == (
            f"tcnn-finetune: interrupted; go on from the last checkpoint with: {resume}"
        )
    assert not [*tmp_path.rglob("*.partial")]
    assert [result["epoch"] for result in finish(settings, resume=True)["history"]] == [
        0,
        1,
        2,
    ]


def _send(number: int) -> None:
    # os.kill may reach another thread, and can merge two signals into one.
    signal.raise_signal(number)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGUSR1, 0), (signal.SIGTERM, 0)],
)
def test_signals_end_the_run_with_a_checkpoint(
    number: int,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Only the signal causes a checkpoint within an epoch.
    settings = config(tmp_path, **{**SHORT, "checkpoint_steps": None})
    make_step = loop.Training.make_step

    def signalled(self: Any, *arguments: Any) -> None:
        make_step(self, *arguments)
        _send(number)

    before = {
        name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }
    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "make_step", signalled)
        patch.setattr("tcnn_model.training.command.parse", lambda _: (settings, False))
        assert main([]) == status
    assert {name: signal.getsignal(name) for name in before} == before
    assert (
        f"stopped in epoch 1, after step 1; go on with: tcnn-finetune --resume --out {tmp_path}"
        in (capsys.readouterr().err.splitlines())
    )
    assert torch.load(tmp_path / "checkpoints" / "within.pt", weights_only=True)["step"] == 1


def test_what_goes_on_is_a_run_of_as_many_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of two processes is refused by one."""

    def stopped(*_: object, **__: object) -> Any:
        raise loop.StopRequested("in epoch 1", signal.SIGTERM)

    monkeypatch.setattr("tcnn_model.training.command.train", stopped)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["resnet18", "--out", str(tmp_path)]) == 0
    hint = f"torchrun ... -m tcnn_model.training --resume --out {tmp_path}"
    assert hint in capsys.readouterr().err


def test_second_interrupt_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(tmp_path, **SHORT)
    # A process that a shell started in the background ignores SIGINT, so the handler is set.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(*_: Any) -> None:
        _send(signal.SIGINT)
        _send(signal.SIGINT)
        raise AssertionError("the second one is an exception")

    monkeypatch.setattr(loop.Training, "make_step", interrupted)
    monkeypatch.setattr("tcnn_model.training.command.parse", lambda _: (settings, False))
    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)


def test_two_processes_cannot_share_a_folder(tmp_path: Path, refusal: Callable[..., str]) -> None:
    """The second process is refused while the first one trains,
    whether it resumes the run or starts a new one.
    """
    settings = config(tmp_path, **SHORT)
    reading, writing = os.pipe()
    # The first training waits on a pipe for as long as the test needs, instead of sleeping.
    released, releasing = os.pipe()

    def train_slowly() -> None:
        make_step = loop.Training.make_step

        def slow(self: Any, *arguments: Any) -> None:
            os.write(writing, b"1")
            os.read(released, 1)
            make_step(self, *arguments)

        loop.Training.make_step = (
            slow  # the process ends after this call, so the patch is not undone
        )
        finish(settings)

    first = fork(train_slowly)
    try:
        os.read(reading, 1)
        said = refusal("--resume", "--out", tmp_path)
        assert f"another training runs in {tmp_path}: wait until it ends" in said
    finally:
        os.write(releasing, b"11")
        assert os.waitpid(first, 0)[1] == 0
    finish(settings, resume=True)


def test_two_trainings_of_one_process_cannot_share_a_folder(tmp_path: Path) -> None:
    """The second training is refused, and the first one still keeps other processes out
    afterwards.
    """
    settings = config(tmp_path, **SHORT)
    training = train(settings, progress=False)
    next(training)
    # A refused attempt must not release the lock, or the second attempt would get it.
    for _ in range(2):
        with pytest.raises(ValueError, match="another training runs in"):
            finish(settings, resume=True)
    process = fork(lambda: finish(settings, resume=True))
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    training.close()
    finish(settings, resume=True)


@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("damaged", [True, False])
def test_lost_best_weights_are_restored_or_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bool, available: bool
) -> None:
    """Best weights are restored from the checkpoint of their epoch;
    if it is not kept, a warning says so.
    """
    settings = config(tmp_path, **SHORT)
    finish(settings)
    best = tmp_path / "best.pt"
    intact = torch.load(best, weights_only=True)
    if damaged:
        content = bytearray(best.read_bytes())
        content[content.index(intact["state_dict"]["fc.weight"].numpy().tobytes())] ^= 1
        best.write_bytes(content)
    else:
        best.unlink()
    if available:
        finish(settings, resume=True)
        again = torch.load(best, weights_only=True)
        assert again["epoch"] == intact["epoch"] == 2
        for name, value in intact["state_dict"].items():
            assert torch.equal(again["state_dict"][name], value), name
        return
    # The history is changed as if no later epoch were better, and the checkpoint of the best epoch
    # is gone.
    path = tmp_path / "checkpoints" / "epoch-0002.pt"
    state = torch.load(path, weights_only=True)
    state["history"][2]["top1"] = 0.125
    torch.save(state, path)
    (tmp_path / "checkpoints" / "epoch-0001.pt").unlink()
    lost = (
        r"best\.pt is damaged or missing, "
        r"and the checkpoint of epoch 1 is not kept: .* 0\.5000, are lost"
    )
    with pytest.warns(RuntimeWarning, match=lost):
        finish(settings, resume=True)
    assert "best in epoch 1: 0.5000\nits weights: lost; all" in capsys.readouterr().err


class _Clock:
    """Batches that request a stop after the first batch of a validation."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            yield batch
            if number == 0:
                _send(signal.SIGTERM)
            assert number < 1, "a batch was validated after SIGTERM"


def test_sigterm_during_validation_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # accuracies are not scripted here
    settings = config(tmp_path / "run", **{**SHORT, "limit": 24})
    expected = finish(config(tmp_path / "whole", **{**SHORT, "limit": 24}))
    validate = loop.Training.validate
    calls = []

    def interrupted(self: Any, model: Any, batches: Any, *arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            stopping = type("", (), {"validation": lambda _: _Clock(batches.validation())})
            return validate(self, model, stopping(), *arguments)
        return validate(self, model, batches, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "validate", interrupted)
        with pytest.raises(loop.StopRequested, match="in epoch 1, after step 3"):
            finish(settings)
    assert_same_weights(finish(settings, resume=True), expected)
