"""Labels and posteriors, and reasons for heads without a label, in recordings made by hand."""

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from sklearn.mixture import GaussianMixture

import tcnn_probe

NAN = math.nan
BOTH = ("thresholds", "mixture")
# There are 64 keys, as with 8 x 8 patches; 16 images are more than the 8 that types by content need.
KEYS, DISTANCE, IMAGES = 64, 8.0, 16  # the same in every layer
# These numbers are well inside of each type, so that thresholds near the defaults give the same types.
CONV, AVERAGE, CONTENT = (
    (0.0, 0.5, 0.25, 0.9),
    (0.0, 1.0, 1.0, 0.1),
    (0.5, 0.6, 0.8, 0.2),
)
"""Numbers that types depend on, as shares: information, entropy, distance, and equivariance."""


def recording(layers: Mapping[str, Mapping[str, Any]], marks: int = 1) -> xr.Dataset:
    """Return a dataset of layers with variables of shape (marks, heads); heads that a layer lacks are NaN."""
    names = list(dict.fromkeys(name for about in layers.values() for name in about))
    heads = max(np.shape(about["attention_distance"])[-1] for about in layers.values())
    values = {name: np.full((marks, len(layers), heads), NAN) for name in names}
    for at, about in enumerate(layers.values()):
        for name, numbers in about.items():
            values[name][:, at, : np.shape(numbers)[-1]] = numbers
    ds = xr.Dataset(
        {name: (("epoch", "layer", "head"), value) for name, value in values.items()},
        {
            # Epochs start at 2, so that they differ from their positions.
            "epoch": 2 + np.arange(marks),
            "layer": np.array(list(layers), dtype=object),
            "head": range(heads),
        },
    )
    scales = {
        "uniform_entropy": math.log(KEYS),
        "uniform_distance": DISTANCE,
        "images": IMAGES,
    }
    shape = marks, len(layers)
    return ds.assign(
        {
            name: (("epoch", "layer"), np.full(shape, value))
            for name, value in scales.items()
        }
    )


def layer(*heads: Any, gate: Any = NAN) -> dict[str, np.ndarray]:
    """Return the variables of a layer from shares (heads, 4) or (marks, heads, 4), and from gates."""
    information, entropy, distance, equivariance = np.moveaxis(
        np.array(heads, dtype=float), -1, 0
    )
    return {
        "content_information": information * math.log(KEYS),
        "entropy": entropy * math.log(KEYS),
        "attention_distance": distance * DISTANCE,
        "translation_equivariance": equivariance,
        "gate": np.broadcast_to(gate, information.shape),
        "positional_entropy": np.where(np.isnan(gate), NAN, 0.5 * math.log(KEYS))
        # Zero times the information is added, so that a head without information lacks this as well.
        + 0 * information,
    }


def of_marks() -> xr.Dataset:
    """Return three marks of five heads, of which the last one changes, and of a head without a position."""
    # The information is between the two thresholds, and otherwise the head is convolutional.
    mixed = (0.05, 0.5, 0.25, 0.9)
    marks = [[CONV, AVERAGE, CONTENT, mixed, last] for last in (CONV, mixed, CONTENT)]
    about = {
        name: np.array([layer(*mark)[name] for mark in marks]) for name in layer(CONV)
    }
    return recording({"conv": about, "pool": layer((NAN,) * 4)}, 3)


