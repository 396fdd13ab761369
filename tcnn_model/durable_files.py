"""Files that are whole after a kill or a loss of power."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["sync_folder", "write_file"]


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file in one step: after a kill or a loss of power it has either content whole.

    Args:
        path: File.
        write: Function that writes the new content; after an exception the file is unchanged.
    """
    # The name is fixed, so that the file of a killed run is overwritten.
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # it may be a link
    try:
        with partial.open("xb") as file:
            write(file)
            file.flush()
            # Without fsync before the renaming, a loss of power could leave a renamed file without
            # its bytes.
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # half a file would keep a full disk full
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk; Windows has no way to."""
    if hasattr(os, "O_DIRECTORY"):
        file = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
