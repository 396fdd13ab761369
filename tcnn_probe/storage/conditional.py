"""Objects that are replaced only if nobody else has replaced them meanwhile, in stores that can do that.

These are S3 through s3fs (``If-Match``), and every store of obstore that has conditional writes.
"""

import errno
from typing import Any

from zarr.abc.store import Store
from zarr.storage import FsspecStore, ObjectStore

from tcnn_probe.storage.errors import StoreError
from tcnn_probe.storage.place import get, put

__all__ = ["condition", "put_if"]


async def condition(store: Store, key: str) -> dict[str, Any] | None:
    """Give the arguments of a write that fails once the object has changed; None where a store has none."""
    try:
        if isinstance(store, FsspecStore) and "s3" in store.fs.protocol:
            return {"IfMatch": (await store.fs._info(f"{store.path}/{key}", refresh=True))["ETag"]}
        if isinstance(store, ObjectStore):
            import obstore

            return {"mode": {"e_tag": (await obstore.head_async(store.store, key))["e_tag"]}}
    except FileNotFoundError:
        return {"mode": "create"}
    return None


async def put_if(store: Store, key: str, data: bytes, only: dict[str, Any] | None) -> None:
    """Write an object on a condition, or just write it where the store has none; StoreError if it does not hold."""
    try:
        if isinstance(store, FsspecStore) and only is not None:
            await store.fs._pipe_file(f"{store.path}/{key}", data, **only)
        elif isinstance(store, ObjectStore) and only is not None:
            import obstore

            await obstore.put_async(store.store, key, data, **only)
        else:
            await put(store, key, data)
    except Exception as error:
        if only is None:
            raise
        if await condition(store, key) == only:  # the condition holds, so it is no reason
            if getattr(error, "errno", None) != errno.ENOSYS and not isinstance(error, NotImplementedError):
                raise
            await put(store, key, data)
        elif await get(store, key) != data:  # else an earlier try has written it, and its answer was lost
            raise StoreError(f"another recorder writes to {store}: it was written to meanwhile") from error
