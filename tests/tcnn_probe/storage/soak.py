"""Random operations on recordings, in processes that are killed at any moment; every value is checked after each.

    python -m tests.tcnn_probe.storage.soak --minutes 60

Each round does every operation once, in random order; at least one round is done. What is compared follows from the
numbers given with the marks. A mark that is tried again after a kill gets other values, so that nothing stale passes.
"""

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tcnn_probe.schema import difference
from tcnn_probe.storage import EpochStore, StoreError, open_recording, repack
from tests.tcnn_probe.storage.tables import (
    GROUPS,
    add,
    assert_holds,
    contents,
    create,
    values,
)

MOST = 90  # marks of a recording; numbers begin a second chunk with the 65th
Tell = Callable[[int], object]


class Child:
    """A forked process that does some work and sends numbers; the parent process has not opened a store."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        announced, tell = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of zarr's thread, where a writer forks.
            warnings.simplefilter("ignore")
            # A fork copies no threads, so zarr must start its thread again in the child, which is tested, too.
            self.pid = os.fork()
        if not self.pid:
            # Two minutes: an operation takes a fraction of a second.
            signal.alarm(120)  # a process that hangs has failed
            warnings.simplefilter("error")
            try:
                work(*arguments, lambda number: os.write(tell, b"%d\n" % number))
                # Not sys.exit: pytest's own clean-up must not run a second time in the child.
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(tell)
        self._told = os.fdopen(announced)

    def numbers(self, count: int) -> list[int]:
        """The next numbers that the process sends."""
        return [int(self._told.readline()) for _ in range(count)]

    def end(self, *, kill: bool = False) -> list[int]:
        """Its other numbers, when it has ended, or was killed; it has not failed."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        with self._told:
            rest = [int(line) for line in self._told]
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # Killed or done: the kill may come after the last mark.
        assert status == 0 or (kill and status == -signal.SIGKILL), status
        return rest


def scalars(epoch: int, seed: int) -> dict[str, float]:
    """One that always comes, and one that comes with five epochs only."""
    # A scalar that begins and ends leaves epochs without a value, which must read as NaN.
    return {"top1": seed / 7, f"phase{epoch // 5}": seed}


def write(path: Path, first: int, count: int, fork: bool, tell: Tell) -> None:
    """Add marks, telling each when it is durable, and close."""
    store = create(path)
    for epoch in range(len(store.marks), len(store.marks) + count):
        # Other numbers for each attempt at an epoch, so that values of a killed attempt do not pass.
        add(store, epoch, first + epoch, **scalars(epoch, first + epoch))
        tell(epoch)
        if fork:
            Child(go_on, store, os.getpid()).end()
    store.close()


def go_on(store: EpochStore, pid: int, tell: Tell) -> None:
    """Read and leave, as a forked process may, which has no right to write."""
    with pytest.raises(StoreError, match=f"is being written by process {pid} "):
        # An epoch far beyond the last, which no order of marks could refuse.
        add(store, 10**6, 1)
    store.dataset().load()
    store.close()


def check(path: Path, seeds: list[int], tell: Tell) -> None:
    """Compare everything in a store with the seeds, as plain xarray reads it; looking at it changes nothing."""
    before = contents(path)
    expected = {f"phase{epoch // 5}": {} for epoch in range(len(seeds))} | {"top1": {}}
    for epoch, seed in enumerate(seeds):
        for name, value in scalars(epoch, seed).items():
            expected[name][epoch] = value
    assert_holds(path, dict(enumerate(seeds)), expected)
    assert open_recording(path).epoch.values.tolist() == list(range(len(seeds)))
    assert contents(path) == before
    row = sum(value.size for group in values(0).values() for value in group.values())
    # The number of values compared: it shows that a soak did not compare empty stores.
    tell((row + 2) * len(seeds))


def look(path: Path, first: int, seeds: list[int], count: int, tell: Tell) -> None:
    """Open a recording again and again while marks are added."""
    for _ in range(count):
        tree = open_recording(path)
        # As many as the reader sees: the writer goes on meanwhile.
        present = [*seeds, *range(first + len(seeds), first + tree.sizes["epoch"])]
        for name in GROUPS:
            group = tree[name or "heads"].to_dataset()
            assert group.epoch.values.tolist() == list(range(len(present)))
            for variable in GROUPS[name].variables:
                expected = [values(seed)[name][variable] for seed in present]
                np.testing.assert_array_equal(group[variable], expected)
        tell(len(present))


def refused(path: Path, pid: int, tell: Tell) -> None:
    """A second recorder, and one of something else."""
    store = create(path)
    with pytest.raises(
        StoreError,
        # The writer may have left between the two lines, and then the marks are what refuses.
        match=rf"is being written by process {pid} |: \d+ marks were left in it",
    ):
        add(store, 10**6, 1)
    assert difference(EpochStore(path).groups or {}, {"": GROUPS[""]}) is not None


def begin_anew(path: Path, seed: int, tell: Tell) -> None:
    """Replace a recording by one of a single mark."""
    store = create(path, mode="w")
    tell(0)
    add(store, 0, seed, **scalars(0, seed))
    store.close()


def first_seed(path: Path, tell: Tell) -> None:
    """Read the seed off the scalar that every mark has."""
    # Sevenths, rounded back to the seed.
    tell(round(7 * open_recording(path).top1.values[0].item()))


def pack(path: Path, packed: Path, tell: Tell) -> None:
    """Repack."""
    tell(0)
    repack(path, packed)


