"""Recordings and results are read, typed and drawn
with the light core alone, without torch or timm.
"""

import json
import subprocess
import sys
import tomllib
from collections import OrderedDict
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.networks import scatter

# The program runs in this directory, so that it finds the package without an installation.
ROOT = Path(tcnn_probe.__file__).parents[1]
# Packages are hidden: their import raises what it does where they are not installed.
HIDING = """
import json, sys, warnings
from importlib.machinery import PathFinder

absent = {*json.loads(sys.argv[1])}

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, *arguments):
        return None if name.partition(".")[0] in absent else super().find_spec(name, *arguments)

sys.meta_path[:] = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
warnings.simplefilter("error")
"""

# Public names, modules and commands say what they need.
NAMING = """
from importlib import import_module
from importlib.util import find_spec
import tcnn_model
from tcnn_probe import evaluation, heads
from tcnn_probe.command_line import main

packages = tcnn_model, tcnn_probe, evaluation, heads
uses = {f"{p.__name__}.{name}": (getattr, p, name) for p in packages for name in p.__all__}
modules = "tcnn_model.models", "tcnn_probe.callbacks.lightning", "tcnn_probe.callbacks.huggingface"
uses |= {name: (import_module, name) for name in modules}
needing = []
for name, (use, *arguments) in uses.items():
    try:
        use(*arguments)
    except ModuleNotFoundError as error:
        module = error.name.partition(".")[0]
        assert find_spec(module) is None, error
        assert str(error) == f"{name} needs {module}: pip install {module}", error
        needing.append(name)
for command in ("look", "maps"):
    assert main([command, "vit_tiny_patch16_224", "pictures", "-o", "page.html"]) == 2
print(json.dumps(needing))
"""
CALLBACKS = {"tcnn_probe.callbacks.lightning", "tcnn_probe.callbacks.huggingface"}
_NEEDING = {  # names that need timm or torchvision, and names that need torch
    "timm": {
        "tcnn_model.reparameterize",
        "tcnn_model.models",
        "tcnn_probe.look",
        "tcnn_probe.evaluation.robustness",
    },
    "torch": {"tcnn_model.GPSA", "tcnn_model.gpsa", "tcnn_probe.heads.cross_patch"},
}

DRAWING = """
statistics = {*json.loads(sys.argv[3])}
import matplotlib, numpy as np, xarray as xr
matplotlib.use("Agg")
ds = xr.open_zarr(sys.argv[2])
# Text of fixed width, which matplotlib draws; with room for longer names that join later.
assert ds.layer.dtype.kind == "U" and ds.layer.values.tolist() == ["層", "far"]
mesh = ds.entropy.isel(epoch=-1).plot()
ticks = [label.get_text() for label in mesh.axes.get_yticklabels()]
mesh.figure.clear()
lines = ds.gate.sel(layer="層").dropna("head").plot.line(x="epoch")
gates = [line.get_ydata()[-1].item() for line in lines]

import tcnn_probe
from tcnn_probe import plot
from tcnn_probe.evaluation import mean_interval, improvement, mean_corruption_error
from tcnn_probe.evaluation import disagreement
assert tcnn_probe.open(sys.argv[2])["heads"].gate.identical(ds.gate)
tcnn_probe.load_example()
types = {by: tcnn_probe.head_types(ds, by=by).values.tolist() for by in ("content", "gate")}
tcnn_probe.head_table(ds)
plot.anatomy(ds.isel(epoch=-1))
plot.evolution(ds.gate)
rng = np.random.default_rng(0)
coords = {"layer": ["a", "b"], "head": range(3)}
maps = xr.DataArray(rng.random((2, 3, 5, 7)), coords, ("layer", "head", "y", "x"))
plot.attention_grid(maps)
saliency = xr.DataArray(rng.random((2, 5, 7)), dims=("image", "y", "x"))
plot.saliency_overlay(saliency, rng.random((2, 3, 10, 14)))

absent -= statistics
dims = "model", "corruption", "severity", "seed", "image"
answers = {
    "correct": (dims, rng.random((2, 2, 1, 1, 9)) < 0.7),
    "clean_correct": (("model", "image"), rng.random((2, 9)) < 0.8),
}
coords = {
    "model": ["a", "b"],
    "corruption": ["fog", "snow"],
    "severity": [1],
    "group": ("corruption", ["weather"] * 2),
}
results = xr.Dataset(answers, coords)
plot.robustness(results, baseline="a")
improvement(results, "a")
accuracies = {
    "accuracy": results.correct.mean("image"),
    "clean_accuracy": results.clean_correct.mean("image"),
}
mean_corruption_error(results.assign(accuracies), "a")
absent |= statistics

from tcnn_probe.command_line import main
assert main(["show", sys.argv[2]]) == 0
assert main(["info"]) == 0
try:
    tcnn_probe.record
except ModuleNotFoundError as error:
    assert str(error) == "tcnn_probe.record needs torch: pip install torch", error
else:
    raise AssertionError("torch is not absent")
from tcnn_model.training.__main__ import main
assert main(["resnet18"]) == 2
print(json.dumps([ticks, gates, types]))
"""


