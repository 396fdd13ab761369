"""The small form of every study, run once: it succeeds,
writes its figures, and stores the right numbers.
"""

import contextlib
import copy
import importlib
import io
import math
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import coarse_labels
import tcnn_probe
from common.data import digits_loaders, probed_images
from common.models import small_resnet
from common.training import Study
from tcnn_model import EpochResult, reparameterize
from tcnn_model.training.evaluation import evaluate
from tests.extras import need

STUDIES = sorted(path.stem for path in (Path(__file__).parents[2] / "studies").glob("*.py"))
SMALL = ["--small", "--device", "cpu"]
ON_THE_CPU = (
    "ablations",
    "distillation",
    "pretrained_heads",
    "segmentation_attention",
)
"""Studies of trainings of seconds, which have no option for the device."""
FURTHER = {
    "gating_evolution": ["--unstrided", "--matched-start"],
    # A second seed joins in test_a_killed_run_and_those_of_another_seed_are_trained.
    "content_or_mixing": ["--seeds", "0"],
}
"""Options that add arms to a small form, or leave seeds for later."""
LAYERS = [f"layer4.{block}.conv{n}" for block in (0, 1) for n in (1, 2)]


@pytest.fixture(autouse=True)
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all figures with few pixels, and without what moves panels and titles apart:
    it takes longer than the drawing, and a reader judges it.
    """
    # At a given height, matplotlib does not look for what a title would cover.
    monkeypatch.setitem(mpl.rcParams, "axes.titley", 1.0)
    write = Figure.savefig

    def savefig(figure: Figure, file: Path, dpi: float) -> None:
        figure.set_layout_engine(None)
        write(figure, file, dpi=dpi / 4)

    monkeypatch.setattr(Figure, "savefig", savefig)


class Done(NamedTuple):
    code: int
    printed: str
    out: Path
    stuck: list[str]


@contextlib.contextmanager
def gradients_watched(stuck: list[str]) -> Iterator[None]:
    """Append the parameters that any optimizer was given
    and that had no gradient in any of its steps.

    A single step would not do: a branch whose last scale begins at zero has no gradient before that
    scale has moved.
    """
    watched: dict[int, tuple[Tensor, str]] = {}
    moved: set[int] = set()

    def before_step(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in moved:
                    continue
                name = f"{group.get('name', 'parameters')} {tuple(parameter.shape)}"
                # The tensor is kept, because the id of one that is gone may be given again.
                watched[id(parameter)] = parameter, name
                if parameter.grad is not None and parameter.grad.any():
                    moved.add(id(parameter))

    handle = register_optimizer_step_pre_hook(before_step)
    try:
        yield
    finally:
        handle.remove()
        stuck += [name for key, (_, name) in watched.items() if key not in moved]


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Done]:
    """Return a function that runs ``python studies/NAME.py --small`` only once
    and returns its results.

    Several studies share the CNN, its control and its T-CNN: each is trained once. For later
    studies the weights of every epoch are loaded, and the control and the T-CNN are validated
    again, for the study's recorder.
    """
    runs: dict[str, Done] = {}
    trained: dict[str, list[tuple[EpochResult, dict[str, Tensor]]]] = {}
    threads = torch.get_num_threads()
    train = Study._train

    def train_once(
        study: Study, model: nn.Module, file: str, title: str, **recipe: Any
    ) -> Iterator[EpochResult]:
        weights = model.state_dict()
        # T-CNNs of the same recipe may start from other gates.
        gates = [value.tolist() for name, value in weights.items() if name.endswith("gating")]
        shapes = {name: value.shape for name, value in weights.items()}
        key = repr((file.partition("_")[0], recipe, shapes, gates))
        if key not in trained:
            trained[key] = []
            for result in train(study, model, file, title, **recipe):
                trained[key].append((result, copy.deepcopy(model.state_dict())))
                yield result
            return
        for result, weights in trained[key]:
            model.load_state_dict(weights)
            # Studies record only the T-CNN and its control.
            if file.startswith(("tcnn", "control")):
                evaluate(model.eval(), study.loaders[1])
            yield result

    def run_once(name: str) -> Done:
        if name not in runs:
            out = tmp_path_factory.mktemp(name)
            printed = io.StringIO()
            stuck: list[str] = []
            with (
                gradients_watched(stuck),
                warnings.catch_warnings(),
                contextlib.redirect_stdout(printed),
                contextlib.redirect_stderr(printed),
                pytest.MonkeyPatch.context() as patch,
            ):
                # After so short a training Grad-CAM may be zero everywhere.
                warnings.filterwarnings("ignore", "constant maps")
                patch.setattr(Study, "_train", train_once)
                options = ["--small"] if name in ON_THE_CPU else [*SMALL]
                options += FURTHER.get(name, [])
                code = need(name).main([*options, "--out", str(out)])
            # A study sets its own number of threads.
            torch.set_num_threads(threads)
            runs[name] = Done(code, printed.getvalue(), out, stuck)
        return runs[name]

    return run_once


@pytest.mark.parametrize("study", STUDIES)
def test_small_form_writes_figures_and_numbers(
    study: str, small_run: Callable[[str], Done]
) -> None:
    done = small_run(study)
    assert done.code == 0, done.printed
    assert "check: " in done.printed
    figures = sorted(done.out.glob(f"{study}*.png"))
    assert figures, "no figure"
    for path in figures:
        with Image.open(path) as figure:
            # An empty figure would be smaller, with a quarter of the pixels a side.
            assert min(figure.size) > 100, path.name
    with xr.open_datatree(done.out / f"{study}.zarr", engine="zarr") as tree:
        numbers = {
            f"{node.path}/{name}": values.load()
            for node in tree.subtree
            for name, values in node.data_vars.items()
            if values.dtype.kind == "f"
        }
    assert numbers
    # NaN stands for what an arm or an epoch lacks, and never for a whole variable.
    assert not [name for name, values in numbers.items() if not values.notnull().any()]


@pytest.mark.parametrize("study", STUDIES)
def test_every_parameter_that_an_arm_trains_has_a_gradient(
    study: str, small_run: Callable[[str], Done]
) -> None:
    assert not small_run(study).stuck


def test_coarse_labels_are_tested_on_the_validation_images(
    small_run: Callable[[str], Done],
) -> None:
    out = small_run("coarse_labels").out
    weights = torch.load(out / "coarse_labels_runs" / "plain_0" / "best.pt", weights_only=True)[
        "state_dict"
    ]
    images, digits = coarse_labels.pictures("validation", 128)
    with torch.no_grad():
        named = coarse_labels.loaded(coarse_labels.network(), weights)(images).argmax(1).numpy()
    top1 = float(xr.open_zarr(out / "coarse_labels.zarr").top1.sel(arm="plain")[0])
    # The coarse labels are parities.
    assert np.mean(named == digits % 2) == pytest.approx(top1, abs=1e-6)


def test_gating_evolution_records_both_trainings(
    small_run: Callable[[str], Done],
) -> None:
    ds = xr.open_zarr(small_run("gating_evolution").out / "gating_evolution.zarr").load()
    assert dict(ds.sizes) == {"epoch": 5, "layer": 4, "head": 9}
    # 70 images are a quarter of 280: the whole validation set, once an epoch.
    assert (ds.images == 70).all()
    for name in ("top1", "control_top1", "train_top1", "val_loss"):
        assert np.isfinite(ds[name].values[1:]).all(), name
    np.testing.assert_allclose(ds.gate[0], 1 / (1 + math.exp(-1)), rtol=1e-6)


def test_gating_evolution_sees_in_its_small_form_what_its_page_says(
    small_run: Callable[[str], Done],
) -> None:
    """It is README's command."""
    printed = small_run("gating_evolution").printed
    assert "check: mean gates of the layers moved apart" in printed
    assert "need the full form" not in printed


