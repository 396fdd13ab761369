"""A run in its folder: settings, checkpoints, table of epochs, and how it is taken up again."""

import csv
import io
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tcnn_model.training.build import convert
from tcnn_model.training.checkpoint import read_checkpoint, write_checkpoint, write_file
from tcnn_model.training.config import Config, as_toml
from tcnn_model.training.distributed import Ranks
from tcnn_model.training.loop import StopRequested, Training

__all__ = ["Folder", "Stopping", "say"]

FREE = ("device", "workers", "out", "compile", "keep", "checkpoint_steps", "watcher")
"""Settings that may change when a run is resumed: they have nothing to do with what comes out."""


class Stopping:
    """SIGTERM, as schedulers of clusters send it, noticed between two steps."""

    def __init__(self, ranks: Ranks) -> None:
        self._asked, self._ranks = False, ranks

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, SIGTERM asks for a stop instead of ending the process."""
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def asked(self) -> bool:
        """Whether any process was asked to stop."""
        return self._ranks.any(self._asked)


class Folder:
    """The files of a run.

    ``config.toml``, ``epochs.csv``, ``best.pt`` (weights of the epoch with the best accuracy), ``checkpoints/`` and
    whatever watches writes beside them.

    Args:
        config: of the run.
        ranks: this process; the first one writes.
    """

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.path, self.config, self.ranks = Path(config.out), config, ranks
        self.scaled = config.scaled(ranks.count)
        self._checkpoints = self.path / "checkpoints"
        self._settings = {name: value for name, value in config.as_dict().items() if name not in FREE}
        self._settings["processes"] = ranks.count
        self._steps = 0

    @property
    def exists(self) -> bool:
        """Whether there is a run."""
        return (self.path / "config.toml").exists()

    def begin(self) -> None:
        """Write the settings down."""
        if self.ranks.first:
            self.path.mkdir(parents=True, exist_ok=True)
            _write(self.path / "config.toml", as_toml(self.config.as_dict()))

    def load(self, training: Training, steps: int) -> None:
        """Take the run up where its latest checkpoint is, or at the beginning where there is none.

        Raises:
            ValueError: a checkpoint that is damaged, or of a run with other settings.
        """
        if not (latest := self._latest()):
            return
        state = read_checkpoint(latest, self._settings, training.device)
        assert state is not None
        if state["converted"]:
            convert(training, self.scaled, steps, self.ranks)
        training.load_state_dict(state)

    def after_step(self, training: Training, stopping: Stopping) -> None:
        """A checkpoint, if it is time for one or the run is to stop.

        Raises:
            StopRequested: it is.
        """
        self._steps += 1
        stop = stopping.asked()
        if stop or (self.config.checkpoint_steps and self._steps % self.config.checkpoint_steps == 0):
            self._write(training, self._checkpoints / "within.pt")
        if stop:
            raise StopRequested(f"in epoch {training.epoch}, after step {training.step}")

    def after_epoch(self, training: Training) -> None:
        """A checkpoint, the best weights, and the table."""
        done = training.history[-1].epoch
        state = self._write(training, self._checkpoints / f"epoch-{done:04d}.pt")
        if not self.ranks.first:
            return
        (self._checkpoints / "within.pt").unlink(missing_ok=True)
        for old in sorted(self._checkpoints.glob("epoch-*.pt"))[: -self.config.keep]:
            old.unlink()
        if training.history[-1].top1 >= max(result.top1 for result in training.history):
            best: dict[str, Any] = {"state_dict": state["model"], "epoch": done}
            best |= {} if training.ema is None else {"state_dict_ema": state["ema"]}
            write_checkpoint(self.path / "best.pt", best)
        table = io.StringIO()
        writer = csv.DictWriter(table, list(asdict(training.history[0])))
        writer.writeheader()
        writer.writerows(asdict(result) for result in training.history)
        _write(self.path / "epochs.csv", table.getvalue())

    def keep_batch(self, images: torch.Tensor, targets: torch.Tensor, where: str) -> Path:
        """Write down the batch that gave a loss that is no number."""
        path = self.path / f"nonfinite-{self.ranks.rank}.pt"
        write_checkpoint(path, {"images": images.cpu(), "targets": targets.cpu(), "where": where})
        return path

    def _write(self, training: Training, path: Path) -> dict[str, Any]:
        state = training.state_dict()
        if self.ranks.first:
            converted = any(name.endswith(".raw_locality") for name, _ in training.model.named_parameters())
            write_checkpoint(path, {**state, "settings": self._settings, "converted": converted})
        return state

    def _latest(self) -> Path | None:
        """The checkpoint within an epoch is later than those of epochs: it goes when an epoch has its own."""
        within = self._checkpoints / "within.pt"
        whole = sorted(self._checkpoints.glob("epoch-*.pt"))
        if within.exists() and whole:  # a kill may have come between the two
            number = int(whole[-1].stem.removeprefix("epoch-"))
            reached = torch.load(within, map_location="cpu", weights_only=True)["epoch"]
            return within if reached > number else whole[-1]
        return within if within.exists() else whole[-1] if whole else None


def _write(path: Path, text: str) -> None:
    write_file(path, lambda file: file.write(text.encode()))


def say(text: str, ranks: Ranks) -> None:
    """Print, once for all processes."""
    if ranks.first:
        print(text, file=sys.stderr)
