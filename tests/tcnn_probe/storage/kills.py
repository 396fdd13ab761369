"""Writers in processes of their own, to be killed at any moment; what they had announced must be there."""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.storage.tables import GROUPS, assert_holds, values

__all__ = ["WRITER", "kill_and_resume", "read", "read_while_it_writes", "run_and_kill"]

WRITER = """
import sys
from tests.tcnn_probe.storage.tables import add, create
print("ready", flush=True)
store = create(sys.argv[1])
epoch = len(store.marks)
while True:
    add(store, epoch, **{"top1": epoch / 7, f"phase{epoch // 5}": epoch})
    print(epoch, flush=True)
    epoch += 1
"""


def _start(script: str, path: Path) -> subprocess.Popen[str]:
    """A writer that has imported what it needs."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-c", script, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert writer.stdout.readline() == "ready\n", writer.communicate()[1]
    return writer


def run_and_kill(script: str, path: Path, *, epochs: int, after: float) -> list[int]:
    """The epochs that a writer announced before it was killed, ``after`` seconds from when it announced ``epochs``."""
    with _start(script, path) as writer:
        announced = [writer.stdout.readline() for _ in range(epochs)]
        time.sleep(after)
        died = writer.poll() is not None
        writer.kill()
        rest, errors = writer.communicate()
    assert (died, errors) == (False, "")  # neither errors nor warnings
    return [int(line) for line in [*announced, *rest.splitlines()]]


def read(path: Path) -> int:
    """The number of epochs in the store, after a look at every value of every group."""
    epochs = list(range(xr.open_zarr(path).sizes["epoch"]))
    scalars = {f"phase{phase}": {e: float(e) for e in epochs if e // 5 == phase} for phase in {e // 5 for e in epochs}}
    assert_holds(path, epochs, {"top1": {epoch: epoch / 7 for epoch in epochs}, **scalars})
    return len(epochs)


def kill_and_resume(path: Path, *, kills: int, seed: int) -> int:
    """Kill writers of one store at random moments; gives the number of its epochs. Each is checked, and resumed."""
    chance, count = random.Random(seed), 0
    for _ in range(kills):
        announced = run_and_kill(WRITER, path, epochs=chance.randint(1, 7), after=chance.uniform(0, 0.1))
        before, count = count, read(path)
        assert announced == list(range(before, announced[-1] + 1))
        assert 0 <= count - announced[-1] - 1 <= 1  # one may be there and not yet announced
    return count


def read_while_it_writes(path: Path, *, seconds: float) -> list[int]:
    """Open the store again and again while a writer appends; the number of epochs that each look found."""
    seen: list[int] = []
    with _start(WRITER, path) as writer:
        try:
            assert writer.stdout.readline() == "0\n"
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                tree = tcnn_probe.open(path)
                seen.append(tree.sizes["epoch"])
                for name in GROUPS:
                    group = tree[name or "heads"].to_dataset()
                    assert group.epoch.values.tolist() == list(range(seen[-1]))
                    for variable, expected in values(seen[-1] - 1)[name].items():
                        np.testing.assert_array_equal(group[variable][-1], expected)
            assert writer.poll() is None
        finally:
            writer.kill()
    return seen


if __name__ == "__main__":  # python -m tests.tcnn_probe.storage.kills 200
    with tempfile.TemporaryDirectory() as folder:
        marks = kill_and_resume(Path(folder) / "run.zarr", kills=int(sys.argv[1]), seed=int(sys.argv[1]))
        print(f"{sys.argv[1]} kills, {marks} marks, none lost")
