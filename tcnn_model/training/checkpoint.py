"""Checkpoints of a training run: on the disk whole or not at all, and read back or refused."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = ["read_checkpoint", "write_checkpoint", "write_file"]


def write_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint as :func:`write_file` does."""
    write_file(path, lambda file: torch.save(state, file))


def write_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file in one step. When this returns, it survives a loss of power."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read_checkpoint(path: str | Path, settings: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
    """What was written, or None if there is no file.

    Args:
        path: of the file.
        settings: that the run must have been started with.
        device: to load tensors to.

    Raises:
        ValueError: the file is damaged, is no checkpoint of this package, or belongs to a run with
            other settings.
    """
    path = Path(path)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        before = dict(state["settings"])
        if missing := {"model", "optimizer", "history"} - state.keys():
            raise KeyError(*sorted(missing))
    except Exception as error:  # torch.load raises whatever its reader meets
        raise ValueError(f"{path.name} is damaged, or no checkpoint of tcnn_model.finetune: {error!r}") from error
    if differing := [f"{k}: {before.get(k)} there, {v} now" for k, v in settings.items() if before.get(k) != v]:
        raise ValueError(f"checkpoint {path.name} is of a run with other settings ({'; '.join(differing)})")
    return state
