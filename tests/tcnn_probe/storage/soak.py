"""Random operations on recordings, in processes that are killed; every value is checked.

    python -m tests.tcnn_probe.storage.soak --minutes 60

Each round does every operation once, in random order; at least one round is done. The expected
values follow from the numbers given with the marks. A mark that is repeated after a kill gets other
values, so stale values are noticed.
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

from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tests.tcnn_probe.storage.tables import GROUPS, add, assert_holds, contents, create, values

MOST = 90  # a recording has at most this many marks; the 65th begins a second chunk of numbers
Tell = Callable[[int], object]


class Child:
    """A forked process that does some work and sends numbers."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        announced, tell = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of zarr's thread if a writer forks.
            warnings.simplefilter("ignore")
            # A fork copies no threads, so the child has to restart zarr's, which is part of the
            # test.
            self.pid = os.fork()
        if not self.pid:
            # An operation takes a fraction of a second; the limit is two minutes.
            signal.alarm(120)  # a process that hangs has failed
            warnings.simplefilter("error")
            try:
                work(*arguments, lambda number: os.write(tell, b"%d\n" % number))
                # sys.exit would run pytest's own clean-up a second time in the child.
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.close(tell)
        self._told = os.fdopen(announced)

    def numbers(self, count: int) -> list[int]:
        """Return the next numbers that the process sends."""
        return [int(self._told.readline()) for _ in range(count)]

    def end(self, *, kill: bool = False) -> list[int]:
        """Return the remaining numbers once the process has ended well, or been killed."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        with self._told:
            rest = [int(line) for line in self._told]
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        # A process that is killed may have finished before, as the kill may come after the last
        # mark.
        assert status == 0 or (kill and status == -signal.SIGKILL), status
        return rest


def scalars(epoch: int, seed: int) -> dict[str, float]:
    """Return a scalar that every epoch has and one that five epochs have."""
    # A scalar that begins and ends leaves epochs without a value, which must read as NaN.
    return {"top1": seed / 7, f"phase{epoch // 5}": seed}


def write(path: Path, first: int, count: int, fork: bool, tell: Tell) -> None:
    """Add marks, report each when it is durable, and close."""
    store = create(path)
    for epoch in range(len(store.marks), len(store.marks) + count):
        # Each attempt at an epoch has other numbers, so values of a killed attempt are noticed.
        add(store, epoch, first + epoch, **scalars(epoch, first + epoch))
        tell(epoch)
        if fork:
            Child(refused, store).end()
    store.close()


def refused(source: EpochStore | Path, tell: Tell) -> None:
    """Assert that a second recorder and a forked process can read, and are not allowed to write."""
    store = source if isinstance(source, EpochStore) else create(source)
    # If the writer closes between the two lines, the refusal is due to its marks.
    reason = r"is being written by another|: \d+ marks were left in it"
    with pytest.raises(StoreError, match=reason):
        # The epoch is far beyond the last, so that the order of marks is no reason to refuse it.
        add(store, 10**6, 1)
    store.dataset().load()
    store.close()


def check(path: Path, seeds: list[int], tell: Tell) -> None:
    """Compare everything in a store with the seeds; reading must not change the store."""
    before = contents(path)
    expected = {f"phase{epoch // 5}": {} for epoch in range(len(seeds))} | {"top1": {}}
    for epoch, seed in enumerate(seeds):
        for name, value in scalars(epoch, seed).items():
            expected[name][epoch] = value
    assert_holds(path, dict(enumerate(seeds)), expected)
    assert open_recording(path).epoch.values.tolist() == list(range(len(seeds)))
    assert contents(path) == before
    row = sum(value.size for group in values(0).values() for value in group.values())
    # The number of compared values shows that the soak did not compare empty stores.
    tell((row + 2) * len(seeds))


def look(path: Path, first: int, seeds: list[int], count: int, tell: Tell) -> None:
    """Open a recording again and again while marks are added."""
    for _ in range(count):
        tree = open_recording(path)
        # The reader sees a varying number of marks, as the writer continues meanwhile.
        present = [*seeds, *range(first + len(seeds), first + tree.sizes["epoch"])]
        for name in GROUPS:
            group = tree[name or "heads"].to_dataset()
            assert group.epoch.values.tolist() == list(range(len(present)))
            for variable in GROUPS[name].variables:
                expected = [values(seed)[name][variable] for seed in present]
                np.testing.assert_array_equal(group[variable], expected)
        tell(len(present))


def begin_anew(path: Path, seed: int, tell: Tell) -> None:
    """Replace a recording by one with a single mark."""
    store = create(path, mode="w")
    tell(0)
    add(store, 0, seed, **scalars(0, seed))
    store.close()


def peek(path: Path, tell: Tell) -> None:
    """Count the marks, and read the seed of the first off the scalar that every mark has."""
    top1 = EpochStore(path).dataset().top1.values
    tell(len(top1))
    # The scalar in sevenths is rounded back to the seed.
    tell(round(7 * top1[0].item()))


class Soak:
    """Operations on one recording after another, with the ``seeds`` of its marks."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.path = folder / "run.zarr"
        self.chance = random.Random(seed)
        self.counts = Counter[str]()
        self.seeds = list[int]()
        self.runs = 0

    def round(self) -> None:
        """Do each operation once."""
        operations = [self.mark, self.kill, self.kill_early, self.read, self.replace]
        # The order is random, so that each operation eventually follows each other one.
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
        """Add some marks and close; sometimes fork a process after each mark."""
        fork = self.chance.random() < 0.5
        self._announced(self._writer(self.chance.randint(1, 4), fork=fork).end())
        self.counts["forking"] += fork

    def kill(self) -> None:
        """Kill a writer at any moment of a mark."""
        # The writer is killed before it makes as many marks.
        writer = self._writer(1000)
        self._killed(
            writer,
            writer.numbers(self.chance.randint(1, 6)),
            # A mark takes some hundredths of a second, so a tenth covers all of its moments.
            self.chance.uniform(0, 0.1),
        )

    def kill_early(self) -> None:
        """Kill a writer while it opens or makes the recording, or makes its first mark."""
        self._killed(self._writer(1000), [], self.chance.uniform(0, 0.15))

    def read(self) -> None:
        """Read in another process, and try to write, while marks are added."""
        writer = self._writer(1000)
        announced = writer.numbers(1)
        counts_seen = Child(
            look, self.path, self.first, self.seeds, self.chance.randint(1, 3)
        ).end()
        # A reader never sees fewer marks than before.
        assert counts_seen == sorted(counts_seen)
        self.counts["looks"] += len(counts_seen)
        Child(refused, self.path).end()
        self._killed(writer, announced, 0)

    def replace(self) -> None:
        """Replace the recording; a killed writer leaves the old recording or the new mark."""
        if not self.seeds:
            self.mark()
        self.runs += 1
        seed = 1000 * self.runs
        writer = Child(begin_anew, self.path, seed)
        writer.numbers(1)
        time.sleep(self.chance.uniform(0, 0.15))
        # Most replacements are killed, as a finished one leaves an ordinary recording.
        writer.end(kill=self.chance.random() < 0.7)
        if Child(peek, self.path).end()[1] == seed:
            self.seeds = [seed]
            self.counts["replaced"] += 1
        self.mark()  # the mark deletes leftovers of a killed process

    def _writer(self, count: int, *, fork: bool = False) -> Child:
        self.runs += 1
        # Each writer has a thousand numbers of its own.
        self.first = 1000 * self.runs
        return Child(write, self.path, self.first, count, fork)

    def _killed(self, writer: Child, announced: list[int], after: float) -> None:
        time.sleep(after)
        self._announced([*announced, *writer.end(kill=True)])
        if self.path.exists():  # there may be one more mark than was reported
            present = Child(peek, self.path).end()[0]
            # There is at most one, as a mark is durable before it is reported, and the next begins
            # after that.
            assert 0 <= present - len(self.seeds) <= 1
            self.counts["not told"] += present - len(self.seeds)
            self.seeds += [self.first + len(self.seeds)] * (present - len(self.seeds))
        else:
            assert not self.seeds

    def _announced(self, epochs: list[int]) -> None:
        assert epochs == list(range(len(self.seeds), len(self.seeds) + len(epochs)))
        self.seeds += [self.first + epoch for epoch in epochs]
        self.counts["marks"] += len(epochs)


def main(kind: Callable[[Path, int], Any], about: str | None) -> None:
    """Do rounds and print the counts; after a failure the folder is kept."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    print(f"seed {options.seed}, in {folder}", flush=True)
    soak = kind(folder, options.seed)
    end = time.monotonic() + 60 * options.minutes
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        soak.round()
        rounds += 1
        if rounds % 100 == 0:
            print(f"{rounds} rounds: {dict(soak.counts)}", flush=True)
    shutil.rmtree(folder)
    print(f"{rounds} rounds, nothing lost, nothing wrong: {dict(soak.counts)}")


if __name__ == "__main__":
    main(Soak, __doc__)
