"""Verdicts of the study of disagreement on predictions made by hand."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from PIL import Image
from torchvision.transforms.functional import normalize

import disagreement
from common.output import ended
from disagreement import CNN, ORDER, START, TCNN


def decisions() -> xr.Dataset:
    """Return predictions of 2 trainings of 3 models on 7 images,
    with 3 corruptions of 2 groups at 2 severities.
    """
    random = np.random.default_rng(0)
    coords = {
        "model": np.array([CNN, TCNN, ORDER], dtype=object),
        "corruption": ["fog", "blur", "snow"],
    }
    coords |= {
        "group": ("corruption", ["weather", "blur", "weather"]),
        "severity": [1, 5],
        "seed": [0],
    }
    ds = xr.Dataset(coords=coords | {"label": ("image", np.arange(7) % 3)})
    ds["clean_prediction"] = (
        ("training", "model", "image"),
        random.integers(0, 3, (2, 3, 7)),
    )
    dims = ("training", "model", "corruption", "severity", "seed", "image")
    ds["prediction"] = dims, random.integers(0, 3, (2, 3, 3, 2, 1, 7))
    return ds


def test_rates_of_disagreement_by_hand() -> None:
    results = disagreement.with_other_start(decisions())
    assert results.model.values.tolist() == [CNN, TCNN, ORDER, START]
    rates = disagreement.differing(results, "group")
    assert rates.dims == ("training", "model", "group", "image")
    assert rates.group.values.tolist() == ["clean", "weather", "blur"]
    clean = results.clean_prediction.values
    corrupted = results.prediction.values
    for nth, model, image in np.ndindex(2, 3, 7):
        # The "other start" is the CNN of the other training.
        at = {TCNN: (nth, 1), ORDER: (nth, 2), START: (1 - nth, 0)}[str(rates.model.values[model])]
        cells = [
            (corrupted[(*at, c, s, 0, image)], corrupted[nth, 0, c, s, 0, image])
            for c in (0, 2)
            for s in (0, 1)
        ]
        expected = [
            clean[(*at, image)] != clean[nth, 0, image],
            np.mean([a != b for a, b in cells]),
        ]
        np.testing.assert_allclose(rates[nth, model, :2, image], expected)


def test_verdicts_follow_the_intervals() -> None:
    shares = {TCNN: [1.0, 0.0, 0.0], ORDER: [0.0, 1.0, 0.0], START: [0.5, 0.5, 0.5]}
    values = np.broadcast_to(np.array([*shares.values()])[None, :, :, None], (2, 3, 3, 7))
    coords = {"model": np.array([*shares], dtype=object)}
    rates = {
        by: xr.DataArray(
            values, coords | {by: ["clean", *names]}, ("training", "model", by, "image")
        )
        for by, names in {
            "group": ["noise", "blur"],
            "corruption": ["shot_noise", "defocus_blur"],
        }.items()
    }
    lines = disagreement.verdicts(rates).splitlines()
    ends = ["more often", "less often", "not distinguishable"]
    for label, end in zip(["clean ", "noise", "blur"], ends, strict=True):
        assert next(line for line in lines if line.startswith(f"  {label}")).endswith(end)
    # The line appears once for each yardstick.
    assert sum(line.startswith("  clean ") for line in lines) == 2


def test_models_of_the_user_are_compared_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model has its own weights and normalisation;
    a distilled one averages its two classifiers.
    """
    create = timm.create_model
    names = ["deit_tiny_distilled_patch16_224", "test_vit"]
    narrow = {"embed_dim": 6, "depth": 1, "num_heads": 2}
    monkeypatch.setattr(
        timm,
        "create_model",
        lambda name, **options: create(name, **{**options, **narrow}),
    )
    torch.manual_seed(0)
    models = [timm.create_model(name, img_size=32, num_classes=2).eval() for name in names]
    for model, name in zip(models, names, strict=True):
        # Large random weights make the models tell images apart.
        for part, parameter in model.named_parameters():
            if "norm" not in part:
                torch.nn.init.normal_(parameter, std=float(part.endswith("weight")))
        torch.save(model.state_dict(), tmp_path / f"{name}.pth")
    random = np.random.default_rng(0)
    pixels = (
        # The noise differs in brightness between images, which even untrained models tell apart.
        random.random((2, 2, 8, 37, 41, 3)) * random.integers(0, 255, (2, 2, 8, 1, 1, 3))
    ).astype(np.uint8)
    for split, label, n in np.ndindex(2, 2, 8):
        path = tmp_path / "images" / ("train", "val")[split] / str(label) / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[split, label, n]).save(path)
    weights = [str(tmp_path / f"{name}.pth") for name in names]
    options = f"--data {tmp_path / 'images'} --img-size 32 --out {tmp_path / 'out'}"
    options += " --severities 3 --corruptions contrast --device cpu --workers 0"
    models_options = ["--model", *names, "--pretrained", *weights]
    assert ended(disagreement.main, [*models_options, *options.split()]) == 0
    results = xr.open_zarr(tmp_path / "out" / "disagreement.zarr")
    # All images are resized and cropped for the first model.
    plain = {
        "mean": (0, 0, 0),
        "std": (1, 1, 1),
        "interpolation": "bicubic",
        "crop_pct": 0.9,
    }
    transform = timm.data.create_transform((3, 32, 32), **plain)
    images = torch.stack(
        [transform(Image.fromarray(picture)) for picture in pixels[1].reshape(16, 37, 41, 3)]
    )
    expected = []
    for model in models:
        x = normalize(images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
        with torch.no_grad():
            tokens = model.forward_features(x)
            classifiers = (
                [model.head(tokens[:, 0]), model.head_dist(tokens[:, 1])]
                if hasattr(model, "head_dist")
                else None
            )
            expected.append((sum(classifiers) / 2 if classifiers else model(x)).argmax(1).numpy())
    assert results.model.values.tolist() == names
    np.testing.assert_array_equal(results.clean_prediction, expected)
    differ = np.mean(expected[0] != expected[1])
    # Models that agree on all images, or on none, would not show which predictions are compared.
    assert 0 < differ < 1
    (line,) = (
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(" and ".join(names))
    )
    assert f" {differ:.3f} [" in line
