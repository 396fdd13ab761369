"""The check that ends each study, on numbers made by hand:
it passes, and it fails where it has to.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import xarray as xr

import ablations
import architectures
import attention_maps
import cait_attention
import class_attention_saliency
import coarse_labels
import dense_features
import disagreement
import distillation
import finetune_length
import gating_evolution
import head_entropy
import initial_locality
import layer_scale
import learning_rate_dip
import object_heads
import representations
import resmlp_weights
import tcnn_claims
import test_resolution as resolution
import when_to_reparameterize
from common.output import finish
from common.verdicts import learned
from tests.studies import test_ablations, test_distillation, test_tcnn_claims

HEADS = {"layer": ["first", "last"], "head": [0, 1]}


# sigmoid(1) = 0.73 is the gate that lambda = 1 gives every head before fine-tuning.
def gates(first: float, last: float) -> xr.DataArray:
    """Return gates of two layers of two heads at two epochs; all 0.73 at first."""
    values = np.full((2, 2, 2), 0.73)
    values[1] = np.array([[first] * 2, [last] * 2])
    return xr.DataArray(values, {"epoch": [0, 6], **HEADS}, ("epoch", "layer", "head"))


def gating(first: float = 0.9, last: float = 0.2, top1: float = 0.5) -> tuple[xr.Dataset, float]:
    return xr.Dataset(
        {
            # With 99 images, an accuracy of 0.5 cannot come from guessing among ten classes, and
            # one of 0.15 can.
            "gate": gates(first, last),
            "top1": ("epoch", [0.3, top1]),
            "images": ("epoch", [99, 99]),
        }
    ), 0.1


def maps(
    first: float = 0.9,
    last: float = 0.2,
    tap: int = 0,
    peaks: tuple[float, float] = (0.5, 0.1),
) -> tuple[Any]:
    # 3 x 5 weights: a peak found along the wrong axis would lie elsewhere.
    attention = np.zeros((2, 2, 2, 2, 3, 5))
    attention[..., 1, 2] = np.array(peaks)[:, None]
    place = xr.zeros_like(gates(0, 0))
    peak = (place.expand_dims(image=2) + tap).transpose("epoch", "image", ...)
    ds = xr.Dataset(
        {
            "gate": gates(first, last),
            "center_y": place,
            "center_x": place,
            "peak_y": peak,
            "peak_x": peak,
            "query_y": place.isel(head=0) + 1,
            "query_x": place.isel(head=0) + 2,
        }
    )
    return (ds.assign(attention=(("epoch", "image", "layer", "head", "y", "x"), attention)),)


def entropies(
    kinds: str = "convolutional content", first: str = "convolutional", low: float = 0.1
) -> tuple[Any]:
    types = np.array([[[first] * 2] * 2, [[kind] * 2 for kind in kinds.split()]], dtype=object)
    values = np.array([[[low] * 2, [1.0] * 2]] * 2)
    dims = ("epoch", "layer", "head")
    measured = dict.fromkeys(("entropy", "attention_distance"), (dims, values))
    return (xr.Dataset({"gate": gates(0.9, 0.2), "head_type": (dims, types), **measured}),)


def saliency(hits: float = 1.0, top1: float = 0.9) -> tuple[Any, ...]:
    pointing = np.stack([np.full((1, 7), hits), np.full((1, 7), 0.2)], 1)
    coords = {
        "epoch": [3],
        "attribution": ["class_attention", "chance"],
        "class": range(10),
    }
    ds = xr.Dataset(
        {
            "pointing_game": (("epoch", "attribution", "image"), pointing),
            "top1": ("epoch", [top1]),
        },
        coords,
    )
    return xr.DataTree.from_dict({"PatchConvNet": ds}), (99, 0.1)


def curves(
    low: float = 0.5,
    high: float = 0.8,
    dim: str = "length",
    labels: tuple[int, int] = (1, 2),
) -> tuple[Any, ...]:
    """Return accuracies of two runs of two models, at epochs 0, 1, 2."""
    top1 = np.broadcast_to(np.array([[0.3, low, low], [0.3, high, high]])[:, None], (2, 2, 3))
    coords = {dim: [*labels], "model": ["CNN", "T-CNN"], "epoch": [0, 1, 2]}
    return xr.Dataset({"top1": ((dim, "model", "epoch"), top1), "images": 99}, coords), 0.1


def rates(low: float = 0.5, high: float = 0.8) -> tuple[Any, ...]:
    return curves(low, high, dim="lr")


def starts(low: float = 0.3, high: float = 0.9, top1: float = 0.5) -> tuple[Any, ...]:
    dims = ("locality_strength", "gating", "epoch", "layer", "head")
    # There is one value of lambda, as the check compares runs of equal locality whose gates start
    # low and high.
    scores = {
        "gate": (dims, np.array([low, high]).reshape(1, 2, 1, 1, 1)),
        "top1": (dims[:3], np.full((1, 2, 1), top1)),
        "images": (dims[:3], np.full((1, 2, 1), 99)),
    }
    return xr.Dataset(scores), 0.1


def resolutions(small: float = 0.2, trained: float = 0.6) -> tuple[Any, ...]:
    # There is only the CNN: the check examines each model, and one suffices to see it fail.
    coords = {"resolution": [32, 64], "model": ["CNN"]}
    scores = xr.Dataset(
        {"top1": (("resolution", "model"), [[small], [trained]]), "images": 99}, coords
    )
    return scores, 64, 0.1


def costs(ratio: float = 2.0, top1: float = 0.5) -> tuple[Any, ...]:
    # The CNN's cost is the unit, so that the T-CNN's is the ratio that the check prints.
    coords = {"architecture": ["one"], "model": [architectures.CNN, architectures.TCNN]}
    counts = [[1.0, ratio]]
    dims = ("architecture", "model")
    return xr.Dataset(
        {"multiply_adds": (dims, counts), "top1": (dims, [[0.5, top1]]), "images": 99},
        coords,
    ), 0.1


def times(heads: int = 18, top1: float = 0.5) -> tuple[Any, ...]:
    """Return the hybrid and the CNN, each trained for two epochs."""
    # The runs agree until the last epoch, because the check must read that one.
    accuracies = [[0.1, 0.3, top1], [0.1, 0.3, 0.5]]
    coords = {"t1": [0, 2], "epoch": [0, 1, 2]}
    scores = {
        "top1": (("t1", "epoch"), accuracies),
        "heads": ("t1", [heads, 0]),
        "images": 99,
    }
    return (xr.Dataset(scores, coords),)


def knowledge(before: float = 1.0, gain: float = 0.9, top1: float = 0.5) -> tuple[Any, ...]:
    """Return three stages and 100 images; neighbours find a share ``gain``
    of them at the end, none at the start.
    """
    dims = ("model", "epoch", "layer")
    # Only the first stage, which precedes the attention layers, may be expected to equal the CNN's.
    cka = (
        np.array([[before, 0.4, 0.3], [0.9, 0.8, 0.8]])[None, :, :, None].repeat(2, 0).repeat(3, 3)
    )
    correct = np.zeros((2, 2, 3, 100))
    correct[:, 1, 2, : int(100 * gain)] = 1
    stages = ["first", "attention", "last"]
    coords = {
        "model": ["T-CNN", "CNN"],
        "epoch": [0, 1],
        "layer": stages,
        "other_layer": stages,
    }
    scores = {
        "cka": ((*dims, "other_layer"), cka),
        "knn_correct": ((*dims, "image"), correct),
    }
    top = {
        "top1": (dims[:2], np.full((2, 2), top1)),
        "seen": (dims, np.full((2, 2, 3), 99)),
    }
    return xr.Dataset(scores | top | {"converted": ("layer", [False, True, True])}, coords), 0.1


class NotTrained(NamedTuple):
    """Stand-in for a run with 99 images of ten classes."""

    args: Any = Namespace(model=None, init_values=0.1)

    def learned(self, name: str, accuracy: float) -> bool:
        return learned(name, accuracy, 99, 0.1)


def matrices(start: float = 0.01, equivariance: float = 0.3, top1: float = 0.5) -> tuple[Any, ...]:
    """Return two blocks on 8 x 8 patches; random matrices have an equivariance below 0.021."""
    weights = {
        "translation_equivariance": (
            ("epoch", "layer"),
            [[start, -0.01], [0.3, equivariance]],
        ),
        "top1": ("epoch", [0.1, top1]),
        "weight": (
            ("epoch", "layer", "query_y", "query_x", "y", "x"),
            np.ones((2, 2, 8, 8, 8, 8)),
        ),
    }
    return xr.Dataset(weights), NotTrained()


def ratios(share: float = 0.1, top1: float = 0.5) -> tuple[Any, ...]:
    """Return two blocks at the start and at the end."""
    # The model without LayerScale is the unit: the check compares the ratios of the two models at
    # the start.
    values = np.broadcast_to(np.array([1, share]).reshape(2, 1, 1, 1), (2, 2, 2, 2))
    coords = {
        "model": [layer_scale.WITHOUT, layer_scale.WITH],
        "branch": ["mixer", "mlp"],
    }
    scores = {
        "residual_ratio": (("model", "epoch", "layer", "branch"), values),
        "top1": (("model", "epoch"), [[0.1, 0.5], [0.1, top1]]),
    }
    return xr.Dataset(scores, coords), NotTrained()


def class_maps(on_digit: float = 0.4, top1: float = 0.5) -> tuple[Any, ...]:
    """Return two layers of one head, on 9 images."""
    values = np.broadcast_to(np.array([on_digit, 0.2]).reshape(1, 2, 1), (9, 2, 1))
    shares = {
        "on_digit": (("image", "layer", "head"), values),
        "even": ("image", np.full(9, 0.2)),
        "top1": top1,
    }
    return xr.Dataset(shares), NotTrained()


def decisions(differ: float = 0.1, top1: float = 0.8) -> tuple[Any, ...]:
    """Return two trainings, 99 images and two conditions."""
    coords = {"model": [disagreement.CNN, disagreement.TCNN, disagreement.ORDER]}
    # With 0.8 and 0.8, errors that are independent differ in 2 x 0.8 x 0.2 = 0.32 of the images.
    accuracies = np.broadcast_to([0.8, top1, 0.8], (2, 3))
    results = xr.Dataset(
        {"clean_accuracy": (("training", "model"), accuracies)},
        coords | {"image": range(99)},
    )
    shares = np.broadcast_to(np.array([0.3, differ])[:, None, None], (2, 2, 2, 99))
    dims = ("training", "model", "group", "image")
    return (
        xr.DataArray(shares, {"model": coords["model"][1:], "group": ["clean", "blur"]}, dims),
        results,
        0.1,
    )


def dense(before: float = 0.5, fine: float = 0.4, top1: float = 0.5) -> tuple[Any, ...]:
    """Return two stages and nine scenes; the ResNet is trained for two epochs,
    and the other models for one.
    """
    names = [
        dense_features.CNN,
        dense_features.TCNN,
        dense_features.UNSTRIDED,
        dense_features.PATCH,
    ]
    # NaN where a model is not trained for as long: the check takes the last epoch that each model
    # has.
    iou = np.full((4, 3, 2), 0.5)
    iou[0, 2] = (0.5, 0.2)
    iou[1:, 0] = (before, 0.3)
    iou[1:, 1] = (0.6, fine)
    iou[1:, 2] = np.nan
    top = (("model", "epoch"), np.where(np.isnan(iou[..., 0]), np.nan, top1))
    scores = {
        "iou": (("model", "epoch", "stage", "image"), iou[..., None].repeat(9, -1)),
        "top1": top,
        "images": 99,
    }
    return xr.Dataset(scores, {"model": names, "epoch": range(3), "stage": [1, 2]}), 0.1


def on_objects(start: float = 0.001, top1: float = 0.5) -> tuple[Any, ...]:
    """Return two trainings of 99 images; attention
    that spreads over the query's own side has an isolation of 0.4.
    """
    values = np.full((2, 2, 2, 2, 1, 3, 5), 0.3)
    values[:, 0, 0] += start  # at epoch 0, on the scenes' own masks
    dims = ("seed", "epoch", "mask", "query", "layer", "head", "image")
    return (
        xr.Dataset(
            {
                "on_object": (dims, values),
                "largest": (("seed", "epoch"), np.full((2, 2), 0.4)),
                "top1": (("seed", "epoch"), [[0.1, 0.5], [0.1, top1]]),
                "images": 99,
            },
            {"seed": [0, 1], "mask": ["own", "other"]},
        ),
        0.1,
    )


def fine_digits(grafit: float = 0.8) -> tuple[Any, ...]:
    """Return two trainings of each kind, on 99 images."""
    top1 = [[0.9, 0.9], [0.9, grafit]]
    return (
        xr.Dataset(
            {"top1": (("training", "arm"), top1)},
            {"arm": list(coarse_labels.ARMS), "image": range(99)},
        ),
    )


def ablation_results(**changes: float) -> tuple[Any]:
    return (test_ablations.results(**changes),)


def distillation_results(**changes: float) -> tuple[Any]:
    return (test_distillation.results(**changes),)


def claims(**changes: float) -> tuple[Any, float]:
    return test_tcnn_claims.results(**changes), 0.1


@pytest.mark.parametrize(
    ("study", "make_results", "changes", "message"),
    [
        (coarse_labels, fine_digits, {"grafit": 0.5}, "grafit did NOT learn"),
        (
            dense_features,
            dense,
            # Where a check has a limit, the changes are as small as it can detect, so that a
            # shifted limit fails the test.
            {"before": 0.49},
            "begin NOT as the CNN's: IoU apart by 0.0100",
        ),
        (
            dense_features,
            dense,
            {"fine": 0.1},
            "finds NOT clearly more of the strokes: -0.100 [",
        ),
        (dense_features, dense, {"top1": 0.1}, "the T-CNN did NOT learn"),
        (
            object_heads,
            on_objects,
            {"start": -0.021},
            "at epoch 0 is NOT near zero: at most 0.0210",
        ),
        (object_heads, on_objects, {"top1": 0.1}, "the T-CNN of seed 1 did NOT learn"),
        (
            resmlp_weights,
            matrices,
            # Just above 0.021, which no random matrix of this size reached.
            {"start": 0.03},
            "at the start equivariance is NOT that of random matrices",
        ),
        (
            resmlp_weights,
            matrices,
            {"equivariance": 0.02},
            "NOT all blocks are above: 0.020 to 0.300",
        ),
        (resmlp_weights, matrices, {"top1": 0.1}, "the ResMLP did NOT learn"),
        (
            layer_scale,
            ratios,
            # A hundredth above the initial weight of LayerScale: the ratio is printed with two
            # digits.
            {"share": 0.11},
            "is 0.11 times that without: NOT the initial weight 0.1",
        ),
        (layer_scale, ratios, {"top1": 0.1}, "with LayerScale did NOT learn"),
        (
            cait_attention,
            class_maps,
            {"on_digit": 0.2},
            "looks at the strokes NOT more than even attention",
        ),
        (cait_attention, class_maps, {"top1": 0.1}, "the CaiT did NOT learn"),
        (
            representations,
            knowledge,
            {"before": 0.9},
            "the stages before those with attention are NOT the CNN's: CKA of at least 0.90",
        ),
        (
            representations,
            knowledge,
            {"gain": 0.01},
            "do NOT clearly know more of the class",
        ),
        (representations, knowledge, {"top1": 0.1}, "the T-CNN did NOT learn"),
        (
            disagreement,
            decisions,
            {"differ": 0.4},
            "disagree NOT less than independent errors: 0.400, 0.320",
        ),
        (disagreement, decisions, {"top1": 0.1}, "a model did NOT learn"),
        (
            when_to_reparameterize,
            times,
            {"heads": 0},
            "t1 = 0 has 0 heads: NOT what it should have become",
        ),
        (
            when_to_reparameterize,
            times,
            # 12 of 99 images with ten classes are more than the expected number, but within what
            # guessing reaches.
            {"top1": 0.12},
            "the run of t1 = 0 did NOT learn",
        ),
        (
            architectures,
            costs,
            {"ratio": 0.9},
            "need NOT more multiply-adds than their CNNs: 0.90 times",
        ),
        (architectures, costs, {"top1": 0.1}, "T-CNN, fine-tuned did NOT learn"),
        (
            finetune_length,
            curves,
            {"low": 0.8},
            "T-CNN NOT more accurate after the longest",
        ),
        (finetune_length, curves, {"low": 0.05, "high": 0.1}, "CNN did NOT learn"),
        (learning_rate_dip, rates, {"low": 0.9}, "does NOT climb higher"),
        (learning_rate_dip, rates, {"low": 0.05, "high": 0.1}, "CNN did NOT learn"),
        (initial_locality, starts, {"low": 0.95}, "do NOT end higher: 0.95, 0.90"),
        (initial_locality, starts, {"top1": 0.1}, "did NOT learn"),
        (
            resolution,
            resolutions,
            {"small": 0.7},
            "CNN NOT more accurate at 64 pixels than at 32",
        ),
        (resolution, resolutions, {"trained": 0.11, "small": 0.1}, "CNN did NOT learn"),
        (gating_evolution, gating, {"first": 0.73, "last": 0.73}, "did NOT move apart"),
        # 15 of 99 images are within reach of guessing: one guess in twenty does as well.
        (gating_evolution, gating, {"top1": 0.15}, "did NOT learn"),
        (attention_maps, maps, {"tap": 1}, "4 of 4 heads do NOT look at their tap"),
        (attention_maps, maps, {"peaks": (0.1, 0.5)}, "do NOT have fainter peaks"),
        (
            head_entropy,
            entropies,
            {"first": "mixed"},
            "0 of 4 heads start convolutional, NOT all",
        ),
        (
            head_entropy,
            entropies,
            {"kinds": "mixed content"},
            "0 are convolutional and 2 low-gate: NOT both kinds",
        ),
        (
            head_entropy,
            entropies,
            {"kinds": "convolutional mixed"},
            "2 are convolutional and 0 low-gate: NOT both",
        ),
        (head_entropy, entropies, {"low": 2.0}, "entropy of low-gate heads NOT larger"),
        (class_attention_saliency, saliency, {"hits": 0.2}, "NOT above chance"),
        (
            class_attention_saliency,
            saliency,
            {"top1": 0.1},
            "PatchConvNet did NOT learn",
        ),
        (ablations, ablation_results, {"alone": 0.9}, "a ResMLP is NOT more accurate"),
        (ablations, ablation_results, {"top1": 0.05, "alone": 0.0}, "did NOT learn"),
        (distillation, distillation_results, {"top1": 0.1}, "labels alone did NOT learn"),
        (distillation, distillation_results, {"teacher": 0.1}, "CNN did NOT learn"),
        (tcnn_claims, claims, {"start": 1.5}, "heads do NOT all start by position"),
        (tcnn_claims, claims, {"top1": 0.1}, "the median T-CNN did NOT learn"),
    ],
)
def test_the_check_can_fail(
    study: ModuleType,
    make_results: Callable[..., tuple[Any, ...]],
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # First come the results that pass: a check that never passes would pass the rest of this test.
    assert study.check(*make_results())
    assert "NOT" not in capsys.readouterr().out
    assert not study.check(*make_results(**changes))
    assert message in capsys.readouterr().out


def test_two_classes_cannot_pass_by_chance_and_can_be_learned() -> None:
    """The verdict follows the upper tail of the binomial distribution, summed term by term."""
    # These lie on both sides of 1 %, and include samples so small, or chances so large, that even
    # all right proves nothing.
    for right, images, chance in (
        (29, 40, 0.5),
        (27, 40, 0.5),
        (4, 4, 0.5),
        (40, 40, 0.9),
        (70, 70, 0.9),
    ):
        tail = 0.0
        for k in range(right, images + 1):
            wrong = images - k
            tail += math.comb(images, k) * chance**k * (1 - chance) ** wrong
        verdict = learned("it", right / images, images, chance)
        assert verdict == (tail < 0.01), (right, images, chance)


@pytest.mark.parametrize(
    ("passed", "options", "code", "said"),
    [
        (True, {"data": "digits"}, 0, ""),
        (True, {"data": "photos"}, 0, ""),
        (False, {"data": "digits"}, 3, ""),
        (False, {}, 3, ""),
        (False, {"model": None}, 3, ""),
        # Anybody may bring photographs: if a study sees something else there, that is a finding.
        (False, {"data": "photos"}, 0, "findings, not errors"),
        (False, {"model": "cait_xxs24_224"}, 0, "findings, not errors"),
        (False, {"small": True}, 0, "need the full form"),
    ],
)
def test_a_check_that_fails_is_an_error_on_all_of_the_digits_only(
    passed: bool,
    options: dict[str, Any],
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert finish(passed, Namespace(**{"small": False, **options})) == code
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(said) == bool(printed)


@pytest.mark.parametrize(("swapped", "correlation"), [(False, "1.00"), (True, "0.50")])
def test_gates_are_compared_with_shares_of_the_offset(swapped: bool, correlation: str) -> None:
    gate = xr.zeros_like(gates(0, 0))
    gate[-1] = [[0.9, 0.2], [0.5, np.nan]]
    offset = 3 * gate
    if swapped:
        offset[-1, 0, 0], offset[-1, 1, 0] = 1.5, 2.7
    ds = xr.Dataset({"gate": gate, "offset_information": offset, "selectivity": 0 * offset + 3})
    text = gating_evolution.offset_report(ds)
    assert "explains 0.20 to 0.90 of the heads' selectivity, 0.53 on average" in text
    assert text.endswith(f"correlation with the gate {correlation}, over 3 heads")
