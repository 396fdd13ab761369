"""Random histories of a store: marks, crashes, kills and resuming, compared with a plain dict."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from tcnn_probe.storage import EpochStore, open_recording
from tests.tcnn_probe.storage.tables import (
    MAPS,
    Crash,
    Remote,
    add,
    assert_holds,
    create,
    dies,
    steps,
)

SCALARS = st.dictionaries(
    st.sampled_from(["top1", "loss", "lr"]), st.floats(-9, 9), max_size=2
)


class Histories(RuleBasedStateMachine):
    """State machine with the expected seed of each mark and the expected values of each scalar by mark."""

    store: EpochStore | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.patch = pytest.MonkeyPatch()
        # Chunks have three marks, so that a dozen steps fill several.
        self.patch.setattr("tcnn_probe.storage.arrays.MOST_MARKS", 3)
        self.seeds: dict[Any, int] = {}
        self.scalars: dict[str, dict[Any, float]] = {}
        self.count = 0

    @initialize(directory=st.booleans(), floats=st.booleans())
    def begin(self, directory: bool, floats: bool) -> None:
        self.target = self.folder / "run.zarr" if directory else Remote()
        self.step = 0.5 if floats else 1
        self.store = create(self.target)

    @rule(
        gap=st.integers(1, 3),
        scalars=SCALARS,
        crash=st.none() | st.integers(0, 45),
        killed=st.booleans(),
    )
    def mark(
        self, gap: int, scalars: dict[str, float], crash: int | None, killed: bool
    ) -> None:
        """Mark, or crash at a step; then the same store continues, or another one after a kill."""
        self.count += 1
        mark = (self.store.marks[-1] if self.seeds else -self.step) + gap * self.step
        with steps(crash) as done:
            try:
                add(self.store, mark, self.count, **scalars)
            except Crash:
                assert self.store.marks == tuple(self.seeds)
                if killed:
                    dies(self.store)
                    self.store = create(self.target)
                if not (self.seeds and f"replace {self.target}/zarr.json" in done[:-1]):
                    return  # nothing of the mark is there
                if not killed:  # the mark is there unannounced and is repeated
                    add(self.store, mark, self.count, **scalars)
        self.seeds[mark] = self.count
        for name, value in scalars.items():
            self.scalars.setdefault(name, {})[mark] = value

    @rule(close=st.booleans())
    def resume(self, close: bool) -> None:
        if close:
            self.store.close()
        dies(self.store)
        self.store = create(self.target)
        assert not self.seeds or open_recording(self.target)[MAPS].sizes[
            "epoch"
        ] == len(self.seeds)

    @invariant()
    def holds(self) -> None:
        if self.seeds:
            assert self.store.marks == tuple(self.seeds)
            assert_holds(self.store, self.seeds, self.scalars)

    def teardown(self) -> None:
        if self.store is not None:
            self.store.close()
        self.patch.undo()
        shutil.rmtree(self.folder)


Histories.TestCase.settings = settings(
    # There are few examples, as each step compares the whole store; the soak runs for a chosen time.
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_random_histories = Histories.TestCase
