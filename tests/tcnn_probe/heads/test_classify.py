"""Labels, posteriors and what is said of heads without a label, of recordings made by hand."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tcnn_probe.heads.mixture import Mixture

NAN = math.nan
BOTH = ("thresholds", "mixture")
ENTROPY, DISTANCE = 4.0, 8.0  # of uniform attention in every layer: shares are then exact in binary


def recording(layers: Mapping[str, Mapping[str, Any]], marks: int = 1) -> xr.Dataset:
    """A dataset of these layers; each has variables of shape (marks, heads). Heads that a layer has not are NaN."""
    names = list(dict.fromkeys(name for about in layers.values() for name in about))
    heads = max(np.shape(about["attention_distance"])[-1] for about in layers.values())
    values = {name: np.full((marks, len(layers), heads), NAN) for name in names}
    for at, about in enumerate(layers.values()):
        for name, given in about.items():
            values[name][:, at, : np.shape(given)[-1]] = given
    ds = xr.Dataset(
        {name: (("epoch", "layer", "head"), value) for name, value in values.items()},
        {"epoch": 2 + np.arange(marks), "layer": np.array(list(layers), dtype=object), "head": range(heads)},
    )
    scales = {"uniform_entropy": ENTROPY, "uniform_distance": DISTANCE}
    return ds.assign({name: (("epoch", "layer"), np.full((marks, len(layers)), one)) for name, one in scales.items()})


def gated(gate: Any, spread: Any = 0.5, reach: Any = 0.25) -> dict[str, np.ndarray]:
    """A layer with gates, by the shares that its types depend on, each (heads,) or (marks, heads)."""
    gate, spread, reach = (np.atleast_1d(one) for one in np.broadcast_arrays(gate, spread, reach))
    entropies = dict.fromkeys(("positional_entropy", "entropy"), spread * ENTROPY)
    return {"gate": gate, **entropies, "attention_distance": reach * DISTANCE}


def plain(reach: Any, evenness: Any = 0.5) -> dict[str, np.ndarray]:
    """A layer of plain attention, likewise."""
    return {name: gated(0.5, evenness, reach)[name] for name in ("entropy", "attention_distance")}


def both_kinds() -> xr.Dataset:
    """Three marks of five gated heads, of two plain heads and of a head without any place."""
    gates = [[0.9, 0.1, 0.5, 0.9, 0.9], [0.9, 0.2, 0.5, 0.9, 0.6], [0.8, 0.1, 0.4, 0.9, 0.1]]
    conv = gated(gates, [0.5, 0.5, 0.5, 1, 0.5])
    return recording({"conv": conv, "attn": plain([[0.25, 1.0], [0.6, 1.0], [0.8, 1.0]]), "pool": plain([NAN])}, 3)


@pytest.mark.parametrize("method", BOTH)
def test_types_of_both_kinds_and_their_attributes(method: Any, tmp_path: Path) -> None:
    ds = both_kinds()
    before = ds.copy(deep=True)
    types = tcnn_probe.head_types(ds, method, gate=(0.3, 0.625))
    xr.testing.assert_identical(ds, before)
    assert (types.name, types.dims) == ("head_type", ds.gate.dims)
    assert (types.sel(layer="pool") == "").all()
    assert json.loads(types.attrs["unlabelled"]) == {"pool": "attention_distance / uniform_distance is not finite"}
    assert types.attrs["gate_thresholds"] == [0.3, 0.625]
    definitions = json.loads(types.attrs["definitions"])
    assert definitions["convolutional"] == (
        "gate >= 0.625, positional_entropy <= 0.75 uniform_entropy, attention_distance <= uniform_distance"
    )
    if method == "thresholds":
        conv, content, mixed = "convolutional", "content", "mixed"
        assert types.sel(layer="conv").values.tolist() == [
            [conv, content, mixed, mixed, conv],
            [conv, content, mixed, mixed, mixed],
            [conv, content, mixed, mixed, content],
        ]
        plain = [[one, "global", "", "", ""] for one in ("local", mixed, "global")]
        assert types.sel(layer="attn").values.tolist() == plain
        xr.testing.assert_identical(tcnn_probe.head_types(ds[{"epoch": [0, 1]}], gate=(0.3, 0.625)), types[:2])
    ds.assign(head_type=types).to_zarr(tmp_path / "typed.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "typed.zarr", consolidated=False).head_type.load()
    assert again.values.tolist() == types.values.tolist()
    assert again.attrs == types.attrs
    assert {*again.coords} == {*types.coords}


@pytest.mark.parametrize("method", BOTH)
def test_selections_keep_their_dimensions_and_coordinates(method: Any) -> None:
    ds = both_kinds().rename(epoch="step").transpose("head", "step", "layer")
    whole = tcnn_probe.head_types(ds, method)
    assert whole.dims == ("head", "step", "layer")
    for chosen in ({"step": 1}, {"layer": 0, "head": 4}, {"step": 0, "layer": 0, "head": 1}, {"layer": [1, 0]}):
        part = ds.isel(chosen)
        types = tcnn_probe.head_types(part, method)
        assert types.dims == part.gate.dims
        for name in part.gate.coords:
            np.testing.assert_array_equal(types[name], part[name])
        if method == "thresholds":
            xr.testing.assert_equal(types, whole.isel(chosen))


def test_numbers_that_are_not_finite_give_no_label() -> None:
    about = gated([[0.9, 0.9, 0.9, 0.9, 0.1], [0.9] * 5])
    ds = recording({"conv": about, "gone": gated([0.9]), "attn": plain([0.25])}, 2)
    for head, name in enumerate(("gate", "positional_entropy", "attention_distance")):
        ds[name].values[0, 0, head] = NAN
    ds.attention_distance.values[0, 0, 3] = math.inf
    ds.gate.values[:, 1] = NAN  # a gate that became NaN: it is no plain attention
    ds.attrs["missing"] = json.dumps({"gate": {"gone": "why not"}})
    types = tcnn_probe.head_types(ds)
    assert types.values[0, 0].tolist() == ["", "", "", "", "content"]
    assert (types[1, 0] == "convolutional").all()
    assert (types[:, 1] == "").all()
    told = json.loads(types.attrs["unlabelled"])
    assert told["conv"] == (
        "gate is not finite; positional_entropy / uniform_entropy is not finite; "
        "attention_distance / uniform_distance is not finite"
    )
    assert told["gone"] == "gate is not finite (why not)"
    posterior = tcnn_probe.head_types(ds, "mixture").posterior_content
    assert np.isnan(posterior.values[0, 0]).tolist() == [True] * 4 + [False]
    nothing = tcnn_probe.head_types(ds * NAN, "mixture")
    assert (nothing == "").all()
    assert json.loads(nothing.attrs["unlabelled"])["attn"] == "nothing finite is recorded of it"
    one_key = recording({"one": plain([0.0, 0.0])})
    assert (tcnn_probe.head_types(one_key.assign(uniform_distance=one_key.uniform_distance * 0)) == "").all()


@pytest.mark.parametrize(("layer", "expected"), [(gated([0.9]), "convolutional"), (plain([0.25]), "local")])
def test_a_single_head_and_heads_that_are_alike(layer: dict[str, Any], expected: str) -> None:
    for method, heads in itertools.product(BOTH, (1, 5)):
        ds = recording({"only": {name: np.repeat(value, heads) for name, value in layer.items()}}, marks=heads)
        types = tcnn_probe.head_types(ds, method)
        assert (types == expected).all()
    np.testing.assert_array_equal(types[f"posterior_{expected}"], 1)


def noisy(marks: int = 13) -> xr.Dataset:
    """Convolutional, content and mixed heads in turn, and local and global ones, with noise."""
    rng = np.random.default_rng(0)

    def around(means: Sequence[float], count: int) -> np.ndarray:
        return rng.normal(np.resize(means, count), 0.04, (marks, count))

    layers = {
        name: gated(around([0.8, 0.15, 0.5], 9), around([0.3, 0.5, 0.6], 9), around([0.3, 0.8, 0.5], 9))
        for name in ("c0", "c1")
    }
    return recording({**layers, "attn": plain(around([0.2, 0.95], 6), around([0.3, 0.9], 6))}, marks)


def test_mixture_of_known_clusters() -> None:
    """Labels are known; posteriors are Bayes' rule by hand; the order of the heads does not matter."""
    ds = noisy()
    types = tcnn_probe.head_types(ds, "mixture")
    assert types.sel(layer="c1").values.tolist() == [["convolutional", "content", "mixed"] * 3] * 13
    assert types.sel(layer="attn").values.tolist() == [["local", "global"] * 3 + [""] * 3] * 13
    said = json.loads(types.attrs["mixture"])
    assert sorted(said["plain"]["components"]) == ["global", "local"]
    names = ["convolutional", "content", "local", "global", "mixed"]
    posterior = np.stack([types[f"posterior_{name}"].values for name in names])
    labelled = types.values != ""
    np.testing.assert_allclose(posterior[:, labelled].sum(0), 1, rtol=1e-12)
    assert np.isnan(posterior[:, ~labelled]).all()
    at = {"epoch": 5, "layer": "c0", "head": 2}
    row = ds.sel(at)
    point = np.array([row.gate, row.positional_entropy / ENTROPY, row.attention_distance / DISTANCE])
    one = said["gated"]
    densities = []
    for weight, mean, covariance in zip(one["weights"], one["means"], one["covariances"], strict=True):
        exponent = -0.5 * (point - mean) @ np.linalg.inv(covariance) @ (point - mean)
        densities.append(weight * math.exp(exponent) / math.sqrt(np.linalg.det(covariance)))
    for name, density in zip(one["components"], densities, strict=True):
        found = float(types[f"posterior_{name}"].sel(at))
        assert found == pytest.approx(density / sum(densities), rel=1e-9, abs=1e-300)
    order = np.random.default_rng(1).permutation(9)
    xr.testing.assert_identical(tcnn_probe.head_types(ds.isel(head=order), "mixture"), types.isel(head=order))


