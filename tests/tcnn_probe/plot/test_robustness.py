"""Bars of robustness: their heights and errors against sums by hand."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.text import Text

import tcnn_probe

MODELS = ["CNN", "control", "T-CNN"]
GROUPS = ["noise", "blur", "noise", "weather"]
IMAGES = 19


TIMM = [
    "resnet50",
    "deit3_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "vit_base_patch16_clip_224.openai",
    "convnext_tiny",
    "resnet10t",
]


def of_models(names: list[str]) -> xr.Dataset:
    """Likewise of models of these names."""
    ds = measured()
    return ds.isel(model=[place % 3 for place in range(len(names))]).assign_coords(model=np.array(names, dtype=object))


def texts_of(axes: Axes) -> list[Text]:
    """Tick labels, legend and labels."""
    found = [*axes.get_legend().get_texts(), *axes.get_xticklabels(), axes.xaxis.label, axes.yaxis.label]
    return [text for text in found if text.get_text()]


def overlap(one: Text, other: Text) -> bool:
    """Of two texts as they are drawn, turned ones along their own direction."""
    (x, y), (u, v) = (text.get_window_extent().min for text in (one, other))
    if one.get_rotation() == other.get_rotation() == 60:
        lines = [text.get_fontsize() / 72 * text.figure.dpi for text in (one, other)]
        return abs((u - x) * np.sin(np.pi / 3) - (v - y) * np.cos(np.pi / 3)) < 0.8 * max(lines)
    return bool(one.get_window_extent().overlaps(other.get_window_extent()))


def measured(*, plain: bool = False) -> xr.Dataset:
    """What tcnn_probe.robustness gives, of 3 models, 4 corruptions, 5 severities, 2 seeds, 2 attacks."""
    rng = np.random.default_rng(0)
    right = rng.random((3, 4, 5, 2, IMAGES)) < np.array([0.5, 0.55, 0.8])[:, None, None, None, None]
    coords = {
        "model": np.array(MODELS, dtype=object),
        "corruption": np.array(["gaussian_noise", "motion_blur", "shot_noise", "fog"], dtype=object),
        "group": ("corruption", np.array(GROUPS, dtype=object)),
        "severity": range(1, 6),
        "attack": np.array(["fgsm", "pgd"], dtype=object),
        "seed": [0, 7],
    }
    ds = xr.Dataset({"correct": (("model", "corruption", "severity", "seed", "image"), right)}, coords)
    if not plain:
        ds["clean_correct"] = ("model", "image"), rng.random((3, IMAGES)) < 0.9
        ds["adversarial_correct"] = ("model", "attack", "seed", "image"), rng.random((3, 2, 2, IMAGES)) < 0.3
    return ds


def heights(axes: Axes) -> dict[str, list[float]]:
    """Of the bars of each model, from left to right."""
    bars_only = [bars for bars in axes.containers if isinstance(bars, BarContainer)]
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in bars_only}


def error_bars(axes: Axes) -> list[list[list[float]]]:
    """[low, high] of each bar, by model."""
    return [[[end[1] for end in segment] for segment in lines.get_segments()] for lines in axes.collections]


def by_hand(ds: xr.Dataset, model: int, corruptions: list[int], severities: list[int]) -> list[float]:
    """Every image's share of right answers."""
    right, shares = ds.correct.values, []
    for image in range(IMAGES):
        answers = [right[model, c, s, seed, image] for c in corruptions for s in severities for seed in (0, 1)]
        shares.append(sum(map(int, answers)) / len(answers))
    return shares


@pytest.mark.parametrize(
    ("by", "names", "parts"),
    [
        ("group", ["noise", "blur", "weather"], [([c], range(5)) for c in ([0, 2], [1], [3])]),
        ("corruption", ["gaussian_noise", "motion_blur", "shot_noise", "fog"], [([[c]], range(5)) for c in range(4)]),
        ("severity", ["1", "2", "3", "4", "5"], [([[0, 1, 2, 3]], [s]) for s in range(5)]),
    ],
)
def test_accuracies_and_standard_errors(by: Any, names: list[str], parts: list[Any]) -> None:
    ds = measured(plain=True)
    axes = tcnn_probe.plot.robustness(ds.transpose("image", ...), by=by)
    assert [label.get_text() for label in axes.get_xticklabels()] == names
    assert list(heights(axes)) == MODELS
    assert [text.get_text() for text in axes.get_legend().get_texts()] == MODELS
    for model, name in enumerate(MODELS):
        for place, ((corruptions,), severities) in enumerate(parts):
            shares = by_hand(ds, model, list(corruptions), list(severities))
            mean = sum(shares) / IMAGES
            error = (sum((share - mean) ** 2 for share in shares) / (IMAGES - 1) / IMAGES) ** 0.5
            assert heights(axes)[name][place] == pytest.approx(mean)
            np.testing.assert_allclose(error_bars(axes)[model][place], [mean - error, mean + error])


