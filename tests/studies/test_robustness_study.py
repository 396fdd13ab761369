"""Sentences of the study on results made by hand claim no more than the intervals support."""

from argparse import Namespace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import robustness as study
from common.controls import (
    CONTROLS,
    TRAINING_TITLES,
    control_models,
)
from common.models import small_resnet
from tcnn_model import GPSA, reparameterize
from tcnn_probe import evaluation

MODELS = [study.CNN, study.CONTROL, study.TCNN]
GROUPS = {"fog": "weather", "snow": "weather", "contrast": "digital"}


def answers(chances: list[float], *, harder: float = 0.4) -> xr.Dataset:
    """Return answers on 150 images, the same for all models;
    severity 5 lowers the accuracy by ``harder``.
    """
    random = np.random.default_rng(0)
    by_severity = np.array([0.0, harder])[:, None, None]
    draw = random.random((1, 3, 2, 1, 150))
    right = draw < np.array(chances)[:, None, None, None, None] - by_severity
    clean = random.random((1, 150)) < np.array(chances)[:, None]
    attacked = random.random((1, 2, 1, 150)) < np.array(chances)[:, None, None, None] - 0.2
    return xr.Dataset(
        {
            "correct": (("model", "corruption", "severity", "seed", "image"), right),
            "clean_correct": (("model", "image"), clean),
            "adversarial_correct": (("model", "attack", "seed", "image"), attacked),
            "accuracy": (("model", "corruption", "severity", "seed"), right.mean(-1)),
            "clean_accuracy": (("model",), clean.mean(-1)),
            "adversarial_accuracy": (("model", "attack", "seed"), attacked.mean(-1)),
        },
        {
            "model": MODELS,
            "corruption": list(GROUPS),
            "group": ("corruption", list(GROUPS.values())),
            "severity": [1, 5],
            "attack": ["fgsm", "pgd"],
        },
    )


def test_verdicts_follow_from_the_intervals() -> None:
    lines = study.verdicts(answers([0.6, 0.8, 0.8]), 10).splitlines()
    control = lines.index(
        f"T-CNN against {study.CONTROL!r}, difference in accuracy with 95 % interval over images:"
    )
    against_cnn = [line for line in lines[:control] if line.startswith("  ")]
    against_control = [line for line in lines[control + 1 :] if line.startswith("  ")]
    names = ["clean", "weather", "digital", "fgsm", "pgd"]
    assert [line.split()[0] for line in against_cnn] == names
    assert all(line.endswith("T-CNN ahead") for line in against_cnn)
    assert [line.split()[0] for line in against_control] == names
    assert all(line.endswith("not distinguishable") for line in against_control)
    behind = study.verdicts(answers([0.8, 0.8, 0.6]), 10)
    # Five conditions are compared with each of the two other models.
    assert behind.count("T-CNN behind") == 10
    assert "another training may differ" in behind
    assert "chance" not in behind
    # All conditions but the clean images are near chance.
    assert study.verdicts(answers([0.4, 0.4, 0.3]), 4).count("(both near chance)") == 8


def test_table_has_the_means() -> None:
    results = answers([0.6, 0.7, 0.8])
    lines = study.table(results).splitlines()
    assert lines[2].split() == ["clean", "weather", "digital", "fgsm", "pgd"]
    row = (
        next(line for line in lines if line.startswith(study.TCNN)).removeprefix(study.TCNN).split()
    )
    weather = results.correct.values[2, :2].mean()
    expected = [
        results.clean_correct.values[2].mean(),
        weather,
        results.correct.values[2, 2].mean(),
    ]
    # The table prints three decimals: the tolerance is half a unit of the last one, and a little
    # more.
    assert [float(cell) for cell in row[:3]] == pytest.approx(expected, abs=6e-4)


def test_the_check_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert study.check(answers([0.6, 0.8, 0.8]), 0.1)
    assert not study.check(answers([0.6, 0.8, 0.8], harder=-0.1), 0.1)
    assert "does NOT grow" in capsys.readouterr().out
    assert not study.check(answers([0.6, 0.8, 0.8]), 0.6)
    assert "did NOT learn" in capsys.readouterr().out
    single = answers([0.6, 0.8, 0.8]).isel(severity=[1])
    assert study.check(single, 0.1)  # compared with clean images


def test_the_second_control_has_the_finer_grid_and_no_attention() -> None:
    cnn = small_resnet()
    for norm in cnn.modules():
        if isinstance(norm, nn.BatchNorm2d):
            # timm's zeros at the end of a branch would hide what its layers compute.
            nn.init.ones_(norm.weight)
    alone = Namespace(unstrided=False, matched_start=False, seed=0)
    assert [*control_models(cnn, alone)] == ["control"]
    args = Namespace(unstrided=True, matched_start=True, seed=0)
    controls = control_models(cnn, args)
    assert [*controls] == [*CONTROLS] == [*TRAINING_TITLES]
    control, finer, matched = (model.eval() for model in controls.values())
    images = torch.randn(2, 1, 64, 48)
    papers = reparameterize(cnn).eval()
    scores = finer(images)
    near, far = ((model(images) - scores).norm() for model in (matched, papers))
    assert 0 < near < 0.3 * far
    # Every parameter of its attention can learn, unlike at the exact start.
    layer = matched.layer4[0].conv1
    assert isinstance(layer, GPSA)
    matched(images).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert control.layer4[0].conv1.stride == (2, 2)
    assert finer.layer4[0].conv1.stride == (1, 1)
    assert isinstance(finer.layer4[0].conv1, nn.Conv2d)


def test_imagenet_c_is_reported_and_drawn() -> None:
    """The mCE needs every corruption and severity;
    a model that is always wrong has an mCE above AlexNet's 100.
    """
    names = list(evaluation.CORRUPTIONS)
    groups = [evaluation.CORRUPTIONS[name].group for name in names]
    right = np.zeros((2, 15, 5, 1, 7), bool)
    # Four of seven images are right, which leaves three sevenths of the first model's errors.
    right[1, ..., ::2] = True
    dims = ("model", "corruption", "severity", "seed", "image")
    coords = {"model": ["CNN", "T-CNN"], "corruption": names, "severity": range(1, 6)}
    results = xr.Dataset(
        {"correct": (dims, right), "accuracy": (dims[:-1], right.mean(-1))},
        {**coords, "group": ("corruption", groups)},
    )
    shares = [1 / evaluation.ALEXNET_ERRORS[name] for name in names]
    report = study.imagenet_c_report(results)
    assert f"mCE {100 * np.mean(shares):.1f} (AlexNet: 100)" in report
    assert f"mCE {100 * 3 / 7 * np.mean(shares):.1f} (AlexNet: 100)" in report
    assert "mCE" not in study.imagenet_c_report(results.isel(severity=[0, 4]))
    results["correct"].loc[{"model": "CNN", "image": 0}] = True
    by_group, by_severity = study.draw_imagenet_c(results, "CNN").axes
    ticks = [len(axes.get_xticks()) for axes in (by_group, by_severity)]
    assert ticks == [4, 5]
