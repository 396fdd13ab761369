"""A recording in zarr, to which marks are added, each in one step: the only package that knows zarr.

A mark becomes durable in :mod:`tcnn_probe.storage.commit`: every chunk of the mark is written first, each to a
temporary name that is then renamed, and brought to the disk. Then the root ``zarr.json`` is replaced in one step. It
states how long every array of every group is, so this replacement is the commit: before it nobody sees the mark,
after it everybody sees all of it. A run that is killed, or a machine that loses power, keeps each mark whose
``append`` returned; a reader never sees half a mark. Nothing in a recording is ever deleted, but all of it with
``mode="w"``, after the recording that replaces it has its first mark.

One recorder writes at a time. In a directory a lock sees to that; everywhere the root is compared before each mark
with the one that this recorder wrote last.
"""

from tcnn_probe.schema import StoreError
from tcnn_probe.storage.epochs import EpochStore, Mode
from tcnn_probe.storage.reading import load_example, numbers, open_recording, repack
from tcnn_probe.storage.runs import open_recordings as open  # noqa: A004 (the public name)

__all__ = [
    "EpochStore",
    "Mode",
    "StoreError",
    "load_example",
    "numbers",
    "open",
    "open_recording",
    "repack",
]
