"""robustness() against loops by hand, and on models of known accuracy."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tcnn_probe import evaluation
from tcnn_probe.evaluation.corruptions.table import named_corruptions
from tests.tcnn_probe.contracts.helpers import Trace
from tests.tcnn_probe.evaluation.classifiers import (
    NONE,
    NORMALIZATION,
    Small,
    configured,
    labels,
    pixels,
)

SOME = {
    "corruptions": ["contrast", "gaussian_noise", "pixelate"],
    # Sorting would change this order.
    "severities": (5, 2),
    "seeds": (3, 0),
}
QUICK: dict[str, Any] = {
    "corruptions": "pixelate",
    "severities": 1,
    "attacks": "fgsm",
    "normalization": NONE,
}
CLEAN: dict[str, Any] = {"corruptions": (), "attacks": (), "normalization": NONE}
# The result of these attacks is almost only their starting point.
STARTS = {"fgsm": {"epsilon": 0.9}, "pgd": {"epsilon": 0.9, "step": 1e-6, "steps": 1}}


def right(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    labels: Tensor,
    normalization: Any,
) -> list[bool]:
    """Compute right answers one image at a time."""
    mean, std = (
        torch.as_tensor(numbers, dtype=images.dtype).view(-1, 1, 1) for numbers in normalization
    )
    with torch.no_grad():
        scores = [model(((image - mean) / std)[None])[0] for image in images]
    return [
        max(range(len(s)), key=lambda k, s=s: float(s[k])) == int(y)
        for s, y in zip(scores, labels, strict=True)
    ]


def test_robustness_equals_a_loop() -> None:
    models = {"a": Small().double().eval(), "b": Small(seed=1).double().eval()}
    x = pixels(7).double()
    y = labels(7)
    # The budget is large enough to change some decisions, and leaves others, as asserted at the
    # end.
    pgd = {"epsilon": 0.05, "step": 0.02, "steps": 3}
    attacks = {"pgd": pgd, "fgsm": {"epsilon": 0.04}}
    ds = evaluation.robustness(
        models, x, y, **SOME, attacks=attacks, normalization=NORMALIZATION, batch_size=3
    )
    # This is the published order.
    assert ds.corruption.values.tolist() == ["gaussian_noise", "contrast", "pixelate"]
    assert ds.group.values.tolist() == ["noise", "digital", "digital"]
    assert ds.severity.values.tolist() == [5, 2]
    assert ds.seed.values.tolist() == [3, 0]
    assert ds.label.values.tolist() == y.tolist()
    assert ds.attack.values.tolist() == ["fgsm", "pgd"]
    assert dict(ds.sizes) == {
        "model": 2,
        "image": 7,
        "corruption": 3,
        "severity": 2,
        "seed": 2,
        "attack": 2,
    }
    for name, model in models.items():
        of = ds.sel(model=name)
        assert of.clean_correct.values.tolist() == right(model, x, y, NORMALIZATION)
        for correct in of.correct.stack(condition=("corruption", "severity", "seed")).transpose(
            "condition", "image"
        ):
            corruption, severity, seed = correct.condition.item()
            worse = evaluation.corrupt(x, corruption, severity, seed=seed)
            assert correct.values.tolist() == right(model, worse, y, NORMALIZATION)
        for seed in (3, 0):
            worse = {
                "pgd": evaluation.pgd(model, x, y, seed=seed, normalization=NORMALIZATION, **pgd)
            }
            worse["fgsm"] = evaluation.fgsm(model, x, y, epsilon=0.04, normalization=NORMALIZATION)
            for attack, images in worse.items():
                correct = of.adversarial_correct.sel(attack=attack, seed=seed)
                assert correct.values.tolist() == right(model, images, y, NORMALIZATION)
    pairs = {
        "clean_correct": "clean_accuracy",
        "correct": "accuracy",
        "adversarial_correct": "adversarial_accuracy",
    }
    for name, mean in pairs.items():
        share = ds[name].values.astype(float).sum(-1) / 7
        assert ds[mean].dims == ds[name].dims[:-1] == ds[f"{mean}_se"].dims
        # These are quotients of integers below 8, in float64.
        np.testing.assert_allclose(ds[mean], share, atol=1e-15)
        np.testing.assert_allclose(ds[f"{mean}_se"], (share * (1 - share) / 7) ** 0.5, atol=1e-15)
        # Some answers are right and some are wrong, or the loops above would show nothing.
        assert ds[name].values.any() > ds[name].values.all()


def test_predictions_and_confidences_equal_a_loop() -> None:
    """The loop takes one image at a time, with the softmax in float64;
    scores are rounded to float32 first.
    """
    models = {"a": Small().double().eval(), "b": Small(seed=1).double().eval()}
    x = pixels(7).double()
    y = labels(7)
    ds = evaluation.robustness(
        models, x, y, **SOME, attacks="fgsm", normalization=NONE, batch_size=3
    )
    for name, model in models.items():
        of = ds.sel(model=name)
        kinds = {
            "clean_": x,
            "adversarial_": evaluation.fgsm(model, x, y, normalization=NONE),
        }
        kinds[""] = evaluation.corrupt(x, "gaussian_noise", 2, seed=3)
        at = {
            "": {"corruption": "gaussian_noise", "severity": 2, "seed": 3},
            "adversarial_": {"seed": 0},
        }
        for kind, images in kinds.items():
            with torch.no_grad():
                scores = [model(image[None])[0].tolist() for image in images]
            best = [max(range(5), key=row.__getitem__) for row in scores]
            sure = [
                math.exp(row[b]) / sum(map(math.exp, row))
                for row, b in zip(scores, best, strict=True)
            ]
            decisions = of.sel(at.get(kind, {}))
            assert decisions[f"{kind}prediction"].values.ravel().tolist() == best
            # exp turns the rounding of a score s into a relative error of |s| eps; c = 4.
            bound = (
                4
                * (1 + max(abs(score) for row in scores for score in row))
                * np.finfo(np.float32).eps
            )
            np.testing.assert_allclose(
                decisions[f"{kind}confidence"].values.ravel(), sure, rtol=bound
            )
    assert ds.prediction.dtype == np.int32
    assert ds.confidence.dtype == np.float32
    assert len(set(ds.prediction.values.ravel().tolist())) > 1


def sensitive(x: Tensor) -> Tensor:
    """Return scores of images 9 x 11 that any noise changes."""
    weight = torch.randn(
        3 * 9 * 11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return (x.double() - 0.5).flatten(1) @ weight


def test_batch_size_does_not_matter() -> None:
    x = pixels(17, size=(9, 11))
    y = labels(17)
    options: dict[str, Any] = {**SOME, "normalization": NONE, "attacks": STARTS}
    expected = evaluation.robustness(sensitive, x, y, **options)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)

    def once() -> Iterator[list[Any]]:
        # Batches have two sizes and types, and can be read only once.
        yield from ([x[:3].numpy(), y[:3].tolist()], [x[3:], y[3:]])

    for batches in (loader, once()):
        xr.testing.assert_equal(evaluation.robustness(sensitive, batches, **options), expected)


def test_seeds_are_independent_measurements() -> None:
    """Results of a seed do not depend on the others,
    and conditions without randomness are measured once.
    """
    x = pixels(31, size=(9, 11))
    y = labels(31)
    options: dict[str, Any] = {
        "corruptions": ["impulse_noise", "contrast"],
        "severities": 4,
        "attacks": STARTS,
    }
    batches = list[Tensor]()

    def model(x: Tensor) -> Tensor:
        batches.append(x)
        return sensitive(x)

    together = evaluation.robustness(
        {"a": model, "b": model}, x, y, seeds=(5, 1), normalization=NONE, **options
    )
    # FGSM starts at the image for any seed; PGD starts at random, once for each of two seeds.
    once = {
        "clean": 1,
        "impulse_noise": 2,
        "contrast": 1,
        "gradient and answer": 2 * (1 + 2),
    }
    assert len(batches) == 2 * sum(once.values())
    # The clean batches come first, and then three corrupted batches, each for one model and the
    # other. Each batch is corrupted once for both models.
    for first, second in zip(batches[2:8:2], batches[3:8:2], strict=True):
        assert torch.equal(first, second)
    for seed in (5, 1):
        alone = evaluation.robustness(
            {"a": sensitive, "b": sensitive},
            x,
            y,
            seeds=seed,
            normalization=NONE,
            **options,
        )
        xr.testing.assert_equal(together.sel(seed=[seed]), alone)
    # Contrast and FGSM do not depend on the seed.
    for name, expected in (
        ("correct", [False, True]),
        ("adversarial_correct", [True, False]),
    ):
        same = (together[name].sel(seed=5) == together[name].sel(seed=1))[0]
        assert same.all("image").values.ravel().tolist() == expected


def test_functions_and_normalization_per_model() -> None:
    model = configured().eval()
    x = pixels(5)
    y = labels(5)
    mean, std = ([*model.pretrained_cfg[key]] for key in ("mean", "std"))
    # A function has no ``pretrained_cfg``.
    models = {"own": model, "given": model, "function": lambda x: model(x)}
    options: dict[str, Any] = {
        "corruptions": "contrast",
        "severities": 1,
        "attacks": {"pgd": {"epsilon": 0.02}},
    }
    normalizations = {"given": (mean, std), "function": (mean, std)}
    ds = evaluation.robustness(models, x, y, normalization=normalizations, **options)
    for name in ("given", "function"):
        xr.testing.assert_equal(ds.sel(model=name, drop=True), ds.sel(model="own", drop=True))
    assert json.loads(ds.attrs["models"]) == {
        "own": "Small",
        "given": "Small",
        "function": "<lambda>",
    }
    assert json.loads(ds.attrs["normalization"])["own"] == [mean, std]


def test_only_requested_conditions_are_measured() -> None:
    clean = evaluation.robustness(Small(), pixels(2), labels(2), **CLEAN)
    of_images = {f"clean_{name}" for name in ("prediction", "confidence", "correct")}
    assert set(clean.variables) == of_images | {
        "model",
        "image",
        "label",
        "clean_accuracy",
        "clean_accuracy_se",
    }
    attacked = evaluation.robustness(Small(), pixels(2), labels(2), **CLEAN | {"attacks": "fgsm"})
    assert "accuracy" not in attacked
    assert named_corruptions("blur") == (
        "defocus_blur",
        "glass_blur",
        "motion_blur",
        "zoom_blur",
    )
    assert named_corruptions(["fog", "noise"]) == (
        "gaussian_noise",
        "shot_noise",
        "impulse_noise",
        "fog",
    )
    assert named_corruptions(None) == tuple(evaluation.CORRUPTIONS)


def test_a_users_own_frost() -> None:
    x = pixels(3, size=(11, 13)) * 0.2

    def bright(x: Tensor) -> Tensor:
        # A bright picture is class 0, the right one: white frost makes it bright, but black frost
        # does not.
        return torch.stack([x.mean((1, 2, 3)), torch.full((len(x),), 0.45)], 1)

    options: dict[str, Any] = CLEAN | {"corruptions": "frost", "severities": 2}
    for white in (1.0, 0.0):
        ds = evaluation.robustness(
            bright, x, [0] * 3, frost=[np.full((31, 37, 3), white)], **options
        )
        assert ds.accuracy.item() == white
        assert ds.attrs["frost"] == "given"


def test_ties_and_nan() -> None:
    # Among equal scores the first one counts, so only label 0 is right.
    x = pixels(4)
    y = torch.tensor([0, 0, 1, 2])
    ties = evaluation.robustness(lambda x: torch.zeros(len(x), 3), x, y, **CLEAN)
    assert ties.clean_correct[0].values.tolist() == [True, True, False, False]

    def broken(x: Tensor) -> Tensor:
        scores = torch.eye(3)[[0, 0, 1, 2]]
        scores[1, 2] = scores[2, 1] = torch.nan  # torch takes NaN for the highest score
        return scores

    with pytest.warns(RuntimeWarning, match="scores with NaN, counted as wrong: {'bad': 2}"):
        ds = evaluation.robustness({"bad": broken}, x, y, **CLEAN)
    assert ds.clean_correct[0].values.tolist() == [True, False, False, True]
    assert ds.clean_prediction[0].values.tolist() == [0, -1, -1, 2]
    assert ds.clean_confidence[0].isnull().values.tolist() == [False, True, True, False]
    assert json.loads(ds.attrs["nan_scores"]) == {"bad": 2}
    assert "NaN" in ds.attrs["prediction"]


def test_results_can_be_stored_in_zarr(tmp_path: Path) -> None:
    variant = evaluation.Variant("mine", [(pixels(3), labels(3))])
    ds = evaluation.robustness(
        Small(),
        pixels(5),
        labels(5),
        **SOME,
        variants=variant,
        normalization=NORMALIZATION,
    )
    ds.to_zarr(tmp_path / "robustness.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "robustness.zarr", consolidated=False).load()
    xr.testing.assert_identical(again, ds)
    options = {"epsilon": 1 / 255, "step": 0.5 / 255, "steps": 5, "random_start": True}
    assert json.loads(again.attrs["attacks"])["pgd"] == options
    assert {"torch_version", "created_at", "frost"} <= set(again.attrs)
    assert again.accuracy_se.attrs["definition"] == "sqrt(p (1 - p) / n), n images"
    assert all(again[name].attrs["long_name"] for name in again.data_vars)


def test_variants_of_imagenet() -> None:
    """Variants may have their own classes, or several right answers."""
    models = {"a": Small().eval(), "b": Small(seed=1).eval()}
    x = pixels(9)
    y = labels(9)
    any_of = (
        torch.nn.functional.one_hot(y, 5).bool()
        | torch.nn.functional.one_hot((y + 1) % 5, 5).bool()
    )
    # Labels are 0 and 3, the classes of the variant.
    few = y % 2 * 3
    variants = [
        evaluation.Variant("plain", DataLoader(TensorDataset(x, y), batch_size=4)),
        evaluation.Variant("several", [(x[:5], any_of[:5]), (x[5:], any_of[5:])]),
        evaluation.Variant("few", [(x[:7], few[:7])], classes=(3, 0)),
    ]
    ds = evaluation.robustness(models, x[:2], y[:2], variants=variants, **CLEAN)
    assert ds.variant.values.tolist() == ["plain", "several", "few"]
    assert ds.variant_images.values.tolist() == [9, 9, 7]
    plain, shifted = (
        evaluation.robustness(models, x, targets, **CLEAN).clean_accuracy
        for targets in (y, (y + 1) % 5)
    )
    best = {name: (lambda x, model=model: model(x)[:, [0, 3]]) for name, model in models.items()}
    masked = evaluation.robustness(best, x[:7], few[:7] // 3, **CLEAN).clean_accuracy
    np.testing.assert_allclose(
        # A prediction that equals one of two distinct labels equals either one or the other.
        ds.variant_accuracy,
        np.stack([plain, plain + shifted, masked], 1),
        atol=1e-15,
    )
    p = ds.variant_accuracy.values
    np.testing.assert_allclose(ds.variant_accuracy_se, np.sqrt(p * (1 - p) / [9, 9, 7]), atol=1e-15)


class BrokenError(Exception):
    pass


def test_models_are_left_unchanged() -> None:
    """This holds also after an exception in any of each model's 6 forwards."""
    model = Small().train()
    calls = 0
    broken_at = 0
    # The model has a mode, a frozen weight and a gradient that a mere ``train()`` would lose.
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.head.weight.grad = torch.full_like(model.head.weight, 0.5)

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == broken_at:
            raise BrokenError

    model.drop.register_forward_hook(fail)
    x, copy = pixels(3), pixels(3)
    before = Trace(model)
    random = torch.get_rng_state()
    numpys = np.random.get_state()[1].copy()  # noqa: NPY002
    # There is no exception, or one in the first, a middle or the last forward.
    for number in (0, 1, 3, 6):
        calls = 0
        broken_at = number
        with pytest.raises(BrokenError) if number else nullcontext():
            evaluation.robustness({"a": model, "b": model}, x, labels(3), **QUICK)
        assert Trace(model) == before
        assert torch.equal(torch.get_rng_state(), random)
        assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002
        assert torch.equal(x, copy)
        assert (model.head.weight.grad == 0.5).all()
        assert all(p.grad is None for n, p in model.named_parameters() if n != "head.weight")


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for shown in (True, False):
        evaluation.robustness(Small(), pixels(3), labels(3), **QUICK, batch_size=2, progress=shown)
        written = capsys.readouterr().err
        # There are two batches, each of them clean, pixelated and attacked.
        assert ("robustness" in written) == ("/6 [" in written) == shown


