"""What faithfulness() is given and gives; the numbers are those of the functions of plain tensors."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import attribution as explaining
from tests.tcnn_probe.attribution.models import CONVOLVED, Linear, OneBlock, bright, patchconvnet

IMAGES = torch.randn(3, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MAPS = torch.randn(3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
MASKS = MAPS.roll(1, 0) > 0.5


def first(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The first channel."""
    return x[:, 0]


def test_numbers_are_those_of_the_functions() -> None:
    model = Linear()
    target = torch.tensor([2, 0, 1])
    options = {"steps": 5, "baseline": 0.1, "samples": 3, "seed": 8}
    found = tcnn_probe.faithfulness(
        model, IMAGES, {"mine": MAPS, "x": first}, target, masks=MASKS, start=0.2, tolerance=1.5, radius=0.1, **options
    )
    assert set(found) == set(explaining.METRICS)
    assert found.attribution.values.tolist() == ["mine", "x"]
    assert found.target.values.tolist() == [2, 0, 1]
    for name, maps in {"mine": MAPS, "x": IMAGES[:, 0]}.items():
        row = found.sel({"method": name})
        deletion = explaining.deletion_curve(model, IMAGES, maps, target, steps=5, baseline=0.1, seed=8)
        insertion = explaining.insertion_curve(model, IMAGES, maps, target, steps=5, start=0.2, seed=8)
        expected = {
            "deletion_auc": explaining.area_under(*deletion),
            "insertion_auc": explaining.area_under(*insertion),
            "energy_inside": explaining.energy_inside(maps, MASKS),
            "pointing_game": explaining.pointing_game(maps, MASKS, 1.5),
            "infidelity": explaining.infidelity(model, IMAGES, maps, target, baseline=0.1, samples=3, seed=8),
        }
        for variable, values in expected.items():
            np.testing.assert_allclose(row[variable], values, atol=1e-12)
            assert row[variable].dims == ("image",)
    sensitive = explaining.sensitivity(model, IMAGES, lambda x, target: x[:, 0], target, samples=3, radius=0.1, seed=8)
    np.testing.assert_allclose(found.sensitivity.sel({"attribution": "x"}), sensitive)
    assert found.sensitivity.sel({"attribution": "mine"}).isnull().all()
    assert json.loads(found.sensitivity.attrs["missing"]) == {
        "mine": "given as maps, which cannot be computed for a changed image"
    }
    assert found.rank_correlation.dims == ("attribution", "other", "image")
    agreement = explaining.rank_correlation(MAPS, IMAGES[:, 0])
    np.testing.assert_allclose(found.rank_correlation.sel({"attribution": "mine", "other": "x"}), agreement)
    np.testing.assert_allclose(found.rank_correlation.sel({"attribution": "x", "other": "mine"}), agreement)
    np.testing.assert_allclose(found.rank_correlation.sel({"attribution": "x", "other": "x"}), 1)


def test_every_variable_says_what_it_is() -> None:
    found = tcnn_probe.faithfulness(Linear(), IMAGES, [first], masks=MASKS, metrics=list(explaining.METRICS))
    for name, variable in found.items():
        assert {"long_name", "units", "range", "better", "definition", "source", "options"} <= variable.attrs.keys()
        assert variable.dtype == "float64", name
    assert json.loads(found.deletion_auc.attrs["options"]) == {"steps": 32, "baseline": 0.0, "seed": 0}
    assert found.attrs["captum_version"]
    assert json.loads(found.attrs["attributions"])["first"]["definition"] == "The first channel."
    plain = tcnn_probe.faithfulness(Linear(), IMAGES, first, metrics="deletion_auc")
    assert list(plain) == ["deletion_auc"]
    assert "captum_version" not in plain.attrs


def test_what_saliency_gave() -> None:
    """One method, several, and several as one array: with the targets that the maps are of."""
    model = Linear()
    several = tcnn_probe.saliency(model, IMAGES, [1, 1, 0], ["occlusion", "input_x_gradient"])
    expected = tcnn_probe.faithfulness(model, IMAGES, several)
    assert expected.target.values.tolist() == [1, 1, 0]
    assert set(expected) == {"deletion_auc", "insertion_auc", "infidelity", "rank_correlation"}
    assert (expected.infidelity.sel({"attribution": "input_x_gradient"}) < 1e-12).all()
    stacked = several.to_dataarray("attribution").transpose("x", "image", "y", "attribution")
    again = tcnn_probe.faithfulness(model, IMAGES, stacked)
    for name in expected:
        np.testing.assert_allclose(again[name], expected[name], atol=1e-12)
    alone = tcnn_probe.saliency(model, IMAGES, [1, 1, 0], "occlusion")
    one = tcnn_probe.faithfulness(model, IMAGES, alone, metrics="deletion_auc")
    assert one.attribution.values.tolist() == ["occlusion"]
    np.testing.assert_allclose(one.deletion_auc[0], expected.deletion_auc[0], atol=1e-12)
    chosen = tcnn_probe.faithfulness(model, IMAGES, several, 2, metrics="deletion_auc")
    assert chosen.target.values.tolist() == [2, 2, 2]


