"""Verdicts of the study of disagreement on predictions made by hand."""

import numpy as np
import xarray as xr

import disagreement
from disagreement import CNN, ORDER, START, TCNN


def decisions() -> xr.Dataset:
    """Return predictions of 2 trainings of 3 models on 7 images,
    with 3 corruptions of 2 groups at 2 severities.
    """
    random = np.random.default_rng(0)
    coords = {
        "model": np.array([CNN, TCNN, ORDER], dtype=object),
        "corruption": ["fog", "blur", "snow"],
    }
    coords |= {
        "group": ("corruption", ["weather", "blur", "weather"]),
        "severity": [1, 5],
        "seed": [0],
    }
    ds = xr.Dataset(coords=coords | {"label": ("image", np.arange(7) % 3)})
    ds["clean_prediction"] = (
        ("training", "model", "image"),
        random.integers(0, 3, (2, 3, 7)),
    )
    dims = ("training", "model", "corruption", "severity", "seed", "image")
    ds["prediction"] = dims, random.integers(0, 3, (2, 3, 3, 2, 1, 7))
    return ds


def test_rates_of_disagreement_by_hand() -> None:
    results = disagreement.with_other_start(decisions())
    assert results.model.values.tolist() == [CNN, TCNN, ORDER, START]
    rates = disagreement.differing(results, "group")
    assert rates.dims == ("training", "model", "group", "image")
    assert rates.group.values.tolist() == ["clean", "weather", "blur"]
    clean = results.clean_prediction.values
    corrupted = results.prediction.values
    for nth, model, image in np.ndindex(2, 3, 7):
        # The "other start" is the CNN of the other training.
        at = {TCNN: (nth, 1), ORDER: (nth, 2), START: (1 - nth, 0)}[str(rates.model.values[model])]
        cells = [
            (corrupted[(*at, c, s, 0, image)], corrupted[nth, 0, c, s, 0, image])
            for c in (0, 2)
            for s in (0, 1)
        ]
        expected = [
            clean[(*at, image)] != clean[nth, 0, image],
            np.mean([a != b for a, b in cells]),
        ]
        np.testing.assert_allclose(rates[nth, model, :2, image], expected)


def test_verdicts_follow_the_intervals() -> None:
    shares = {TCNN: [1.0, 0.0, 0.0], ORDER: [0.0, 1.0, 0.0], START: [0.5, 0.5, 0.5]}
    values = np.broadcast_to(np.array([*shares.values()])[None, :, :, None], (2, 3, 3, 7))
    coords = {"model": np.array([*shares], dtype=object)}
    rates = {
        by: xr.DataArray(
            values, coords | {by: ["clean", *names]}, ("training", "model", by, "image")
        )
        for by, names in {
            "group": ["noise", "blur"],
            "corruption": ["shot_noise", "defocus_blur"],
        }.items()
    }
    lines = disagreement.verdicts(rates).splitlines()
    ends = ["more often", "less often", "not distinguishable"]
    for label, end in zip(["clean ", "noise", "blur"], ends, strict=True):
        assert next(line for line in lines if line.startswith(f"  {label}")).endswith(end)
    # The line appears once for each yardstick.
    assert sum(line.startswith("  clean ") for line in lines) == 2
