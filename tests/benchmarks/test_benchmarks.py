"""Each benchmark compares things that compute the same, and prints what it says it prints."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import contest

ROOT = Path(__file__).parents[2]
SMALL = {
    "backends": ["--batch", "1"],
    "convit_layer": ["--sides", "3", "5"],
    "recording": ["--models", "vit_tiny_patch16_224", "t_resnet50", "--size", "64", "--batch", "2"],
    "resolution": ["--sides", "3", "5"],
    "resolution_memory": ["--sizes", "48", "64", "--training"],
    "tcnn_layer": ["--sides", "3", "--batch", "1", "--channels", "9"],
    "whole_model": ["--size", "64", "--batch", "1"],
}


def test_every_benchmark_is_here() -> None:
    assert {p.stem for p in (ROOT / "benchmarks").glob("*.py")} == {*SMALL, "contest"}


@pytest.mark.parametrize("name", SMALL)
def test_every_contestant_takes_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # the C++ compiler is not what is tested
    benchmark = importlib.import_module(name)
    arguments = benchmark.parser().parse_args(SMALL[name])
    contests = benchmark.contests(arguments)
    assert contests
    for contestants in list(contests.values())[:3]:
        assert len(contestants) > 1
        for prepare in contestants.values():
            prepare()()


def test_table_of_ratios_and_memory() -> None:
    command = [sys.executable, ROOT / "benchmarks" / "convit_layer.py", "--sides", "7", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "7 x 7: largest difference of outputs" in done.stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "tokens" in line]
    assert [row[1] for row in rows] == ["timm", "tcnn_model.accelerate"]
    assert rows[0][2] == "1"
    assert float(rows[1][2]) > 0


def test_memory_against_resolution(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Tables and figure of a report, with memory that grows like the area but for one that grows like its square."""
    benchmark = importlib.import_module("resolution_memory")
    arguments = benchmark.parser().parse_args(["--sizes", "10", "20", "30", "--figure", str(tmp_path / "figure.png")])
    every = benchmark.contests(arguments)

    def pretend(every: contest.Mapping[str, contest.Contest]) -> dict[str, dict[str, int]]:
        return {
            size: {label: 2**20 * (int(size) ** 4 if "not" in label else 3 * int(size) ** 2) for label in contestants}
            for size, contestants in every.items()
        }

    monkeypatch.setattr(contest, "memory", pretend)
    benchmark.report(arguments, every)
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in capsys.readouterr().out.splitlines()[3:8]}
    assert [cell.strip() for cell in rows["ResNet-50"]] == ["300", "1200", "2700", "1.00", "1.00 - 1.00", "1.0000"]
    assert [cell.strip() for cell in rows["ViT-S, not fused"]][3:5] == ["2.00", "2.00 - 2.00"]
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_memory_of_each_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "_memory_in_child", lambda name, contestant: f"{contestant} of {name}")
    found = contest.memory({"a": {"x": None, "y": None}, "b": {"x": None}})
    assert found == {"a": {"x": "x of a", "y": "y of a"}, "b": {"x": "x of b"}}


def test_marking_is_timed_in_memory_and_on_disk(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("recording").marking(20)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["in memory", "on disk"]
    assert all("at 20 epochs" in line for line in lines[-2:])


def test_memory_is_the_peak_of_a_step() -> None:
    """A step that makes 128 MiB and drops them, then keeps 64 MiB."""
    kept: list[torch.Tensor] = []

    def step() -> None:
        torch.ones(2**25)
        kept.append(torch.ones(2**24))

    assert 120 * 2**20 < contest._peak_memory(step, "cpu") < 140 * 2**20
