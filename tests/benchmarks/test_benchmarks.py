"""Benchmarks with tiny models: every contestant runs,
and tables and figures have the expected form.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import nn

import contest
from tcnn_model.training.config import recipe_settings

# Sizes at which every contestant takes milliseconds.
SMALL = {
    "backends": ["--batch", "1"],
    "convit_layer": ["--sides", "3", "5"],
    "convolved_heads": ["--sizes", "56", "70"],
    "depthwise_layer": ["--batch", "1"],
    "recording": [
        "--models",
        "vit_tiny_patch16_224",
        "t_resnet50",
        "--size",
        "64",
        "--batch",
        "2",
    ],
    "resolution": ["--sides", "3", "5"],
    "resolution_memory": ["--sizes", "48", "64", "--training"],
    "rollout": ["--sizes", "32"],
    "tcnn_layer": ["--sides", "3", "--batch", "1", "--channels", "9"],
    "whole_model": ["--size", "64", "--batch", "1"],
}
TINY: dict[str, dict[str, Any]] = {
    "resnet": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    "vit": {"depth": 1, "embed_dim": 12, "num_heads": 3},
    "patchconvnet": {"depth": 1, "embed_dim": 16},
}


def test_every_benchmark_is_tested() -> None:
    tested_below = {
        *("contest", "kernel_resources", "recorded_forward", "recording_epoch"),
        *("beginnings", "head_costs", "read_recording"),
        *("statistics_floor", "training_budget"),
    }
    assert {p.stem for p in (Path(__file__).parents[2] / "benchmarks").glob("*.py")} == {
        *SMALL,
        *tested_below,
    }


@pytest.mark.parametrize("name", SMALL)
def test_every_contestant_takes_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = timm.create_model

    def tiny(model: str, **options: Any) -> torch.nn.Module:
        smaller = next(value for key, value in TINY.items() if key in model)
        return create(model, **{**options, **smaller})

    monkeypatch.setattr(timm, "create_model", tiny)
    # torch.compile is replaced by the identity, as the C++ compiler is not under test.
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    benchmark = importlib.import_module(name)
    contests = benchmark.contests(benchmark.parser().parse_args(SMALL[name]))
    assert contests
    # Later contests have the same contestants at other sizes; recording has two models.
    for contestants in list(contests.values())[:2]:
        assert len(contestants) > 1
        for prepare in contestants.values():
            # The first call sets the contestant up, and the second one takes a step.
            prepare()()


def test_statistics_and_their_floor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module("statistics_floor")
    create = timm.create_model
    monkeypatch.setattr(
        timm, "create_model", lambda *name, **size: create(*name, **size, **TINY["vit"])
    )
    options = ["--model", "vit_tiny_patch16_224", "--batch", "1", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["statistics_floor.py", *options])
    benchmark.main()
    assert re.search(r"the cost is \d+\.\d\d times", capsys.readouterr().out)
    query, key = torch.randn(2, 3, 2, 67, 5)
    rows, pattern = benchmark.floor(query, key, torch.ones(67, 67))
    attention = (query @ key.mT).softmax(-1)
    entropy = rows[:, 1].log() - rows[:, 2] / rows[:, 1]
    torch.testing.assert_close(entropy, torch.special.entr(attention).sum(-1))
    torch.testing.assert_close(pattern.sum(0), attention[:, :, 3:].sum(0))


def test_recorded_epoch_beside_a_plain_one(tmp_path: Path) -> None:
    benchmark = importlib.import_module("recording_epoch")
    # ImageNet has 1,281,167 training images and 50,000 for validation.
    assert pytest.approx(25.6, abs=0.03) == benchmark.PROPORTION
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **TINY["vit"])
    training = benchmark.Training(model, torch.randn(3, 3, 32, 32), tmp_path / "run.zarr")
    for epoch in range(2):
        assert min(training.step(), training.validate(), training.mark(epoch)) > 0
    recorded = xr.open_zarr(tmp_path / "run.zarr")
    assert recorded.epoch.values.tolist() == [0, 1]
    assert recorded.images.values.tolist() == [[3], [3]]
    rounds = np.array(
        [[[2.0, 2.0], [1.0, 1.5]], [[2.0, 2.2], [1.0, 1.5]], [[3.0, 3.3], [1.0, 1.5]]]
    )
    assert benchmark.longer(rounds) == pytest.approx(
        (25.62 * 2.2 + 1.5) / (25.62 * 2 + 1) - 1, abs=1e-4
    )


def test_both_models_are_recorded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio is that of recording, 1.2, although the second model takes 1.5 times
    as long as the first.
    """
    benchmark = importlib.import_module("recorded_forward")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, **TINY["vit"]).eval()
    images = torch.randn(2, 3, 32, 32)
    assert benchmark.forward(model, images) > 0
    attached = []
    record = benchmark.tcnn_probe.record

    @contextmanager
    def attach(model: nn.Module, **options: Any) -> Iterator[Any]:
        assert options == {"health": True}
        with record(model, **options) as recorder:
            attached.append(id(model))
            yield recorder
            attached.remove(id(model))

    def seconds(network: nn.Module, images: torch.Tensor) -> float:
        network(images)
        return (1.0 if network is model else 1.5) * (1.2 if id(network) in attached else 1.0)

    monkeypatch.setattr(benchmark.tcnn_probe, "record", attach)
    monkeypatch.setattr(benchmark, "forward", seconds)
    measured = benchmark.compare(model, images, rounds=2, repeats=3, health=True)
    assert measured == pytest.approx([1.2] * 3)


