"""Bars of robustness: their heights and errors equal sums by hand."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.container import BarContainer

import tcnn_probe
from tcnn_probe import evaluation
from tests.tcnn_probe.plot.layout import texts_within_and_apart

MODELS = ["CNN", "control", "T-CNN"]
# The number is a prime, so that means over images and over conditions cannot be confused.
IMAGES = 19
# timm has such long names, and labels must still fit beside each other.
TIMM = [
    "resnet50",
    "deit3_small_patch16_224",
    "swin_tiny_patch4_window7_224",
    "vit_base_patch16_clip_224.openai",
]


def measured(
    models: list[str] = MODELS, corruptions: int = 4, *, plain: bool = False
) -> xr.Dataset:
    """Return results like those of evaluation.robustness,
    with 5 severities, 2 seeds and 2 attacks.
    """
    rng = np.random.default_rng(0)
    count = len(models)
    right = (
        rng.random((count, corruptions, 5, 2, IMAGES))
        # Models differ in accuracy, so that exchanged bars would show.
        < np.linspace(0.5, 0.8, count)[:, None, None, None, None]
    )
    names = [
        "gaussian_noise",
        "motion_blur",
        "shot_noise",
        "fog",
        *list(evaluation.CORRUPTIONS)[-11:],
    ][:corruptions]
    groups = ["noise", "blur", "noise", "weather", *["digital"] * 11][:corruptions]
    coords = {
        "model": np.array(models, dtype=object),
        "corruption": np.array(names, dtype=object),
        "group": ("corruption", np.array(groups, dtype=object)),
        "severity": range(1, 6),
        "attack": np.array(["fgsm", "pgd"], dtype=object),
        "seed": [0, 7],
    }
    ds = xr.Dataset(
        {"correct": (("model", "corruption", "severity", "seed", "image"), right)},
        coords,
    )
    if not plain:
        ds["clean_correct"] = ("model", "image"), rng.random((count, IMAGES)) < 0.9
        ds["adversarial_correct"] = (
            ("model", "attack", "seed", "image"),
            rng.random((count, 2, 2, IMAGES)) < 0.3,
        )
    return ds


def bars(axes: Axes) -> dict[str, Any]:
    """Return the bars of each model, from left to right."""
    return {
        container.get_label(): container
        for container in axes.containers
        if isinstance(container, BarContainer)
    }


def heights(axes: Axes) -> dict[str, list[float]]:
    return {name: [bar.get_height() for bar in container] for name, container in bars(axes).items()}


def error_bars(axes: Axes) -> list[list[list[float]]]:
    """Return [low, high] of each bar, by model."""
    return [
        [[end[1] for end in segment] for segment in lines.get_segments()]
        for lines in axes.collections
    ]


def by_hand(
    ds: xr.Dataset, model: int, corruptions: list[int], severities: list[int]
) -> list[float]:
    """Return every image's share of right answers."""
    right = ds.correct.values
    shares = []
    for image in range(IMAGES):
        answers = [
            right[model, c, s, seed, image]
            for c in corruptions
            for s in severities
            for seed in (0, 1)
        ]
        shares.append(sum(map(int, answers)) / len(answers))
    return shares


ALL = [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("by", "parts"),
    [
        ("group", {"noise": ([0, 2], ALL), "blur": ([1], ALL), "weather": ([3], ALL)}),
        (
            "corruption",
            {name: ([c], ALL) for c, name in enumerate(measured().corruption.values)},
        ),
        ("severity", {str(s + 1): ([0, 1, 2, 3], [s]) for s in range(5)}),
    ],
    ids=["group", "corruption", "severity"],
)
def test_accuracies_and_standard_errors(by: Any, parts: dict[str, Any]) -> None:
    ds = measured(plain=True)
    axes = tcnn_probe.plot.robustness(ds.transpose("image", ...), by=by)
    assert axes is plt.gca()
    assert [label.get_text() for label in axes.get_xticklabels()] == list(parts)
    assert (
        list(heights(axes)) == [text.get_text() for text in axes.get_legend().get_texts()] == MODELS
    )
    for model, name in enumerate(MODELS):
        for place, (corruptions, severities) in enumerate(parts.values()):
            shares = by_hand(ds, model, corruptions, severities)
            mean = sum(shares) / IMAGES
            error = (sum((share - mean) ** 2 for share in shares) / (IMAGES - 1) / IMAGES) ** 0.5
            assert heights(axes)[name][place] == pytest.approx(mean)
            np.testing.assert_allclose(error_bars(axes)[model][place], [mean - error, mean + error])


def test_clean_images_come_first_and_attacks_last() -> None:
    ds = measured()
    axes = tcnn_probe.plot.robustness(ds, by="attack")
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "clean",
        "fgsm",
        "pgd",
    ]
    expected = [
        ds.clean_correct[2].values.mean(),
        *ds.adversarial_correct[2].values.mean((1, 2)),
    ]
    np.testing.assert_allclose(heights(axes)["T-CNN"], expected)
    assert axes.get_ylabel() == "accuracy\n(lines: standard error over images)"


