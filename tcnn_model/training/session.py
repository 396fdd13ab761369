"""The folder of a run: settings, checkpoints, table of epochs, and resuming."""

import csv
import io
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from tcnn_model.training.build import convert
from tcnn_model.training.checkpoint import (
    load_tensors,
    read_checkpoint,
    write_checkpoint,
    write_file,
)
from tcnn_model.training.config import Config, as_toml
from tcnn_model.training.distributed import Processes
from tcnn_model.training.evaluation import best_result
from tcnn_model.training.loop import StopRequested, Training

__all__ = ["RunFolder", "Stopping", "say"]

FREE = ("device", "workers", "out", "compile", "keep", "checkpoint_steps", "watcher")
"""Settings that may change when a run is resumed, because they do not influence the weights."""

_EPOCH = re.compile(r"epoch-(\d+)\.pt")


class Stopping:
    """Signals that ask a training to stop between two batches:
    Ctrl-C, and SIGTERM or SIGUSR1 from clusters.
    """

    SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._before: dict[int, Any] = {}
        self.signal: int | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into requests to stop; a second Ctrl-C interrupts at once."""
        for name in self.SIGNALS:
            if hasattr(signal, name):  # Windows has no SIGUSR1
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._ask)
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        self.signal = number
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
            say("stopping after this step; Ctrl-C again stops at once", self._processes)

    def asked(self) -> bool:
        """Return True if any process was asked to stop; all processes must call this together."""
        return self._processes.any(self.signal is not None)


class RunFolder:
    """The files of a run.

    These are ``config.toml``, ``classes.csv``, ``epochs.csv``, ``best.pt`` (weights of the epoch
    with the best accuracy, and the names of the classes), ``checkpoints/``, and the files of
    watchers.

    Args:
        config: Settings of the run.
        processes: The processes that train together; rank 0 writes the files.
    """

    def __init__(self, config: Config, processes: Processes) -> None:
        self.path = Path(config.out)
        self.config = config
        self.classes: list[str] | None = None
        """Names of the classes by label; None if they are unknown."""
        self.processes = processes
        self.scaled = config.scaled(processes.count)
        self._checkpoints = self.path / "checkpoints"
        self._within = self._checkpoints / "within.pt"
        self._settings = {
            name: value for name, value in config.as_dict().items() if name not in FREE
        }
        # Random numbers and batch norms differ between processes, so a run must be resumed with as
        # many as before.
        self._settings["processes"] = processes.count
        self._steps = 0
        self._best: int | None = None

    @property
    def rates(self) -> dict[str, float]:
        """Learning rates as they are used, by their settings."""
        names = ("lr", "qk_lr", "gating_lr", "warmup_lr", "min_lr", "gating_min_lr")
        rates = {name: getattr(self.scaled, name) for name in names}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other trainings out of this folder, until this process ends at the latest.

        Raises:
            ValueError: Another training, in this process or another one, uses the folder.
        """
        with ExitStack() as stack:
            refused = False
            if self.processes.first:
                self.path.mkdir(parents=True, exist_ok=True)
                try:
                    lock = FileLock(self.path / ".lock", timeout=0, thread_local=False)
                    stack.enter_context(lock)
                except Timeout:
                    refused = True
            # Only rank 0 knows of the refusal; without any(), the others would wait for it.
            if self.processes.any(refused):
                raise ValueError(
                    f"another training runs in {self.path}: wait until it ends, or give another "
                    "--out"
                )
            yield

    def check_free(self) -> None:
        """Refuse a folder that holds a run.

        Raises:
            ValueError: The folder holds a run.
        """
        if (self.path / "config.toml").exists():
            raise ValueError(
                f"{self.path} already holds a run: --resume continues it, or give another --out"
            )

    def begin(self) -> None:
        """Write the settings, after all processes have checked the folder."""
        self.processes.wait()
        if self.processes.first:
            # Comments, because the settings themselves are scaled again when the run is resumed.
            used = [f"# as used: {name} = {rate:g}" for name, rate in self.rates.items()]
            settings = as_toml(self.config.as_dict())
            _write(self.path / "config.toml", "\n".join([settings.rstrip(), *used, ""]))
            if self.classes is not None:
                rows = [("label", "class"), *enumerate(self.classes)]
                _write(self.path / "classes.csv", _table(rows))

    def load(self, training: Training, steps: int) -> None:
        """Restore the latest checkpoint, if there is one.

        A process may have been killed after it had written the checkpoint of an epoch but before
        the other files, which are then written here.

        Raises:
            ValueError: The checkpoint is damaged, or belongs to a run with other settings.
        """
        state = self._latest(training.device)
        if state is not None:
            self._check_classes(state.get("classes"))
            if state["converted"]:
                convert(training, self.scaled, steps, self.processes)
            training.load_state_dict(state)
        self.processes.wait()  # other processes may still read files that are deleted next
        if self.processes.first:
            partials = [
                self.path / f".{name}.partial"
                for name in ("config.toml", "classes.csv", "epochs.csv", "best.pt")
            ]
            for partial in [*partials, *self._checkpoints.glob(".*.pt.partial")]:
                partial.unlink(missing_ok=True)
            if training.history:
                self._settle(training)
                best = best_result(training.history)
                if not self.has_best(training):
                    warnings.warn(
                        f"{self.path / 'best.pt'} is damaged or missing, and the checkpoint of "
                        f"epoch {best.epoch} is not kept: the weights of the best accuracy, "
                        f"{best.top1:.4f}, are lost",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _check_classes(self, before: list[str] | None) -> None:
        """Refuse to continue with other classes, or with classes in another order.

        Raises:
            ValueError: A label does not mean what it meant before.
        """
        if before == self.classes:
            return
        pairs = enumerate(zip_longest(before or [], self.classes or []))
        label, names = next((label, pair) for label, pair in pairs if len({*pair}) > 1)
        raise ValueError(
            f"the run in {self.path} has other classes than the data: label {label} was "
            f"{names[0]!r} and is {names[1]!r} now; {self.path / 'classes.csv'} lists those of the "
            "run"
        )

    def has_best(self, training: Training) -> bool:
        """Return True if ``best.pt`` has the weights of the best epoch; only rank 0 knows."""
        return self._best == best_result(training.history).epoch

    def after_step(self, training: Training, stopping: Stopping) -> None:
        """Write a checkpoint if one is due or the run should stop.

        Raises:
            StopRequested: The run should stop.
        """
        self._steps += 1
        if stopping.asked():
            self._stop(training, stopping)
        elif self.config.checkpoint_steps and self._steps % self.config.checkpoint_steps == 0:
            self._write_checkpoint(training, self._within)

    def while_validating(self, training: Training, stopping: Stopping) -> None:
        """Stop between two validation batches if the run should stop.

        Several processes stop only after validation: with different numbers of batches, they could
        not agree earlier.

        Raises:
            StopRequested: The run should stop.
        """
        if self.processes.count == 1 and stopping.asked():
            self._stop(training, stopping)

    def after_epoch(self, training: Training, stopping: Stopping) -> None:
        """Write a checkpoint, the best weights, and the table of epochs.

        Raises:
            StopRequested: The run should stop before its last epoch.
        """
        epoch = training.history[-1].epoch
        state = self._write_checkpoint(training, self._checkpoints / f"epoch-{epoch:04d}.pt")
        if self.processes.first:
            self._settle(training, state)
        if epoch < self.config.epochs and stopping.asked():
            raise StopRequested(f"after epoch {epoch}", stopping.signal)

    def keep_batch(self, images: torch.Tensor, targets: torch.Tensor, where: str) -> Path:
        """Write the batch for which the loss is not finite."""
        path = self.path / f"nonfinite-{self.processes.rank}.pt"
        write_checkpoint(path, {"images": images.cpu(), "targets": targets.cpu(), "where": where})
        return path

    def _stop(self, training: Training, stopping: Stopping) -> None:
        if training.step > 0:  # otherwise the last epoch's checkpoint suffices
            self._write_checkpoint(training, self._within)
        raise StopRequested(
            f"in epoch {training.epoch}, after step {training.step}", stopping.signal
        )

    def _settle(self, training: Training, state: dict[str, Any] | None = None) -> None:
        """Update the other files from the checkpoints of epochs,
        in an order that loses nothing if it is interrupted.

        Args:
            training: Training whose history the files will show.
            state: State at the end of the last epoch; None to read it from its checkpoint.
        """
        checkpoints = self._epochs()
        best = best_result(training.history).epoch
        if self._best is None:
            self._best = self._epoch_of_best()
        if self._best != best and best in checkpoints:
            if state is None:
                state = load_tensors(checkpoints[best])
            content: dict[str, Any] = {"state_dict": state["model"], "epoch": best}
            content["classes"] = self.classes
            if state["ema"] is not None:
                content["state_dict_ema"] = state["ema"]
            write_checkpoint(self.path / "best.pt", content)
            self._best = best

        rows = [asdict(result) for result in training.history]
        table = [[*rows[0]], *([*row.values()] for row in rows)]
        _write(self.path / "epochs.csv", _table(table))

        # In the middle of an epoch, this checkpoint is newer than that of the last epoch and is
        # kept.
        if training.step == 0:
            self._within.unlink(missing_ok=True)
        for epoch in sorted(checkpoints)[: -self.config.keep]:
            checkpoints[epoch].unlink()

    def _epoch_of_best(self) -> int | None:
        with suppress(ValueError, OSError, LookupError, TypeError):
            return int(load_tensors(self.path / "best.pt")["epoch"])
        return None

    def _write_checkpoint(self, training: Training, path: Path) -> dict[str, Any]:
        state = training.state_dict()
        if self.processes.first:
            converted = any(
                name.endswith(".raw_locality") for name, _ in training.model.named_parameters()
            )
            write_checkpoint(
                path,
                {
                    **state,
                    "settings": self._settings,
                    "classes": self.classes,
                    "converted": converted,
                },
            )
        return state

    def _epochs(self) -> dict[int, Path]:
        """Find the checkpoints by epoch, and ignore other files in the folder."""
        matches = [
            (_EPOCH.fullmatch(path.name), path) for path in self._checkpoints.glob("epoch-*.pt")
        ]
        return {int(match[1]): path for match, path in matches if match}

    def _latest(self, device: torch.device) -> dict[str, Any] | None:
        """Read the newest checkpoint: one within an epoch,
        unless that epoch has ended, or else the last epoch's.
        """
        epochs = self._epochs()
        last = max(epochs, default=-1)
        within = read_checkpoint(self._within, self._settings, device)
        if within is not None and within["epoch"] > last:
            return within
        return read_checkpoint(epochs[last], self._settings, device) if epochs else None


def _table(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as text with comma-separated values."""
    table = io.StringIO()
    csv.writer(table).writerows(rows)
    return table.getvalue()


def _write(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))


def say(text: str, processes: Processes) -> None:
    """Print a line, on rank 0 only."""
    if processes.first:
        print(text, file=sys.stderr)
