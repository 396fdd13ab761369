"""FGSM and PGD against foolbox, and their guarantees about pixels, batches and models."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import evaluation
from tests.extras import need
from tests.tcnn_probe.contracts.helpers import Trace, images, vit
from tests.tcnn_probe.evaluation.classifiers import (
    NONE,
    NORMALIZATION,
    Small,
    configured,
    labels,
    pixels,
)

pytestmark = pytest.mark.numerical

ATTACKS: dict[str, Callable[..., Tensor]] = {
    "fgsm": evaluation.fgsm,
    "pgd": evaluation.pgd,
}


def foolbox_attack(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    normalization: Any,
    start: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Run foolbox's FGSM or, with several steps, its PGD from a given start."""
    with warnings.catch_warnings():
        # foolbox, inactive since 2024, and eagerpy warn about their imports.
        warnings.simplefilter("ignore")
        foolbox = need("foolbox")
        eagerpy = need("eagerpy")
    attack: Any = foolbox.attacks.LinfFastGradientAttack()
    if "steps" in options:
        attack = foolbox.attacks.LinfProjectedGradientDescentAttack(
            abs_stepsize=options["step"],
            steps=options["steps"],
            random_start=start is not None,
        )
        # foolbox's own generator would draw another start.
        attack.get_random_start = lambda x, epsilon: eagerpy.astensor(start)
    mean, std = ([float(x) for x in numbers] for numbers in normalization)
    preprocessing = {"mean": mean, "std": std, "axis": -3}
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu", preprocessing=preprocessing)
    return attack.run(wrapped, images, labels, epsilon=options["epsilon"])


@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("epsilon", [1 / 255, 0.1])
def test_fgsm_equals_foolbox(channels: int, epsilon: float) -> None:
    model = Small(channels).double().eval()
    x = pixels(7, channels).double()
    y = labels(7)
    normalization = [numbers[:channels] for numbers in NORMALIZATION]
    adversarial = evaluation.fgsm(model, x, y, epsilon=epsilon, normalization=normalization)
    expected = foolbox_attack(model, x, y, normalization, epsilon=epsilon)
    # foolbox converts to float32.
    torch.testing.assert_close(adversarial, expected, rtol=0, atol=1e-6)
    assert ((adversarial == 0) & (x > 0)).any()  # clipped to the range