class Soak:
    """One recording after the other; ``seeds`` are of its marks, ``counts`` of what was done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = folder / "run.zarr"
        self.packed = folder / "packed.zarr"
        self.chance = random.Random(seed)
        self.counts = Counter[str]()
        self.seeds = list[int]()
        self.runs = 0

    def round(self) -> None:
        """Do each operation once."""
        operations = [
            self.mark,
            self.kill,
            self.kill_early,
            self.read,
            self.refuse,
            self.repack,
            self.fork,
            self.replace,
        ]
        # In random order, so that each operation follows each other one.
        for operation in self.chance.sample(operations, len(operations)):
            operation()
            self.counts[operation.__name__] += 1
            if self.path.exists():
                self.counts["values"] += Child(check, self.path, self.seeds).end()[0]
            if len(self.seeds) > MOST:
                shutil.rmtree(self.path)
                self.seeds.clear()
                self.counts["recordings"] += 1

    def mark(self) -> None:
        """Some marks, and an orderly end."""
        self._ended(self._writer(self.chance.randint(1, 4)))

    def kill(self) -> None:
        """Killed at any moment of a mark."""
        # More marks than it lives to make.
        writer = self._writer(1000)
        self._killed(
            writer,
            writer.numbers(self.chance.randint(1, 6)),
            # A mark takes some hundredths of a second: a tenth reaches all of its moments.
            self.chance.uniform(0, 0.1),
        )

    def kill_early(self) -> None:
        """Killed at any moment of opening, or making, the recording and its first mark."""
        self._killed(self._writer(1000), [], self.chance.uniform(0, 0.15))

    def read(self) -> None:
        """Read by another process meanwhile."""
        writer = self._writer(1000)
        announced = writer.numbers(1)
        counts_seen = Child(
            look, self.path, self.first, self.seeds, self.chance.randint(1, 3)
        ).end()
        # A reader never sees fewer marks than before.
        assert counts_seen == sorted(counts_seen)
        self.counts["looks"] += len(counts_seen)
        self._killed(writer, announced, 0)

    def refuse(self) -> None:
        """Refused to others meanwhile."""
        writer = self._writer(1000)
        announced = writer.numbers(1)
        Child(refused, self.path, writer.pid).end()
        self._killed(writer, announced, 0)

    def repack(self) -> None:
        """A copy, sometimes killed on its way; then there is none, or a whole one."""
        if not self.seeds:
            self.mark()
        copy = Child(pack, self.path, self.packed)
        copy.numbers(1)
        # Up to a little more than a copy takes on a quiet machine.
        time.sleep(self.chance.uniform(0, 0.2))
        copy.end(kill=self.chance.random() < 0.5)
        if not self.packed.exists():
            self.counts["copies killed"] += 1
            Child(pack, self.path, self.packed).end()
        assert {path.name for path in self.path.parent.iterdir()} == {
            "run.zarr",
            "packed.zarr",
        }
        self.counts["values"] += Child(check, self.packed, self.seeds).end()[0]
        shutil.rmtree(self.packed)

    def replace(self) -> None:
        """Replace it, sometimes killed on the way; then the old one is there, or the first mark of the new."""
        if not self.seeds:
            self.mark()
        self.runs += 1
        seed = 1000 * self.runs
        writer = Child(begin_anew, self.path, seed)
        writer.numbers(1)
        time.sleep(self.chance.uniform(0, 0.15))
        # More often killed than not: what a finished replacement leaves is what any recording has.
        writer.end(kill=self.chance.random() < 0.7)
        if Child(first_seed, self.path).end()[0] == seed:
            self.seeds = [seed]
            self.counts["replaced"] += 1
        self.mark()  # which deletes what a killed process left beside it

    def fork(self) -> None:
        """Forked after each mark, by a process that goes on."""
        self._ended(self._writer(self.chance.randint(1, 3), fork=True))

    def _writer(self, count: int, *, fork: bool = False) -> Child:
        self.runs += 1
        # A thousand for each writer, so that its numbers are no other's.
        self.first = 1000 * self.runs
        return Child(write, self.path, self.first, count, fork)

    def _ended(self, writer: Child) -> None:
        self._announced(writer.end())

    def _killed(self, writer: Child, announced: list[int], after: float) -> None:
        time.sleep(after)
        self._announced([*announced, *writer.end(kill=True)])
        if self.path.exists():  # one more may be there than was told
            present = Child(marks, self.path).end()[0]
            # At most one: a mark is durable before it is told, and the next is not begun before that.
            assert 0 <= present - len(self.seeds) <= 1
            self.counts["not told"] += present - len(self.seeds)
            self.seeds += [self.first + len(self.seeds)] * (present - len(self.seeds))
        else:
            assert not self.seeds

    def _announced(self, epochs: list[int]) -> None:
        assert epochs == list(range(len(self.seeds), len(self.seeds) + len(epochs)))
        self.seeds += [self.first + epoch for epoch in epochs]
        self.counts["marks"] += len(epochs)


def marks(path: Path, tell: Tell) -> None:
    """Count the marks."""
    tell(len(EpochStore(path).marks))


def main(minutes: float, seed: int) -> None:
    """Do rounds, and print what was done; after a failure the folder stays."""
    folder = Path(tempfile.mkdtemp())
    end = time.monotonic() + 60 * minutes
    soak = Soak(folder, seed)
    rounds = 0
    print(f"seed {seed}, in {folder}", flush=True)
    while rounds == 0 or time.monotonic() < end:
        soak.round()
        rounds += 1
        if rounds % 100 == 0:
            print(f"{rounds} rounds: {dict(soak.counts)}", flush=True)
    shutil.rmtree(folder)
    print(f"{rounds} rounds, no mark lost, no value wrong: {dict(soak.counts)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