def test_clean_images_first_and_attacks() -> None:
    ds = measured()
    axes = tcnn_probe.plot.robustness(ds, by="attack")
    assert [label.get_text() for label in axes.get_xticklabels()] == ["clean", "fgsm", "pgd"]
    expected = [ds.clean_correct[2].values.mean(), *ds.adversarial_correct[2].values.mean((1, 2))]
    np.testing.assert_allclose(heights(axes)["T-CNN"], expected)
    assert "accuracy" in axes.get_ylabel()
    assert "standard error" in axes.get_ylabel()


def test_improvement_over_a_baseline_is_paired_by_image() -> None:
    ds = measured(plain=True)
    own = plt.figure().subplots()
    axes = tcnn_probe.plot.robustness(ds, own, baseline="control", confidence=0.9)
    assert axes is own
    found = heights(axes)
    assert list(found) == ["CNN", "T-CNN"]
    for bar, model in ((0, 0), (1, 2)):
        for place, corruptions in enumerate(([0, 2], [1], [3])):
            one, other = (np.array(by_hand(ds, m, corruptions, [0, 1, 2, 3, 4])) for m in (model, 1))
            relative = (one.mean() - other.mean()) / other.mean()
            assert found[MODELS[model]][place] == pytest.approx(100 * relative)
            drawn = np.random.default_rng(1).multinomial(IMAGES, np.full(IMAGES, 1 / IMAGES), 4000)
            low, high = np.quantile((drawn @ one) / (drawn @ other) - 1, [0.05, 0.95])
            np.testing.assert_allclose(error_bars(axes)[bar][place], [100 * low, 100 * high], atol=3)
    assert "improvement over control (%)" in axes.get_ylabel()
    assert "90 %" in axes.get_ylabel()


def test_a_models_colour_does_not_depend_on_the_baseline() -> None:
    ds = measured()
    plain, beside = (tcnn_probe.plot.robustness(ds, plt.figure().subplots(), baseline=name) for name in (None, "CNN"))
    colors = [
        {bars.get_label(): bars[0].get_facecolor() for bars in axes.containers if isinstance(bars, BarContainer)}
        for axes in (plain, beside)
    ]
    assert colors[0]["T-CNN"] == colors[1]["T-CNN"]
    assert len({colors[0][name] for name in MODELS}) == 3


def test_a_baseline_that_is_never_right_has_no_improvement_over_it() -> None:
    ds = measured(plain=True)
    ds.correct[0, 3] = False
    axes = tcnn_probe.plot.robustness(ds, baseline="CNN")
    assert np.isnan(heights(axes)["T-CNN"][2])
    assert np.isfinite(heights(axes)["T-CNN"][:2]).all()


@pytest.mark.parametrize("by", ["group", "corruption", "severity", "attack"])
@pytest.mark.parametrize("count", [3, 6])
def test_names_as_long_as_timms_beside_each_other(by: Any, count: int) -> None:
    ds = of_models(TIMM[:count])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    tcnn_probe.plot.robustness(ds, left, by=by)
    tcnn_probe.plot.robustness(ds, right, by=by, baseline=TIMM[2])
    figure.canvas.draw()
    texts = [*texts_of(left), *texts_of(right)]
    for place, text in enumerate(texts):
        span = text.get_window_extent()
        assert figure.bbox.x0 <= span.x0 < span.x1 <= figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 <= span.y0 < span.y1 <= figure.bbox.y1, text.get_text()
        for other in texts[:place]:
            assert not overlap(text, other), (text.get_text(), other.get_text())
    for axes in (left, right):
        assert axes.get_position().width > 0.35
        assert axes.get_position().height > 0.2


def test_names_as_long_as_timms_in_a_figure_of_its_own() -> None:
    axes = tcnn_probe.plot.robustness(of_models(TIMM))
    axes.figure.canvas.draw()
    assert axes.get_position().width > 0.8
    assert [text.get_text() for text in axes.get_legend().get_texts()] == TIMM
    assert axes.get_legend().get_window_extent().x1 <= axes.figure.bbox.x1


def test_names_are_turned_where_they_would_meet_only() -> None:
    ds = measured()
    rotations = []
    for width in (4, 16):
        axes = plt.figure(figsize=(width, 4)).subplots()
        tcnn_probe.plot.robustness(ds, axes, by="corruption")
        rotations.append({label.get_rotation() for label in axes.get_xticklabels()})
    assert rotations == [{60}, {0}]


