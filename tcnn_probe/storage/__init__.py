"""Storage of recordings in zarr, to which marks are added atomically; the only package that uses zarr.

A mark becomes durable in :mod:`tcnn_probe.storage.commit`: first every chunk of the mark is written to a temporary
file, flushed to the disk and renamed. Then the root ``zarr.json``, which states the length of every array of every
group, is replaced atomically. This replacement is the commit: before it no reader sees the mark, after it every reader
sees all of it. After a kill or a loss of power, each mark whose ``append`` returned is still there; a reader never sees
half a mark. Nothing in a recording is ever deleted, except that ``mode="w"`` deletes all of it, after the new recording
has its first mark.

One recorder writes at a time. A directory has a lock for this; in all places the root is compared, before each mark,
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