def test_a_selected_corruption_has_its_bars() -> None:
    ds = measured(corruptions=2).isel(corruption=1)
    drawn = heights(tcnn_probe.plot.robustness(ds, by="corruption"))
    for model, name in enumerate(MODELS):
        np.testing.assert_allclose(
            drawn[name], [ds.clean_correct[model].mean(), ds.correct[model].mean()]
        )


def test_improvement_over_a_baseline_is_paired_by_image() -> None:
    ds = measured(plain=True)
    separate = plt.figure().subplots()
    axes = tcnn_probe.plot.robustness(ds, separate, baseline="control")
    assert axes is separate
    drawn_heights = heights(axes)
    assert list(drawn_heights) == ["CNN", "T-CNN"]
    for bar, model in ((0, 0), (1, 2)):
        for place, corruptions in enumerate(([0, 2], [1], [3])):
            accuracies, baseline = (np.array(by_hand(ds, m, corruptions, ALL)) for m in (model, 1))
            relative = (accuracies.mean() - baseline.mean()) / baseline.mean()
            assert drawn_heights[MODELS[model]][place] == pytest.approx(100 * relative)
            # The same images are drawn for both models, as the improvement is paired.
            drawn = np.random.default_rng(1).multinomial(IMAGES, np.full(IMAGES, 1 / IMAGES), 4000)
            low, high = np.quantile((drawn @ accuracies) / (drawn @ baseline) - 1, [0.025, 0.975])
            # Values are in per cent; Fieller's interval and a bootstrap's quantiles agree only
            # roughly for so few images.
            np.testing.assert_allclose(
                error_bars(axes)[bar][place], [100 * low, 100 * high], atol=3
            )
    assert axes.get_ylabel() == "improvement over control (%)\n(lines: 95 % interval over images)"


def test_errors_are_seen_on_a_dark_page() -> None:
    with plt.style.context("dark_background"):
        axes = tcnn_probe.plot.robustness(measured(), plt.figure().subplots())
    errors = [errors for errors in axes.collections if isinstance(errors, LineCollection)]
    assert len(errors) == len(MODELS)
    assert {tuple(lines.get_color()[0]) for lines in errors} == {to_rgba("w")}


def test_a_models_colour_does_not_depend_on_the_baseline() -> None:
    ds = measured()
    plain, beside = (
        tcnn_probe.plot.robustness(ds, plt.figure().subplots(), baseline=name)
        for name in (None, "CNN")
    )
    colors = [
        {name: patches[0].get_facecolor() for name, patches in bars(axes).items()}
        for axes in (plain, beside)
    ]
    assert colors[0]["T-CNN"] == colors[1]["T-CNN"]
    assert len(set(colors[0].values())) == 3


def test_bars_without_an_interval_are_hatched() -> None:
    ds = measured(plain=True)
    ds.correct[1, 3] = False
    ds.correct[1, 3, 0, 0, 5] = True  # right on one image, which many resamples lack
    ds.correct[1, 1] = False  # never right, so that there is no bar, either
    axes = tcnn_probe.plot.robustness(ds, plt.figure().subplots(), baseline="control")
    for container in bars(axes).values():
        assert [bar.get_hatch() for bar in container] == [None, None, "///"]
        assert np.isnan(container[1].get_height())
    assert "hatched: no interval" in axes.get_ylabel()
    axes = tcnn_probe.plot.robustness(measured(), plt.figure().subplots(), baseline="control")
    assert "hatched" not in axes.get_ylabel()


@pytest.mark.parametrize("by", ["group", "corruption", "severity"])
def test_names_as_long_as_timms_fit_beside_each_other(by: Any) -> None:
    ds = measured(TIMM, corruptions=15)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    tcnn_probe.plot.robustness(ds, left, by=by)
    tcnn_probe.plot.robustness(ds, right, by=by, baseline=TIMM[2])
    texts_within_and_apart(figure)
    # These are the shares of the figure that labels leave to the bars.
    for axes in (left, right):
        assert axes.get_position().width > 0.3
        assert axes.get_position().height > 0.2


def test_bad_arguments_are_refused() -> None:
    ds = measured()
    draw = tcnn_probe.plot.robustness
    with pytest.raises(ValueError, match=r"nothing to draw by None"):
        draw(ds, by=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"results of .*robustness with 'adversarial_correct'"):
        draw(measured(plain=True), by="attack")
    with pytest.raises(ValueError, match=r"'correct' with the coordinate 'group'"):
        draw(ds.drop_vars("group"))
    with pytest.raises(ValueError, match=r"nothing to draw by 'corruption'"):
        draw(ds.isel(corruption=slice(0)), by="corruption")
    assert plt.get_fignums() == []
