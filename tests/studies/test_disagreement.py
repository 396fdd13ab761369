"""What the study of disagreement makes of made decisions."""

import numpy as np
import xarray as xr

import disagreement
from disagreement import CNN, ORDER, START, TCNN


def made() -> xr.Dataset:
    """2 trainings of 3 models, 3 corruptions of 2 groups, 2 severities, 7 images."""
    random = np.random.default_rng(0)
    coords = {"model": np.array([CNN, TCNN, ORDER], dtype=object), "corruption": ["fog", "blur", "snow"]}
    coords |= {"group": ("corruption", ["weather", "blur", "weather"]), "severity": [1, 5], "seed": [0]}
    ds = xr.Dataset(coords=coords | {"label": ("image", np.arange(7) % 3)})
    ds["clean_prediction"] = ("training", "model", "image"), random.integers(0, 3, (2, 3, 7))
    dims = ("training", "model", "corruption", "severity", "seed", "image")
    ds["prediction"] = dims, random.integers(0, 3, (2, 3, 3, 2, 1, 7))
    return ds


def test_differing_by_hand() -> None:
    results = disagreement.with_other_start(made())
    assert results.model.values.tolist() == [CNN, TCNN, ORDER, START]
    found = disagreement.differing(results, "group")
    assert found.dims == ("training", "model", "group", "image")
    assert found.group.values.tolist() == ["clean", "weather", "blur"]
    clean, worse = results.clean_prediction.values, results.prediction.values
    for nth, model, image in np.ndindex(2, 3, 7):
        at = {TCNN: (nth, 1), ORDER: (nth, 2), START: (1 - nth, 0)}[str(found.model.values[model])]
        cells = [(worse[(*at, c, s, 0, image)], worse[nth, 0, c, s, 0, image]) for c in (0, 2) for s in (0, 1)]
        expected = [clean[(*at, image)] != clean[nth, 0, image], np.mean([a != b for a, b in cells])]
        np.testing.assert_allclose(found[nth, model, :2, image], expected)


def test_verdicts_follow_the_intervals() -> None:
    shares = {TCNN: [1.0, 0.0, 0.0], ORDER: [0.0, 1.0, 0.0], START: [0.5, 0.5, 0.5]}
    values = np.broadcast_to(np.array([*shares.values()])[None, :, :, None], (2, 3, 3, 7))
    of = {"model": np.array([*shares], dtype=object)}
    found = {
        by: xr.DataArray(values, of | {by: ["clean", *names]}, ("training", "model", by, "image"))
        for by, names in {"group": ["noise", "blur"], "corruption": ["shot_noise", "defocus_blur"]}.items()
    }
    lines = disagreement.verdicts(found).splitlines()
    ends = ["more often", "less often", "not distinguishable"]
    for label, end in zip(["clean ", "noise", "blur"], ends, strict=True):
        assert next(line for line in lines if line.startswith(f"  {label}")).endswith(end)
    assert sum(line.startswith("  clean ") for line in lines) == 2  # once for each yardstick