def attention_maps(out: Path) -> xr.Dataset:
    return xr.open_zarr(out / "attention_maps.zarr").load()


def test_attention_maps_are_those_of_the_recorder(
    small_run: Callable[[str], Done],
) -> None:
    out = small_run("attention_maps").out
    ds = attention_maps(out)
    assert dict(ds.sizes) == {
        "epoch": 2,
        "image": 2,
        "layer": 4,
        "head": 9,
        "y": 4,
        "x": 4,
    }
    assert ds.layer.values.tolist() == LAYERS
    assert ds.epoch.values.tolist() == [0, 2]
    xr.testing.assert_allclose(ds.attention.sum(["y", "x"]) + ds.outside, xr.ones_like(ds.outside))
    recorded = xr.open_zarr(out / "attention_maps_recording.zarr").load()
    gates = recorded.gate.sel(epoch=[0, 2])
    xr.testing.assert_allclose(*(x.reset_coords(drop=True) for x in (ds.gate, gates)))
    model = reparameterize(small_resnet())
    weights = torch.load(out / "attention_maps_checkpoints" / "tcnn-0002.pt", weights_only=True)
    model.load_state_dict(weights)
    loaders = digits_loaders(size=32, batch_size=16, seed=0, limit=128, clutter=0)
    with tcnn_probe.record(model.eval(), images=2) as recorder, torch.no_grad():
        model(probed_images(loaders[1].dataset, 2).images)
        recorder.mark(epoch=2)
    (maps,) = (
        node.dataset for node in recorder.tree["maps"].subtree if "center_attention" in node.dataset
    )
    expected = (
        maps.center_attention.isel(epoch=0)
        .squeeze(drop=True)
        .transpose("image", "layer", "head", "y", "x")
    )
    # The study stores maps in float16.
    np.testing.assert_allclose(ds.attention.sel(epoch=2), expected, atol=1e-3)