def test_bars_without_an_interval_say_so() -> None:
    ds = measured(plain=True)
    ds.correct[1, 3] = False
    ds.correct[1, 3, 0, 0, 5] = True  # in one image: many a resample lacks it
    ds.correct[0, 3] = False  # and a model that is worse
    figure = plt.figure()
    axes = tcnn_probe.plot.robustness(ds, figure.subplots(), baseline="control")
    figure.canvas.draw()
    marks = [text for text in axes.texts if text.get_text() == "no interval"]
    tall, low = heights(axes)["T-CNN"][2], heights(axes)["CNN"][2]
    assert [mark.xy[1] for mark in marks] == [0, tall]
    assert (low, tall > 0) == (-100, True)
    assert [round(mark.xy[0], 6) for mark in marks] == [1.8, 2.2]
    room = axes.get_window_extent()
    assert all(mark.get_window_extent().y1 < room.y1 for mark in marks)
    ds.correct[1, 3] = True
    assert not tcnn_probe.plot.robustness(ds, plt.figure().subplots(), baseline="control").texts


def test_two_lines_on_ones_own_store(tmp_path: Any) -> None:
    measured().to_zarr(tmp_path / "robustness.zarr", consolidated=False)
    ds = xr.open_zarr(tmp_path / "robustness.zarr", consolidated=False)
    assert len(heights(tcnn_probe.plot.robustness(ds, baseline="CNN", by="severity"))["T-CNN"]) == 6


def test_what_robustness_measures_can_be_drawn() -> None:
    def by_brightness(images: torch.Tensor) -> torch.Tensor:
        mean = images.mean((1, 2, 3))
        return torch.stack([0.5 - mean, mean - 0.5], 1)

    models = {"mine": by_brightness, "blind": lambda images: 0 * by_brightness(images) + torch.tensor([0.0, 1.0])}
    images = torch.rand(7, 3, 17, 19, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.5, 1.5, 7).view(
        -1, 1, 1, 1
    )
    options = {"corruptions": ["contrast", "gaussian_noise"], "severities": (1, 3), "attacks": ("fgsm",)}
    none = ((0.0,), (1.0,))
    ds = tcnn_probe.robustness(
        models, images.clamp(0, 1), torch.tensor([0, 0, 0, 1, 1, 1, 1]), normalization=none, **options
    )
    axes = tcnn_probe.plot.robustness(ds, by="corruption")
    expected = [ds.clean_accuracy, *ds.accuracy.mean(["severity", "seed"]).transpose("corruption", "model")]
    for place, values in enumerate(expected):
        found = [heights(axes)[name][place] for name in ("mine", "blind")]
        np.testing.assert_allclose(found, values)
    beside = tcnn_probe.plot.robustness(ds, plt.figure().subplots(), baseline="blind", by="attack")
    assert len(heights(beside)["mine"]) == 2


def test_a_selected_corruption_is_drawn() -> None:
    ds = measured().isel(corruption=1)
    bars = heights(tcnn_probe.plot.robustness(ds, by="corruption"))
    np.testing.assert_allclose(bars["T-CNN"][1], ds.correct[2].mean())


def test_what_it_refuses() -> None:
    ds, bars = measured(), tcnn_probe.plot.robustness
    with pytest.raises(TypeError, match=r"an xarray.Dataset; got DataArray"):
        bars(ds.correct)
    with pytest.raises(ValueError, match=r"expected by to be one of .*'severity'.* got 'seed'"):
        bars(ds, by="seed")
    with pytest.raises(ValueError, match=r"nothing to draw by None"):
        bars(ds, by=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"robustness with 'correct', got .*'clean_correct'"):
        bars(ds.drop_vars("correct"))
    with pytest.raises(ValueError, match=r"robustness with 'adversarial_correct'"):
        bars(measured(plain=True), by="attack")
    with pytest.raises(ValueError, match=r"'correct' with the dimension 'image'"):
        bars(ds.mean("image"))
    with pytest.raises(ValueError, match=r"'correct' with the coordinate 'group'"):
        bars(ds.drop_vars("group"))
    with pytest.raises(ValueError, match=r"nothing to draw by 'corruption'"):
        bars(ds.isel(corruption=slice(0)), by="corruption")
    with pytest.raises(ValueError, match=r"one of the models .*'CNN'.*, got 'cnn'"):
        bars(ds, baseline="cnn")
    with pytest.raises(ValueError, match=r"another model beside the baseline, got \['CNN'\]"):
        bars(ds.sel(model=["CNN"]), baseline="CNN")
    assert plt.get_fignums() == []
