"""Inputs and results of faithfulness(),
whose values are those of the functions of plain tensors.
"""

import json
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import attribution as explaining
from tests.tcnn_probe.attribution.models import CONVOLVED, Linear, patchconvnet

IMAGES = torch.randn(3, 2, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
# Values have both signs, to tell apart metrics that sort from metrics that take positive parts.
MAPS = torch.randn(3, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
# Each image has the mask of another image's map, so that a part of each map lies inside.
MASKS = MAPS.roll(1, 0) > 0.5


def first(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The first channel."""
    return x[:, 0]


def test_values_are_those_of_the_functions() -> None:
    model = Linear()
    target = torch.tensor([2, 0, 1])
    # None of these is a default.
    options = {"steps": 5, "baseline": 0.1, "seed": 8}
    ds = tcnn_probe.faithfulness(
        model,
        IMAGES,
        {"mine": MAPS, "x": first},
        target,
        masks=MASKS,
        start=0.2,
        tolerance=1.5,
        **options,
    )
    assert set(ds) == set(explaining.METRICS)
    assert ds.attribution.values.tolist() == ["mine", "x"]
    assert ds.target.values.tolist() == [2, 0, 1]
    for name, maps in {"mine": MAPS, "x": IMAGES[:, 0]}.items():
        row = ds.sel(attribution=name)
        deletion = explaining.deletion_curve(
            model, IMAGES, maps, target, steps=5, baseline=0.1, seed=8
        )
        insertion = explaining.insertion_curve(
            model, IMAGES, maps, target, steps=5, start=0.2, seed=8
        )
        expected = {
            "deletion_auc": explaining.area_under(*deletion),
            "insertion_auc": explaining.area_under(*insertion),
            "energy_inside": explaining.energy_inside(maps, MASKS),
            "pointing_game": explaining.pointing_game(maps, MASKS, 1.5),
        }
        for variable, values in expected.items():
            # The same functions run in the same order, in float64.
            np.testing.assert_allclose(row[variable], values, atol=1e-12)
            assert row[variable].dims == ("image",)
    assert ds.rank_correlation.dims == ("attribution", "other", "image")
    agreement = explaining.rank_correlation(MAPS, IMAGES[:, 0])
    np.testing.assert_allclose(ds.rank_correlation.sel(attribution="mine", other="x"), agreement)
    np.testing.assert_allclose(ds.rank_correlation.sel(attribution="x", other="mine"), agreement)
    np.testing.assert_allclose(ds.rank_correlation.sel(attribution="x", other="x"), 1)


def test_every_variable_is_described() -> None:
    ds = tcnn_probe.faithfulness(
        Linear(), IMAGES, [first], masks=MASKS, metrics=list(explaining.METRICS)
    )
    for name, variable in ds.items():
        assert {
            "long_name",
            "units",
            "range",
            "better",
            "definition",
            "source",
            "options",
        } <= variable.attrs.keys()
        assert variable.dtype == "float64", name
    assert json.loads(ds.deletion_auc.attrs["options"]) == {
        "steps": 32,
        "baseline": 0.0,
        "score": "softmax",
        "seed": 0,
    }
    assert ds.attrs["captum_version"]
    assert json.loads(ds.attrs["attributions"])["first"]["definition"] == "The first channel."
    plain = tcnn_probe.faithfulness(Linear(), IMAGES, first, metrics="deletion_auc")
    assert list(plain) == ["deletion_auc"]


def test_results_of_saliency_as_input() -> None:
    """Maps may be of one method or several,
    in any order of dimensions; targets are those of the maps.
    """
    model = Linear()
    maps = tcnn_probe.saliency(model, IMAGES, [1, 1, 0], ["occlusion", "input_x_gradient"])
    expected = tcnn_probe.faithfulness(model, IMAGES, maps)
    assert expected.target.values.tolist() == [1, 1, 0]
    assert set(expected) == {"deletion_auc", "insertion_auc", "rank_correlation"}
    turned = tcnn_probe.faithfulness(model, IMAGES, maps.transpose("x", "image", "y"))
    for name in expected:
        np.testing.assert_allclose(turned[name], expected[name], atol=1e-12)
    # A single method has no dimension of methods.
    alone = tcnn_probe.saliency(model, IMAGES, [1, 1, 0], "occlusion")
    single = tcnn_probe.faithfulness(model, IMAGES, alone, metrics="deletion_auc")
    assert single.attribution.values.tolist() == ["occlusion"]
    np.testing.assert_allclose(single.deletion_auc[0], expected.deletion_auc[0], atol=1e-12)
    of_class_2 = tcnn_probe.faithfulness(model, IMAGES, maps, 2, metrics="deletion_auc")
    assert of_class_2.target.values.tolist() == [2, 2, 2]


def test_methods_by_name_equal_the_results_of_saliency() -> None:
    model = patchconvnet()
    x = torch.randn(3, 3, *CONVOLVED)
    layer = {"layer": "blocks.0.conv1"}
    maps = tcnn_probe.saliency(model, x, method=["class_attention", "gradcam"], gradcam=layer)
    precomputed = tcnn_probe.faithfulness(
        model, x, maps, metrics=["deletion_auc", "rank_correlation"]
    )
    # Names are "a" and "b", so that options must be found by the name and not by the method.
    now = tcnn_probe.faithfulness(
        model,
        x,
        {"a": "class_attention", "b": "gradcam"},
        options={"b": layer},
    )
    assert now.attribution.values.tolist() == ["a", "b"]
    for name in precomputed:
        # Maps are in float32, and are computed in other batches.
        np.testing.assert_allclose(now[name], precomputed[name], atol=1e-5)
    assert "energy_inside" not in now


@pytest.mark.parametrize("kept", [["first"], ["first", "input_x_gradient"]])
def test_an_unsupported_method_is_left_out(kept: list[str]) -> None:
    model = Linear()
    methods: list[Any] = [first if name == "first" else name for name in kept]
    alone = tcnn_probe.faithfulness(model, IMAGES, methods)
    methods.insert(1, "rollout")
    with pytest.warns(RuntimeWarning, match="'rollout' is left out: no attention"):
        beside = tcnn_probe.faithfulness(model, IMAGES, methods)
    xr.testing.assert_equal(beside, alone)
    with pytest.raises(ValueError, match="no attention was seen"):
        tcnn_probe.faithfulness(model, IMAGES, "rollout")


LABELLED = tcnn_probe.saliency(Linear(), IMAGES, [0, 1, 2], "input_x_gradient")


@pytest.mark.parametrize(
    ("saliency", "options", "error", "message"),
    [
        (MAPS, {}, TypeError, r"maps without a name: give them as \{'name': maps\}"),
        ({}, {}, ValueError, "at least one method, got none"),
        (
            {"a": MAPS[:2]},
            {},
            ValueError,
            r"maps of 'a' of shape \(3, 7, 11\), got \(2, 7, 11\)",
        ),
        (
            {"a": [first, None]},
            {},
            TypeError,
            r"expected maps of 'a', an array \(B, H, W\)",
        ),
        (
            LABELLED.rename(y="row"),
            {},
            ValueError,
            r"dims \(image, y, x\), got \('image', 'row', 'x'\)",
        ),
        (
            {"a": LABELLED, "b": LABELLED.assign_coords(target=("image", [0, 1, 1]))},
            {},
            ValueError,
            "'a' and 'b' explain different targets",
        ),
        (
            first,
            {"metrics": "auc"},
            ValueError,
            r"metrics among \['deletion_auc', .*got 'auc'",
        ),
        (
            first,
            {"metrics": ["pointing_game"]},
            ValueError,
            "'pointing_game' needs masks",
        ),
        (
            first,
            {"masks": MASKS[:2]},
            ValueError,
            r"masks of shape \(3, 7, 11\), got \(2, 7, 11\)",
        ),
        (
            first,
            {"masks": MASKS.float()},
            TypeError,
            "dtype bool, True on the object, got torch.float32",
        ),
        (
            first,
            {"options": {"gradcam": {}}},
            ValueError,
            "options for 'gradcam', which is not one of",
        ),
        (
            {"mine": first},
            {"options": {"gradcam": {}}},
            ValueError,
            r"which is not one of the methods to compute: \['mine'\]",
        ),
        (first, {"steps": 0}, ValueError, "integer from 1 for steps, got 0"),
        (
            first,
            {"start": "noise"},
            ValueError,
            "expected 'blur', a number or an image, got 'noise'",
        ),
    ],
)
def test_bad_arguments_are_refused(
    saliency: object, options: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.faithfulness(Linear(), IMAGES, saliency, **options)
