"""Loggers of the last mark: the recorded numbers, alarms, and maps over their images."""

import sys
from collections.abc import Iterator
from io import BytesIO
from types import ModuleType
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images, vit


class Writer:
    """TensorBoard's writer, reduced to the method that is called for each value."""

    def __init__(self) -> None:
        self.logged: dict[str, tuple[Any, int]] = {}

    def add_scalar(self, tag: str, value: Any, global_step: int) -> None:
        self.logged[tag] = value, global_step

    add_text = add_figure = add_scalar


class Run:
    """A run of wandb, reduced to the methods that are called."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.axes: dict[str, str | None] = {}
        self.alerts: list[tuple[str, str]] = []

    def define_metric(
        self, name: str, step_metric: str | None = None, hidden: bool | None = None
    ) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, Any]) -> None:
        self.logged = values

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run, with a fake wandb module whose ``Image`` returns the figure itself."""
    module = ModuleType("wandb")
    module.Image = lambda figure: figure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return Run()


def marks() -> Iterator[tcnn_probe.Recorder]:
    """Mark a healthy ViT, then one with an ill first block,
    and twice one with an ill second block.
    """
    model = vit()
    blocks = [block.attn.qkv.weight for block in model.blocks]
    healthy = [weight.clone() for weight in blocks]
    with (
        tcnn_probe.record(model, images=[0, 2], health=True) as recorder,
        torch.no_grad(),
    ):
        for epoch, factors in {3: (1, 1), 5: (9, 1), 7: (1, 9), 8: (1, 9)}.items():
            for weight, before, factor in zip(blocks, healthy, factors, strict=True):
                weight.copy_(before)
                # The first 24 of 36 rows are queries and keys, so logits grow by a factor of 81.
                weight[:24] *= factor
            model(images(3, seed=epoch))
            # Alarms are also warnings, which would be errors here.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("warnings.warn", lambda *_, **__: None)
                recorder.mark(epoch=epoch, top1=0.5)
            yield recorder


PICTURES = images(3, seed=1)[[0, 2], :1]


def check_picture(figure: Figure, recorder: tcnn_probe.Recorder, name: str) -> None:
    """Draw a figure and compare its maps and image
    with the recording of the given "NAME/GRID/image N".
    """
    figure.savefig(BytesIO())
    *panels, _ = figure.axes
    variable, grid, image = name.split("/")
    number = int(image.removeprefix("image "))
    recorded = recorder.tree[f"maps/{grid}"].dataset[variable]
    maps = recorded.isel(epoch=-1).sel(image=number).values.reshape(-1, 5, 7)
    picture = PICTURES[0 if number == 0 else 1, 0].double()
    picture = (picture - picture.min()) / (picture.max() - picture.min())
    for panel, expected in zip(panels, maps, strict=True):
        below, above = panel.images
        # The picture is drawn from float32 and scaled here in float64.
        np.testing.assert_allclose(below.get_array(), picture, atol=1e-6)
        np.testing.assert_array_equal(above.get_array(), expected)


@pytest.mark.study
def test_log_to_tensorboard() -> None:
    writer = Writer()
    *_, recorder = marks()
    tcnn_probe.log_to_tensorboard(writer, recorder, PICTURES)
    assert {step for _, step in writer.logged.values()} == {8}
    ds = recorder.dataset.sel(epoch=8)
    for layer in ("blocks.0.attn", "blocks.1.attn"):
        entropy = ds.entropy.sel(layer=layer).mean().item()
        assert writer.logged[f"entropy/{layer}"][0] == entropy
    alarms = tcnn_probe.health(recorder.dataset).alarms
    lasting = [alarm for alarm in alarms if alarm.until is None]
    # The alarm of the first block has ended before the last mark.
    assert 0 < len(lasting) < len(alarms)
    assert writer.logged["health/alarms"][0] == len(lasting)
    assert writer.logged["health/findings"][0] == "\n\n".join(map(str, lasting))
    assert "top1" not in writer.logged
    pictures = {tag[5:] for tag in writer.logged if tag.startswith("maps/")}
    names = ("attention_received", "class_attention")
    assert pictures == {f"{name}/3x5x7/image {i}" for name in names for i in (0, 2)}
    for name in pictures:
        check_picture(writer.logged[f"maps/{name}"][0], recorder, name)


@pytest.mark.study
def test_log_to_wandb(wandb: Run) -> None:
    for recorder in marks():
        alarms = tcnn_probe.health(recorder.dataset).alarms
        begun = [alarm for alarm in alarms if alarm.since == recorder.epochs[-1]]
        wandb.alerts.clear()
        tcnn_probe.log_to_wandb(wandb, recorder)
        assert wandb.alerts == [(f"{a.sign}: {a.layer}", str(a)) for a in begun]
        # Alarms of the last mark began before it.
        assert bool(begun) == (recorder.epochs[-1] in (5, 7))
    tcnn_probe.log_to_wandb(wandb, recorder, PICTURES, heads=True)
    assert wandb.logged["recording/epoch"] == 8
    assert wandb.axes["recording/epoch"] is None
    sections = {name.split("/")[0] for name in wandb.logged} - {"recording"}
    assert {name for name, axis in wandb.axes.items() if axis} == {
        f"{section}/*" for section in sections
    }
    assert {*wandb.axes.values()} == {None, "recording/epoch"}
    recorded = recorder.dataset.sel(epoch=8, layer="blocks.1.attn")
    logged = [wandb.logged[f"max_logit/blocks.1.attn/{head}"] for head in range(3)]
    np.testing.assert_array_equal(logged, recorded.max_logit)
    lasting = [alarm for alarm in alarms if alarm.until is None]
    assert wandb.logged["health/alarms"] == len(lasting) < len(alarms)
    figures = {name for name in wandb.logged if name.startswith("maps/")}
    assert len(figures) == 4
    for name in figures:
        check_picture(wandb.logged[name], recorder, name[5:])


def test_wandb_before_anybody_imports_pyplot(wandb: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's Image looks for ``matplotlib.pyplot`` without importing it."""
    recorder = next(marks())
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    monkeypatch.delattr(mpl, "pyplot", raising=False)
    pyplots = []
    monkeypatch.setattr(sys.modules["wandb"], "Image", lambda _: pyplots.append(mpl.pyplot))
    tcnn_probe.log_to_wandb(wandb, recorder, PICTURES)
    assert len(pyplots) == 4


def test_logging_without_maps_layers_or_images(wandb: Run) -> None:
    model = vit()
    writer = Writer()
    with tcnn_probe.record(model, probes=[]) as recorder:
        recorder.mark(epoch=0, top1=0.5)
    tcnn_probe.log_to_tensorboard(writer, recorder, images(1))
    assert writer.logged == {"health/alarms": (0, 0)}
    tcnn_probe.log_to_wandb(wandb, recorder)
    assert wandb.logged == {"health/alarms": 0, "recording/epoch": 0}
    with tcnn_probe.record(model, images=2) as recorder, torch.no_grad():
        with pytest.raises(RuntimeError, match="nothing"):
            tcnn_probe.log_to_tensorboard(writer, recorder)
        model(images(3))
        recorder.mark(epoch=0)
    with pytest.raises(ValueError, match="the 2 images whose maps are recorded, got 1"):
        tcnn_probe.log_to_tensorboard(writer, recorder, images(1, 0)[:, :1])
