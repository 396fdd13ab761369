"""Improvement over a baseline and mCE, against loops over made results."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from tcnn_probe.evaluation import improvement, mean_corruption_error

CORRUPTIONS = {
    "shot_noise": "noise",
    "fog": "weather",
    "snow": "weather",
    "jpeg": "digital",
    "blur": "blur",
}


@pytest.fixture
def results() -> xr.Dataset:
    """Return results of 3 models, 5 corruptions, 2 severities, 7 seeds, 2 attacks and 23 images."""
    random = np.random.default_rng(0)
    sizes = {"model": 3, "corruption": 5, "severity": 2, "seed": 7, "image": 23}
    chances = (
        # One model is better and one worse than the baseline; probabilities differ between
        # corruptions, so that means of groups differ, too.
        np.array([0.6, 0.7, 0.3])[:, None, None, None, None]
        * np.linspace(0.5, 1, 5)[:, None, None, None]
    )
    coords = {
        "model": ["cnn", "tcnn", "worse"],
        "corruption": list(CORRUPTIONS),
        "severity": [1, 5],
    }
    coords["group"] = ("corruption", list(CORRUPTIONS.values()))
    correct = (tuple(sizes), random.random(tuple(sizes.values())) < chances)
    clean = (("model", "image"), random.random((3, 23)) < 0.8)
    attacked = (
        ("model", "attack", "seed", "image"),
        random.random((3, 2, 7, 23)) < 0.5,
    )
    answers = {
        "correct": correct,
        "clean_correct": clean,
        "adversarial_correct": attacked,
    }
    ds = xr.Dataset(answers, coords | {"attack": ["fgsm", "pgd"], "seed": range(7)})
    return ds.assign(
        accuracy=ds.correct.mean("image"), clean_accuracy=ds.clean_correct.mean("image")
    )


def test_improvement_by_group(results: xr.Dataset) -> None:
    result = improvement(results, "cnn", "group")
    # The order is that of the results.
    assert result.group.values.tolist() == ["noise", "weather", "digital", "blur"]
    assert result.model.values.tolist() == ["tcnn", "worse"]
    raw = results.correct.values
    for m, model in ((1, "tcnn"), (2, "worse")):
        for group in result.group.values:
            of = [n for n, name in enumerate(CORRUPTIONS.values()) if name == group]
            accuracy, baseline = (np.mean([raw[k, c] for c in of]) for k in (m, 0))
            cell = result.sel(model=model, group=group)
            assert float(cell.improvement) == pytest.approx(accuracy / baseline - 1)
            low, high = cell.interval.values
            assert low < accuracy / baseline - 1 < high


# Decisions get Bonett and Price's two additional pairs, but means over conditions do not.
@pytest.mark.parametrize(("by", "added"), [("severity", []), (None, [[1, 0], [0, 1]])])
def test_relative_interval_contains_what_a_t_test_does_not_reject(
    results: xr.Dataset, by: str | None, added: list[list[int]]
) -> None:
    result = improvement(results, "cnn", by)
    if by is None:
        interval = result.interval.sel(model="tcnn")
        pairs = results.clean_correct.values[:2].astype(float)
    else:  # the mean over corruptions and seeds of each image
        interval = result.interval.sel(model="tcnn", severity=5)
        pairs = results.correct.values[:2, :, 1].mean((1, 2))
    baseline, ours = np.concatenate([pairs.T, np.array(added, float).reshape(-1, 2)[:, ::-1]]).T
    # Fieller's interval is found by trying every ratio.
    ratios = np.linspace(0.2, 4, 2001)
    tests = stats.ttest_1samp(ours - ratios[:, None] * baseline, 0, axis=1)
    compatible = ratios[tests.pvalue >= 0.05]
    # The ratios are 0.0019 apart.
    np.testing.assert_allclose(interval, [min(compatible) - 1, max(compatible) - 1], atol=0.002)


@pytest.mark.parametrize(("by", "dims"), [(None, ("model",)), ("attack", ("model", "attack"))])
def test_improvement_on_clean_and_attacked_images(
    results: xr.Dataset, by: str | None, dims: tuple[str, ...]
) -> None:
    result = improvement(results, "tcnn", by, relative=False)
    assert result.improvement.dims == dims
    name = "clean_correct" if by is None else "adversarial_correct"
    right = results[name].mean([d for d in results[name].dims if d not in dims])
    np.testing.assert_allclose(
        result.improvement.sel(model="cnn"),
        right.sel(model="cnn") - right.sel(model="tcnn"),
    )


@pytest.mark.parametrize("right", [0, 2])
def test_no_relative_improvement_over_a_baseline_that_is_never_right(
    results: xr.Dataset, right: int
) -> None:
    """A baseline that is right twice in 23 may be right so rarely
    that any ratio is possible: it has no interval.
    """
    few = (results.model != "cnn") | (results.image < right)
    rare = xr.Dataset({"clean_correct": (results.clean_correct | (results.image < 2)) & few})
    share, difference = (
        improvement(rare, "cnn", None, relative=relative) for relative in (True, False)
    )
    assert share.improvement.isnull().all() == (right == 0)
    assert share.interval.isnull().all()
    assert difference.notnull().all().to_array().all()


def test_mean_corruption_error_by_hand(results: xr.Dataset) -> None:
    result = mean_corruption_error(results, "cnn")
    error = 1 - results.correct.values.mean((3, 4))
    clean = 1 - results.clean_correct.values.mean(1)
    groups = list(CORRUPTIONS.values())
    for kind in ("", "relative_"):
        ratio = np.zeros((3, 5))
        for model in range(3):
            for corruption in range(5):
                summed = [
                    sum(error[m, corruption, s] - (clean[m] if kind else 0) for s in (0, 1))
                    for m in (model, 0)
                ]
                ratio[model, corruption] = summed[0] / summed[1]
        np.testing.assert_allclose(result[f"{kind}corruption_error"], ratio)
        np.testing.assert_allclose(result[f"{kind}mean_corruption_error"], ratio.mean(1))
        for group, values in result[f"{kind}group_corruption_error"].groupby("group"):
            of = [n for n, name in enumerate(groups) if name == group]
            np.testing.assert_allclose(values.squeeze("group"), ratio[:, of].mean(1))
    assert result.mean_corruption_error.sel(model="cnn") == 1
    assert result.attrs["baseline"] == "cnn"
    assert result.mean_corruption_error.attrs["long_name"] == "mean corruption error, of cnn's"


def test_no_error_relative_to_a_baseline_without_errors(results: xr.Dataset) -> None:
    """Nor is there a mean over the other corruptions."""
    # The division would be by an error of 0.
    results.accuracy.loc[{"model": "cnn", "corruption": "snow"}] = 1
    result = mean_corruption_error(results, "cnn")
    assert result.corruption_error.isnull().sum("corruption").values.tolist() == [
        1,
        1,
        1,
    ]
    assert result.mean_corruption_error.isnull().all()
    assert result.group_corruption_error.isnull().all("model").sel(
        group=["weather", "noise"]
    ).values.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("by", "dim", "label"),
    [
        ("group", "corruption", "fog"),
        ("severity", "severity", 5),
        ("attack", "attack", "pgd"),
        (None, "seed", 3),
    ],
)
def test_selected_conditions_are_summarised(
    results: xr.Dataset, by: str | None, dim: str, label: str | int
) -> None:
    scalar = results.sel({dim: label})
    listed = results.sel({dim: [label]})
    gain = improvement(scalar, "cnn", by)
    expected = improvement(listed, "cnn", by)
    assert gain.improvement.dims == (("model",) if by is None else ("model", by))
    xr.testing.assert_identical(gain.reset_coords(drop=True), expected.reset_coords(drop=True))
    errors = mean_corruption_error(scalar, "cnn")
    expected = mean_corruption_error(listed, "cnn")
    xr.testing.assert_allclose(errors.reset_coords(drop=True), expected.reset_coords(drop=True))


def test_bad_arguments_are_refused(results: xr.Dataset) -> None:
    for function in (improvement, mean_corruption_error):
        with pytest.raises(
            ValueError,
            match=r"one of the models \['cnn', 'tcnn', 'worse'\], got 'resnet'",
        ):
            function(results, "resnet")
    with pytest.raises(
        ValueError, match=r"expected another model beside the baseline, got \['cnn'\]"
    ):
        improvement(results.sel(model=["cnn"]), "cnn")
    with pytest.raises(ValueError, match="expected 'correct' with the coordinate 'severity'"):
        improvement(results.mean("severity"), "cnn", "severity")
    with pytest.raises(
        ValueError,
        match=r"expected by to be one of None, 'attack', 'group'.*got 'colour'",
    ):
        improvement(results, "cnn", "colour")
