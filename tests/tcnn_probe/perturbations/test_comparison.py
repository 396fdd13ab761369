"""Improvement over a baseline against loops over made results."""

import numpy as np
import pytest
import xarray as xr

from tcnn_probe.perturbations.comparison import improvement

CORRUPTIONS = {"shot_noise": "noise", "fog": "weather", "snow": "weather", "jpeg": "digital", "blur": "blur"}


@pytest.fixture
def results() -> xr.Dataset:
    random = np.random.default_rng(0)
    sizes = {"model": 3, "corruption": 5, "severity": 2, "seed": 7, "image": 23}
    chances = np.array([0.6, 0.7, 0.3])[:, None, None, None, None] * np.linspace(0.5, 1, 5)[:, None, None, None]
    coords = {"model": ["cnn", "tcnn", "worse"], "corruption": list(CORRUPTIONS), "severity": [1, 5]}
    coords["group"] = ("corruption", list(CORRUPTIONS.values()))
    drawn = random.random(tuple(sizes.values())) < chances
    return xr.Dataset(
        {
            "correct": (tuple(sizes), drawn),
            "clean_correct": (("model", "image"), random.random((3, 23)) < 0.8),
            "adversarial_correct": (("model", "attack", "seed", "image"), random.random((3, 2, 7, 23)) < 0.5),
        },
        coords | {"attack": ["fgsm", "pgd"]},
    )


def test_by_group(results: xr.Dataset) -> None:
    found = improvement(results, "cnn", "group")
    assert found.group.values.tolist() == ["noise", "weather", "digital", "blur"]  # as they come
    assert found.model.values.tolist() == ["tcnn", "worse"]
    raw = results.correct.values
    for m, model in ((1, "tcnn"), (2, "worse")):
        for group in found.group.values:
            of = [n for n, name in enumerate(CORRUPTIONS.values()) if name == group]
            ours, theirs = (np.mean([raw[k, c] for c in of]) for k in (m, 0))
            cell = found.sel(model=model, group=group)
            assert float(cell.improvement) == pytest.approx(ours / theirs - 1)
            low, high = cell.interval.values
            assert low < ours / theirs - 1 < high


def test_interval_is_that_of_pairs(results: xr.Dataset) -> None:
    random = np.random.default_rng(5)
    found = improvement(results, "cnn", "severity", confidence=0.9, resamples=4000)
    assert found.improvement.dims == ("model", "severity")
    per_image = results.correct.values[:, :, 1].mean((1, 2))  # (model, image) at severity 5
    drawn = []
    for _ in range(4000):
        which = random.integers(0, 23, 23)
        drawn.append(per_image[1, which].mean() / per_image[0, which].mean() - 1)
    expected = np.sort(drawn)[[200, 3800]]
    np.testing.assert_allclose(found.interval.sel(model="tcnn", severity=5), expected, atol=0.02)


@pytest.mark.parametrize(("by", "dims"), [(None, ("model",)), ("attack", ("model", "attack"))])
def test_of_clean_and_attacked_images(results: xr.Dataset, by: str | None, dims: tuple[str, ...]) -> None:
    found = improvement(results, "tcnn", by, relative=False)
    assert found.improvement.dims == dims
    name = "clean_correct" if by is None else "adversarial_correct"
    right = results[name].mean([d for d in results[name].dims if d not in dims])
    difference = right.sel(model="cnn") - right.sel(model="tcnn")
    np.testing.assert_allclose(found.improvement.sel(model="cnn"), difference)


def test_a_baseline_that_is_never_right_has_no_ratio(results: xr.Dataset) -> None:
    results = results.assign(clean_correct=results.clean_correct & (results.model != "cnn"))
    assert improvement(results, "cnn", None).improvement.isnull().all()
    assert improvement(results, "cnn", None).interval.isnull().all()
    assert improvement(results, "cnn", None, relative=False).improvement.notnull().all()


def test_no_interval_of_shares_where_a_resample_has_none_right(results: xr.Dataset) -> None:
    """Twice of 23, the baseline is never right in 0.91^23 = 12 % of the resamples."""
    few = (results.model != "cnn") | (results.image < 2)
    results = results.assign(clean_correct=(results.clean_correct | (results.image < 2)) & few)
    found = improvement(results, "cnn", None)
    assert found.improvement.notnull().all()
    assert found.interval.isnull().all()
    assert improvement(results, "cnn", None, relative=False).interval.notnull().all()


@pytest.mark.parametrize("by", ["group", "corruption", "severity", "attack", None])
def test_of_what_was_selected(results: xr.Dataset, by: str | None) -> None:
    for one in ({"corruption": "fog"}, {"severity": 5}, {"seed": 3}, {"attack": "pgd"}):
        several = {name: [label] for name, label in one.items()}
        found, expected = improvement(results.sel(one), "cnn", by), improvement(results.sel(several), "cnn", by)
        assert found.improvement.dims == ("model",) if by is None else ("model", by)
        xr.testing.assert_identical(*(each.reset_coords(drop=True) for each in (found, expected)))


def test_errors(results: xr.Dataset) -> None:
    for confidence in (95, 0, 1, float("nan")):
        with pytest.raises(ValueError, match=f"expected a confidence between 0 and 1, got {confidence}"):
            improvement(results, "cnn", confidence=confidence)
    with pytest.raises(TypeError, match=r"an xarray.Dataset; got DataArray"):
        improvement(results.correct, "cnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected another model beside the baseline, got \['cnn'\]"):
        improvement(results.sel(model=["cnn"]), "cnn")
    with pytest.raises(ValueError, match=r"expected 'correct' with the dimension 'model', got \('corruption'"):
        improvement(results.sel(model="cnn"), "cnn")
    with pytest.raises(ValueError, match="expected 'correct' with the coordinate 'severity'"):
        improvement(results.mean("severity"), "cnn", "severity")
    with pytest.raises(ValueError, match=r"one of the models \['cnn', 'tcnn', 'worse'\], got 'resnet'"):
        improvement(results, "resnet")
    with pytest.raises(ValueError, match=r"expected by to be one of None, 'attack', 'group'.*got 'colour'"):
        improvement(results, "cnn", "colour")
    with pytest.raises(ValueError, match="with 'correct', got"):
        improvement(results.drop_vars("correct"), "cnn")
