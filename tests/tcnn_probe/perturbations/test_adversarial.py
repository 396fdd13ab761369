"""FGSM and PGD against foolbox's, and what they promise of pixels, batches and models."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, images, vit
from tests.tcnn_probe.perturbations.classifiers import NORMALIZATION, Brightness, Small, labels, pixels, resnet

ATTACKS: dict[str, Callable[..., Tensor]] = {"fgsm": tcnn_probe.fgsm, "pgd": tcnn_probe.pgd}
NONE = ((0,), (1,))


def foolbox_attack(
    name: str,
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    normalization: Any,
    start: Tensor | None,
    **options: Any,
) -> Tensor:
    """The same by foolbox, from a given start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import eagerpy
        import foolbox
    mean, std = ([float(x) for x in each] for each in normalization)
    attack: Any
    if name == "fgsm":
        attack = foolbox.attacks.LinfFastGradientAttack()
    else:
        attack = foolbox.attacks.LinfProjectedGradientDescentAttack(
            abs_stepsize=options["step"], steps=options["steps"], random_start=start is not None
        )
        attack.get_random_start = lambda x, epsilon: eagerpy.astensor(start)
    preprocessing = {"mean": mean, "std": std, "axis": -3}
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu", preprocessing=preprocessing)
    return attack.run(wrapped, images, labels, epsilon=options["epsilon"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [2, 3])
@pytest.mark.parametrize("epsilon", [1 / 255, 0.1])
def test_fgsm_is_foolboxs(channels: int, epsilon: float, dtype: torch.dtype) -> None:
    model, x, y = Small(channels).to(dtype).eval(), pixels(7, channels).to(dtype), labels(7)
    normalization = [each[:channels] for each in NORMALIZATION]
    mine = tcnn_probe.fgsm(model, x, y, epsilon=epsilon, normalization=normalization)
    theirs = foolbox_attack("fgsm", model, x, y, normalization, None, epsilon=epsilon)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert ((mine == 0) & (x > 0)).any()  # cut off


@pytest.mark.parametrize("random_start", [True, False])
@pytest.mark.parametrize(("epsilon", "step", "steps"), [(1 / 255, 0.5 / 255, 5), (0.1, 0.07, 3)])
def test_pgd_is_foolboxs(epsilon: float, step: float, steps: int, random_start: bool) -> None:
    """From the point where ours starts: that of an ascent whose first step is too small to matter."""
    model, x, y = Small().double().eval(), pixels(7).double(), labels(7)
    options = {"epsilon": epsilon, "step": step, "steps": steps}
    mine = tcnn_probe.pgd(model, x, y, normalization=NORMALIZATION, random_start=random_start, seed=3, **options)
    start = None
    if random_start:
        start = tcnn_probe.pgd(model, x, y, epsilon=epsilon, step=1e-300, steps=1, seed=3, normalization=NORMALIZATION)
        moved = ((start - x) / epsilon)[(x > epsilon) & (x < 1 - epsilon)]
        for value, expected in ((moved.min(), -1), (moved.max(), 1), (moved.mean(), 0), (moved.square().mean(), 1 / 3)):
            assert abs(value - expected) < 0.03  # uniform
    theirs = foolbox_attack("pgd", model, x, y, NORMALIZATION, start, **options)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert ((mine == 1) & (x < 1)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("epsilon", [1 / 255, 0.03, 1e-9, 0.7])
def test_budget_and_range(name: str, epsilon: float, dtype: torch.dtype) -> None:
    model, x = Small(), pixels(5, size=(29, 31)).to(dtype)
    found = ATTACKS[name](model, x, labels(5), epsilon=epsilon, normalization=NORMALIZATION)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found.double() - x.double()).abs().max() <= epsilon
    assert (found - x.to(found)).abs().max() <= torch.tensor(epsilon, dtype=found.dtype)
    assert found.min() >= 0
    assert found.max() <= 1
    if epsilon > 1e-3:
        assert (found.double() - x.double()).abs().max() > 0.999 * epsilon


@pytest.mark.parametrize("name", ATTACKS)
def test_it_harms(name: str) -> None:
    model, x = Small().eval(), pixels(23)
    y = model(x).argmax(1)
    weak, strong = (
        ATTACKS[name](model, x, y, epsilon=e, normalization=NONE) for e in (1e-4, 0.3 if name == "fgsm" else 0.01)
    )
    loss = [nn.functional.cross_entropy(model(each), y) for each in (x, weak, strong)]
    assert loss[0] < loss[1] < loss[2]


def test_pgd_on_a_model_whose_worst_images_are_known() -> None:
    """The brighter class is one step away, and all pixels go up."""
    x = torch.full((1, 3, 5, 7), 0.49)
    found = tcnn_probe.pgd(Brightness(2), x, [0], epsilon=0.02, step=0.01, normalization=NONE, random_start=False)
    torch.testing.assert_close(found, torch.full_like(x, 0.51))


def test_batches_do_not_matter() -> None:
    model, x, y = Small().double(), pixels(7).double(), labels(7)
    whole = tcnn_probe.pgd(model, x, y, seed=5, normalization=NORMALIZATION)
    parts = [
        tcnn_probe.pgd(model, x[a:b], y[a:b], seed=5, first=a, normalization=NORMALIZATION)
        for a, b in ((0, 2), (2, 3), (3, 7))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    assert not torch.equal(whole, tcnn_probe.pgd(model, x, y, seed=6, normalization=NORMALIZATION))


def test_each_image_has_a_start_of_its_own() -> None:
    x = torch.full((2, 3, 11, 13), 0.5)
    start = tcnn_probe.pgd(Small(), x, [0, 0], step=1e-12, steps=1, normalization=NONE) - x
    assert (start[0] != start[1]).float().mean() > 0.9


def test_normalization() -> None:
    """timm's own, as given; numbers or one a channel."""
    model, x, y = resnet(), pixels(3, size=(32, 43)), labels(3)
    mean, std = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    usual = tcnn_probe.fgsm(model, x, y)
    assert torch.equal(usual, tcnn_probe.fgsm(model, x, y, normalization=(mean, std)))
    assert torch.equal(usual, tcnn_probe.fgsm(model, x, y, normalization=(torch.tensor(mean), std)))
    assert not torch.equal(usual, tcnn_probe.fgsm(model, x, y, normalization=NONE))
    one = tcnn_probe.fgsm(model, x, y, normalization=(0.5, 0.25))
    assert torch.equal(one, tcnn_probe.fgsm(model, x, y, normalization=([0.5] * 3, [0.25] * 3)))


def test_a_function_is_as_good_as_a_module() -> None:
    model, x, y = Small().eval(), pixels(3), labels(3)
    for attack in ATTACKS.values():
        expected = attack(model, x, y, normalization=NORMALIZATION)
        assert torch.equal(attack(lambda image: model(image), x, y, normalization=NORMALIZATION), expected)
        assert torch.equal(attack(model, x.numpy(), y.tolist(), normalization=NORMALIZATION), expected)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("precision", ["float32", "float64", "autocast"])
def test_whatever_mode_the_caller_is_in(name: str, mode: Any, precision: str) -> None:
    dtype = torch.float64 if precision == "float64" else torch.float32
    model, attack = Small().to(dtype).eval(), ATTACKS[name]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        outside = attack(model, pixels(3).to(dtype), labels(3), normalization=NORMALIZATION)
        with mode():
            x, y = pixels(3).to(dtype), labels(3)
            model(x)  # fills autocast's cache
            inside = attack(model, x, y, normalization=NORMALIZATION)
            function = attack(lambda x: model(x), x, y, normalization=NORMALIZATION)
        assert torch.equal(inside, outside)
        assert torch.equal(function, outside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model, x, y = Small().eval(), pixels(11), labels(11)
    full = tcnn_probe.fgsm(model, x, y, epsilon=0.1, normalization=NORMALIZATION) - x
    half = tcnn_probe.fgsm(model.to(dtype), x, y, epsilon=0.1, normalization=NORMALIZATION) - x
    assert (half.sign() == full.sign()).float().mean() > 0.9


def test_small_gradients_of_a_half_precision_model_are_not_zero() -> None:
    """A model so sure of itself that its gradient, unscaled, is below the least float16."""
    x = torch.full((1, 1, 2, 3), 0.5)
    sure = nn.Sequential(nn.Flatten(), nn.Linear(6, 2)).half()
    with torch.no_grad():
        sure[1].weight[0], sure[1].weight[1], sure[1].bias[:] = -1, 1, torch.tensor([26.0, 0.0])
    found = tcnn_probe.fgsm(sure, x, [0], epsilon=0.25, normalization=NONE)
    assert (found == 0.75).all()


def test_gradients_that_are_nan_move_nothing() -> None:
    x = pixels(3)
    found = tcnn_probe.pgd(
        lambda image: Small()(image) * torch.nan, x, labels(3), random_start=False, normalization=NONE
    )
    assert torch.equal(found, x)


@pytest.mark.parametrize("function", [False, True])
def test_recorders_do_not_see_it(function: bool) -> None:
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model(images(3))
        for attack in ATTACKS.values():
            attack((lambda x: model(x)) if function else model, pixels(2, 2, size=(20, 28)), [0, 1], normalization=NONE)
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_left(name: str, broken: bool) -> None:
    model, x, y = Small().train(), pixels(3), labels(3)
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.head.weight.grad = torch.full_like(model.head.weight, 0.5)

    def fail(*args: Any) -> None:
        if broken:
            raise BrokenError

    model.drop.register_forward_hook(fail)
    before, random, given = Trace(model), torch.get_rng_state(), x.clone()
    if broken:
        with pytest.raises(BrokenError):
            ATTACKS[name](model, x, y, normalization=NORMALIZATION)
    else:
        ATTACKS[name](model, x, y, normalization=NORMALIZATION)
    assert Trace(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, given)
    assert (model.head.weight.grad == 0.5).all()
    assert all(p.grad is None for n, p in model.named_parameters() if n != "head.weight")


def test_dropout_is_off() -> None:
    model, x, y = Small().train(), pixels(5), labels(5)
    found = tcnn_probe.fgsm(model, x, y, normalization=NORMALIZATION)
    assert torch.equal(found, tcnn_probe.fgsm(model.eval(), x, y, normalization=NORMALIZATION))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": pixels(3) * 4 - 2}, r"in \[0, 1\], before normalisation; got values from -2 to 2"),
        ({"images": pixels(3) - 0.5}, "got values from -0.5 to 0.5"),
        ({"images": pixels(3) * torch.nan}, "got values from nan to nan"),
        (
            {"images": (pixels(3) * 255).byte()},
            r"floating point in \[0, 1\] \(of bytes: images / 255\), got torch.uint8",
        ),
        ({"images": pixels(3)[0]}, r"shape \(B, C, H, W\), B > 0, got shape \(3, 13, 19\); of one image"),
        ({"images": "pixels"}, "expected images, a tensor or an array"),
        ({"labels": [0, 1]}, r"expected 3 labels, one for each image, got shape \(2,\)"),
        ({"labels": [0, 1, 5]}, "expected labels from 0 to 4, the model having 5 classes; got 5"),
        ({"labels": [0, 1, -100]}, "expected labels from 0, got -100"),
        ({"labels": [0.0, 1.0, 2.0]}, "expected class indices for labels, got torch.float32"),
        ({"labels": ["cat"] * 3}, "expected class indices for labels, got list"),
        ({"epsilon": 0}, "expected a positive number for epsilon, of a range of 1, got 0"),
        ({"epsilon": 8}, r"epsilon of pixels in \[0, 1\], 1 at most, got 8; did you mean 8 / 255\?"),
        ({"epsilon": 256.0}, r"1 at most, got 256\.0$"),
        ({"step": 2.5}, r"step of pixels in \[0, 1\], 1 at most, got 2\.5; did you mean 2\.5 / 255\?"),
        ({"epsilon": torch.inf}, "expected a positive number for epsilon"),
        ({"step": -0.1}, "expected a positive number for step"),
        ({"steps": 0}, "expected a positive integer for steps, got 0"),
        ({"steps": 2.5}, "expected a positive integer for steps, got 2.5"),
        ({"seed": -1}, "expected an integer from 0 for seed, got -1"),
        ({"first": True}, "expected an integer from 0 for first, got True"),
        ({"normalization": None}, r"no pretrained_cfg of timm's\): give normalization=\(mean, std\).*for none"),
        ({"normalization": 0.5}, r"expected normalization=\(mean, std\), got 0.5"),
        ({"normalization": ([0.5, 0.5], 1)}, "one for each of the images' 3 channels; got 2"),
        ({"normalization": (0, 0)}, "expected a finite mean and a positive std"),
        ({"model": "resnet50"}, "expected a module or a function from images to scores, got str"),
        ({"model": lambda x: x}, r"expected the model to give a score for each class, shape \(3, K\)"),
        ({"model": lambda x: Small()(x.detach())}, "expected scores that can be differentiated by the images"),
        ({"model": lambda x: Small()(x).detach()}, "expected scores that can be differentiated by the images"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"model": Small(), "images": pixels(3), "labels": labels(3), "normalization": NONE} | options
    with pytest.raises((TypeError, ValueError), match=message):
        tcnn_probe.pgd(**given)
    if not set(options) & {"step", "steps", "seed", "first"}:
        with pytest.raises((TypeError, ValueError), match=message):
            tcnn_probe.fgsm(**given)


def test_what_rounding_leaves_beyond_the_range_is_cut_off() -> None:
    x, y = pixels(3), labels(3)
    beyond = x + torch.where(x == 0, -5e-5, torch.where(x == 1, 5e-5, 0.0))
    for attack in ATTACKS.values():
        assert torch.equal(attack(Small(), beyond, y, normalization=NONE), attack(Small(), x, y, normalization=NONE))


def test_a_timm_model_of_other_channels() -> None:
    import timm

    model = timm.create_model("resnet10t", in_chans=2, num_classes=5)
    with pytest.raises(ValueError, match=r"images' 2 channels; got 3: give normalization=\(mean, std\)"):
        tcnn_probe.fgsm(model, pixels(2, 2), labels(2))
