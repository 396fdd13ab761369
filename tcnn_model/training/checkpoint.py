"""Checkpoints of a training run, which are written atomically and checked when they are read."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from tcnn_model import durable_files

__all__ = [
    "check_sums",
    "load_tensors",
    "read_checkpoint",
    "write_checkpoint",
    "write_file",
]

_FOLDER_ATTRIBUTE = 0x10  # MS-DOS attribute of a folder in a zip file's directory


def write_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint as :func:`write_file` does."""
    write_file(path, lambda file: _save(state, file))


def _save(state: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(state, file)
    except RuntimeError as error:
        # After a failed write torch closes its archive, which fails too and hides the cause: a full
        # disk, or Ctrl-C.
        cause = error.__context__
        if isinstance(cause, OSError | KeyboardInterrupt):
            raise cause from error
        raise


def write_file(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file, in a folder that is created, by
    :func:`tcnn_model.durable_files.write_file`.

    Raises:
        OSError: The disk is full, or the file cannot be written. The previous file is then
            unchanged.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable_files.write_file(path, write)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def check_sums(path: str | Path) -> None:
    """Verify the checksums of the tensors, which torch writes but does not verify when it reads.

    Safetensors files and files in torch's format before 1.6 are not zip files and have no
    checksums.

    Raises:
        BadZipFile: A checksum does not match.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        entries = archive.infolist()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} does not match")
    # torch reads no bytes of an entry that is marked as a folder, and returns uninitialised memory
    # as the tensor.
    folders = [entry.filename for entry in entries if entry.external_attr & _FOLDER_ATTRIBUTE]
    if folders:
        raise zipfile.BadZipFile(f"{folders[0]} is called a folder")


def load_tensors(path: str | Path, device: torch.device | str = "cpu") -> Any:
    """Load a file that torch saved, after its checksums are verified,
    and without running code from it.

    Raises:
        ValueError: The file is damaged, or holds more than tensors and plain values.
    """
    try:
        check_sums(path)
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch and zipfile raise many types for damaged files
        raise ValueError(
            f"{Path(path).name} is damaged, or is not a checkpoint of tcnn_model: {error!r}"
        ) from error


def read_checkpoint(
    path: str | Path, settings: dict[str, Any], device: torch.device
) -> dict[str, Any] | None:
    """Return the state in a checkpoint, or None if the file does not exist.

    Args:
        path: Path of the file.
        settings: Settings that the run must have been started with.
        device: Device to load tensors to.

    Raises:
        ValueError: The file is damaged, is not a checkpoint of this package, or belongs to a run
            with other settings.
    """
    path = Path(path)
    if not path.exists():
        return None
    state: dict[str, Any] = load_tensors(path, device)
    required = {"settings", "model", "optimizer", "history"}
    if not isinstance(state, dict) or not required <= state.keys():
        expected = ", ".join(sorted(required))
        raise ValueError(
            f"{path.name} is damaged, or is not a checkpoint of tcnn_model: expected {expected} in "
            "it"
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
