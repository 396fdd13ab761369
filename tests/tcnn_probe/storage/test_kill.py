"""A writer killed at any moment leaves every mark that it announced, and the next one goes on from there."""

import random
from pathlib import Path

from tests.tcnn_probe.storage.kills import WRITER, kill_and_resume, read, read_while_it_writes, run_and_kill


def test_killed_at_random_moments_and_resumed(tmp_path: Path) -> None:
    assert kill_and_resume(tmp_path / "run.zarr", kills=4, seed=0) >= 4


def test_killed_while_it_makes_the_store(tmp_path: Path) -> None:
    chance, path = random.Random(1), tmp_path / "run.zarr"
    for _ in range(2):
        announced = run_and_kill(WRITER, path, epochs=0, after=chance.uniform(0, 0.1))
        assert (read(path) if path.exists() else 0) >= len(announced)
    run_and_kill(WRITER, path, epochs=1, after=0)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]


def test_read_while_it_writes(tmp_path: Path) -> None:
    seen = read_while_it_writes(tmp_path / "run.zarr", seconds=3)
    assert seen == sorted(seen)
    assert len(set(seen)) >= 5
