"""Random histories of a store: marks, crashes, resuming, compacting, against a plain dict."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tcnn_probe.storage import EpochStore, WriteError, compact, open_recording
from tcnn_probe.storage import chunks as layout
from tests.tcnn_probe.storage.crashes import Crash, Remote, crash_at_write
from tests.tcnn_probe.storage.tables import MAPS, add, assert_holds, create

SCALARS = st.dictionaries(st.sampled_from(["top1", "loss", "lr"]), st.floats(-9, 9), max_size=2)


class Histories(RuleBasedStateMachine):
    """The model: for each mark its seed, for each scalar its values by mark; what is queued is apart."""

    store: EpochStore

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        for name, value in {
            "_MARKS_PER_CHUNK": (1, 3),
            "_MARKS_PER_COMPACT_SHARD": 4,
            "_MARKS_PER_COMPACT_CHUNK": 2,
            "_SPARE_MAPS": 2,
        }.items():
            self.patch.setattr(layout, name, value)
        self.seeds: dict[Any, int] = {}
        self.scalars: dict[str, dict[Any, float]] = {}
        self.queued: list[tuple[Any, int, dict[str, float]]] = []
        self.count = 0

    @initialize(directory=st.booleans(), floats=st.booleans())
    def begin(self, directory: bool, floats: bool) -> None:
        self.target = self.folder / "run.zarr" if directory else Remote()
        self.step = 0.5 if floats else 1
        self.store = create(self.target)

    def next_mark(self, gap: int) -> Any:
        marks = self.store.marks
        return (marks[-1] if marks else -self.step) + gap * self.step

    def committed(self, mark: Any, seed: int, scalars: dict[str, float]) -> None:
        self.seeds[mark] = seed
        for name, value in scalars.items():
            self.scalars.setdefault(name, {})[mark] = value

    def settle(self) -> None:
        for each in self.queued:
            self.committed(*each)
        self.queued = []

    @rule(gap=st.integers(1, 3), scalars=SCALARS, wait=st.booleans())
    def mark(self, gap: int, scalars: dict[str, float], wait: bool) -> None:
        self.count += 1
        self.queued.append((self.next_mark(gap), self.count, scalars))
        add(self.store, *self.queued[-1][:2], wait=wait, **scalars)
        assert self.store.marks == (*self.seeds, *(mark for mark, _, _ in self.queued))
        if wait:
            self.settle()

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.settle()

    @rule(gap=st.integers(1, 3), scalars=SCALARS, number=st.integers(0, 12), wait=st.booleans(), reopen=st.booleans())
    def crash(self, gap: int, scalars: dict[str, float], number: int, wait: bool, reopen: bool) -> None:
        self.flush()
        self.count += 1
        mark = self.next_mark(gap)
        with crash_at_write(number):
            try:
                add(self.store, mark, self.count, wait=wait, **scalars)
                self.store.flush()
                self.committed(mark, self.count, scalars)
            except (Crash, WriteError):
                assert self.store.marks == tuple(self.seeds)
                reopen = reopen or not wait
        if reopen:
            self.store = create(self.target)

    @rule(close=st.booleans())
    def resume(self, close: bool) -> None:
        if close:
            self.store.close()
        self.flush()
        self.store = create(self.target)
        assert self.store.marks == tuple(self.seeds)

    @precondition(lambda self: not self.queued and self.seeds)
    @rule(number=st.integers(0, 12))
    def compact(self, number: int) -> None:
        self.store.close()
        with crash_at_write(number), suppress(Crash):
            compact(self.target)
        assert_holds(self.store, self.seeds, self.scalars)
        self.store = create(self.target)

    @invariant()
    def holds(self) -> None:
        if not self.queued and hasattr(self, "store"):
            assert_holds(self.store, self.seeds, self.scalars)
            tree = open_recording(self.target)
            assert tree[MAPS].sizes["epoch"] == len(self.seeds)
            if isinstance(self.target, Path):
                assert_holds(self.target, self.seeds, self.scalars)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)


Histories.TestCase.settings = settings(
    max_examples=20,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_random_histories = Histories.TestCase
