"""mCE of accuracies that were made up, by hand."""

import numpy as np
import pytest
import xarray as xr

import tcnn_probe


def made_up() -> xr.Dataset:
    """Two models, three corruptions in two groups, two severities, two seeds; error rates below."""
    random = np.random.default_rng(0)
    return xr.Dataset(
        {
            "clean_accuracy": ("model", [0.9, 0.8]),
            "accuracy": (("model", "corruption", "severity", "seed"), random.uniform(0.1, 0.7, (2, 3, 2, 2))),
        },
        {
            "model": ["cnn", "tcnn"],
            "corruption": ["shot_noise", "snow", "fog"],
            "group": ("corruption", ["noise", "weather", "weather"]),
            "severity": [1, 3],
            "seed": [0, 1],
        },
    )


def test_by_hand() -> None:
    ds = made_up()
    found = tcnn_probe.mean_corruption_error(ds, "cnn")
    error = 1 - ds.accuracy.values
    clean = [0.1, 0.2]
    ratios = np.zeros((2, 2, 3))
    for model in range(2):
        for corruption in range(3):
            mine = [sum(error[m, corruption, s].mean() for s in range(2)) for m in (model, 0)]
            lost = [sum(error[m, corruption, s].mean() - clean[m] for s in range(2)) for m in (model, 0)]
            ratios[0, model, corruption] = mine[0] / mine[1]
            ratios[1, model, corruption] = lost[0] / lost[1]
    for kind, ratio in zip(("", "relative_"), ratios, strict=True):
        np.testing.assert_allclose(found[f"{kind}corruption_error"], ratio)
        np.testing.assert_allclose(found[f"{kind}mean_corruption_error"], ratio.mean(1))
        groups = found[f"{kind}group_corruption_error"].transpose("model", "group")
        assert groups.group.values.tolist() == ["noise", "weather"]
        np.testing.assert_allclose(groups, np.stack([ratio[:, 0], ratio[:, 1:].mean(1)], 1))
        assert found[f"{kind}mean_corruption_error"].sel(model="cnn") == 1
    assert found.attrs["baseline"] == "cnn"
    assert found.mean_corruption_error.attrs["long_name"] == "mean corruption error, of cnn's"


def test_a_baseline_without_errors() -> None:
    """No ratio, and no mean over the rest of the corruptions in its place."""
    ds = made_up()
    ds.accuracy.loc[{"model": "cnn", "corruption": "snow"}] = 1
    found = tcnn_probe.mean_corruption_error(ds, "cnn")
    assert found.corruption_error.isnull().sum("corruption").values.tolist() == [1, 1]
    assert found.mean_corruption_error.isnull().all()
    assert found.group_corruption_error.sel(group="weather").isnull().all()
    assert not found.group_corruption_error.sel(group="noise").isnull().any()


def test_of_what_was_selected() -> None:
    ds = made_up()
    whole = tcnn_probe.mean_corruption_error
    for one in ({"seed": 1}, {"severity": 3}, {"severity": 3, "seed": 0}):
        several = {name: [label] for name, label in one.items()}
        xr.testing.assert_allclose(whole(ds.sel(one), "cnn").drop_vars(one), whole(ds.sel(several), "cnn"))
    for name, label in (("corruption", "fog"), ("corruption", "shot_noise")):
        xr.testing.assert_allclose(whole(ds.sel({name: label}), "cnn"), whole(ds.sel({name: [label]}), "cnn"))


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"what tcnn_probe.robustness gives, an xarray.Dataset; got DataArray"):
        tcnn_probe.mean_corruption_error(made_up().accuracy, "cnn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"with the dimension 'model', got \('corruption', 'severity', 'seed'\)"):
        tcnn_probe.mean_corruption_error(made_up().sel(model="cnn"), "cnn")
    with pytest.raises(ValueError, match="expected one of the models cnn, tcnn for baseline, got 'alexnet'"):
        tcnn_probe.mean_corruption_error(made_up(), "alexnet")
    with pytest.raises(ValueError, match="gives for corruptions, got no accuracy"):
        tcnn_probe.mean_corruption_error(made_up().drop_vars("accuracy"), "cnn")
