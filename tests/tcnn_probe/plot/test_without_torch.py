"""Recordings and results are drawn where torch and timm are not installed."""

import subprocess
import sys
from pathlib import Path

import tcnn_probe

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(("torch", "timm", "torchvision", "captum")))  # as if they were not installed
import matplotlib, numpy as np, xarray as xr
matplotlib.use("Agg")
from tcnn_probe import bootstrap_interval, improvement, mean_corruption_error, plot
rng = np.random.default_rng(0)
heads = xr.DataArray(rng.random((4, 2, 3)), {"layer": ["a", "b"], "head": range(3)}, ("epoch", "layer", "head"), "gate")
plot.evolution(heads)
plot.attention_grid(xr.DataArray(rng.random((2, 3, 5, 7)), dims=("layer", "head", "y", "x"), coords=heads[0].coords))
plot.saliency_overlay(xr.DataArray(rng.random((2, 5, 7)), dims=("image", "y", "x")), rng.random((2, 3, 10, 14)))
answers = {"correct": (("model", "corruption", "severity", "seed", "image"), rng.random((2, 2, 1, 1, 9)) < 0.7)}
coords = {"model": ["a", "b"], "corruption": ["fog", "snow"], "severity": [1], "group": ("corruption", ["weather"] * 2)}
ds = xr.Dataset(answers | {"clean_correct": (("model", "image"), rng.random((2, 9)) < 0.8)}, coords)
plot.robustness(ds, baseline="a")
improvement(ds, "a")
mean_corruption_error(ds.assign(accuracy=ds.correct.mean("image"), clean_accuracy=ds.clean_correct.mean("image")), "a")
assert sys.modules["torch"] is None
"""


def test_plots_and_summaries_without_torch() -> None:
    root = Path(tcnn_probe.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
