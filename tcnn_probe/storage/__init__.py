"""A recording in zarr, to which whole marks are added: the only package that knows zarr.

Every object of a mark is written first. Then the root ``zarr.json``, whose consolidated metadata states the length of
every array of every group, is replaced in one step, and that replacement is the commit: a run killed at any moment
leaves a store that opens and holds every mark committed before, and a reader never sees half a mark. What the root
states is never written again with other values. This needs a store whose objects appear whole, which zarr's
``LocalStore`` gives since 3.1.3 (temporary name, then rename).
"""

from tcnn_probe.storage.compaction import compact
from tcnn_probe.storage.epochs import EpochStore
from tcnn_probe.storage.errors import StoreError, WriteError
from tcnn_probe.storage.migration import migrate
from tcnn_probe.storage.reading import open_recording
from tcnn_probe.storage.reading import open_recording as open  # noqa: A004 (the public name)

__all__ = ["EpochStore", "StoreError", "WriteError", "compact", "migrate", "open", "open_recording"]
