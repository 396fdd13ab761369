"""robustness() against loops by hand, and on models whose accuracy is known."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace
from tests.tcnn_probe.perturbations.classifiers import NORMALIZATION, Brightness, Small, labels, pixels, resnet

NONE = ((0,), (1,))
SOME = {"corruptions": ["contrast", "gaussian_noise", "pixelate"], "severities": (5, 2), "seeds": (3, 0)}
QUICK: dict[str, Any] = {"corruptions": "pixelate", "severities": 1, "attacks": "fgsm", "normalization": NONE}


def right(model: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, normalization: Any) -> list[bool]:
    """One image at a time."""
    mean, std = (torch.as_tensor(each, dtype=images.dtype).view(-1, 1, 1) for each in normalization)
    with torch.no_grad():
        scores = [model(((image - mean) / std)[None])[0] for image in images]
    return [max(range(len(s)), key=lambda k, s=s: float(s[k])) == int(y) for s, y in zip(scores, labels, strict=True)]


def test_by_hand() -> None:
    models, x, y = {"a": Small().eval(), "b": Small(seed=1).eval()}, pixels(7), labels(7)
    attack = {"epsilon": 0.05, "step": 0.02, "steps": 3}
    ds = tcnn_probe.robustness(models, x, y, **SOME, **attack, normalization=NORMALIZATION, batch_size=3)
    assert ds.corruption.values.tolist() == ["gaussian_noise", "contrast", "pixelate"]  # the published order
    assert ds.group.values.tolist() == ["noise", "digital", "digital"]
    assert ds.severity.values.tolist() == [5, 2]
    assert ds.seed.values.tolist() == [3, 0]
    assert ds.label.values.tolist() == y.tolist()
    assert dict(ds.sizes) == {"model": 2, "image": 7, "corruption": 3, "severity": 2, "seed": 2, "attack": 2}
    for name, model in models.items():
        of = ds.sel(model=name)
        assert of.clean_correct.values.tolist() == right(model, x, y, NORMALIZATION)
        for each in of.correct.stack(each=("corruption", "severity", "seed")).transpose("each", "image"):
            worse = tcnn_probe.corrupt(x, str(each.corruption.item()), int(each.severity), seed=int(each.seed))
            assert each.values.tolist() == right(model, worse, y, NORMALIZATION)
        for seed in (3, 0):
            worse = tcnn_probe.pgd(model, x, y, seed=seed, normalization=NORMALIZATION, **attack)
            pgd = of.adversarial_correct.sel(attack="pgd", seed=seed)
            assert pgd.values.tolist() == right(model, worse, y, NORMALIZATION)
            worse = tcnn_probe.fgsm(model, x, y, epsilon=0.05, normalization=NORMALIZATION)
            fgsm = of.adversarial_correct.sel(attack="fgsm", seed=seed)
            assert fgsm.values.tolist() == right(model, worse, y, NORMALIZATION)


def test_means_and_their_standard_errors() -> None:
    x, y = pixels(11), labels(11)
    ds = tcnn_probe.robustness({"a": Small(), "b": Small(seed=1)}, x, y, **SOME, normalization=NONE, epsilon=0.02)
    pairs = {"clean_correct": "clean_accuracy", "correct": "accuracy", "adversarial_correct": "adversarial_accuracy"}
    for each, mean in pairs.items():
        assert ds[each].dtype == bool
        share = ds[each].values.astype(float).sum(-1) / 11
        assert ds[mean].dims == ds[each].dims[:-1] == ds[f"{mean}_se"].dims
        np.testing.assert_allclose(ds[mean], share, atol=1e-15)
        np.testing.assert_allclose(ds[f"{mean}_se"], (share * (1 - share) / 11) ** 0.5, atol=1e-15)
    assert 0 < ds.clean_accuracy.min() < ds.clean_accuracy.max() < 1


def test_a_model_whose_accuracy_is_known() -> None:
    """Images of four brightnesses, which brightness raises by a tenth for each severity: a class, but not the last."""
    levels = torch.tensor([0.12, 0.32, 0.6, 0.9])
    x = levels.view(-1, 1, 1, 1).expand(4, 3, 11, 13)
    options: dict[str, Any] = {"attacks": "fgsm", "normalization": NONE, "epsilon": 0.02}
    ds = tcnn_probe.robustness(Brightness(), x, range(4), corruptions="brightness", **options)
    assert ds.model.values.tolist() == ["model"]
    assert ds.clean_accuracy.item() == 1
    assert ds.accuracy[0, 0, :, 0].values.tolist() == [1, 0.25, 0.25, 0.25, 0.25]
    assert ds.adversarial_accuracy.item() == 1
    near = tcnn_probe.robustness(Brightness(), x * 0 + 0.49, [1] * 4, corruptions=(), **options)
    assert near.clean_accuracy.item() == 1
    assert near.adversarial_accuracy.item() == 0


def sensitive(x: Tensor) -> Tensor:
    """Scores that any noise changes, of images 9 x 11."""
    weight = torch.randn(3 * 9 * 11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x.double() - 0.5).flatten(1) @ weight


def test_batches_do_not_matter() -> None:
    """Starting points of attacks are almost all there is to them here."""
    x, y = pixels(31, size=(9, 11)), labels(31)
    options = {**SOME, "normalization": NONE, "epsilon": 0.9, "step": 1e-6, "steps": 1}
    whole = tcnn_probe.robustness(sensitive, x, y, **options)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)

    def once() -> Iterator[list[Any]]:
        yield from ([x[:3].numpy(), y[:3].tolist()], [x[3:], y[3:]])

    for given in (loader, once()):
        xr.testing.assert_equal(tcnn_probe.robustness(sensitive, given, **options), whole)
    xr.testing.assert_equal(tcnn_probe.robustness(sensitive, x, y, batch_size=3, **options), whole)


def test_each_model_is_attacked_itself() -> None:
    """What harms one does nothing to the other; each knows half of the labels."""
    x = pixels(31, size=(9, 11))
    models = {"a": sensitive, "b": lambda x: sensitive(x.flip(3))}
    y = torch.where(torch.arange(31) < 16, *(model(x).argmax(1) for model in models.values()))
    options: dict[str, Any] = {"corruptions": (), "normalization": NONE, "epsilon": 0.01}
    both = tcnn_probe.robustness(models, x, y, **options)
    for name, model in models.items():
        alone = tcnn_probe.robustness(model, x, y, **options)
        assert (both.adversarial_correct.sel(model=name) == alone.adversarial_correct[0]).all()
        assert (alone.adversarial_accuracy < alone.clean_accuracy - 0.2).all()


def test_seeds() -> None:
    """Each is its own measurement, whatever the others are; what is not random is the same for all."""
    x, y = pixels(31, size=(9, 11)), labels(31)
    options = {"corruptions": ["impulse_noise", "contrast"], "severities": 4, "epsilon": 0.9, "step": 1e-6, "steps": 1}
    both = tcnn_probe.robustness(sensitive, x, y, seeds=(5, 1), normalization=NONE, **options)
    for seed in (5, 1):
        alone = tcnn_probe.robustness(sensitive, x, y, seeds=seed, normalization=NONE, **options)
        xr.testing.assert_equal(both.sel(seed=[seed]), alone)
    same = both.correct.sel(seed=5) == both.correct.sel(seed=1)
    assert same.all("image").values.tolist() == [[[False], [True]]]
    same = both.adversarial_correct.sel(seed=5) == both.adversarial_correct.sel(seed=1)
    assert same.all("image").values.tolist() == [[True, False]]


def test_each_batch_is_corrupted_once_for_all_models() -> None:
    seen: dict[str, list[Tensor]] = {"a": [], "b": []}

    def spy(name: str) -> Callable[[Tensor], Tensor]:
        def model(x: Tensor) -> Tensor:
            seen[name].append(x)
            return torch.zeros(len(x), 5)

        return model

    tcnn_probe.robustness(
        {name: spy(name) for name in seen}, pixels(5), labels(5), **SOME, attacks=(), normalization=NONE, batch_size=3
    )
    assert len(seen["a"]) == 2 * (1 + 2 * (2 + 1 + 1))
    assert all(torch.equal(a, b) for a, b in zip(seen["a"], seen["b"], strict=True))


def test_functions_and_normalization_by_model() -> None:
    model, x, y = resnet().eval(), pixels(5, size=(32, 37)), labels(5)
    mean, std = ([*model.pretrained_cfg[key]] for key in ("mean", "std"))
    models = {"own": model, "given": model, "function": lambda x: model(x)}
    options = {"corruptions": "contrast", "severities": 1, "epsilon": 0.02}
    both = {"given": (mean, std), "function": (mean, std)}
    ds = tcnn_probe.robustness(models, x, y, normalization=both, **options)
    for name in ("given", "function"):
        xr.testing.assert_equal(ds.sel(model=name, drop=True), ds.sel(model="own", drop=True))
    assert json.loads(ds.attrs["models"]) == {"own": "ResNet", "given": "ResNet", "function": "<lambda>"}
    assert json.loads(ds.attrs["normalization"])["own"] == [mean, std]


def test_classes_that_count() -> None:
    """The best of those; an attack on the others would do nothing."""
    model, x, y = Small(), pixels(13), labels(13) % 2 * 3
    ds = tcnn_probe.robustness(model, x, y, classes=(3, 0), normalization=NONE, corruptions=(), epsilon=0.02)

    def two(x: Tensor) -> Tensor:
        return model(x)[:, [0, 3]]

    model.eval()
    alone = tcnn_probe.robustness(two, x, y // 3, normalization=NONE, corruptions=(), epsilon=0.02)
    for name in ("clean_correct", "adversarial_correct"):
        assert (ds[name] == alone[name]).all()
    assert ds.attrs["classes"] == "[3, 0]"


def test_only_what_is_asked_for() -> None:
    clean = tcnn_probe.robustness(Small(), pixels(2), labels(2), corruptions=(), attacks=(), normalization=NONE)
    assert set(clean.variables) == {"model", "image", "label", "clean_correct", "clean_accuracy", "clean_accuracy_se"}
    attacked = tcnn_probe.robustness(Small(), pixels(2), labels(2), corruptions=(), normalization=NONE)
    assert "accuracy" not in attacked
    assert attacked.attack.values.tolist() == ["fgsm", "pgd"]
    options = {"corruptions": "blur", "severities": 1, "attacks": (), "normalization": NONE}
    blurred = tcnn_probe.robustness(Small(), pixels(1), [0], **options)
    assert blurred.corruption.values.tolist() == ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur"]
    assert "adversarial_accuracy" not in blurred


def test_all_fifteen_by_default() -> None:
    ds = tcnn_probe.robustness(Small(), pixels(1), [0], attacks=(), severities=5, normalization=NONE)
    assert ds.corruption.values.tolist() == list(tcnn_probe.CORRUPTIONS)
    groups = ds.accuracy.groupby("group").mean(["corruption", "severity", "seed"])
    assert groups.sizes == {"model": 1, "group": 4}


def test_frost_of_ones_own(tmp_path: Path) -> None:
    """Read once, as corrupt() reads it."""
    picture = np.full((31, 37, 3), 255, np.uint8)
    Image.fromarray(picture).save(tmp_path / "white.png")
    x = pixels(3, size=(11, 13)) * 0.2

    def model(x: Tensor) -> Tensor:
        return torch.stack([x.mean((1, 2, 3)), torch.full((len(x),), 0.45)], 1)

    options: dict[str, Any] = {"corruptions": "frost", "severities": 2, "attacks": (), "normalization": NONE}
    for frost in (tmp_path, picture, [picture]):
        ds = tcnn_probe.robustness(model, x, [0] * 3, frost=frost, **options)
        assert ds.accuracy.item() == 1
        assert ds.attrs["frost"] == "given"
    black = tcnn_probe.robustness(model, x, [0] * 3, frost=picture * 0, **options)
    assert black.accuracy.item() == 0
    with pytest.raises(TypeError, match="expected for frost a folder"):
        tcnn_probe.robustness(model, x, [0] * 3, frost=3, **options)


def test_ties_and_nan() -> None:
    x, y = pixels(4), torch.tensor([0, 0, 1, 2])
    ties = tcnn_probe.robustness(lambda x: torch.zeros(len(x), 3), x, y, corruptions=(), attacks=(), normalization=NONE)
    assert ties.clean_correct[0].values.tolist() == [True, True, False, False]

    def broken(x: Tensor) -> Tensor:
        scores = torch.eye(3)[[0, 0, 1, 2]]
        scores[1, 2] = scores[2, 1] = torch.nan  # torch takes NaN for the highest
        return scores

    with pytest.warns(RuntimeWarning, match="scores with NaN, counted as wrong: {'bad': 2}"):
        ds = tcnn_probe.robustness({"bad": broken}, x, y, corruptions=(), attacks=(), normalization=NONE)
    assert ds.clean_correct[0].values.tolist() == [True, False, False, True]
    assert json.loads(ds.attrs["nan_scores"]) == {"bad": 2}
    assert "NaN" in ds.attrs["prediction"]


def test_to_zarr_as_it_is(tmp_path: Path) -> None:
    one = tcnn_probe.Variant("mine", [(pixels(3), labels(3))], source="here")
    ds = tcnn_probe.robustness(Small(), pixels(5), labels(5), **SOME, variants=one, normalization=NORMALIZATION)
    ds.to_zarr(tmp_path / "robustness.zarr", consolidated=False)
    again = xr.open_zarr(tmp_path / "robustness.zarr", consolidated=False).load()
    xr.testing.assert_identical(again, ds)
    assert again.attrs["epsilon"] == 1 / 255
    assert {"steps", "step", "random_start", "torch_version", "created_at", "frost"} <= set(again.attrs)
    assert again.accuracy_se.attrs["definition"] == "sqrt(p (1 - p) / n), n images"
    assert all(again[name].attrs["long_name"] for name in again.data_vars)


def test_paired_differences() -> None:
    models = {"a": Small(), "b": Small(seed=1)}
    ds = tcnn_probe.robustness(models, pixels(17), labels(17), **SOME, attacks=(), normalization=NONE)
    gain = ds.correct.sel(model="b").astype(float) - ds.correct.sel(model="a").astype(float)
    interval = tcnn_probe.bootstrap_interval(gain.mean(["severity", "seed"]), resamples=200)
    assert interval.sizes == {"corruption": 3, "bound": 2}
    assert (interval.sel(bound="low") <= gain.mean(["severity", "seed", "image"])).all()


def test_variants() -> None:
    """Of their own classes, and with several right answers; each as if it were the images."""
    models, x, y = {"a": Small().eval(), "b": Small(seed=1).eval()}, pixels(9), labels(9)
    any_of = torch.nn.functional.one_hot(y, 5).bool() | torch.nn.functional.one_hot((y + 1) % 5, 5).bool()
    few = y % 2 * 3
    variants = [
        tcnn_probe.Variant("plain", DataLoader(TensorDataset(x, y), batch_size=4)),
        tcnn_probe.Variant("several", [(x[:5], any_of[:5]), (x[5:], any_of[5:])]),
        tcnn_probe.Variant("few", [(x[:7], few[:7])], classes=(0, 3)),
    ]
    options: dict[str, Any] = {"corruptions": (), "attacks": (), "normalization": NORMALIZATION}
    ds = tcnn_probe.robustness(models, x[:2], y[:2], variants=variants, **options)
    assert ds.variant.values.tolist() == ["plain", "several", "few"]
    assert ds.variant_images.values.tolist() == [9, 9, 7]
    plain = tcnn_probe.robustness(models, x, y, **options).clean_accuracy
    masked = tcnn_probe.robustness(models, x[:7], few[:7], classes=[0, 3], **options).clean_accuracy
    other = tcnn_probe.robustness(models, x, (y + 1) % 5, **options).clean_accuracy
    np.testing.assert_allclose(ds.variant_accuracy, np.stack([plain, plain + other, masked], 1), atol=1e-15)
    p = ds.variant_accuracy.values
    np.testing.assert_allclose(ds.variant_accuracy_se, np.sqrt(p * (1 - p) / [9, 9, 7]), atol=1e-15)


@pytest.mark.filterwarnings("ignore:.*what is measured on it is not what is published:UserWarning")
def test_variants_on_disk(tmp_path: Path) -> None:
    from tests.tcnn_probe.perturbations.folders import HAMMERHEAD, SHARK, by_class

    by_class(tmp_path, [SHARK, HAMMERHEAD])  # levels 10, 20 and 30, 40
    variant = tcnn_probe.imagenet_variant("imagenet-r", tmp_path, size=(5, 7), batch_size=3)

    def model(x: Tensor) -> Tensor:
        """A class that is none of ImageNet-R's first, then class 2 of dark images, 4 of others."""
        scores = torch.zeros(len(x), 1000)
        scores[:, 0] = 9
        scores[range(len(x)), torch.where(x.mean((1, 2, 3)) * 255 < 25, 2, 4)] = 1
        return scores

    ds = tcnn_probe.robustness(model, pixels(1), [0], variants=variant, corruptions=(), attacks=(), normalization=NONE)
    assert ds.variant_accuracy.item() == 1


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("broken_at", [None, 1, 3, 6])
def test_models_are_as_they_were(broken_at: int | None) -> None:
    model, calls = Small().train(), 0
    model.norm.eval()
    model.first.weight.requires_grad_(False)
    model.head.weight.grad = torch.full_like(model.head.weight, 0.5)

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == broken_at:
            raise BrokenError

    model.drop.register_forward_hook(fail)
    x, given = pixels(3), pixels(3)
    before, random, numpys = Trace(model), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    names = {"a": model, "b": model}
    if broken_at:
        with pytest.raises(BrokenError):
            tcnn_probe.robustness(names, x, labels(3), **QUICK)
    else:
        tcnn_probe.robustness(names, x, labels(3), **QUICK)
    assert Trace(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert (np.random.get_state()[1] == numpys).all()  # noqa: NPY002
    assert torch.equal(x, given)
    assert (model.head.weight.grad == 0.5).all()
    assert all(p.grad is None for n, p in model.named_parameters() if n != "head.weight")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whatever_mode_the_caller_is_in(mode: Any) -> None:
    model = Small()
    outside = tcnn_probe.robustness(model, pixels(3), labels(3), **SOME, normalization=NORMALIZATION)
    with mode():
        inside = tcnn_probe.robustness(model, pixels(3), labels(3), **SOME, normalization=NORMALIZATION)
    xr.testing.assert_equal(inside, outside)


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    for progress, shown in ((True, True), (False, False), (None, False)):
        tcnn_probe.robustness(Small(), pixels(3), labels(3), **QUICK, batch_size=2, progress=progress)
        written = capsys.readouterr().err
        assert ("robustness" in written) == shown
        assert ("/6 [" in written) == shown  # two batches: as they are, pixelated, attacked


def many(count: int) -> nn.Module:
    return Small(classes=count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": None}, "expected labels of the images, or an iterable of .* batches; got no labels"),
        ({"labels": [0, 1]}, r"expected 3 labels, one for each image, got shape \(2,\)"),
        (
            {"models": {"a": many(7), "b": many(4)}, "labels": [0, 1, 4]},
            "from 0 to 3, the model 'b' having 4 classes; got 4",
        ),
        ({"models": {}}, "expected one model at least, got none"),
        ({"models": [Small()]}, "expected a module or a function from images to scores, or a mapping .* got list"),
        ({"models": Small}, "expected a module or a function .* got type"),
        ({"models": {3: Small()}}, "expected names of models, got 3"),
        ({"images": pixels(3) * 2}, r"in \[0, 1\], before normalisation; got values from 0 to 2"),
        ({"images": 3}, "expected images as a tensor or an array .* got int"),
        ({"images": [(pixels(3), labels(3))]}, "expected no labels beside an iterable"),
        ({"images": [pixels(3)], "labels": None}, r"expected batches \(images, labels\), got Tensor"),
        ({"images": [], "labels": None}, r"expected batches \(images, labels\), got none"),
        ({"images": [(pixels(3), torch.ones(3, 5).bool())], "labels": None}, "only variants have several"),
        ({"images": [(pixels(3), torch.ones(2, 5).bool())], "labels": None}, r"\(B, K\); got \(2, 5\)"),
        ({"corruptions": "gausian_noise"}, "got 'gausian_noise', did you mean 'gaussian_noise'"),
        ({"corruptions": ["fog", 3]}, r"or groups \(noise, blur, weather, digital\); got 3"),
        ({"severities": 6}, "expected integers from 1 to 5 for severities, got 6"),
        ({"severities": (1, 2.5)}, "for severities, got 2.5"),
        ({"severities": True}, "for severities, got True"),
        ({"severities": ()}, "for severities, got none"),
        ({"severities": (2, 3, 2)}, "expected distinct severities, got 2 twice"),
        ({"seeds": -1}, "expected integers from 0 for seeds, got -1"),
        ({"attacks": "cw"}, "expected attacks among fgsm, pgd; got 'cw'"),
        ({"epsilon": 8}, "did you mean 8 / 255"),
        ({"epsilon": -1}, "expected a positive number for epsilon"),
        ({"batch_size": 0}, "expected a positive integer for batch_size"),
        ({"normalization": None}, "give normalization="),
        ({"normalization": {"b": NONE}}, "expected normalization by the models' names, model; got 'b'"),
        ({"classes": [0, 1]}, "expected labels among the classes that predictions are taken of, got 3"),
        ({"classes": [0, 1, 3, 9]}, "of classes=: expected them from 0 to 4, the model having 5 classes; got 9"),
        (
            {"variants": tcnn_probe.Variant("a", [(pixels(1), labels(1))], classes=(0, 988))},
            "of a variant's classes, .* from 0 to 4, the model having 5 classes; got 988",
        ),
        ({"classes": "ab"}, "expected indices of classes, got 'ab'"),
        ({"classes": [0.5]}, "expected indices of classes, got"),
        ({"classes": []}, "expected indices of classes, got"),
        ({"variants": "imagenet-a"}, "expected variants, as imagenet_variant gives them, got str"),
        ({"variants": [tcnn_probe.Variant("a", [])] * 2}, "expected distinct variants, got 'a' twice"),
        ({"variants": tcnn_probe.Variant("a", [])}, "expected images of the variant 'a', got none"),
        (
            {"variants": tcnn_probe.Variant("a", [(pixels(1), torch.ones(1, 9).bool())])},
            r"expected labels \(B, 5\), the classes of 'model', got \(B, 9\)",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    given = {"models": Small().train(), "images": pixels(3), "labels": torch.tensor([0, 1, 3])} | QUICK | options
    with pytest.raises((TypeError, ValueError), match=message):
        tcnn_probe.robustness(**given)
    if isinstance(given["models"], nn.Module):
        assert given["models"].training
