"""Runs of the command with tiny models on few digits."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tcnn_model.training.command import train
from tcnn_model.training.config import Config

TINY = {"layers": [1, 1, 1, 1], "channels": [8, 8, 16, 16]}
# An epoch has three steps, so there is one between the first and the last.
SMALL: dict[str, Any] = {
    "limit": 24,
    "batch_size": 8,
    "epochs": 2,
    "warmup_epochs": 1,
    "img_size": 32,
    "watcher": "none",
}


def config(out: Path, model: str = "resnet18", **settings: Any) -> Config:
    options = {"model_options": TINY} if model == "resnet18" else {}
    return Config(**{**SMALL, **options, "model": model, "out": str(out), **settings})


def finish(settings: Config, *, resume: bool = False) -> dict[str, Any]:
    """Train to the end, and return the last checkpoint."""
    for _ in train(settings, resume=resume, progress=False):
        pass
    return last_checkpoint(settings)


def last_checkpoint(settings: Config) -> dict[str, Any]:
    path = sorted((Path(settings.out) / "checkpoints").glob("epoch-*.pt"))[-1]
    return torch.load(path, weights_only=True)


def assert_same_weights(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for part in ("model", "ema"):
        assert (actual[part] is None) == (expected[part] is None)
        for name, value in (expected[part] or {}).items():
            assert torch.equal(actual[part][name], value), f"{part}: {name}"
    assert repr(actual["history"]) == repr(expected["history"])


# A new interpreter would take seconds to import torch.
def fork(work: Callable[[], None]) -> int:
    """Run a function in a fork of this process,
    which has imported all modules, and return the fork's process id.
    """
    if process := os.fork():
        return process
    # Since Python 3.14, workers that load images are forked by a server, and only the process that
    # started it can use it.
    forkserver._forkserver.__init__()  # type: ignore[misc, attr-defined]
    # A rank waits half an hour for another one that died; this alarm ends it earlier.
    signal.alarm(120)
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
