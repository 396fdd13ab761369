"""Crashes at a chosen write of an object."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from zarr.storage import LocalStore, MemoryStore

__all__ = ["Crash", "Remote", "crash_at_write", "crash_when"]


class Crash(BaseException):
    """No error that code would handle."""


class Remote(MemoryStore):
    """Stands for a store that is no directory."""


@contextmanager
def crash_when(fails: Callable[[int, str], bool], error: Callable[[], BaseException] = Crash) -> Iterator[list[str]]:
    """Let a write fail for which ``fails(number of the write, key)``; gives the keys of those asked for."""
    asked: list[str] = []

    def guarded(original: Any) -> Any:
        async def set_or_crash(self: Any, key: str, value: Any) -> None:
            asked.append(key)
            if fails(len(asked) - 1, key):
                raise error()
            await original(self, key, value)

        return set_or_crash

    with pytest.MonkeyPatch.context() as patch:
        for store in (LocalStore, Remote):
            patch.setattr(store, "set", guarded(store.set))
        yield asked


@contextmanager
def crash_at_write(number: int) -> Iterator[list[str]]:
    """Let the next ``number`` objects be written, then fail at every one."""
    with crash_when(lambda count, key: count >= number) as asked:
        yield asked