ONE = pixels(1)


def features() -> torch.nn.Module:
    model = Small()
    model.head = torch.nn.Identity()
    return model


@pytest.mark.parametrize("classes", [1, 2, 5])
def test_sigmoid_of_one_output_or_of_each(classes: int) -> None:
    model, images = Small(classes=classes).eval(), pixels(11)
    with torch.no_grad():  # predictions would be the same for all images
        model.head.bias -= model(images).mean(0) / 9
    logits = model(images).detach().double().numpy()
    if classes == 1:  # class 0 has the rest of the probability
        logits = np.concatenate([-logits, logits], 1)
    assert len({*logits.argmax(1)}) > 1
    options = CLEAN | {"attacks": {"fgsm": {"epsilon": 0.2}}}
    ds = evaluation.robustness(model, images, logits.argmax(1), **options, score="sigmoid")
    clean = ds.isel(model=0)
    np.testing.assert_array_equal(clean.clean_prediction, logits.argmax(1))
    confidence = 1 / (1 + np.exp(-logits.max(1)))
    np.testing.assert_allclose(clean.clean_confidence, confidence, rtol=1e-5)
    # All labels are predicted, and an attack finds a direction, also if there is one output.
    assert float(ds.adversarial_accuracy.mean()) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": None}, "expected class indices for labels, got None"),
        (
            {"models": {"b": Small(classes=4)}, "labels": [0, 1, 4]},
            "to 3, the model 'b' having 4 classes; got 4",
        ),
        ({"models": Small(classes=1), "labels": [0, 0, 0]}, "always 1: .*'sigmoid'"),
        ({"score": "logit"}, "expected score='softmax' or 'sigmoid', .* got 'logit'"),
        ({"models": features()}, "gives features .*'head' is an identity"),
        ({"models": {}}, "expected at least one model, got none"),
        (
            {"models": [Small()]},
            "expected a module or a function from images to scores, got list",
        ),
        (
            {"images": 3},
            r"expected images .*, or only an iterable of \(images, labels\) batches; got int",
        ),
        (
            {"images": [(pixels(3), labels(3))]},
            "expected images .*, or only an iterable .*; got list",
        ),
        (
            {"images": [pixels(3)], "labels": None},
            r"expected batches \(images, labels\), got Tensor",
        ),
        (
            {"images": [], "labels": None},
            r"expected batches \(images, labels\), got none",
        ),
        (
            {"images": [(pixels(3), torch.ones(3, 5).bool())], "labels": None},
            "only variants have several",
        ),
        ({"severities": 6}, "expected an integer from 1 to 5 for severities, got 6"),
        ({"severities": ()}, "expected at least one of severities, got none"),
        ({"severities": (2, 3, 2)}, "expected distinct severities, got 2 twice"),
        ({"attacks": "cw"}, "expected attacks among fgsm, pgd; got 'cw'"),
        ({"attacks": {"pgd": {"eps": 0.1}}}, "unexpected keyword argument 'eps'"),
        ({"batch_size": 0}, "expected an integer from 1 for batch_size, got 0"),
        (
            {"normalization": {"b": NONE}},
            "expected the models' names in normalization, model; got 'b'",
        ),
        (
            {"variants": evaluation.Variant("a", [(ONE, [0])], classes=(0, 988))},
            "having 5 classes; got 988",
        ),
        (
            {"variants": [evaluation.Variant("a", [])] * 2},
            "expected distinct variants, got 'a' twice",
        ),
        (
            {"variants": evaluation.Variant("a", [])},
            "expected images of the variant 'a', got none",
        ),
        (
            {"variants": evaluation.Variant("a", [(ONE, torch.ones(1, 9).bool())])},
            r"labels \(B, 5\), .* got \(B, 9\)",
        ),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = (
        {"models": Small(), "images": pixels(3), "labels": torch.tensor([0, 1, 3])}
        | QUICK
        | options
    )
    with pytest.raises((TypeError, ValueError), match=message):
        evaluation.robustness(**arguments)
