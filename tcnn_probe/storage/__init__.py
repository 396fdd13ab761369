"""Storage of recordings, the only package that uses zarr; marks are added atomically.

A mark first extends every array, whose chunks are written to temporary files, flushed to the disk
and renamed. Then the root ``zarr.json``, which states the length of every array of every group, is
replaced. This replacement is the commit: before it no reader sees the mark, after it every reader
sees all of it. After a kill or a loss of power, each mark whose ``append`` returned is still there.

One recorder writes at a time. A directory has a lock for this; in all places the root is compared,
before each mark, with the one that this recorder wrote last.
"""

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.epochs import EpochStore, Mode
from tcnn_probe.storage.reading import load_example, numbers, open_recording
from tcnn_probe.storage.runs import open_recordings as open  # noqa: A004 (the public name)

__all__ = ["EpochStore", "Mode", "StoreError", "load_example", "numbers", "open", "open_recording"]
