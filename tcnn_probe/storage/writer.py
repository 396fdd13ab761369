"""One thread that writes marks in the order in which they come."""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakSet

from tcnn_probe.storage.errors import WriteError

__all__ = ["Writer"]

Mark = int | float


@dataclass
class _Failure:
    mark: Mark
    cause: BaseException
    told: bool = False

    def error(self) -> WriteError:
        self.told = True
        error = WriteError(
            f"mark {self.mark} could not be written ({type(self.cause).__name__}: {self.cause}), nor any after it; "
            f"those before it are safe"
        )
        error.__cause__ = self.cause
        return error


class Writer:
    """A queue of marks to be written, bounded in bytes, and the thread that empties it.

    The thread also writes what is waited for: an interrupt from the keyboard then ends the wait, not the write.

    Args:
        limit: bytes that may wait, at most; a single mark that is larger waits alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bytes = 0
        self._pending: list[Mark] = []
        self._failure: _Failure | None = None
        self._changed = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tcnn_probe_writer")
        _writers.add(self)

    @property
    def pending(self) -> tuple[Mark, ...]:
        """Marks that are queued or being written."""
        with self._changed:
            return tuple(self._pending)

    def put(self, mark: Mark, size: int, job: Callable[[], None], *, wait: bool) -> None:
        """Queue a job, and block while the queue is full.

        Args:
            mark: what it writes, for messages.
            size: bytes that it holds.
            job: what the thread is to call. Its error is raised here if it is waited for; otherwise at the next call,
                and no job after it is done until one comes for a mark that is no later than the one that failed.
            wait: for the job to be done.

        Raises:
            WriteError: an earlier job failed that nobody waited for.
        """
        self._check(mark)
        with self._changed:
            self._changed.wait_for(lambda: not self._bytes or self._bytes + size <= self._limit)
            if self._failure is not None:
                raise self._failure.error()
            self._bytes += size
            self._pending.append(mark)
        future = self._thread.submit(self._do, mark, size, job, wait)
        if wait:
            future.result()

    def flush(self) -> None:
        """Wait until all is written.

        Raises:
            WriteError: something could not be.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
            if self._failure is not None:
                raise self._failure.error()

    def close(self) -> None:
        """Wait until all is written, and end the thread.

        Raises:
            WriteError: something could not be, and no call has said so yet.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)
        self._thread.shutdown()
        if self._failure is not None and not self._failure.told:
            raise self._failure.error()

    def _check(self, mark: Mark) -> None:
        if self._failure is None:
            return
        if not self._failure.told or mark > self._failure.mark:
            raise self._failure.error()
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)  # those that are dropped
            self._failure = None

    def _do(self, mark: Mark, size: int, job: Callable[[], None], awaited: bool) -> None:
        try:
            if self._failure is None:
                job()
            elif awaited:
                raise self._failure.error()
        except BaseException as error:
            if not awaited and self._failure is None:
                self._failure = _Failure(mark, error)
            raise
        finally:
            with self._changed:
                self._bytes -= size
                self._pending.remove(mark)
                self._changed.notify_all()


_writers: WeakSet[Writer] = WeakSet()


def _finish() -> None:
    for writer in list(_writers):
        try:
            writer.flush()
        except WriteError:
            traceback.print_exc()


# A program may end without close(). What atexit calls comes too late: the pools of threads that zarr writes with are
# shut down before, by this same hook, whose callbacks run in reverse order.
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_finish)
