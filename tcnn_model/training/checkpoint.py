"""Checkpoints of a training run: on the disk whole or not at all, and read back or refused."""

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

__all__ = [
    "check_sums",
    "load_tensors",
    "read_checkpoint",
    "write_checkpoint",
    "write_file",
]

_FOLDER_ATTRIBUTE = 0x10  # of MS-DOS, in the directory of a zip file


def write_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint as :func:`write_file` does."""
    write_file(path, lambda file: _save(state, file))


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # torch closes its archive after a failed write, and complains of that in place of the full disk or the Ctrl-C.
        cause = error.__context__
        if isinstance(cause, OSError | KeyboardInterrupt):
            raise cause from error
        raise


def write_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace the file in one step. When this returns, the file survives a loss of power.

    Raises:
        OSError: The disk is full, or the file cannot be written. The file that was there before stays.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            # Before the renaming, or a loss of power could leave the new name on a file whose bytes never reached the
            # disk.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)  # half a checkpoint would keep a full disk full
        if isinstance(error, OSError):
            raise OSError(f"cannot write {path}: {error}") from error
        raise
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            # The folder holds the name: without this the renaming may be lost, though the bytes are not.
            os.fsync(folder)
        finally:
            os.close(folder)


def check_sums(path: str | Path) -> None:
    """Compare the checksums that torch writes for each tensor, and does not look at when it reads.

    Safetensors and torch's format before 1.6, which are no zip files, have none.

    Raises:
        BadZipFile: One does not fit.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        entries = archive.infolist()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    # torch reads nothing of an entry with the attribute of a folder, and gives memory as it is for the tensor.
    folders = [
        entry.filename for entry in entries if entry.external_attr & _FOLDER_ATTRIBUTE
    ]
    if folders:
        raise zipfile.BadZipFile(f"{folders[0]} is called a folder")


def load_tensors(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """Load what torch saved, without running code from it, and only if no bit of it has changed.

    Raises:
        ValueError: The file is damaged, or holds more than tensors and plain values.
    """
    try:
        check_sums(path)
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch and zipfile raise many kinds for damaged files
        raise ValueError(
            f"{Path(path).name} is damaged, or is not a checkpoint of tcnn_model: {error!r}"
        ) from error


def read_checkpoint(
    path: str | Path, settings: dict[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """Return the state that was written, or None if there is no file.

    Args:
        path: Path of the file.
        settings: Settings that the run must have been started with.
        device: Device to load tensors to.

    Raises:
        ValueError: The file is damaged, is no checkpoint of this package, or belongs to a run with other settings.
    """
    path = Path(path)
    if not path.exists():
        return None
    state: dict[str, Any] = load_tensors(path, device)
    required = {"settings", "model", "optimizer", "history"}
    if not isinstance(state, dict) or not required <= state.keys():
        expected = ", ".join(sorted(required))
        raise ValueError(
            f"{path.name} is damaged, or is not a checkpoint of tcnn_model: expected {expected} in it"
        )
    before = state["settings"]
    changes = [
        f"{name}: {before.get(name)} there, {v} now"
        for name, v in settings.items()
        if before.get(name) != v
    ]
    if changes:
        raise ValueError(
            f"checkpoint {path.name} belongs to a run with other settings ({'; '.join(changes)})"
        )
    return state