def test_two_components_of_one_type() -> None:
    """Two clusters of content heads: their posteriors add up."""
    rng = np.random.default_rng(0)
    reach = rng.normal(np.resize([0.3, 0.9], 10), 0.03, (17, 10))
    ds = recording({"a": gated(np.abs(rng.normal(0.1, 0.03, (17, 10))), 0.5, reach)}, 17)
    types = tcnn_probe.head_types(ds, "mixture")
    assert json.loads(types.attrs["mixture"])["gated"]["components"] == ["content", "content"]
    np.testing.assert_allclose(types.posterior_content, 1, rtol=1e-12)


def test_of_types_equally_probable_it_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    ds = recording({"conv": gated([[0.95, 0.94, 0.93, 0.5, 0.51, 0.52, 0.05, 0.06, 0.07]] * 20)}, 20)
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {"convolutional", "mixed", "content"}
    monkeypatch.setattr(Mixture, "posterior", lambda self, points: np.full((len(points), len(self.weights)), 1 / 3))
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {"mixed"}


@pytest.mark.parametrize(
    ("ds", "options", "error", "told"),
    [
        (both_kinds(), {"method": "guess"}, ValueError, "expected method='thresholds' or 'mixture', got 'guess'"),
        (both_kinds(), {"seed": 0.5}, TypeError, "'float' object cannot be interpreted as an integer"),
        (both_kinds().gate, {}, TypeError, "expected an xarray.Dataset that tcnn_probe.record has made, got DataArray"),
        (xr.DataTree(both_kinds()), {}, TypeError, "of a tree, tree['heads'].dataset, got DataTree"),
        (both_kinds().drop_vars("uniform_entropy"), {}, ValueError, "expected 'uniform_entropy' in the dataset, got"),
        (both_kinds().drop_vars("gate"), {}, ValueError, "expected 'gate' beside 'positional_entropy' in the dataset"),
        (both_kinds().drop_vars("entropy"), {"method": "mixture"}, ValueError, "'entropy' in the dataset, which the m"),
        (both_kinds().mean("head"), {}, ValueError, "expected the coordinate 'head', as recorded, got ['epoch', "),
    ],
    ids=["method", "seed", "array", "tree", "scale", "gate", "entropy", "heads"],
)
def test_what_is_refused(ds: Any, options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        tcnn_probe.head_types(ds, **options)