def test_costs_of_heads_as_plain_forwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = importlib.import_module("head_costs")
    create = timm.create_model
    monkeypatch.setattr(
        benchmark.timm,
        "create_model",
        lambda _, **size: create("vit_tiny_patch16_224", **size, **TINY["vit"]),
    )
    # A clock that advances by one at each reading makes all ratios of single runs 1, and
    # differences 0.
    monkeypatch.setattr(benchmark.time, "process_time", iter(range(10**6)).__next__)
    options = ["--size", "32", "--images", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["head_costs.py", *options])
    benchmark.main()
    printed = capsys.readouterr().out
    assert "all heads salient: 1.00 plain forwards" in printed
    assert "head_importance with a loss, five modes: 0.00 plain forwards" in printed
    assert printed.count("by head and mode: 0.00") == 2


def test_budget_of_a_training_by_hand() -> None:
    """Autograd keeps the image and the features between two matrices."""
    benchmark = importlib.import_module("training_budget")
    layers = nn.Flatten(), nn.Linear(3 * 4 * 4, 7), nn.Sigmoid(), nn.Linear(7, 5)
    assert benchmark.kept_bytes(nn.Sequential(*layers).to("meta"), 4) == 2 * (3 * 4 * 4 + 7)
    assert benchmark.hours(1e9, 3_600_000, 100, 6e14, 0.5) == pytest.approx(2.0)
    for recipe, name, data in benchmark.SETTINGS:
        assert {"epochs", "paper_batch"} <= recipe_settings(recipe, name).keys()
        assert timm.is_model(name)
        assert data in benchmark.IMAGES


def test_best_times_by_hand() -> None:
    """A tile holds 128 tokens; test_compiled.py tests the compiled kernel."""
    best_times = importlib.import_module("kernel_resources").best_times
    weights = 1000 * 128 * 128
    # Each time is set by what limits it: bytes by the bandwidth, matrix products by the tensor
    # cores, exponentials and other arithmetic by the number of units times the clock rate. An H200
    # has 4.8 TB/s, 989 TFLOP/s in bfloat16, and 132 multiprocessors at 1980 MHz, each with 16
    # exponentials and 128 other operations a cycle.
    microseconds = [
        1000 * 128 * (2 * 64 * 2 + 5 * 4) / 4.8e6,
        2 * 64 * weights / 989e6,
        2 * weights / (132 * 16 * 1980),
        14 * weights / (132 * 128 * 1980),
    ]
    expected = [f"{time:.1f}" for time in (*microseconds, max(microseconds))]
    assert best_times(1000, 128, 1, 64, None) == [*expected, ""]


def test_marking_is_timed_in_memory_and_on_disk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    importlib.import_module("recording").marking(3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == ["in memory", "on disk"]
    assert all("at 3 epochs" in line for line in lines[-2:])


def test_memory_is_the_peak_of_a_step() -> None:
    """The step allocates 128 MiB and frees them, then allocates and keeps 64 MiB."""
    tensors: list[torch.Tensor] = []

    def step() -> None:
        torch.ones(2**25)
        tensors.append(torch.ones(2**24))

    # The sum would be 192 MiB, and 64 MiB remain allocated; the allocator rounds to pages.
    assert 120 * 2**20 < contest._peak_memory(step, "cpu") < 140 * 2**20


@pytest.mark.filterwarnings("ignore:types need at least 8 images")
def test_a_recording_is_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"epochs": 2, "layers": 3, "heads": 2, "images": 1, "side": 5}
    options = [f"--{name}={size}" for name, size in sizes.items()]
    monkeypatch.setattr(sys, "argv", ["x", *options, "--folder", str(tmp_path)])
    importlib.import_module("read_recording").main()
    assert capsys.readouterr().out.count(" s |") == 14
    assert (tmp_path / "report.html").exists()
