"""Findings of health: each sign in recordings made by hand, and in trainings that go wrong."""

import re
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import timm
import torch
import xarray as xr

import tcnn_probe
from tcnn_probe.command_line import main
from tcnn_probe.diagnosis import HealthLimits
from tcnn_probe.diagnosis.signs import SIGNS
from tests.tcnn_probe.contracts.helpers import recorded

# Epochs need neither start at 0 nor be consecutive.
EPOCHS = [2, 3, 5, 7, 11]
LAYERS = ["near", "far", "last"]
HEADS = 2
DIMS = ("epoch", "layer", "head")


def healthy() -> xr.Dataset:
    """Return a healthy recording of five epochs of three layers with two heads."""
    shape = len(EPOCHS), len(LAYERS), HEADS
    histogram = np.zeros((*shape, 20))
    histogram[..., 14:] = 1 / 6
    by_head = {
        "entropy": np.full(shape, 3.0),
        "max_logit": np.full(shape, 8.0),
        "sink": np.full(shape, 0.1),
        "query_diversity": np.full(shape, 0.9),
        "head_similarity": np.full(shape, 0.5),
        "output_norm": np.full(shape, 2.0),
        "output_rank": np.full(shape, 7.0),
    }
    by_layer = {
        "uniform_entropy": np.full(shape[:2], 4.0),
        "nonfinite_images": np.zeros(shape[:2]),
        "token_cosine": np.full(shape[:2], 0.2),
        "token_outliers": np.zeros(shape[:2]),
    }
    variables = {name: (DIMS, values) for name, values in by_head.items()}
    variables |= {name: (DIMS[:2], values) for name, values in by_layer.items()}
    variables["entropy_histogram"] = ((*DIMS, "entropy_bin"), histogram)
    coords = {"epoch": EPOCHS, "layer": LAYERS, "head": range(HEADS)}
    return xr.Dataset(variables, coords, {"along": "epoch"})


# Each sign has a variable, and a value of it that makes a head or a layer ill.
ILL = {
    "not finite": ("nonfinite_images", 1.0),
    # Values are just beyond the limits, so that a changed limit shows.
    "large logits": ("max_logit", 101.0),
    "logits jump": ("max_logit", 25.0),
    "entropy collapse": ("entropy", 0.3),
    "collapsed queries": ("entropy_histogram", 0.5),
    "silent head": ("output_norm", 0.001),
    "queries alike": ("query_diversity", 0.05),
    "rank collapse": ("output_rank", 1.4),
    "heads alike": ("head_similarity", 0.99),
    "tokens alike": ("token_cosine", 0.96),
    "sink": ("sink", 0.31),
    "outlier tokens": ("token_outliers", 0.006),
}


def make_ill(ds: xr.Dataset, sign: str, epochs: slice) -> xr.Dataset:
    """Let head 1 of the second layer, or that layer, show a sign in the given epochs."""
    variable, value = ILL[sign]
    if variable == "entropy_histogram":
        ds[variable][epochs, 1, 1] = 0
        ds[variable][epochs, 1, 1, 19] = 1 - value
        ds[variable][epochs, 1, 1, 0] = value
    elif ds[variable].ndim == 3:
        ds[variable][epochs, 1, 1] = value
    else:
        ds[variable][epochs, 1] = value
    return ds


def test_healthy_recording_has_no_findings() -> None:
    findings = tcnn_probe.health(healthy())
    assert len(findings) == 0
    assert repr(findings) == "0 alarms, 0 notices in 5 epochs"
    assert not findings.alarms


def test_every_sign_has_a_case() -> None:
    assert ILL.keys() == SIGNS.keys()


@pytest.mark.parametrize("sign", ILL)
def test_each_sign_is_found(sign: str) -> None:
    """A finding tells where, since when and how much, and it ends with its cause."""
    (finding,) = (
        finding
        for finding in tcnn_probe.health(make_ill(healthy(), sign, slice(3, None)))
        if finding.sign == sign
    )
    of_layer = sign in ("not finite", "tokens alike", "outlier tokens")
    assert finding.layer == "far"
    assert finding.heads == () if of_layer else (1,)
    lasts = sign != "logits jump"  # a jump is over at the next mark
    assert finding.since == 7
    assert finding.until == (None if lasts else 7)
    # Entropies are reported as shares of the largest possible one, 4.
    value = ILL[sign][1] / (4 if sign == "entropy collapse" else 1)
    assert finding.value == pytest.approx(value)
    assert finding.is_alarm == (sign not in ("sink", "outlier tokens"))
    assert "{" not in finding.usual
    # The source names a paper that describes the sign, and the origin of the limit.
    assert re.fullmatch(r"arXiv \d{4}\.\d{5}.*; limit: .+", finding.source)

    over = tcnn_probe.health(make_ill(healthy(), sign, slice(1, 3)))
    spell = next(finding for finding in over if finding.sign == sign)
    assert spell.since == 3
    assert spell.until == (5 if lasts else 3)