@pytest.mark.parametrize("random_start", [True, False])
@pytest.mark.parametrize(("epsilon", "step", "steps"), [(1 / 255, 0.5 / 255, 5), (0.1, 0.07, 3)])
def test_pgd_equals_foolbox(epsilon: float, step: float, steps: int, random_start: bool) -> None:
    """The start of our PGD is the result of an ascent with a negligible first step."""
    model = Small().double().eval()
    x = pixels(7).double()
    y = labels(7)
    options = {"epsilon": epsilon, "step": step, "steps": steps}
    adversarial = evaluation.pgd(
        model,
        x,
        y,
        normalization=NORMALIZATION,
        random_start=random_start,
        seed=3,
        **options,
    )
    start = None
    if random_start:
        start = evaluation.pgd(
            model,
            x,
            y,
            epsilon=epsilon,
            step=1e-300,
            steps=1,
            seed=3,
            normalization=NORMALIZATION,
        )
        moved = ((start - x) / epsilon)[(x > epsilon) & (x < 1 - epsilon)]
        for value, expected in (
            (moved.min(), -1),
            (moved.max(), 1),
            (moved.mean(), 0),
            (moved.square().mean(), 1 / 3),
        ):
            assert abs(value - expected) < 0.03  # uniform distribution
    reference = foolbox_attack(model, x, y, NORMALIZATION, start, **options)
    torch.testing.assert_close(adversarial, reference, rtol=0, atol=1e-6)
    assert ((adversarial == 1) & (x < 1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
# These are the papers' budget, one that float32 rounds away near 1, and one that exceeds the range.
@pytest.mark.parametrize("epsilon", [1 / 255, 1e-9, 0.7])
def test_budget_and_range_are_kept(epsilon: float, dtype: torch.dtype) -> None:
    model = Small()
    x = pixels(5, size=(29, 31)).to(dtype)
    for attack in ATTACKS.values():
        adversarial = attack(model, x, labels(5), epsilon=epsilon, normalization=NORMALIZATION)
        assert adversarial.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (adversarial.double() - x.double()).abs().max() <= epsilon
        assert (adversarial - x.to(adversarial)).abs().max() <= torch.tensor(
            epsilon, dtype=adversarial.dtype
        )
        assert 0 <= adversarial.min() <= adversarial.max() <= 1
        # A budget that is lost in rounding cannot be used up.
        if epsilon > 1e-3:
            assert (adversarial.double() - x.double()).abs().max() > 0.999 * epsilon


def test_batch_size_does_not_matter() -> None:
    model = Small().double()
    x = pixels(7).double()
    y = labels(7)
    x[1] = x[0]
    y[1] = y[0]
    # The step is so small that the result is the start of the ascent.
    options: dict[str, Any] = {"normalization": NORMALIZATION, "steps": 1, "step": 1e-9}
    together = evaluation.pgd(model, x, y, seed=5, **options)
    parts = [
        evaluation.pgd(model, x[a:b], y[a:b], seed=5, first=a, **options)
        for a, b in ((0, 2), (2, 3), (3, 7))
    ]
    torch.testing.assert_close(torch.cat(parts), together, rtol=0, atol=1e-12)
    assert not torch.equal(together, evaluation.pgd(model, x, y, seed=6, **options))
    # Each image has its own start.
    assert (together[0] != together[1]).float().mean() > 0.9


def test_normalization_of_the_model_or_given() -> None:
    """The normalisation is timm's own, or a number, or one number per channel."""
    model = configured()
    x = pixels(3)
    y = labels(3)
    mean = model.pretrained_cfg["mean"]
    std = model.pretrained_cfg["std"]
    usual = evaluation.fgsm(model, x, y)
    assert torch.equal(usual, evaluation.fgsm(model, x, y, normalization=(torch.tensor(mean), std)))
    assert not torch.equal(usual, evaluation.fgsm(model, x, y, normalization=NONE))
    by_number = evaluation.fgsm(model, x, y, normalization=(0.5, 0.25))
    assert torch.equal(
        by_number, evaluation.fgsm(model, x, y, normalization=([0.5] * 3, [0.25] * 3))
    )
    with pytest.raises(ValueError, match=r"one for each of the images' 2 channels"):
        evaluation.fgsm(model, pixels(2, 2), labels(2))


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_functions_arrays_and_any_gradient_mode(precision: str) -> None:
    model = Small().eval()
    attack = evaluation.pgd
    x, y = pixels(3), labels(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        expected = attack(model, x, y, normalization=NORMALIZATION)
        assert torch.equal(
            attack(model, x.numpy(), y.tolist(), normalization=NORMALIZATION), expected
        )
        # Tensors made in inference mode, and weights in autocast's cache, cannot be differentiated.
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                x, y = pixels(3), labels(3)
                model(x)  # fills autocast's cache
                assert torch.equal(attack(model, x, y, normalization=NORMALIZATION), expected)
                assert torch.equal(
                    attack(lambda x: model(x), x, y, normalization=NORMALIZATION),
                    expected,
                )


def test_small_gradients_of_a_half_precision_model_are_not_zero() -> None:
    """The model is so confident that its gradient,
    without scaling, is below the smallest number of float16.
    """
    x = torch.full((1, 1, 2, 3), 0.5)
    sure = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)).half()
    with torch.no_grad():
        sure[1].weight[0] = -1
        sure[1].weight[1] = 1
        sure[1].bias[:] = torch.tensor([26.0, 0.0])
    assert (
        # All weights have the same sign, so that all pixels go up.
        evaluation.fgsm(sure, x, [0], epsilon=0.25, normalization=NONE) == 0.75
    ).all()


def test_nan_gradients_move_nothing() -> None:
    x = pixels(3)
    small = Small()
    adversarial = evaluation.pgd(
        lambda x: small(x) * torch.nan,
        x,
        labels(3),
        random_start=False,
        normalization=NONE,
    )
    assert torch.equal(adversarial, x)


def test_recorders_do_not_record_attacks() -> None:
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model(images(3))
        for classifier in (model, lambda x: model(x)):
            evaluation.pgd(classifier, pixels(2, 2, size=(20, 28)), [0, 1], normalization=NONE)
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


class BrokenError(Exception):
    pass


def test_the_model_is_in_eval_mode_during_an_attack_and_restored_afterwards() -> None:
    model = Small()
    x = pixels(3)
    y = labels(3)
    expected = evaluation.pgd(model.eval(), x, y, normalization=NORMALIZATION)
    # Dropout is off.
    assert torch.equal(evaluation.pgd(model.train(), x, y, normalization=NORMALIZATION), expected)

    def fail(*args: Any) -> None:
        raise BrokenError

    # The hook raises in a forward, when the model is in eval mode and its weights need no
    # gradients.
    model.drop.register_forward_hook(fail)
    before = Trace(model)
    random = torch.get_rng_state()
    with pytest.raises(BrokenError):
        evaluation.pgd(model, x, y, normalization=NORMALIZATION)
    assert Trace(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, pixels(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"images": pixels(3) * 4 - 2},
            r"in \[0, 1\], before normalisation; got values from -2 to 2: undo",
        ),
        (
            {"labels": [0, 1]},
            r"expected 3 labels, one for each image, got shape \(2,\)",
        ),
        (
            {"labels": [0, 1, 5]},
            "expected labels from 0 to 4, the model having 5 classes; got 5",
        ),
        ({"labels": [0, 1, -100]}, "expected labels from 0, got -100"),
        (
            {"labels": [0.0, 1.0, 2.0]},
            "expected class indices for labels, got torch.float32",
        ),
        (
            {"epsilon": 0},
            "expected epsilon above 0 and at most 1, the range of pixels, got 0",
        ),
        ({"epsilon": 8}, "expected epsilon .* got 8; did you mean 8 / 255?"),
        ({"steps": 0}, "expected an integer from 1 for steps, got 0"),
        ({"first": 1.5}, "expected an integer from 0 for first, got 1.5"),
        (
            {"normalization": None},
            "the model does not say how its images are normalised",
        ),
        (
            {"normalization": (0, 0)},
            r"expected normalization=\(mean, std\), .* std positive; got \(0, 0\)",
        ),
        ({"normalization": ((0, 0), (1,))}, "one for each of the images' 3 channels"),
        (
            {"model": lambda x: x},
            r"expected the model to give a score for each class, shape \(3, K\)",
        ),
        (
            {"model": lambda x: Small()(x).detach()},
            "expected scores that can be differentiated with respect to the images",
        ),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    arguments = {
        "model": Small(),
        "images": pixels(3),
        "labels": labels(3),
        "normalization": NONE,
    } | options
    with pytest.raises((TypeError, ValueError), match=message):
        evaluation.pgd(**arguments)


def test_rounding_errors_beyond_the_range_are_clipped() -> None:
    x, y = pixels(3), labels(3)
    # Pixels exceed the range by half of the tolerance, as resizing in float16 leaves them.
    beyond = x + torch.where(x == 0, -5e-5, torch.where(x == 1, 5e-5, 0.0))
    adversarial, expected = (
        evaluation.pgd(Small(), values, y, normalization=NONE) for values in (beyond, x)
    )
    assert torch.equal(adversarial, expected)
