"""Types of recordings made by hand: labels, uncertainty,
reasons for heads without a label, and the former rule.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tcnn_probe.heads import PARTS, Thresholds, fit_mixture, part_types

NAN = math.nan
KEYS, IMAGES = (
    64,
    16,
)  # as with 8 x 8 patches; 16 images are more than the 8 that types need
DIMS = ("epoch", "layer", "head")
# Offset, position, key content and query-key content of a head of each type.
HEADS = {
    "convolutional": (1.0, 0.1, 0.2, 0.3),
    "positional": (0.3, 1.5, 0.2, -0.01),
    "content": (0.3, 0.1, 0.4, 0.6),
    "salient": (0.3, 0.1, 0.6, 0.4),
    "averaging": (0.1, 0.02, 0.03, 0.04),
    "mixed": (0.5, 0.4, 0.2, 0.3),
}
TYPED = [*HEADS][:5]


def recording(parts: Any, halves: Any = 0.0, images: int = IMAGES) -> xr.Dataset:
    """Return a dataset of parts (marks, layers, heads, 4), and their differences between halves."""
    parts = np.array(parts, dtype=float)
    halves = np.broadcast_to(halves, parts.shape)
    marks, layers, heads, _ = parts.shape
    by_layer = DIMS[:2], np.ones((marks, layers))
    ds = xr.Dataset(
        {name: (DIMS, parts[..., nth].copy()) for nth, name in enumerate(PARTS)}
        | {f"{name}_halves": (DIMS, halves[..., nth].copy()) for nth, name in enumerate(PARTS)}
        | {"uniform_entropy": by_layer, "images": by_layer},
        {
            # Epochs start at 2, so that they differ from their positions.
            "epoch": 2 + np.arange(marks),
            "layer": np.array(["a", "b", "c"][:layers], dtype=object),
            "head": range(heads),
        },
    )
    return ds.assign(
        selectivity=(DIMS, parts.sum(-1)),
        uniform_entropy=ds.uniform_entropy * math.log(KEYS),
        images=ds.images * images,
    )


def of_marks() -> xr.Dataset:
    """Return three marks of six heads, of which the last one changes,
    and of a layer that lacks the last head.
    """
    marks = [
        [*list(HEADS.values())[:5], HEADS[last]] for last in ("mixed", "salient", "convolutional")
    ]
    lacking = [*list(HEADS.values())[:5], (NAN,) * 4]
    return recording([[mark, lacking] for mark in marks])


def test_attention_to_class_tokens_is_no_convolution() -> None:
    """Three heads differ in what class tokens receive:
    little, so much that content is left, and half.
    """
    ds = recording([[[(1.0, 0.0, 0.3, 0.4)] * 3]])
    assert (tcnn_probe.head_types(ds) == "convolutional").all()
    values = xr.DataArray([[[0.1, 0.4, 0.9]]], dims=DIMS)
    ds = ds.assign(prefix_information=values, prefix_information_halves=0 * values)
    types = tcnn_probe.head_types(ds)
    assert types.values.ravel().tolist() == ["convolutional", "content", "positional"]
    assert not types.uncertain.any()
    # In one half of the images the second head is a convolution, and the third attends to content.
    ds["prefix_information_halves"] += 0.3
    assert tcnn_probe.head_types(ds).uncertain.values.ravel().tolist() == [
        False,
        True,
        True,
    ]


def test_types_and_their_attributes(tmp_path: Path) -> None:
    ds = of_marks()
    before = ds.copy(deep=True)
    types = tcnn_probe.head_types(ds)
    xr.testing.assert_identical(ds, before)
    assert types.name == "head_type"
    assert types.dims == DIMS
    last = ["mixed", "salient", "convolutional"]
    expected = [[[*TYPED, name], [*TYPED, ""]] for name in last]
    assert types.values.tolist() == expected
    assert json.loads(types.attrs["definitions"])["convolutional"] == (
        "offset_information - prefix_information is the largest part, and at least half of "
        "selectivity - prefix_information"
    )
    assert json.loads(types.attrs["unlabelled"]) == {}
    assert types.attrs["images"] == "16"
    # The last mark changes a head, on which types of the first two marks must not depend.
    xr.testing.assert_identical(tcnn_probe.head_types(ds[{"epoch": [0, 1]}]), types[:2])
    # A comparison selects heads, and keeps what is uncertain.
    assert (types == "salient").sum().item() == 3 * 2 + 1
    # zarr returns strings of variable length unchanged to xarray only if they are objects.
    ds.assign(head_type=types).to_zarr(tmp_path / "typed.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "typed.zarr", consolidated=False).head_type.load()
    assert again.values.tolist() == types.values.tolist()
    assert again.attrs == types.attrs
    np.testing.assert_array_equal(again.uncertain, types.uncertain)


def test_types_on_which_the_halves_disagree_are_uncertain() -> None:
    rng = np.random.default_rng(0)
    parts = rng.gamma(1, 0.5, (3, 2, 97, 4))
    differences = rng.normal(0, 0.3, parts.shape)
    differences[:, :, :7] = 0  # halves that are equal have the type of the whole
    differences[0, 0, 8] = NAN
    types = tcnn_probe.head_types(recording(parts, differences))
    halves = [
        part_types(
            *np.moveaxis(half, -1, 0),
            half.sum(-1),
            np.full(half.shape[:-1], 0.05 * math.log(KEYS)),
        )
        for half in (parts + differences / 2, parts - differences / 2)
    ]
    agree = (halves[0] == types.values) & (halves[1] == types.values)
    np.testing.assert_array_equal(types.uncertain, ~agree)
    assert not types.uncertain[:, :, :7].any()
    assert types.uncertain[0, 0, 8]
    assert 0.1 < types.uncertain.mean() < 0.9
    # Without the differences nothing is known of uncertainty.
    ds = recording(parts)
    bare = tcnn_probe.head_types(ds[[*PARTS, "selectivity", "uniform_entropy", "images"]])
    assert "uncertain" not in bare.coords
    np.testing.assert_array_equal(bare, types)


def test_few_images() -> None:
    few = of_marks().assign(images=of_marks().images * 0 + 7)  # one fewer than needed
    with pytest.warns(RuntimeWarning, match="at least 8 images .* some have 7"):
        types = tcnn_probe.head_types(few)
    # An averaging head is known from any number of images.
    assert set(types.values.ravel()) == {"", "averaging"}
    assert (
        "key_content_information: it was measured from fewer than 8 images"
        in json.loads(types.attrs["unlabelled"])["a"]
    )
    np.testing.assert_array_equal(
        tcnn_probe.head_types(few, least_images=7), tcnn_probe.head_types(of_marks())
    )
    untrained = recording([[[HEADS["averaging"]]]], images=1)
    for name in PARTS[1:]:  # a single image gives no more than the offset
        untrained[name].values[:] = NAN
    assert tcnn_probe.head_types(untrained).values.tolist() == [[["averaging"]]]


def test_bound_on_content_is_said_where_it_binds() -> None:
    # From 8 images content is at most 8 / 7 log 8 = 2.376 nat, half of which lies between the two
    # layers.
    content = [(0.1, 0.1, 0.6, 0.6)], [(0.1, 0.1, 0.6, 0.58)]
    types = tcnn_probe.head_types(recording([content], images=8))
    assert json.loads(types.attrs["bound"]).keys() == {"a"}
    assert "n / (n - 1) log n = 2.38 nat" in types.attrs["bound"]
    many = tcnn_probe.head_types(recording([content], images=64))
    assert "bound" not in many.attrs


def test_without_a_grid_content_and_averages_are_known() -> None:
    ds = recording([[[*HEADS.values()]] * 2])
    for name in (*PARTS[:2], *(f"{part}_halves" for part in PARTS[:2])):
        ds[name].values[:, 1] = NAN
    ds.attrs["missing"] = json.dumps({"offset_information": {"b": "no grid"}})
    types = tcnn_probe.head_types(ds)
    assert types.values[0, 1].tolist() == [
        "",
        "",
        "content",
        "salient",
        "averaging",
        "",
    ]
    assert json.loads(types.attrs["unlabelled"]) == {
        "b": "offset_information: no grid; position_information is not finite"
    }


def test_the_reason_for_a_layer_without_parts_is_that_of_the_recording() -> None:
    ds = recording([[[*HEADS.values()]] * 2])
    for name in (*PARTS, *(f"{part}_halves" for part in PARTS), "selectivity"):
        ds[name].values[:, 1] = NAN
    ds.attrs["missing"] = json.dumps({"selectivity": {"b": "masks differ"}})
    types = tcnn_probe.head_types(ds)
    assert json.loads(types.attrs["unlabelled"]) == {
        "b": "what types follow from is not recorded (masks differ)"
    }


def test_layers_whose_only_queries_are_class_tokens() -> None:
    ds = recording([[[*HEADS.values()][:3]] * 2])
    for name in (*PARTS, "selectivity"):
        ds[name].values[:, 1] = NAN
    # Of patches' layers, class tokens do not count.
    classes = [[[9.0] * 3, [1.0, 0.01, 1.0]]], [[[9.0] * 3, [0.6, 0.0, 0.4]]]
    names = ("class_selectivity", "class_content_information")
    ds = ds.assign({name: (DIMS, value) for name, value in zip(names, classes, strict=True)})
    types = tcnn_probe.head_types(ds)
    assert types.values.tolist() == [[[*HEADS][:3], ["salient", "averaging", ""]]]


def test_a_mean_over_the_real_cells_of_gated_attention_averages() -> None:
    """Leaving out the padding alone gives 0.27 nat of position: 49 of 64 cells are real."""
    ds = recording([[[(0.1, 0.2, 0.01, 0.02)]]])
    assert tcnn_probe.head_types(ds).values.tolist() == [[["positional"]]]
    real = ds.assign(uniform_content_entropy=ds.uniform_entropy * 0 + math.log(49))
    assert tcnn_probe.head_types(real).values.tolist() == [[["averaging"]]]


def test_selections_keep_their_dimensions_and_coordinates() -> None:
    # The dimension is renamed and heads come first, as nothing may depend on the name or position
    # of a dimension.
    ds = of_marks().rename(epoch="step").transpose("head", "step", "layer")
    complete = tcnn_probe.head_types(ds)
    assert complete.dims == ("head", "step", "layer")
    for selection in (
        {"step": 1},
        {"layer": 0, "head": 4},
        {"step": 0, "layer": 0, "head": 1},
        {"layer": [1, 0]},
    ):
        part = ds.isel(selection)
        types = tcnn_probe.head_types(part)
        assert types.dims == part.selectivity.dims
        xr.testing.assert_equal(types, complete.isel(selection))


def test_types_by_the_gate() -> None:
    """Types depend on the gate alone, as in the papers; plain attention has no type."""
    # The gates include the papers' thirds, which belong to the outer types.
    gates = [[[0.9, 0.1, 0.5, 1 / 3, 2 / 3], [NAN] * 5]]
    ds = recording([[[HEADS["averaging"]] * 5] * 2], images=1)
    log_keys = math.log(KEYS)
    ds = ds.assign(
        gate=(DIMS, gates),
        positional_entropy=(DIMS, np.array(gates) * 0 + log_keys / 2),
        attention_distance=(DIMS, np.full((1, 2, 5), 2.0)),
        uniform_distance=ds.uniform_entropy * 0 + 8,
    )
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
        "b": "gate is not finite; positional_entropy / uniform_entropy is not finite"
    }
    assert json.loads(types.attrs["definitions"])["content"] == "gate <= 0.3333"


def former() -> xr.Dataset:
    """Return a recording of an earlier version,
    of a head of each former type, and of one without a number.
    """
    heads = np.array(
        [
            # Information, entropy, distance, and equivariance, as shares.
            (0.0, 0.5, 0.25, 0.9),
            (0.0, 1.0, 1.0, 0.1),
            (0.5, 0.6, 0.8, 0.2),
            (0.05, 0.5, 0.25, 0.9),
            (0.0, 0.5, NAN, 0.9),
        ]
    ).T[:, None, None]
    ds = recording(np.zeros((1, 1, 5, 4))).drop_vars(
        [*PARTS, "selectivity", *(f"{part}_halves" for part in PARTS)]
    )
    names = (
        "content_information",
        "entropy",
        "attention_distance",
        "translation_equivariance",
    )
    scales = (math.log(KEYS), math.log(KEYS), 8, 1)
    numbers = zip(names, heads, scales, strict=True)
    ds = ds.assign({name: (DIMS, head * scale) for name, head, scale in numbers})
    return ds.assign(uniform_distance=ds.uniform_entropy * 0 + 8)


FORMER = ["convolutional", "averaging", "content", "mixed", ""]


def test_recordings_of_earlier_versions_are_typed_by_the_former_rule() -> None:
    with pytest.warns(FutureWarning, match="has no parts.*record it anew") as warned:
        types, _ = (tcnn_probe.head_types(former()) for _ in range(2))
    assert len(warned) == 1  # of a line, even where Python would repeat itself
    assert types.values.tolist() == [[FORMER]]
    assert "information is not finite" not in types.attrs["unlabelled"]
    assert "attention_distance / uniform_distance is not finite" in types.attrs["unlabelled"]


def test_former_options_are_deprecated() -> None:
    both = former().assign(recording([[[HEADS["salient"]] * 5]]).data_vars)
    assert (tcnn_probe.head_types(both) == "salient").all()
    with pytest.warns(DeprecationWarning, match=r"method= of head_types\(\) will be"):
        types = tcnn_probe.head_types(both, "thresholds")
    assert types.values.tolist() == [[FORMER]]
    with pytest.warns(DeprecationWarning, match="information= of head_types"):
        types = tcnn_probe.head_types(both, information=(0.01, 0.04))
    assert types.values.tolist() == [[[*FORMER[:3], "content", ""]]]
    with pytest.warns(DeprecationWarning, match="method=, seed="):
        types = tcnn_probe.head_types(both.isel(head=[0, 2]), "mixture", seed=1)
    assert types.values.tolist() == [[["convolutional", "content"]]]
    with pytest.warns(DeprecationWarning, match="use sklearn.mixture.GaussianMixture"):
        mixture, criteria = fit_mixture(np.array([[0.1, 0.2], [0.9, 0.8]]))
    assert len(mixture.means_) == 1 + np.argmin(criteria)
    with pytest.warns(DeprecationWarning, match="Thresholds will be removed"):
        Thresholds()


@pytest.mark.parametrize(
    ("ds", "options", "error", "message"),
    [
        (
            of_marks(),
            {"method": "guess"},
            ValueError,
            "expected method='thresholds' or 'mixture', got 'guess'",
        ),
        (of_marks(), {"by": "name"}, ValueError, "expected by='content' or 'gate'"),
        (of_marks(), {"gate": (0.6, 0.5)}, ValueError, "two ascending gates between"),
        (
            of_marks(),
            {"least_images": 1},
            ValueError,
            "least_images of at least 2, got 1",
        ),
        (
            of_marks().selectivity,
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
            "expect 'uniform_entropy' in the dataset, got",
        ),
        (of_marks(), {"by": "gate"}, ValueError, "types expect 'gate' in the dataset"),
        (
            of_marks().drop_vars("selectivity").assign(gate=1),
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
)
def test_bad_arguments_are_refused(
    ds: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tcnn_probe.head_types(ds, **options)
