"""An exception anywhere: it passes through, nothing is left behind, and who catches it can go on."""

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.storage.objects import Objects
from tests.tcnn_probe.contracts.helpers import Trace, clean, entropies, global_state, images, recorded, vit

ERRORS = [ValueError, KeyboardInterrupt]


class Bomb:
    """A hook, or a module's forward, that raises while it is armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.armed = error, False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.armed:
            raise self.error("boom")


def before_model(model: nn.Module, bomb: Bomb) -> None:
    model.register_forward_pre_hook(bomb)


def after_model(model: nn.Module, bomb: Bomb) -> None:
    model.register_forward_hook(bomb)


def before_attention(model: nn.Module, bomb: Bomb) -> None:
    model.blocks[1].attn.register_forward_pre_hook(bomb)


def in_attention(model: nn.Module, bomb: Bomb) -> None:
    model.blocks[1].attn.fused_attn = False
    model.blocks[1].attn.attn_drop.register_forward_hook(bomb)


def after_attention(model: nn.Module, bomb: Bomb) -> None:
    model.blocks[1].attn.register_forward_hook(bomb)


def in_the_head(model: nn.Module, bomb: Bomb) -> None:
    model.head.register_forward_pre_hook(bomb)


PLACES = [before_model, after_model, before_attention, in_attention, after_attention, in_the_head]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_in_a_forward_and_out_of_the_with(place: Callable[..., None], error: type[BaseException]) -> None:
    model, bomb = vit(), Bomb(error)
    place(model, bomb)
    before = Trace(model)
    with pytest.raises(error, match="boom"), tcnn_probe.record(model) as recorder:  # noqa: PT012
        model(images())
        recorder.mark(epoch=0)
        bomb.armed = True
        model(images())
    assert before == Trace(model)
    assert clean()
    assert recorder.epochs == (0,)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", PLACES)
def test_caught_inside_the_with(place: Callable[..., None], error: type[BaseException]) -> None:
    model, bomb, other = vit(), Bomb(error), vit(seed=1)
    place(model, bomb)
    expected = entropies(model, images(5, seed=1))
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        for epoch in range(2):
            bomb.armed = True
            with pytest.raises(error, match="boom"):
                model(images(7, seed=2))
            bomb.armed = False
            other(images(2))  # what runs now is another model
            model(images(5, seed=1))
            assert global_state() == before.torch
            recorder.mark(epoch=epoch)
            torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("error", ERRORS)
def test_hook_added_while_recording(error: type[BaseException]) -> None:
    """Hooks that run before the recorder's, and after it."""
    model, bomb = vit(), Bomb(error)
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        handles = [model.register_forward_pre_hook(bomb, prepend=True), model.register_forward_hook(bomb)]
        bomb.armed = True
        with pytest.raises(error, match="boom"):
            model(images())
        bomb.armed = False
        model(images())
        recorder.mark(epoch=0)
        for handle in handles:
            handle.remove()
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


@pytest.mark.parametrize("error", [*ERRORS, SystemExit, GeneratorExit])
def test_of_user_code(error: type[BaseException]) -> None:
    model = vit()
    before = Trace(model)
    with pytest.raises(error, match="mine"), tcnn_probe.record(model):  # noqa: PT012
        model(images())
        raise error("mine")
    assert before == Trace(model)


def probe_that_fails_in(function: str, bomb: Bomb) -> tcnn_probe.Probe:
    """A probe one of whose functions is the bomb."""
    variables = {
        "number": tcnn_probe.Variable(("layer",), "1", "a number", "One."),
        "map": tcnn_probe.Variable(("layer", "image", "head", "y", "x"), "1", "a map", "Ones.", dtype="float16"),
    }

    def number(call: Any) -> dict[str, Tensor]:
        if function in ("measure", "attention"):
            bomb()
        return {"number": torch.ones(len(call.output) if isinstance(call, tcnn_probe.ForwardCall) else call.images)}

    def state(module: Any) -> dict[str, Tensor]:
        bomb()
        return {}

    def maps(call: Any, which: Any) -> dict[str, Tensor]:
        bomb()
        return {"map": torch.ones(len(which), 1, 2, 3, 5)}

    given: dict[str, Any] = {"attention": number} if function == "attention" else {"measure": number}
    if function != "attention":
        given["module_type"] = nn.Linear if function == "part" else type(vit().blocks[0].attn)
    if function == "whole":
        given["module_type"] = type(vit())
    given |= {"state": state} if function == "state" else {}
    given |= {"maps": maps} if function == "maps" else {}
    return tcnn_probe.Probe("failing", variables, **given)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("function", ["measure", "attention", "maps", "state"])
