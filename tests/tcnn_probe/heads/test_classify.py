"""Recordings made by hand: labels, posteriors, and what is told of heads without a label."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tcnn_probe.heads import Thresholds, gated_types, plain_types
from tcnn_probe.heads.mixture import Mixture
from tests.tcnn_probe.heads.constructed import EVEN_DISTANCE, EVEN_ENTROPY, gated, plain, recording

NAN = math.nan
BOTH = ("thresholds", "mixture")


def both_kinds() -> xr.Dataset:
    """Three marks of a layer of five gated heads, one of two plain heads and one without any place."""
    layers = {
        "conv": gated([[0.9, 0.1, 0.5, 0.9, 0.9], [0.9, 0.2, 0.5, 0.9, 0.6], [0.8, 0.1, 0.4, 0.9, 0.1]], marks=3),
        "attn": plain([[0.25, 1.0], [0.6, 1.0], [0.8, 1.0]], marks=3),
        "pool": plain([[NAN], [NAN], [NAN]], marks=3),
    }
    layers["conv"]["positional_entropy"] = [[2, 2, 2, 4, 2]] * 3
    return recording(layers, marks=(2, 3, 7))


def test_types_beside_what_they_are_made_of() -> None:
    ds = both_kinds()
    before = ds.copy(deep=True)
    types = tcnn_probe.head_types(ds)
    assert types.name == "head_type"
    assert types.dims == ds.gate.dims
    conv, content, mixed = "convolutional", "content", "mixed"
    assert types.sel(layer="conv").values.tolist() == [
        [conv, content, mixed, mixed, conv],
        [conv, content, mixed, mixed, mixed],
        [conv, content, mixed, mixed, content],
    ]
    assert types.sel(layer="attn").values.tolist() == [
        [one, "global", "", "", ""] for one in ("local", mixed, "global")
    ]
    assert (types.sel(layer="pool") == "").all()
    assert json.loads(types.attrs["unlabelled"]) == {
        "pool": "attention_distance / uniform_distance is not finite",
    }
    xr.testing.assert_identical(ds, before)
    assigned = ds.assign(head_type=types)
    xr.testing.assert_identical(assigned.drop_vars("head_type"), before)
    assert (types == "content").sum("head").sel(layer="conv").values.tolist() == [1, 1, 2]


def test_attributes_say_how() -> None:
    attrs = tcnn_probe.head_types(both_kinds(), gate=(0.25, 0.5), distance=(0.125, 1), entropy=0.5).attrs
    assert attrs["method"] == "thresholds"
    assert attrs["gate_thresholds"] == [0.25, 0.5]
    assert attrs["distance_thresholds"] == [0.125, 1.0]
    assert attrs["entropy_threshold"] == 0.5
    definitions = json.loads(attrs["definitions"])
    assert definitions["content"] == "gate <= 0.25"
    assert definitions["convolutional"] == (
        "gate >= 0.5, positional_entropy <= 0.5 uniform_entropy, attention_distance <= uniform_distance"
    )
    assert definitions["local"] == "no gate, attention_distance <= 0.125 uniform_distance"
    assert json.loads(json.dumps(attrs)) == attrs


@pytest.mark.parametrize("method", BOTH)
def test_stored_and_read_again(method: Any, tmp_path: Path) -> None:
    ds = both_kinds()
    types = tcnn_probe.head_types(ds, method)
    ds.assign(head_type=types).to_zarr(tmp_path / "typed.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "typed.zarr", consolidated=False).head_type.load()
    assert again.values.tolist() == types.values.tolist()
    assert again.attrs == types.attrs
    chosen = again == "content"
    assert chosen.dtype == bool
    np.testing.assert_array_equal(chosen, types == "content")
    assert {*again.coords} == {*types.coords}


@pytest.mark.parametrize("method", BOTH)
def test_selections_keep_their_coordinates(method: Any) -> None:
    ds = both_kinds()
    whole = tcnn_probe.head_types(ds)
    for chosen in (
        {"epoch": 1},
        {"layer": 0},
        {"layer": 0, "head": 4},
        {"epoch": 0, "layer": 0, "head": 1},
        {"layer": [1, 0]},
        {"head": slice(0, 2)},
    ):
        part = ds.isel(chosen)
        types = tcnn_probe.head_types(part, method)
        assert types.dims == part.gate.dims
        assert {name: types[name].values.tolist() for name in part.gate.coords} == {
            name: part[name].values.tolist() for name in part.gate.coords
        }
        if method == "thresholds":
            assert types.values.tolist() == whole.isel(chosen).values.tolist()


def test_marks_of_any_name_and_order_of_dimensions() -> None:
    ds = both_kinds().rename(epoch="step").transpose("head", "step", "layer")
    types = tcnn_probe.head_types(ds)
    assert types.dims == ("head", "step", "layer")
    xr.testing.assert_equal(
        types.transpose("step", "layer", "head"), tcnn_probe.head_types(both_kinds()).rename(epoch="step")
    )


def test_numbers_that_are_missing_give_no_label() -> None:
    about = gated([0.9, 0.9, 0.9, 0.9, 0.1], marks=2)
    about["gate"] = np.array([[NAN, 0.9, 0.9, 0.9, 0.1], [0.9] * 5])
    about["positional_entropy"] = np.array([[2, NAN, 2, 2, 2], [2.0] * 5])
    about["attention_distance"] = np.array([[2, 2, NAN, math.inf, 2], [2.0] * 5])
    types = tcnn_probe.head_types(recording({"conv": about}, marks=(0, 1)))
    assert types.values[0, 0].tolist() == ["", "", "", "", "content"]
    assert (types[1] == "convolutional").all()
    assert json.loads(types.attrs["unlabelled"])["conv"] == (
        "gate is not finite; positional_entropy / uniform_entropy is not finite; "
        "attention_distance / uniform_distance is not finite"
    )
    posterior = tcnn_probe.head_types(recording({"conv": about}, marks=(0, 1)), "mixture").posterior_content
    assert np.isnan(posterior.values[0, 0]).tolist() == [True] * 4 + [False]


def test_a_gate_that_became_nan_is_no_plain_attention() -> None:
    about = gated(0.9, reach=[[0.25, 0.25], [0.25, 0.25]], marks=2)
    about["gate"] = np.full((2, 2), NAN)
    ds = recording({"conv": about, "attn": plain([[0.25], [0.25]], marks=2)}, marks=(0, 1))
    assert (tcnn_probe.head_types(ds).sel(layer="conv") == "").all()


def test_rows_of_nan_and_the_recorded_reason() -> None:
    ds = both_kinds().where(both_kinds().epoch != 3)
    ds.attrs["missing"] = json.dumps({"attention_distance": {"pool": "4 keys: no grid found"}})
    types = tcnn_probe.head_types(ds)
    assert (types.sel(epoch=3) == "").all()
    assert types.sel(epoch=2).values.tolist() == tcnn_probe.head_types(both_kinds()).sel(epoch=2).values.tolist()
    told = json.loads(types.attrs["unlabelled"])
    assert told["pool"] == "attention_distance / uniform_distance is not finite (4 keys: no grid found)"
    assert set(told) == {"conv", "attn", "pool"}
    nothing = tcnn_probe.head_types(xr.full_like(both_kinds(), NAN), "mixture")
    assert (nothing == "").all()
    assert json.loads(nothing.attrs["unlabelled"])["conv"] == "nothing finite is recorded of it"
    assert set(nothing.coords) == {"epoch", "layer", "head"}


def test_a_single_key_has_no_distance() -> None:
    about = {**plain([[0.0, 0.0]]), "uniform_distance": [0.0], "uniform_entropy": [0.0]}
    types = tcnn_probe.head_types(recording({"one": about}))
    assert (types == "").all()


def test_earlier_marks_keep_their_labels() -> None:
    rng = np.random.default_rng(0)
    ds = recording(
        {"conv": gated(rng.random((11, 7)), rng.random((11, 7)), rng.random((11, 7)), marks=11)}, marks=range(11)
    )
    whole = tcnn_probe.head_types(ds)
    assert len(np.unique(whole)) == 3
    for marks in range(1, 11):
        xr.testing.assert_identical(tcnn_probe.head_types(ds.isel(epoch=slice(marks))), whole[:marks])


@pytest.mark.parametrize("layer", [gated([0.9]), plain([0.25])], ids=["gated", "plain"])
def test_a_single_head(layer: dict[str, Any]) -> None:
    ds = recording({"only": layer})
    expected = "convolutional" if "gate" in layer else "local"
    for method in BOTH:
        types = tcnn_probe.head_types(ds, method)
        assert types.values.tolist() == [[[expected]]]
    assert types[f"posterior_{expected}"].values.tolist() == [[[1.0]]]


def test_all_heads_alike() -> None:
    ds = recording({"a": gated([0.1] * 5, marks=3), "b": gated([0.1] * 3, marks=3)}, marks=range(3))
    for method in BOTH:
        types = tcnn_probe.head_types(ds, method)
        assert (types.sel(layer="a") == "content").all()
        assert types.sel(layer="b").values.tolist() == [["content"] * 3 + ["", ""]] * 3
    assert json.loads(types.attrs["mixture"])["gated"]["components"] == ["content"]


# The mixture.


def noisy(seed: int = 0, marks: int = 13) -> xr.Dataset:
    """Convolutional, content and mixed heads in turn, and local and global ones, with noise."""
    rng = np.random.default_rng(seed)

    def around(means: list[float], count: int) -> np.ndarray:
        return rng.normal(np.resize(means, count), 0.04, (marks, count))

    layers = {
        name: gated(around([0.8, 0.15, 0.5], 9), around([0.3, 0.5, 0.6], 9), around([0.3, 0.8, 0.5], 9), marks=marks)
        for name in ("c0", "c1")
    }
    layers["attn"] = plain(around([0.2, 0.95], 6), around([0.3, 0.9], 6), marks=marks)
    return recording(layers, marks=range(marks))


def test_mixture_of_known_clusters() -> None:
    types = tcnn_probe.head_types(noisy(), "mixture")
    assert types.sel(layer="c1").values.tolist() == [["convolutional", "content", "mixed"] * 3] * 13
    assert types.sel(layer="attn").values.tolist() == [["local", "global"] * 3 + [""] * 3] * 13
    said = json.loads(types.attrs["mixture"])
    assert sorted(said["gated"]["components"]) == ["content", "convolutional", "mixed"]
    np.testing.assert_allclose(said["gated"]["weights"], 1 / 3, atol=0.01)
    assert said["gated"]["features"][1] == "positional_entropy / uniform_entropy"
    assert len(said["gated"]["bic"]) == 3
    assert sorted(said["plain"]["components"]) == ["global", "local"]


def test_posterior_sums_to_one_and_is_that_of_the_components() -> None:
    ds = noisy()
    types = tcnn_probe.head_types(ds, "mixture")
    names = ["convolutional", "content", "local", "global", "mixed"]
    assert {str(name) for name in types.coords} == {"epoch", "layer", "head", *(f"posterior_{one}" for one in names)}
    posterior = np.stack([types[f"posterior_{name}"].values for name in names])
    labelled = types.values != ""
    np.testing.assert_allclose(posterior[:, labelled].sum(0), 1, rtol=1e-12)
    assert np.isnan(posterior[:, ~labelled]).all()
    assert (np.array(names)[posterior[:, labelled].argmax(0)] == types.values[labelled]).all()
    said = json.loads(types.attrs["mixture"])["gated"]
    at = {"epoch": 3, "layer": "c0", "head": 2}
    row = ds.sel(at)
    point = [row.gate, row.positional_entropy / EVEN_ENTROPY, row.attention_distance / EVEN_DISTANCE]
    densities = []
    for weight, mean, covariance in zip(said["weights"], said["means"], said["covariances"], strict=True):
        off = np.array(point, dtype=float) - mean
        density = math.exp(-0.5 * off @ np.linalg.inv(covariance) @ off) / math.sqrt(np.linalg.det(covariance))
        densities.append(weight * density)
    for name, density in zip(said["components"], densities, strict=True):
        found = float(types[f"posterior_{name}"].sel(at))
        assert found == pytest.approx(density / sum(densities), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("seed", range(3))
def test_heads_in_another_order_have_the_same_labels(seed: int) -> None:
    ds = noisy()
    types = tcnn_probe.head_types(ds, "mixture", seed=seed)
    order = np.random.default_rng(seed).permutation(9)
    again = tcnn_probe.head_types(ds.isel(head=order), "mixture", seed=seed)
    xr.testing.assert_identical(again, types.isel(head=order))


def test_components_that_cross_keep_their_meaning() -> None:
    """One head goes from convolution to content while another goes the other way."""
    gate = 0.5 - 0.4 * np.tanh(np.linspace(-4, 4, 31))
    down, up = np.tile(gate[:, None], (1, 5)), np.tile(gate[::-1, None], (1, 5))
    noise = np.random.default_rng(0).normal(0, 0.02, (31, 10))
    gates = np.clip(np.hstack([down, up]) + noise, 0, 1)
    types = tcnn_probe.head_types(
        recording({"a": gated(gates, 0.3, 0.9 - 0.6 * gates, marks=31)}, range(31)), "mixture"
    )
    labels = types.values[:, 0]
    assert (labels[:5, :5] == "convolutional").all()
    assert (labels[:5, 5:] == "content").all()
    assert (labels[-5:, :5] == "content").all()
    assert (labels[-5:, 5:] == "convolutional").all()
    posterior = types.posterior_content.values[:, 0, :5].mean(1)
    assert posterior[:10].max() < 0.5 < posterior[-10:].min()


def test_two_components_of_one_type() -> None:
    """Two clusters of content heads: their posteriors add up."""
    rng = np.random.default_rng(0)
    gate = np.abs(rng.normal(0.1, 0.03, (17, 10)))
    reach = rng.normal(np.resize([0.3, 0.9], 10), 0.03, (17, 10))
    types = tcnn_probe.head_types(recording({"a": gated(gate, 0.5, reach, marks=17)}, range(17)), "mixture")
    assert json.loads(types.attrs["mixture"])["gated"]["components"] == ["content", "content"]
    assert (types == "content").all()
    np.testing.assert_allclose(types.posterior_content, 1, rtol=1e-12)


def test_the_mixture_needs_entropies_of_plain_attention_only() -> None:
    ds = recording({"attn": plain([0.25, 1.0])}).drop_vars("entropy")
    assert tcnn_probe.head_types(ds).values.tolist() == [[["local", "global"]]]
    with pytest.raises(ValueError, match=r"expected 'entropy' in the dataset, which the mixture needs"):
        tcnn_probe.head_types(ds, "mixture")
    ds = recording({"conv": gated([0.9, 0.1])}).drop_vars("entropy")
    assert tcnn_probe.head_types(ds, "mixture").values.tolist() == [[["convolutional", "content"]]]


# Recordings of older versions.


def older() -> xr.Dataset:
    return both_kinds().drop_vars(["uniform_entropy", "uniform_distance"])


def test_a_grid_stands_in() -> None:
    sizes = {"conv": (5, 7), "attn": (3, 11), "pool": (1, 2)}
    types = tcnn_probe.head_types(older(), grid={"conv": (5, 7), "a*": (3, 11), "pool": np.array([1, 2]).tolist()})
    ds = older()
    for layer, (height, width) in sizes.items():
        cells = [(y, x) for y in range(height) for x in range(width)]
        far = np.mean([math.dist(one, other) for one in cells for other in cells])
        row = ds.sel(layer=layer)
        reach, spread = row.attention_distance.values / far, row.positional_entropy.values / math.log(len(cells))
        by_hand = gated_types(row.gate.values, spread, reach, Thresholds())
        by_hand = by_hand if layer == "conv" else plain_types(reach, Thresholds())
        assert types.sel(layer=layer).values.tolist() == by_hand.tolist()
    assert (types != "").any()
    of_all = tcnn_probe.head_types(older(), grid=(5, 7)).sel(layer="conv")
    assert of_all.values.tolist() == types.sel(layer="conv").values.tolist()


def test_what_was_recorded_counts_more_than_a_grid() -> None:
    ds = both_kinds()
    xr.testing.assert_identical(tcnn_probe.head_types(ds, grid=(99, 101)), tcnn_probe.head_types(ds))
    ds.uniform_distance.loc[{"layer": "attn"}] = NAN
    assert (tcnn_probe.head_types(ds).sel(layer="attn") == "").all()
    filled = tcnn_probe.head_types(ds, grid=(99, 101)).sel(layer="attn")
    assert filled.isel(head=slice(2)).values.tolist() == [["local", "local"]] * 3


# What is refused.


@pytest.mark.parametrize(
    ("ds", "options", "error", "told"),
    [
        (both_kinds(), {"method": "guess"}, ValueError, "expected method='thresholds' or 'mixture', got 'guess'"),
        (both_kinds(), {"gate": (0.7, 0.3)}, ValueError, "for gate, ascending and between 0 and 1, got (0.7, 0.3)"),
        (both_kinds(), {"seed": 0.5}, TypeError, "'float' object cannot be interpreted as an integer"),
        (both_kinds().gate, {}, TypeError, "expected an xarray.Dataset that tcnn_probe.record has made, got DataArray"),
        (xr.DataTree(both_kinds()), {}, TypeError, "of a tree, tree['heads'].dataset, got DataTree"),
        (
            both_kinds().drop_vars("attention_distance"),
            {},
            ValueError,
            "expected 'attention_distance' in the dataset, got the variables ['gate', 'positional_entropy', 'entropy',",
        ),
        (both_kinds().drop_vars("gate"), {}, ValueError, "expected 'gate' beside 'positional_entropy' in the dataset"),
        (
            both_kinds().drop_vars("positional_entropy"),
            {},
            ValueError,
            "expected 'positional_entropy' beside 'gate' in the dataset",
        ),
        (
            both_kinds().mean("head"),
            {},
            ValueError,
            "expected the coordinate 'head', as recorded, got ['epoch', 'layer']",
        ),
        (
            both_kinds().drop_vars("layer"),
            {},
            ValueError,
            "expected the coordinate 'layer', as recorded, got ['epoch', 'head']",
        ),
        (
            older(),
            {},
            ValueError,
            "expected 'uniform_entropy' in the dataset, which recordings of older versions do not have; give the grid "
            "of keys instead: grid=(rows, columns), or by layer, grid={'conv': (rows, columns)}",
        ),
        (
            older(),
            {"grid": {"conv": (5, 7), "pool": (5, 7)}},
            ValueError,
            "expected 'uniform_distance' in the dataset, which recordings of older versions do not have; give the grid "
            "of keys instead: grid=(rows, columns), or by layer, grid={'attn': (rows, columns)}",
        ),
        (
            older(),
            {"grid": {"layer4*": (5, 7)}},
            ValueError,
            "no layer 'layer4*' to have a grid; the dataset has ['conv'",
        ),
        (
            older(),
            {"grid": 14},
            TypeError,
            "expected grid=(rows, columns), two integers of at least 1, or these by layer",
        ),
        (older(), {"grid": (14, 0)}, TypeError, "or these by layer, got (14, 0)"),
        (older(), {"grid": {"conv": (14, 2.5)}}, TypeError, "or these by layer, got {'conv': (14, 2.5)}"),
    ],
)
def test_what_is_refused(ds: Any, options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        tcnn_probe.head_types(ds, **options)


def test_of_types_equally_probable_it_is_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = [0.95, 0.94, 0.93, 0.5, 0.51, 0.52, 0.05, 0.06, 0.07]
    ds = recording({"conv": gated([gates] * 20, marks=20)}, marks=tuple(range(20)))
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {"convolutional", "mixed", "content"}
    monkeypatch.setattr(Mixture, "posterior", lambda self, points: np.full((len(points), len(self.weights)), 1 / 3))
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {"mixed"}
