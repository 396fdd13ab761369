"""A writer killed at any moment leaves every epoch that it announced, and the next one goes on from there."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.tables import VARIABLES, assert_epochs

PACKAGE, TESTS = Path(tcnn_probe.__file__).parent, Path(__file__).parent

# Imports the store without torch, which the package's __init__ would bring: a start takes half a second, not five.
WRITER = f"""
import sys, types
for name, place in (("tcnn_probe", {str(PACKAGE)!r}), ("tests.tcnn_probe", {str(TESTS)!r})):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [place]
from tcnn_probe.store import EpochStore
from tests.tcnn_probe.tables import LAYERS, VARIABLES, values
assert "torch" not in sys.modules
print("ready", flush=True)
store = EpochStore(sys.argv[1], LAYERS, VARIABLES, {{}})
epoch = len(store.epochs)
while True:
    store.append(epoch, values(epoch), {{"top1": epoch / 7, f"phase{{epoch // 5}}": epoch}})
    print(epoch, flush=True)
    epoch += 1
"""

RECORDING = """
import sys
import torch
torch.set_num_threads(1)
import tcnn_probe
from tcnn_model import GPSA
model = torch.nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
x = torch.randn(1, 2, 5, 7)
with tcnn_probe.record(model, sys.argv[1]) as recorder:
    print("ready", flush=True)
    epoch = len(recorder.epochs)
    while True:
        model[0].center.data.fill_(epoch)
        model(x)
        recorder.mark(epoch=epoch, top1=epoch / 7)
        print(epoch, flush=True)
        epoch += 1
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    """A writer that has imported what it needs."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", script, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert writer.stdout.readline() == "ready\n", writer.communicate()[1]
    return writer


def run_and_kill(script: str, path: Path, *, epochs: int, after: float) -> list[int]:
    """The epochs that a writer announced before it was killed, ``after`` seconds from when it announced ``epochs``."""
    with start(script, path) as writer:
        announced = [writer.stdout.readline() for _ in range(epochs)]
        time.sleep(after)
        died = writer.poll() is not None
        writer.kill()
        rest, errors = writer.communicate()
    assert not died, errors
    assert errors == ""  # neither errors nor warnings
    return [int(line) for line in [*announced, *rest.splitlines()]]


def read(path: Path) -> list[int]:
    """The epochs in the store, after a look at every value."""
    ds = xr.open_zarr(path)
    epochs = ds.epoch.values.tolist()
    assert_epochs(ds, list(range(len(epochs))))
    for name in set(ds) - set(VARIABLES):
        inside = [name == "top1" or name == f"phase{epoch // 5}" for epoch in epochs]
        expected = np.where(inside, np.array(epochs) / 7 if name == "top1" else epochs, np.nan)
        np.testing.assert_array_equal(ds[name], expected)
    if epochs:
        assert {"top1", *(f"phase{epoch // 5}" for epoch in epochs)} == set(ds) - set(VARIABLES)
    return epochs


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    path, chance, epochs = tmp_path / "run.zarr", random.Random(0), []
    for _ in range(8):
        announced = run_and_kill(WRITER, path, epochs=chance.randint(1, 7), after=chance.uniform(0, 0.1))
        before, epochs = epochs, read(path)
        assert announced == list(range(len(before), len(before) + len(announced)))
        assert len(epochs) - len(before) - len(announced) in (0, 1)  # one may be in the store and not yet announced


def test_killed_while_it_creates_the_store(tmp_path: Path) -> None:
    chance = random.Random(1)
    for attempt in range(4):
        path = tmp_path / str(attempt) / "run.zarr"
        announced = run_and_kill(WRITER, path, epochs=0, after=chance.uniform(0, 0.04))
        there = read(path) if path.exists() else []
        assert len(there) - len(announced) in (0, 1)
        announced = run_and_kill(WRITER, path, epochs=2, after=0)
        assert read(path)[: len(there) + len(announced)] == there + announced


def test_read_while_it_writes(tmp_path: Path) -> None:
    path, seen, patience = tmp_path / "run.zarr", [], time.monotonic() + 20
    with start(WRITER, path) as writer:
        try:
            assert writer.stdout.readline() == "0\n"
            while len(set(seen)) < 12 and time.monotonic() < patience:
                seen.append(len(read(path)))
        finally:
            writer.kill()
    assert seen == sorted(seen)
    assert len(set(seen)) == 12


def test_killed_recording(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    announced = run_and_kill(RECORDING, path, epochs=3, after=0.05)
    model = nn.Sequential(GPSA(2, 3, 3, padding=1)).eval()
    with tcnn_probe.record(model, path) as recorder:
        count = len(recorder.epochs)
        assert count - len(announced) in (0, 1)
        model[0].center.data.fill_(count)
        model(torch.randn(1, 2, 5, 7))
        recorder.mark(epoch=count, top1=count / 7)
    ds = xr.open_zarr(path)
    np.testing.assert_array_equal(ds.epoch, np.arange(count + 1))
    np.testing.assert_array_equal(ds.top1, ds.epoch / 7)
    np.testing.assert_array_equal(ds.center_y, np.broadcast_to(ds.epoch.values[:, None, None], ds.gate.shape))
    assert np.isfinite(ds.entropy).all()