def test_in_a_probe(function: str, error: type[BaseException]) -> None:
    model, bomb = vit(), Bomb(error)
    before = Trace(model)
    with tcnn_probe.record(model, probes=["softmax", probe_that_fails_in(function, bomb)], images=[0]) as recorder:
        bomb.armed = True
        with pytest.raises(error, match="boom") as caught:  # noqa: PT012
            model(images())
            recorder.mark(epoch=0)
        if function != "state":
            assert any("tcnn_probe measured the layer 'blocks.0.attn'" in note for note in caught.value.__notes__)
        bomb.armed = False
        if function != "state":  # there the forwards are kept, and the epoch can be marked again
            model(images())
        recorder.mark(epoch=0)
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]
    assert clean()


class Full:
    """A disk that is full while ``now`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, put = False, Objects.put

        def refuse(objects: Objects, *args: Any) -> None:
            if self.now:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(objects, *args)

        monkeypatch.setattr(Objects, "put", refuse)


def test_disk_full_and_made_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, disk = vit(), Full(monkeypatch)
    before, expected = Trace(model), entropies(model, images())
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        model(images())
        recorder.mark(epoch=0)
        model(images())
        disk.now = True
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                recorder.mark(epoch=1)
            assert recorder.epochs == (0,)
        disk.now = False
        recorder.mark(epoch=1)
        torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
    assert before == Trace(model)
    stored = xr.open_zarr(tmp_path / "run.zarr")
    assert stored.epoch.values.tolist() == [0, 1]
    assert stored.images.values.tolist() == [[3, 3], [3, 3]]


def test_disk_full_in_the_writers_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, disk = vit(), Full(monkeypatch)
    before = Trace(model)
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        model(images())
        recorder.mark(epoch=0, wait=False)
        recorder.flush()
        disk.now = True
        model(images())
        recorder.mark(epoch=1, wait=False)
        with pytest.raises(RuntimeError, match=r"mark 1 could not be written \(OSError.*No space left"):
            recorder.flush()
        model(images())
        with pytest.raises(RuntimeError, match="mark 1 could not be written"):
            recorder.mark(epoch=2, wait=False)
        assert recorder.epochs == (0,)  # what is safe, no more
        disk.now = False  # closing the store gives back the room that it had kept for further marks
    assert before == Trace(model)
    assert tcnn_probe.open(tmp_path / "run.zarr").epoch.values.tolist() == [0]


def test_disk_full_that_nobody_has_been_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, disk = vit(), Full(monkeypatch)
    before = Trace(model)

    def run(*, fail: bool) -> None:
        with tcnn_probe.record(model, tmp_path / f"{fail}.zarr") as recorder:
            model(images())
            recorder.mark(epoch=0, wait=False)
            recorder.flush()
            disk.now = True
            model(images())
            recorder.mark(epoch=1, wait=False)
            if fail:
                raise KeyError("mine")

    with pytest.raises(RuntimeError, match="mark 1 could not be written"):
        run(fail=False)
    disk.now = False
    with pytest.raises(KeyError, match="mine") as caught:
        run(fail=True)
    assert "mark 1 could not be written" in caught.value.__notes__[0]
    assert before == Trace(model)


def test_interrupted_forward_is_let_go() -> None:
    model, bomb = vit(), Bomb(KeyboardInterrupt)
    before_attention(model, bomb)
    with tcnn_probe.record(model) as recorder:
        bomb.armed = True
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                model(images())
        recorder.remove()
        gc.collect()
    assert clean()