@pytest.mark.parametrize("method", BOTH)
def test_types_and_their_attributes(method: Any, tmp_path: Path) -> None:
    ds = of_marks()
    before = ds.copy(deep=True)
    # Limits are given explicitly, so that the mixed head stays between them whatever the defaults are.
    types = tcnn_probe.head_types(ds, method, information=(0.03, 0.125))
    xr.testing.assert_identical(ds, before)
    assert types.name == "head_type"
    assert types.dims == ds.entropy.dims
    assert (types.sel(layer="pool") == "").all()
    assert json.loads(types.attrs["unlabelled"]) == {
        "pool": "nothing finite is recorded of it"
    }
    definitions = json.loads(types.attrs["definitions"])
    assert definitions["content"] == "content_information >= 0.125 log keys"
    if method == "thresholds":
        conv, average, content, mixed = "convolutional", "averaging", "content", "mixed"
        expected = [
            [conv, average, content, mixed, last] for last in (conv, mixed, content)
        ]
        assert types.sel(layer="conv").values.tolist() == expected
        # The last mark changes a head, on which types of the first two marks must not depend.
        first = tcnn_probe.head_types(ds[{"epoch": [0, 1]}], information=(0.03, 0.125))
        xr.testing.assert_identical(first, types[:2])
    # zarr returns strings of variable length unchanged to xarray only if they are objects.
    ds.assign(head_type=types).to_zarr(tmp_path / "typed.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "typed.zarr", consolidated=False).head_type.load()
    assert again.values.tolist() == types.values.tolist()
    assert again.attrs == types.attrs
    assert {*again.coords} == {*types.coords}


def test_types_by_the_gate() -> None:
    """Types depend on the gate alone, as in the papers; plain attention has no type."""
    # The gates include the papers' thirds, which belong to the outer types.
    gates = [0.9, 0.1, 0.5, 1 / 3, 2 / 3]
    ds = recording({"gated": layer(*[AVERAGE] * 5, gate=gates), "plain": layer(CONV)})
    types = tcnn_probe.head_types(ds, by="gate")
    assert types[0, 0].values.tolist() == [
        "convolutional",
        "content",
        "mixed",
        "content",
        "convolutional",
    ]
    assert (types[0, 1] == "").all()
    assert json.loads(types.attrs["unlabelled"]) == {
        "plain": "gate is not finite; positional_entropy / uniform_entropy is not finite"
    }
    assert json.loads(types.attrs["definitions"])["content"] == "gate <= 0.3333"
    fuzzy = tcnn_probe.head_types(ds, "mixture", by="gate")
    assert "posterior_averaging" not in fuzzy.coords
    assert (fuzzy[0, 0] != "").all()


def test_entropy_and_information_of_gated_attention_are_relative_to_real_pixels() -> (
    None
):
    ds = recording(
        {
            "a": layer(
                # The entropy is below that of uniform attention to 64 keys, and equals that to 49 real pixels without
                # the padding: only the right scale makes the head averaging.
                (0.0, math.log(49) / math.log(64), 0.9, NAN),
                # The information is above the threshold for content on either scale.
                (0.15, 0.9, 0.9, NAN),
            )
        }
    )
    assert tcnn_probe.head_types(ds).values.tolist() == [[["mixed", "content"]]]
    real = ds.assign(uniform_content_entropy=ds.uniform_entropy * 0 + math.log(49))
    assert tcnn_probe.head_types(real).values.tolist() == [[["averaging", "content"]]]
    for images in (8, 10**6):  # the number of images does not change the scale
        counted = ds.assign(images=ds.images * 0 + images)
        assert tcnn_probe.head_types(counted).values.tolist() == [
            [["mixed", "content"]]
        ]
        assert tcnn_probe.head_types(
            # This is just above the head's 0.15, so that the limit alone decides.
            counted,
            information=(0.0, 0.1501),
        ).values.tolist() == [[["mixed", "mixed"]]]
    # These are one fewer than the 8 images that are needed for types by information.
    few = ds.assign(images=ds.images * 0 + 7)
    with pytest.warns(RuntimeWarning, match="at least 8 images .* some have 7"):
        types = tcnn_probe.head_types(few)
    assert (types == "").all()
    assert (
        "content_information / log keys is not finite (it was measured from fewer than 8 images"
        in types.attrs["unlabelled"]
    )
    assert tcnn_probe.head_types(few, least_images=7).values.tolist() == [
        [["mixed", "content"]]
    ]
    with pytest.raises(ValueError, match="least_images of at least 2, got 1"):
        tcnn_probe.head_types(few, least_images=1)


@pytest.mark.parametrize("method", BOTH)
def test_selections_keep_their_dimensions_and_coordinates(method: Any) -> None:
    # The dimension is renamed and heads come first, as nothing may depend on the name or position of a dimension.
    ds = of_marks().rename(epoch="step").transpose("head", "step", "layer")
    complete = tcnn_probe.head_types(ds, method)
    assert complete.dims == ("head", "step", "layer")
    for selection in (
        {"step": 1},
        {"layer": 0, "head": 4},
        {"step": 0, "layer": 0, "head": 1},
        {"layer": [1, 0]},
    ):
        part = ds.isel(selection)
        types = tcnn_probe.head_types(part, method)
        assert types.dims == part.entropy.dims
        for name in part.entropy.coords:
            np.testing.assert_array_equal(types[name], part[name])
        if method == "thresholds":
            xr.testing.assert_equal(types, complete.isel(selection))


def test_numbers_that_are_not_finite_give_no_label() -> None:
    """Such a number matters only if the type depends on it: the distance does not matter for content."""
    ds = recording({"a": layer(*[CONV] * 4, CONTENT, AVERAGE), "gone": layer(CONV)})
    names = (
        "content_information",
        "entropy",
        "attention_distance",
        "translation_equivariance",
    )
    # Each of the first four heads lacks another number.
    for head, name in enumerate(names):
        # Infinity and NaN are treated alike.
        ds[name].values[0, 0, head] = math.inf if head == 2 else NAN
    for name in names[2:]:
        ds[name].values[0, 0, 4:] = NAN
    ds.content_information.values[:, 1] = NAN
    ds.attrs["missing"] = json.dumps({"content_information": {"gone": "why not"}})
    types = tcnn_probe.head_types(ds)
    assert types.values[0, 0].tolist() == ["", "", "", "", "content", "averaging"]
    assert (types[:, 1] == "").all()
    reasons = json.loads(types.attrs["unlabelled"])
    assert reasons["a"] == (
        "content_information / log keys is not finite; entropy / uniform_entropy is not finite; "
        "attention_distance / uniform_distance is not finite; translation_equivariance is not finite"
    )
    assert reasons["gone"] == "content_information / log keys is not finite (why not)"
    posterior = tcnn_probe.head_types(ds, "mixture")
    assert (posterior == "").all()  # no head has all its numbers
    nothing = tcnn_probe.head_types(ds * NAN, "mixture")
    assert (nothing == "").all()
    assert (
        json.loads(nothing.attrs["unlabelled"])["a"]
        == "nothing finite is recorded of it"
    )


@pytest.mark.parametrize(
    ("head", "expected"), [(CONV, "convolutional"), (CONTENT, "content")]
)
def test_a_single_head_and_equal_heads(head: Any, expected: str) -> None:
    for method, heads in itertools.product(BOTH, (1, 5)):
        types = tcnn_probe.head_types(
            # There are as many marks as heads, so that exchanged axes would have the right shape.
            recording({"only": layer(*[head] * heads)}, marks=heads),
            method,
        )
        assert (types == expected).all()
    np.testing.assert_array_equal(types[f"posterior_{expected}"], 1)


def noisy(marks: int = 13) -> xr.Dataset:
    """Return convolutional, content and averaging heads in turn, with noise."""
    rng = np.random.default_rng(0)
    # Means are many of the standard deviations below apart, so that the labels are known.
    means = np.array([(0.005, 0.5, 0.3, 0.9), CONTENT, (0.005, 1.03, 1.0, 0.1)] * 3)
    deviations = np.array(
        [(0.003, 0.04, 0.04, 0.03), (0.06, 0.04, 0.04, 0.1), (0.003, 0.01, 0.02, 0.1)]
        * 3
    )
    about = [layer(*rng.normal(means, deviations)) for _ in range(2 * marks)]
    layers = {}
    for at, name in enumerate(("c0", "c1")):
        layers[name] = {
            variable: np.array([head[variable] for head in about[at::2]])
            for variable in about[0]
        }
    return recording(layers | {"pool": layer((NAN,) * 4)}, marks)


def test_mixture_of_known_clusters() -> None:
    """Labels are known, posteriors follow Bayes' rule by hand, and the order of heads does not matter."""
    ds = noisy()
    types = tcnn_probe.head_types(ds, "mixture")
    assert (
        types.sel(layer="c1").values.tolist()
        == [["convolutional", "content", "averaging"] * 3] * 13
    )
    said = json.loads(types.attrs["mixture"])
    names = ["convolutional", "averaging", "content", "mixed"]
    posterior = np.stack([types[f"posterior_{name}"].values for name in names])
    labelled = types.values != ""
    np.testing.assert_allclose(posterior[:, labelled].sum(0), 1, rtol=1e-12)
    assert np.isnan(posterior[:, ~labelled]).all()
    at = {"epoch": 5, "layer": "c0", "head": 2}
    row = ds.sel(at)
    scales = (math.log(KEYS), math.log(KEYS), DISTANCE, 1)
    variables = (
        "content_information",
        "entropy",
        "attention_distance",
        "translation_equivariance",
    )
    point = np.array(
        [
            float(row[name]) / scale
            for name, scale in zip(variables, scales, strict=True)
        ]
    )
    densities = []
    for weight, mean, covariance in zip(
        said["weights"], said["means"], said["covariances"], strict=True
    ):
        # This uses the inverse and the determinant, where the library has a Cholesky factor.
        exponent = -0.5 * (point - mean) @ np.linalg.inv(covariance) @ (point - mean)
        densities.append(
            weight * math.exp(exponent) / math.sqrt(np.linalg.det(covariance))
        )
    for name, density in zip(said["components"], densities, strict=True):
        probability = float(types[f"posterior_{name}"].sel(at))
        # Densities of distant components are zero in double precision.
        assert probability == pytest.approx(
            density / sum(densities), rel=1e-9, abs=1e-300
        )
    # Fits start at random points, but heads are sorted before, so that their order does not matter.
    order = np.random.default_rng(1).permutation(9)
    xr.testing.assert_identical(
        tcnn_probe.head_types(ds.isel(head=order), "mixture"), types.isel(head=order)
    )


def test_two_components_of_one_type() -> None:
    """The posteriors of two clusters of content heads are added up."""
    rng = np.random.default_rng(0)
    # Heads are near and far in turn, and only the distance separates the two clusters.
    reach = np.resize([0.3, 0.9], 10)
    marks = [
        layer(*((*rng.normal((0.3, 0.6, center), 0.03), 0.2) for center in reach))
        for _ in range(17)
    ]
    ds = recording(
        {"a": {name: np.array([mark[name] for mark in marks]) for name in marks[0]}}, 17
    )
    types = tcnn_probe.head_types(ds, "mixture")
    assert json.loads(types.attrs["mixture"])["components"] == ["content", "content"]
    np.testing.assert_allclose(types.posterior_content, 1, rtol=1e-12)


def test_equally_probable_types_give_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = layer(
        # Three clusters differ only in entropy: one is below, one between and one above the thresholds.
        *[(0.0, entropy, 0.5, 0.9) for entropy in (0.2, 0.21, 0.9, 0.91, 1.5, 1.51)]
    )
    ds = recording({"a": heads}, 20)
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {
        "convolutional",
        "mixed",
        "averaging",
    }
    # Real numbers do not give equal posteriors, so the mixture is patched.
    monkeypatch.setattr(
        GaussianMixture,
        "predict_proba",
        lambda self, x: np.full((len(x), len(self.weights_)), 1 / 3),
    )
    assert set(tcnn_probe.head_types(ds, "mixture").values.ravel()) == {"mixed"}


@pytest.mark.parametrize(
    ("ds", "options", "error", "message"),
    [
        (
            of_marks(),
            {"method": "guess"},
            ValueError,
            "expected method='thresholds' or 'mixture', got 'guess'",
        ),
        (
            of_marks(),
            {"by": "name"},
            ValueError,
            "expected by='content' or 'gate', got 'name'",
        ),
        (
            of_marks(),
            {"seed": 0.5},
            TypeError,
            "'float' object cannot be interpreted as an integer",
        ),
        (
            of_marks().gate,
            {},
            TypeError,
            "expected an xarray.Dataset that tcnn_probe.record has made, got DataArray",
        ),
        (
            xr.DataTree(of_marks()),
            {},
            TypeError,
            "of a tree, tree['heads'].dataset, got DataTree",
        ),
        (
            of_marks().drop_vars("uniform_entropy"),
            {},
            ValueError,
            "expects 'uniform_entropy' in the dataset, got",
        ),
        (
            of_marks().drop_vars("gate"),
            {"by": "gate"},
            ValueError,
            "by='gate' expects 'gate' in the dataset",
        ),
        (
            of_marks().drop_vars("content_information"),
            {},
            ValueError,
            "softmax attention; by='gate' does without",
        ),
        (
            of_marks().mean("head"),
            {},
            ValueError,
            "expected the coordinate 'head', as recorded, got ['epoch', ",
        ),
    ],
    ids=[
        "method",
        "by",
        "seed",
        "array",
        "tree",
        "scale",
        "gate",
        "information",
        "heads",
    ],
)
def test_bad_arguments_are_refused(
    ds: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tcnn_probe.head_types(ds, **options)
