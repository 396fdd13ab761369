"""Disagreement against loops over made results; runs joined along seeds."""

from fractions import Fraction

import numpy as np
import pytest
import xarray as xr

from tcnn_probe.evaluation import (
    disagreement,
    improvement,
    mean_corruption_error,
    mean_interval,
)
from tests.extras import need

# Corruptions of one group are not adjacent.
CORRUPTIONS = {"fog": "weather", "shot_noise": "noise", "snow": "weather"}


def make_results(run: int = 0) -> xr.Dataset:
    """Return results of 2 models, 3 corruptions,
    2 severities, 1 seed, 2 attacks, 23 images and 4 classes.
    """
    random = np.random.default_rng(run)
    coords = {
        "model": ["cnn", "tcnn"],
        "corruption": [*CORRUPTIONS],
        "severity": [1, 5],
        "attack": ["fgsm", "pgd"],
    }
    coords |= {
        "seed": [0],
        "group": ("corruption", [*CORRUPTIONS.values()]),
        "image": range(23),
    }
    # 4 does not divide 23, so that classes differ in size.
    label = np.arange(23) % 4
    ds = xr.Dataset(coords=coords | {"label": ("image", label)})
    dims = {"clean_": ("model",), "": ("model", "corruption", "severity", "seed")}
    for kind, names in (dims | {"adversarial_": ("model", "attack", "seed")}).items():
        shape = (*(ds.sizes[name] for name in names), 23)
        predictions = np.where(
            # Answers are more often right than wrong, so that every kind of agreement occurs.
            random.random(shape) < 0.6,
            label,
            random.integers(0, 4, shape),
        )
        ds[f"{kind}prediction"] = (*names, "image"), predictions
        ds[f"{kind}confidence"] = (
            (*names, "image"),
            # Confidences are in float32, like the output of a softmax.
            random.random(shape).astype(np.float32),
        )
        ds[f"{kind}correct"] = ds[f"{kind}prediction"] == ds.label
    return ds.assign(
        accuracy=ds.correct.mean("image"), clean_accuracy=ds.clean_correct.mean("image")
    )


@pytest.mark.parametrize("by", [None, "group", "corruption", "severity", "attack"])
def test_disagreement_by_hand(by: str | None) -> None:
    ds = make_results()
    kind = {None: "clean_", "attack": "adversarial_"}.get(by, "")
    result = disagreement(ds, by)
    names = ["ground truth", "cnn", "tcnn"]
    assert result.differ.dims == ("model", "other", *([by] if by else []), "image")
    assert result.model.values.tolist() == result.other.values.tolist() == names
    # A group selects corruptions; every other label is along a dimension of the results.
    for label in result[by].values.tolist() if by else [None]:
        axis = {"group": "corruption"}.get(by, by)
        indices = [n for n, name in enumerate(ds[by].values) if name == label] if by else []
        cells = ds[f"{kind}prediction"].isel({axis: indices} if by else {})
        rows = {name: cells.sel(model=name).values.reshape(-1, 23).tolist() for name in names[1:]}
        rows["ground truth"] = [ds.label.values.tolist()] * len(rows["cnn"])
        of = result.sel({by: label} if by else {})
        for first in names:
            for second in names:
                pair = of.sel(model=first, other=second)
                conditions = list(zip(rows[first], rows[second], strict=True))
                unequal = [a != b for x, y in conditions for a, b in zip(x, y, strict=True)]
                # The fraction is exact, so that the tolerance below is for the library alone.
                share = Fraction(sum(unequal), len(unequal))
                assert float(pair.disagreement) == pytest.approx(float(share), abs=1e-15)
                # `differ` is defined for each image, so one image is checked by itself.
                third = [x[3] != y[3] for x, y in conditions]
                assert float(pair.differ.sel(image=3)) == pytest.approx(sum(third) / len(third))
    if by is None:  # the row of the ground truth has the errors
        error = 1 - ds.clean_accuracy
        np.testing.assert_allclose(result.disagreement.sel(model="ground truth")[1:], error)


@pytest.mark.parametrize("dim", ["training", "seed"])
def test_runs_with_several_seeds_join(dim: str) -> None:
    """Runs join along a dimension of their own or along the corruptions' seeds,
    and means are over both.
    """
    runs = [
        # Each run has its own seed, or three trainings have the same one.
        make_results(n).assign_coords(seed=[n if dim == "seed" else 0])
        for n in (0, 1, 2)
    ]
    ds = xr.concat(runs, dim, **({"data_vars": "all"} if dim == "seed" else {}))
    for by in (None, "group"):
        # Runs have the same size, so that the mean over all is the mean of their means.
        apart = [disagreement(run, by).disagreement for run in runs]
        np.testing.assert_allclose(
            disagreement(ds, by).disagreement,
            sum(result.values for result in apart) / 3,
        )
    pooled = improvement(ds, "cnn", None, relative=False)
    apart = [improvement(run, "cnn", None, relative=False).improvement for run in runs]
    np.testing.assert_allclose(pooled.improvement, sum(result.values for result in apart) / 3)
    assert mean_corruption_error(ds, "cnn").corruption_error.dims[:2] == (
        "model",
        "corruption",
    )
    # The mean lies in its interval; another test checks the width.
    differ = xr.concat([disagreement(run).differ for run in runs], dim).sel(
        model="cnn", other="tcnn"
    )
    low, high = mean_interval(differ, (dim, "image")).values
    assert low < float(differ.mean()) < high


def test_results_that_are_not_loaded() -> None:
    need("dask")
    ds = make_results()
    # 5 does not divide 23, so that the last chunk is shorter.
    lazy = ds.chunk(image=5)
    for of in (
        disagreement,
        lambda results: improvement(results, "cnn"),
        lambda results: mean_interval(results.correct[0]),
    ):
        xr.testing.assert_equal(of(lazy), of(ds))


def test_a_model_that_saw_fewer_conditions() -> None:
    """Merged results have NaN where a model has none,
    which is neither agreement nor disagreement.
    """
    ds = make_results()
    late = (
        make_results(1)
        # It saw two of three corruptions and no attacks, and missing answers must not count as
        # wrong.
        .isel(model=[1], corruption=[0, 2])
        .drop_dims("attack")
        .assign_coords(model=["late"])
    )
    merged = xr.merge([ds, late], join="outer", compat="no_conflicts")
    for by in ("corruption", "attack"):
        result = disagreement(merged, by)
        old = {
            "model": ["ground truth", "cnn", "tcnn"],
            "other": ["ground truth", "cnn", "tcnn"],
        }
        xr.testing.assert_equal(result.sel(old), disagreement(ds, by))
        unseen = (
            result.sel(model="late")
            if by == "attack"
            else result.sel(model="late", corruption="shot_noise")
        )
        assert unseen.to_dataarray().isnull().all()
    interval = improvement(merged, "cnn", "corruption", relative=False).interval.sel(
        model=["tcnn", "late"]
    )
    assert interval.isnull().any("bound").values.tolist() == [
        [False] * 3,
        [False, True, False],
    ]


def test_bad_arguments_are_refused() -> None:
    ds = make_results()
    with pytest.raises(KeyError, match="No variable named 'clean_prediction'"):
        disagreement(ds.drop_vars("clean_prediction"))
    with pytest.raises(ValueError, match=r"Dimensions .'model'. do not exist"):
        disagreement(ds.sel(model="cnn"))
    with pytest.raises(ValueError, match=r"expected by to be one of None, .*got 'colour'"):
        disagreement(ds, "colour")
