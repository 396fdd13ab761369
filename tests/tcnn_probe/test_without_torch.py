"""Recordings and results are read, typed and drawn where torch and timm are not installed."""

import json
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.networks import scatter

PROGRAM = """
import json, sys, warnings

class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "timm", "torchvision", "captum", "tcnn_model"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
warnings.simplefilter("error")
import matplotlib, numpy as np, xarray as xr
matplotlib.use("Agg")
ds = xr.open_zarr(sys.argv[1])
assert ds.layer.dtype == ds.layer.astype(str).dtype == "<U3"
mesh = ds.entropy.isel(epoch=-1).plot()
ticks = [label.get_text() for label in mesh.axes.get_yticklabels()]
mesh.figure.clear()
gates = [line.get_ydata()[-1].item() for line in ds.gate.sel(layer="層").dropna("head").plot.line(x="epoch")]

import tcnn_probe
from tcnn_probe import plot
from tcnn_probe.evaluation import mean_interval, improvement, mean_corruption_error
from tcnn_probe.evaluation import calibration_error, disagreement, mcnemar
assert tcnn_probe.open(sys.argv[1])["heads"].gate.identical(ds.gate)
types = {method: tcnn_probe.head_types(ds, method).values.tolist() for method in ("thresholds", "mixture")}
plot.evolution(ds.gate)
rng = np.random.default_rng(0)
maps = xr.DataArray(rng.random((2, 3, 5, 7)), {"layer": ["a", "b"], "head": range(3)}, ("layer", "head", "y", "x"))
plot.attention_grid(maps)
plot.saliency_overlay(xr.DataArray(rng.random((2, 5, 7)), dims=("image", "y", "x")), rng.random((2, 3, 10, 14)))
answers = {"correct": (("model", "corruption", "severity", "seed", "image"), rng.random((2, 2, 1, 1, 9)) < 0.7)}
coords = {"model": ["a", "b"], "corruption": ["fog", "snow"], "severity": [1], "group": ("corruption", ["weather"] * 2)}
results = xr.Dataset(answers | {"clean_correct": (("model", "image"), rng.random((2, 9)) < 0.8)}, coords)
plot.robustness(results, baseline="a")
improvement(results, "a")
accuracies = {"accuracy": results.correct.mean("image"), "clean_accuracy": results.clean_correct.mean("image")}
mean_corruption_error(results.assign(accuracies), "a")
from tcnn_probe.command_line import main
assert main(["show", sys.argv[1]]) == 0
assert main(["info"]) == 0
print(json.dumps([ticks, gates, types]))
"""


def test_read_typed_and_drawn_without_torch(tmp_path: Path) -> None:
    layers = OrderedDict(
        {
            "層": scatter(GPSA(2, 5, 3, padding=1)),
            "far": scatter(GPSA(5, 3, 5, padding=1), seed=2),
        }
    )
    model = nn.Sequential(layers).eval()
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        for epoch in range(2):
            model(
                torch.randn(8, 2, 7, 11, generator=torch.Generator().manual_seed(epoch))
            )
            recorder.mark(epoch=epoch)
            model[0].gating += 0.5
    command, root = (
        [sys.executable, "-c", PROGRAM, tmp_path / "run.zarr"],
        Path(tcnn_probe.__file__).parents[1],
    )
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    shown, _, printed = done.stdout.rstrip().rpartition("\n")
    assert "層" in shown
    assert shown.endswith(
        "device: unknown, as importing torch raises ModuleNotFoundError"
    )
    ticks, gates, types = json.loads(printed)
    ds = recorder.dataset
    assert ticks == ["層", "far"]
    assert gates == ds.gate.sel(layer="層", epoch=1).dropna("head").values.tolist()
    assert types == {
        method: tcnn_probe.head_types(ds, method).values.tolist() for method in types
    }