def test_computed_now_is_what_saliency_gives() -> None:
    model, x = patchconvnet(), torch.randn(3, 3, *CONVOLVED)
    names = {"class_attention": {}, "gradcam": {"layer": "blocks.0.conv1"}}
    maps = tcnn_probe.saliency(model, x, method=list(names), gradcam=names["gradcam"])
    given = tcnn_probe.faithfulness(model, x, maps, metrics=["deletion_auc", "rank_correlation"])
    now = tcnn_probe.faithfulness(model, x, list(names), options={"gradcam": names["gradcam"]})
    renamed = tcnn_probe.faithfulness(
        model, x, {"a": "class_attention", "b": "gradcam"}, options={"b": names["gradcam"]}, metrics="deletion_auc"
    )
    for name in given:
        np.testing.assert_allclose(now[name], given[name], atol=1e-5)
    assert renamed.attribution.values.tolist() == ["a", "b"]
    np.testing.assert_allclose(renamed.deletion_auc, given.deletion_auc, atol=1e-5)
    assert now.sensitivity.notnull().all()
    assert "energy_inside" not in now


def test_batches_do_not_matter() -> None:
    model, x = OneBlock(), bright()
    alone, together = (
        tcnn_probe.faithfulness(
            model, x, ["occlusion", "gradcam"], masks=model.mask(3), samples=4, steps=7, batch_size=n
        )
        for n in (1, 50)
    )
    for name in together:
        np.testing.assert_allclose(alone[name], together[name], atol=1e-5)


def test_arrays_that_are_read_only_or_mirrored() -> None:
    arrays = [array.numpy()[::-1] for array in (IMAGES, MAPS, MASKS)]
    for array in arrays:
        array.flags.writeable = False
    images, maps, masks = arrays
    found = tcnn_probe.faithfulness(Linear(), images, {"a": maps}, masks=masks)
    usual = tcnn_probe.faithfulness(Linear(), IMAGES, {"a": MAPS}, masks=MASKS)
    for name in usual:
        np.testing.assert_allclose(found[name][:, ::-1], usual[name], atol=1e-12)


def test_truth_wins() -> None:
    model, x = OneBlock(), bright()
    mask = model.mask(3)
    maps = {"truth": mask.float(), "constant": torch.ones(3, 12, 20), "inverse": (~mask).float()}
    scores = tcnn_probe.faithfulness(model, x, maps, 1, masks=mask, start=0.0).mean("image")
    for name, better in {"deletion_auc": -1, "insertion_auc": 1, "energy_inside": 1, "pointing_game": 1}.items():
        truth, constant, inverse = scores[name].values * better
        assert truth > constant > inverse, name
    infidelity = scores.infidelity.to_series()
    assert infidelity.idxmin() == "truth"


def test_nan_maps_have_nan_scores() -> None:
    maps = MAPS.clone()
    maps[1, 2, 3] = torch.nan
    scores = tcnn_probe.faithfulness(Linear(), IMAGES, {"a": maps, "b": MAPS}, masks=MASKS)
    for name in ("deletion_auc", "insertion_auc", "energy_inside", "pointing_game", "infidelity"):
        assert scores[name].isnull().values.tolist() == [[False, True, False], [False, False, False]], name
    assert scores.rank_correlation.sel({"attribution": "a", "other": "b"}).isnull().values.tolist() == [
        False,
        True,
        False,
    ]


LABELLED = tcnn_probe.saliency(Linear(), IMAGES, [0, 1, 2], "input_x_gradient")


@pytest.mark.parametrize(
    ("saliency", "options", "error", "message"),
    [
        (MAPS, {}, TypeError, r"maps without a name: give them as \{'name': maps\}"),
        ({}, {}, ValueError, "at least one method, got none"),
        ({"a": MAPS[:2]}, {}, ValueError, r"shape \(3, 7, 11\) for 'a', got \(2, 7, 11\)"),
        ({"a": [first, None]}, {}, TypeError, "expected maps, a method's name or a function for 'a'"),
        ({"a": "grad_cam"}, {}, ValueError, r"one of \['class_attention', .*got 'grad_cam'"),
        (LABELLED.rename(y="row"), {}, ValueError, r"dims \(\[method,\] image, y, x\), got \('image', 'row', 'x'\)"),
        (LABELLED[:, 1:], {}, ValueError, r"shape \(3, 7, 11\) for 'input_x_gradient', got \(3, 6, 11\)"),
        ({"a": LABELLED.expand_dims("attribution")}, {}, ValueError, r"maps of one method for 'a'"),
        (
            {"a": LABELLED, "b": LABELLED.assign_coords(target=("image", [0, 1, 1]))},
            {},
            ValueError,
            "'a' and 'b' are of",
        ),
        (first, {"metrics": "auc"}, ValueError, r"metrics among \['deletion_auc', .*got 'auc'"),
        (first, {"metrics": ["pointing_game"]}, ValueError, "'pointing_game' needs masks"),
        ({"a": MAPS, "b": first}, {"metrics": "sensitivity"}, ValueError, "computed again.*'a' was given as maps"),
        (first, {"masks": MASKS[:2]}, ValueError, r"masks of shape \(3, 7, 11\), got \(2, 7, 11\)"),
        (first, {"masks": MASKS.float()}, TypeError, "dtype bool, True on the object, got torch.float32"),
        (first, {"options": {"gradcam": {}}}, ValueError, "options for 'gradcam', which is none of"),
        ({"a": MAPS}, {"options": {"a": {}}}, ValueError, r"none of the methods to compute: \[\]"),
        (first, {"steps": 0}, ValueError, "positive number of steps"),
        (first, {"start": "noise"}, ValueError, "start='blur'"),
        (first, {"masks": MASKS, "tolerance": -1}, ValueError, "at least 0 pixels"),
        (first, {"batch_size": 1.5}, ValueError, "positive integer for batch_size"),
    ],
)
def test_errors(saliency: object, options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.faithfulness(Linear(), IMAGES, saliency, **options)