# A model of a user's own, recorded, ablated and looked at with torch and the core.
RECORDING = """
import torch
from torch import nn
import tcnn_probe

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 8, 8)
        layers = (nn.TransformerEncoderLayer(12, 3, 24, batch_first=True) for _ in range(2))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

model, images = Classifier().eval(), torch.randn(9, 3, 24, 40)
with torch.no_grad(), tcnn_probe.record(model, images=2, health=True) as recorder:
    model(images)
    recorder.mark(epoch=0)
assert recorder.tree["maps/3x3x5"].attention_received.notnull().all()
tcnn_probe.health(recorder.tree)
with torch.no_grad(), tcnn_probe.ablate(model, {recorder.layers[0]: [0]}):
    model(images)
assert len(tcnn_probe.attention_maps(model, images[:2]).children) == 1
entropy = recorder.dataset.entropy.isel(epoch=0, layer=0)
for use in (
    lambda: tcnn_probe.saliency(model, images[:2], method="gradcam"),
    lambda: tcnn_probe.representation.knn_correct(torch.randn(9, 4), range(9)),
    lambda: tcnn_probe.evaluation.mean_interval(entropy, "head"),
    lambda: tcnn_probe.report(recorder.tree),
    lambda: tcnn_probe.attention_maps(model, "no such file"),
):
    try:
        use()
    except (ModuleNotFoundError, OSError, TypeError) as error:
        print(error)
"""


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _modules_beyond(requirements: list[str]) -> list[str]:
    """List modules of packages that are neither requirements nor dependencies of them."""
    waiting = [*requirements]
    packages: set[str] = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name in packages or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        packages.add(name)
        waiting += metadata.requires(name) or []
    return [
        module
        for module, distributions in metadata.packages_distributions().items()
        if not packages & {canonicalize_name(name) for name in distributions}
        and module not in ("tcnn_probe", "tcnn_model")
    ]


def _run(program: str, absent: Iterable[str], *arguments: str, package: str) -> tuple[str, str]:
    """Run a program, and then use all public names, in an interpreter without some packages.

    Args:
        program: Source of the program.
        absent: Modules that cannot be imported.
        arguments: Further arguments of the program.
        package: The absent package that the commands name.

    Returns:
        What was printed to stdout and to stderr, but for the errors of the commands.
    """
    done = subprocess.run(
        [sys.executable, "-c", HIDING + program + NAMING, json.dumps([*absent]), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output, _, needing = done.stdout.rstrip().rpartition("\n")
    assert _NEEDING[package] | CALLBACKS <= {*json.loads(needing)}
    *lines, look, maps = done.stderr.splitlines()
    assert look == f"tcnn-probe: look needs {package}: pip install {package}"
    assert maps == f"tcnn-probe: maps needs {package}: pip install {package}"
    return output, "\n".join(lines)


@pytest.mark.study
def test_read_typed_and_drawn_without_torch(tmp_path: Path) -> None:
    # A name beyond ASCII shows that names survive as text.
    layers = OrderedDict(
        {
            "層": scatter(GPSA(2, 5, 3, padding=1)),
            "far": scatter(GPSA(5, 3, 5, padding=1), seed=2),
        }
    )
    model = nn.Sequential(layers).eval()
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        # Two epochs are needed to draw a line.
        for epoch in range(2):
            model(
                # Heads are typed by content from eight images on.
                torch.randn(8, 2, 7, 11, generator=torch.Generator().manual_seed(epoch))
            )
            recorder.mark(epoch=epoch)
            # The gate changes between the marks, so that the last mark differs from the first.
            model[0].gating += 0.5
    core = PROJECT["dependencies"]
    stats = PROJECT["optional-dependencies"]["stats"]
    absent = {*_modules_beyond(core)}
    statistics = absent - {*_modules_beyond([*core, *stats])}
    # If the core required one of these packages, the test would prove nothing.
    assert {"torch", "timm", "captum", "bokeh"} <= absent - statistics
    assert {"scipy", "sklearn"} <= statistics
    arguments = str(tmp_path / "run.zarr"), json.dumps([*statistics])
    output, errors = _run(DRAWING, absent, *arguments, package="torch")
    assert errors == "tcnn-finetune needs torch: pip install torch timm"
    # The last line is JSON; the output before is that of `show` and `info`.
    shown, _, printed = output.rpartition("\n")
    assert "層" in shown
    assert shown.endswith("device: unknown, as importing torch raises ModuleNotFoundError")
    ticks, gates, types = json.loads(printed)
    ds = recorder.dataset
    assert ticks == ["層", "far"]
    assert gates == ds.gate.sel(layer="層", epoch=1).dropna("head").values.tolist()
    # Types are the same with and without torch.
    assert types == {by: tcnn_probe.head_types(ds, by=by).values.tolist() for by in types}


@pytest.mark.study
def test_a_model_of_the_users_own_is_recorded_with_torch_alone() -> None:
    """Packages that the core lacks are named where they are needed, with what to type."""
    absent = _modules_beyond([*PROJECT["dependencies"], "torch"])
    assert {"timm", "captum", "scipy", "sklearn", "bokeh"} <= {*absent}
    output, _ = _run(RECORDING, absent, package="timm")
    assert [line.rpartition(": ")[2] for line in output.splitlines()][:4] == [
        "pip install captum",
        "pip install scikit-learn",
        "pip install scipy",
        "pip install bokeh",
    ]