def test_all_heads_of_a_layer_are_silent() -> None:
    ds = healthy()
    ds.output_norm[3:, 1] = 0
    (finding,) = tcnn_probe.health(ds)
    assert (finding.sign, finding.layer, finding.heads) == ("silent head", "far", (0, 1))


def test_signs_that_a_pretrained_model_may_have_from_the_start() -> None:
    """One-hot heads, logits of 50, and heads or tokens
    that are alike raise no alarm unless they appear later.
    """
    ds = healthy()
    # These three signs are alarms at any time, the others only if they appear.
    for sign in ILL.keys() - {"not finite", "large logits", "silent head"}:
        ds = make_ill(ds, sign, slice(None))
    assert not tcnn_probe.health(ds).alarms
    # A whole layer of one-hot heads is an alarm from the start.
    ds.entropy[:, 0] = 0.3
    assert [alarm.layer for alarm in tcnn_probe.health(ds).alarms] == ["near"]


def test_alarms_come_first_then_lasting_signs() -> None:
    ds = healthy()
    for sign in ("sink", "heads alike", "large logits"):
        make_ill(ds, sign, slice(4, None))
    ds.nonfinite_images[1, 0] = 1
    assert [finding.sign for finding in tcnn_probe.health(ds)] == [
        "large logits",
        "logits jump",
        "heads alike",
        "not finite",
        "sink",
    ]


def test_limits_can_be_set() -> None:
    ds = make_ill(healthy(), "large logits", slice(3, None))
    signs = {f.sign for f in tcnn_probe.health(ds, max_logit=200, logit_jump=20)}
    assert not signs
    for name in vars(HealthLimits()):
        assert f"{name}: " in str(HealthLimits.__doc__)
    with pytest.raises(TypeError, match="max_logits"):
        tcnn_probe.health(ds, max_logits=200)
    with pytest.raises(TypeError, match="expected a recording's dataset"):
        tcnn_probe.health(ds.entropy)
    with pytest.raises(ValueError, match="expected a recording"):
        tcnn_probe.health(ds.drop_attrs())
    with pytest.raises(ValueError, match="got several"):
        tcnn_probe.health(ds.expand_dims("run"))
    with pytest.raises(ValueError, match="no layers"):
        tcnn_probe.health(xr.Dataset({"top1": ("epoch", [0.5])}, attrs=ds.attrs))


def test_table_of_findings() -> None:
    ds = make_ill(healthy(), "heads alike", slice(2, None))
    findings = tcnn_probe.health(ds)
    title, header, row, *notes = repr(findings).splitlines()
    assert title == "1 alarm, 0 notices in 5 epochs"
    assert header.split()[:4] == ["sign", "layer", "heads", "since"]
    assert row.split()[:6] == ["ALARM", "heads", "alike", "far", "1", "5"]
    assert notes[0].startswith("heads alike: the layer has only one head in effect")
    assert findings.to_dicts()[0]["layer"] == "far"
    # Names come from a file, and a notebook would interpret them as HTML.
    renamed = ds.assign_coords(layer=["<b>", "<i>", "x"])
    page = tcnn_probe.health(renamed)._repr_html_()
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def test_gated_layers_are_judged_by_their_content_part() -> None:
    """The whole attention, half of which is positional, does not collapse."""
    ds = healthy()
    ds["content_entropy"] = ds.entropy.where(ds.layer == "far")
    ds["uniform_content_entropy"] = ds.uniform_entropy.where(ds.layer == "far")
    ds.content_entropy[2:, 1, 0] = 0.1
    (finding,) = tcnn_probe.health(ds)
    assert finding.sign == "entropy collapse"
    assert finding.layer == "far"
    assert finding.heads == (0,)
    assert finding.value == pytest.approx(0.1 / 4)


def test_default_recordings_show_the_signs_they_can() -> None:
    names = ["entropy", "uniform_entropy", "max_logit", "nonfinite_images"]
    ds = make_ill(healthy(), "entropy collapse", slice(3, None))[names]
    findings = tcnn_probe.health(ds)
    assert [finding.sign for finding in findings] == ["entropy collapse"]
    assert findings.unseen["sink"] == ["sink", "query_diversity"]
    assert repr(findings).splitlines()[-1].endswith("record(..., health=True) keeps them")