def test_drawing_attention_maps_again_does_not_train(
    small_run: Callable[[str], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = small_run("attention_maps").out
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    Image.new("RGB", (31, 17), (255, 255, 255)).save(tmp_path / "white.png")

    def no_training(*args: object, **options: object) -> None:
        raise AssertionError("trains")

    monkeypatch.setattr(Study, "_train", no_training)
    image = tmp_path / "white.png"
    again = f"--resume --epoch 1 --query 9,30 --image {image} --out {out}"
    study = importlib.import_module("attention_maps")
    assert study.main([*SMALL, *again.split()]) == 0
    ds = attention_maps(out)
    assert ds.epoch.values.tolist() == [0, 1, 2]
    assert ds.name.values.tolist() == ["white.png"]
    # Of four rows and columns, pixel 9 of 32 is in the second row, and pixel 30 in the last column.
    assert set(ds.query_y.values.ravel()) == {1}
    assert set(ds.query_x.values.ravel()) == {3}
    assert (out / "attention_maps.png").read_bytes() != (
        finished / "attention_maps.png"
    ).read_bytes()


def test_head_entropy_measures_the_parts_of_attention(
    small_run: Callable[[str], Done],
) -> None:
    heads = xr.open_zarr(small_run("head_entropy").out / "head_entropy.zarr").load()
    assert dict(heads.sizes) == {"epoch": 3, "layer": 4, "head": 9}
    parts = heads.gate * heads.positional_distance + (1 - heads.gate) * heads.content_distance
    # Gates, parts and the whole are measured in float32, the whole in a pass of its own.
    np.testing.assert_allclose(parts, heads.attention_distance, rtol=1e-4)
    distances = []
    for y in range(4):
        # Head 0, with alpha = 1, looks at (-1, -1); keys are 4 x 4 pixels and a ring of padding.
        for x in range(4):
            keys = [(j - y, i - x) for j in range(-1, 5) for i in range(-1, 5)]
            weights = [math.exp(-((dy + 1) ** 2) - (dx + 1) ** 2) for dy, dx in keys]
            distances.append(
                sum(w * math.hypot(*key) for w, key in zip(weights, keys, strict=True))
                / sum(weights)
            )
    np.testing.assert_allclose(heads.positional_distance[0, :, 0], sum(distances) / 16, rtol=1e-5)
    assert (heads.head_type[0] == "convolutional").all()
    # The study assigns types by the gate, as the papers do.
    np.testing.assert_array_equal(heads.head_type == "content", heads.gate <= 1 / 3)


def test_representations_have_the_labels_of_their_images(
    small_run: Callable[[str], Done],
) -> None:
    out = small_run("representations").out
    scores = xr.open_zarr(out / "representations.zarr").load()
    assert dict(scores.cka.sizes) == {
        "model": 2,
        "epoch": 3,
        "layer": 4,
        "other_layer": 4,
    }
    _, labels = zip(
        *digits_loaders(size=32, batch_size=16, seed=0, limit=128, clutter=0)[1].dataset,
        strict=True,
    )
    for model, name in (("T-CNN", "tcnn"), ("CNN", "control")):
        features = tcnn_probe.open(out / f"representations_{name}.zarr")["features"].dataset.feature
        last = features.sel(epoch=2, layer="layer4", token="mean").dropna("channel")
        correct = tcnn_probe.representation.knn_correct(last, labels)
        np.testing.assert_array_equal(
            scores.knn_correct.sel(model=model, epoch=2, layer="layer4"), correct
        )


@pytest.mark.parametrize("study", ["layer_scale", "resmlp_weights"])
def test_a_resumed_study_keeps_its_earlier_epochs(
    study: str, small_run: Callable[[str], Done], tmp_path: Path
) -> None:
    """The resumed model has its last weights,
    with which earlier epochs must not be measured again.
    """
    finished = small_run(study).out
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    assert importlib.import_module(study).main([*SMALL, "--resume", "--out", str(out)]) == 0
    results = [xr.open_zarr(folder / f"{study}.zarr").load() for folder in (finished, out)]
    assert results[0].sizes["epoch"] > 2
    xr.testing.assert_allclose(*results, rtol=1e-6)


def test_a_killed_run_and_those_of_another_seed_are_trained(
    small_run: Callable[[str], Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(small_run("content_or_mixing").out, out)
    study = importlib.import_module("content_or_mixing")
    file = out / "content_or_mixing_checkpoints" / "1_frozen_C_+1_0.npz"
    # A kill leaves a partial file under this name.
    before = file.rename(file.with_name(f"{file.name}.tmp")).read_bytes()
    trained = []
    train = study.train_and_measure
    monkeypatch.setattr(
        study,
        "train_and_measure",
        lambda run, *rest: (trained.append((run.arm, run.seed)), train(run, *rest)),
    )
    options = ["--resume", "--seeds", "0", "1", "--arms", "C", "--out", str(out)]
    assert study.main(options) == 0
    assert trained == [("C", 0), ("C", 1)]
    with np.load(file) as again, np.load(io.BytesIO(before)) as first:
        for name in first:
            np.testing.assert_array_equal(again[name], first[name])


CLASS_RUNS = [
    "ResNet, average pooling",
    "ResNet, attention pooling",
    "PatchConvNet",
    "PatchConvNet, by class",
]
GRADIENTS = ["gradcam", "integrated_gradients", "input_x_gradient", "occlusion"]


def class_scores(out: Path) -> xr.DataTree:
    with xr.open_datatree(out / "class_attention_saliency.zarr", engine="zarr") as tree:
        return tree.load()


def test_class_attention_scores_every_model_and_method(
    small_run: Callable[[str], Done],
) -> None:
    tree = class_scores(small_run("class_attention_saliency").out)
    assert set(tree.children) == set(CLASS_RUNS)
    for name in CLASS_RUNS:
        ds: Any = tree[name].dataset
        methods = ds.attribution.values.tolist()
        assert methods == [
            *([] if "average" in name else ["class_attention"]),
            *GRADIENTS,
            "chance",
        ]
        assert ds.epoch.values.tolist() == [0, 2]
        assert dict(ds.saliency.sizes) == {
            "epoch": 2,
            "attribution": len(methods),
            "image": 4,
            "y": 32,
            "x": 32,
        }
        # A constant map is not scored; chance has scores and no map.
        pixels = ["y", "x"]
        has_score = ds.saliency.max(pixels) != ds.saliency.min(pixels)
        for measure in (
            "pointing_game",
            "pointing_game_exact",
            "energy_inside",
            "deletion_auc",
            "insertion_auc",
        ):
            assert (np.isfinite(ds[measure]) == has_score).all(), (name, measure)
        np.testing.assert_allclose(ds.probability.sum("class"), 1, rtol=1e-5)
        masks = probed_images(
            digits_loaders(size=32, batch_size=16, seed=0, limit=80, clutter=0)[1].dataset,
            4,
        ).masks
        # For chance, the share of the image that the mask covers.
        chance = ds.energy_inside.sel(attribution="chance")
        np.testing.assert_allclose(chance[0], masks.double().mean((1, 2)))


def test_class_attention_records_maps_of_classes_at_every_epoch(
    small_run: Callable[[str], Done],
) -> None:
    out = small_run("class_attention_saliency").out
    tree = tcnn_probe.open(out / "class_attention_saliency_patchconvnet_by_class.zarr")
    maps = tree["maps/classes/8x8"].dataset.load()
    assert dict(maps.attention_by_class.sizes) == {
        "epoch": 3,
        "layer": 1,
        "image": 2,
        "class": 3,
        "y": 8,
        "x": 8,
    }
    np.testing.assert_allclose(maps.attention_by_class.sum(["y", "x"]), 1, rtol=1e-5)
    probability = class_scores(out)["PatchConvNet, by class"].dataset.probability
    for epoch in (0, 2):
        for row in range(2):
            best = probability.sel(epoch=epoch).isel(image=row).argsort().values[::-1][:3]
            assert (
                maps.class_index.sel(epoch=epoch).isel(layer=0, image=row).values.tolist()
                == best.tolist()
            )
