"""An exception anywhere passes through and leaves nothing behind,
and recording can continue after it is caught.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.probes import ForwardCall
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    global_state,
    images,
    vit,
)


class Bomb:
    """Hook that raises while it is armed."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.armed = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.armed:
            raise self.error("boom")


def in_attention(model: nn.Module, bomb: Bomb) -> None:
    # Attention is not fused, so that a hook can raise between the softmax and the product with the
    # values.
    model.blocks[1].attn.fused_attn = False
    model.blocks[1].attn.attn_drop.register_forward_hook(bomb)


PLACES: dict[str, Callable[[nn.Module, Bomb], object]] = {
    "before the model": lambda model, bomb: model.register_forward_pre_hook(bomb),
    "after the model": lambda model, bomb: model.register_forward_hook(bomb),
    "before attention": lambda model, bomb: model.blocks[1].attn.register_forward_pre_hook(bomb),
    "in attention": in_attention,
    "in the head": lambda model, bomb: model.head.register_forward_pre_hook(bomb),
}


@pytest.mark.parametrize(
    ("place", "error"),
    [*((place, ValueError) for place in PLACES), ("in attention", KeyboardInterrupt)],
)
def test_exception_in_a_forward(place: str, error: type[BaseException]) -> None:
    model = vit()
    bomb = Bomb(error)
    second_model = vit(seed=1)
    PLACES[place](model, bomb)
    expected = entropies(model, images(5, seed=1))
    before = Trace(model)
    with pytest.raises(error, match="boom"), tcnn_probe.record(model) as recorder:  # noqa: PT012
        for epoch in range(2):
            bomb.armed = True
            with pytest.raises(error, match="boom"):
                # This forward has other images, and more of them, than the forward that counts, so
                # that leftovers would show.
                model(images(7, seed=2))
            bomb.armed = False
            second_model(images(2))  # another model runs next
            model(images(5, seed=1))
            assert global_state() == before.torch
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=5)
        bomb.armed = True
        model(images())
    assert before == Trace(model)
    assert clean()
    assert recorder.epochs == (0, 1)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_exception_in_user_code_and_in_hooks_added_while_recording(
    error: type[BaseException],
) -> None:
    model = vit()
    bomb = Bomb(error)
    before = Trace(model)
    with pytest.raises(error, match="mine"), tcnn_probe.record(model) as recorder:  # noqa: PT012
        handles = [
            # Hooks run before the recorder's own and after them.
            model.register_forward_pre_hook(bomb, prepend=True),
            model.register_forward_hook(bomb),
        ]
        bomb.armed = True
        with pytest.raises(error, match="boom"):
            model(images())
        bomb.armed = False
        model(images())
        recorder.mark(epoch=0)
        for handle in handles:
            handle.remove()
        raise error("mine")
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


def test_record_that_is_refused_or_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vit()
    before = Trace(model)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(tcnn_probe.StoreError, match=r"notes\.txt"):
        tcnn_probe.record(model, tmp_path)
    assert before == Trace(model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for a hook")

    # This module comes after the last block, so that hooks of earlier modules are registered by
    # then.
    monkeypatch.setattr(type(model.norm), "register_forward_hook", fail)
    with pytest.raises(MemoryError, match="no room"):
        tcnn_probe.record(model, tmp_path / "run.zarr")
    monkeypatch.undo()
    assert before == Trace(model)


def probe_that_fails_in(function: str, bomb: Bomb) -> tcnn_probe.Probe:
    """Return a probe of the attention layers with one function that is the bomb."""

    def number(call: Any) -> dict[str, Tensor]:
        if function in ("measure", "attention"):
            bomb()
        images = len(call.output) if isinstance(call, ForwardCall) else call.images
        return {"number": torch.ones(images)}

    def state(module: Any) -> dict[str, Tensor]:
        bomb()
        return {}

    def maps(call: Any, which: Any) -> dict[str, Tensor]:
        bomb()
        return {"map": torch.ones(len(which), 1, 2, 3, 5)}

    variables = {
        "number": tcnn_probe.Variable(("layer",), "1", "a number", "One."),
        "map": tcnn_probe.Variable(
            ("layer", "image", "head", "y", "x"), "1", "a map", "Ones.", dtype="float16"
        ),
    }
    functions: dict[str, Any] = {"attention": number}
    if function != "attention":
        functions = {"measure": number, "module_type": type(vit().blocks[0].attn)}
    functions |= {
        name: failing for name, failing in (("state", state), ("maps", maps)) if name == function
    }
    return tcnn_probe.Probe("failing", variables, **functions)


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("measure", KeyboardInterrupt),
        ("attention", ValueError),
        ("maps", ValueError),
        ("state", ValueError),
    ],
)
def test_exception_in_a_probe(function: str, error: type[BaseException]) -> None:
    model = vit()
    bomb = Bomb(error)
    before = Trace(model)
    with tcnn_probe.record(
        model, probes=["softmax", probe_that_fails_in(function, bomb)], images=[0]
    ) as recorder:
        bomb.armed = True
        with pytest.raises(error, match="boom") as caught:  # noqa: PT012
            model(images())
            recorder.mark(epoch=0)
        assert any(
            "tcnn_probe measured the layer 'blocks.0.attn'" in note
            for note in caught.value.__notes__
        )
        bomb.armed = False
        # If reading the parameters fails, the forwards are kept, and the epoch can be marked again.
        if function != "state":
            model(images())
        recorder.mark(epoch=0)
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]
    assert clean()