def test_entropy_quantile_from_a_histogram() -> None:
    """Quantiles equal those of the entropies up to the width of a bin,
    also for empty bins and missing heads.
    """
    rng = np.random.default_rng(0)
    values = rng.beta(5, 2, (3, 2, 997))
    counts = [[np.histogram(x, 20, (0, 1))[0] / 997 for x in row] for row in values]
    histogram = np.array(counts)
    histogram[2, 1] = np.nan
    ds = xr.Dataset({"entropy_histogram": (("layer", "head", "entropy_bin"), histogram)})
    for q in (0, 0.05, 0.5, 0.99, 1):
        got = tcnn_probe.entropy_quantile(ds, q)
        assert got.dims == ("layer", "head")
        assert np.isnan(got[2, 1])
        exact = np.quantile(values, q, axis=-1)
        # Quantiles are read from bins of width 0.05.
        assert (abs(got - exact)[:2] <= 0.05 + 1e-9).all()
    with pytest.raises(ValueError, match="from 0 to 1"):
        tcnn_probe.entropy_quantile(ds, 5)
    with pytest.raises(ValueError, match="no entropy_histogram"):
        tcnn_probe.entropy_quantile(xr.Dataset(), 0.5)


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=(32, 48),
        patch_size=8,
        embed_dim=21,
        # The first block stays healthy, and must not be named.
        depth=2,
        num_heads=3,
    ).eval()


def record_illness(path: Path) -> None:
    """Record three epochs, where the queries and keys
    of a block are scaled up from the second on.
    """
    model = vit()
    x = torch.randn(5, 3, 32, 48)
    with tcnn_probe.record(model, path, health=True) as recorder, torch.no_grad():
        model(x)
        recorder.mark(epoch=0)
        # The first 2 x 21 rows are those of queries and keys.
        model.blocks[1].attn.qkv.weight[:42] *= 60
        model(x)
        with pytest.warns(RuntimeWarning, match="blocks.1.attn") as caught:
            recorder.mark(epoch=1)
        signs = {str(warning.message).split(" in ")[0] for warning in caught}
        assert "large logits" in signs
        assert all("blocks.0" not in str(warning.message) for warning in caught)
        model(x)
        recorder.mark(epoch=2)  # the warning is not repeated


@pytest.mark.study
def test_findings_of_a_training_are_warned_about_printed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.zarr"
    record_illness(path)
    ds = xr.open_zarr(path)
    alarms = tcnn_probe.health(ds).alarms
    assert {alarm.layer for alarm in alarms} == {"blocks.1.attn"}
    assert {alarm.since for alarm in alarms} == {1}

    # A script can use this status, as with grep and diff.
    assert main(["health", str(path)]) == 1
    assert capsys.readouterr().out == repr(tcnn_probe.health(ds)) + "\n"
    healthy_limits = ["--limit", "max_logit", "1e9", "--limit", "logit_floor", "1e9"]
    healthy_limits += ["--limit", "entropy", "0", "--limit", "collapsed", "2"]
    assert main(["health", str(path), *healthy_limits]) == 0
    assert main(["health", str(path), "--limit", "max_logits", "1"]) == 2
    assert "max_logits" in capsys.readouterr().err

    plt.close("all")  # close the axes of other tests, on which the plot would be drawn
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        axes = tcnn_probe.plot.health(ds)
    assert len(axes.patches) == len(tcnn_probe.health(ds))
    label = axes.get_yticklabels()[0].get_text()
    assert label == f"{alarms[0].sign}: blocks.1.attn ({', '.join(map(str, alarms[0].heads))})"
    # A bar starts half a mark before its epoch.
    assert axes.patches[0].get_x() == 0.5
    assert axes.get_xlim() == (-0.5, 2.5)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    plt.close("all")
    long_names = [f"encoder.vision_tower.transformer.{name}" for name in ds.layer.values]
    axes = tcnn_probe.plot.health(ds.assign_coords(layer=long_names), plt.figure().gca())
    label = axes.get_yticklabels()[0].get_text()
    assert label == f"{alarms[0].sign}: layer 1 ({', '.join(map(str, alarms[0].heads))})"
    plt.close("all")
    axes = tcnn_probe.plot.health(ds.isel(epoch=[0]))
    assert [text.get_text() for text in axes.texts] == ["nothing found"]
    plt.close("all")


def test_health_adds_its_probe_once() -> None:
    """The probe joins those that are named; without a layer there is nothing to warn about."""
    model = vit()
    x = torch.randn(5, 3, 32, 48)
    recorder = recorded(model, x, probes="health", health=True)
    assert "entropy" not in recorder.dataset
    assert "sink" in recorder.dataset
    recorder = recorded(model, x, probes=[], health=True)
    assert "sink" in recorder.dataset


@pytest.mark.study
@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_224",
        "deit3_small_patch16_224",
        "swin_tiny_patch4_window7_224",
    ],
)
def test_large_architectures_raise_no_alarm_at_initialisation(name: str) -> None:
    """Limits were set on small networks; these have the widths,
    numbers of heads and depths of common models.
    """
    torch.manual_seed(0)
    # Limits depend on width and depth, so images are small to save time.
    model = timm.create_model(name, img_size=(64, 96)).eval()
    with tcnn_probe.record(model, health=True) as recorder, torch.no_grad():
        for epoch in range(2):
            model(torch.randn(3, 3, 64, 96))
            recorder.mark(epoch=epoch)
    findings = tcnn_probe.health(recorder.dataset)
    assert not findings.unseen
    assert not findings.alarms
