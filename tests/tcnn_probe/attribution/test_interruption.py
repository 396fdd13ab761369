"""Ctrl-C where a method enters or leaves a context manager
or a mode must leave no mode and no hook behind.
"""

import contextlib
import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import grad_mode
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch, hooks

import tcnn_probe
from tcnn_probe.attention import head_editor, stream
from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.hooks import calls, compilation, forwards, modes
from tcnn_probe.interventions.edited_forwards import ModelCalls
from tcnn_probe.models import untouched
from tests.tcnn_probe.attribution.models import SIZE, transformer
from tests.tcnn_probe.contracts.helpers import Trace, vit

# Python delivers a signal at the start of a function, and at the start of these functions a mode or
# a hook is half entered or left.
FILES = {
    contextlib.__file__,
    _python_dispatch.__file__,
    calls.__file__,
    forwards.__file__,
    head_editor.__file__,
    modes.__file__,
    grad_mode.__file__,
    hooks.__file__,
    stream.__file__,
}
CALLERS = (
    "class_attention.py",
    "layer_choice.py",
    "hooks/calls.py",
    "hooks/forwards.py",
    "hooks/modes.py",
    "attention/stream.py",
)
Place = tuple[str, str, int]


class Interruption:
    """Trace function that notes where context managers are called,
    and raises KeyboardInterrupt at one such place.
    """

    def __init__(self, place: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self._place = place

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        caller = frame.f_back
        if frame.f_code.co_filename not in FILES or caller is None:
            return
        # Places are lines of the caller, not calls, so that a loop counts once.
        place = (frame.f_code.co_name, caller.f_code.co_filename, caller.f_lineno)
        self.places[place] = None
        if place == self._place:
            raise KeyboardInterrupt

    def __enter__(self) -> "Interruption":
        sys.settrace(self)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.settrace(None)


@pytest.mark.study
@pytest.mark.parametrize("method", ["class_attention", "gradcam"])
def test_nothing_is_left_by_an_interruption(method: str) -> None:
    model = transformer("deit_tiny_patch16_224", depth=1, embed_dim=12)
    images = torch.randn(1, 3, *SIZE)
    # The first call imports captum, which is not under test.
    tcnn_probe.saliency(model, images, 1, method)
    trace = Trace(model)
    with Interruption() as interruption:
        tcnn_probe.saliency(model, images, 1, method)
    places = [place for place in interruption.places if place[1].endswith(CALLERS)]
    assert places
    gc.freeze()  # objects that exist already take no time in the collections below
    for place in places:
        with pytest.raises(KeyboardInterrupt), Interruption(place):
            tcnn_probe.saliency(model, images, 1, method)
        # Leftovers that the garbage collector removes are allowed.
        gc.collect()
        assert not _python_dispatch._get_current_dispatch_mode_stack(), place
        assert not _get_current_function_mode_stack(), place
        assert Trace(model) == trace, place
        torch.zeros(1)  # fails if dispatch keys of a mode are left behind
    gc.unfreeze()


@pytest.mark.study
@pytest.mark.parametrize(
    "attach",
    [
        tcnn_probe.record,
        tcnn_probe.ablate,
        lambda model: tcnn_probe.attention_stream(model, lambda attention: HeadEdit([0])),
    ],
    ids=["record", "ablate", "attention_stream"],
)
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_a_forward_after_an_interrupted_one_is_like_any_other(
    attach: Callable[[nn.Module], Any],
) -> None:
    model, images = vit(), torch.randn(2, 2, 20, 28)
    trace = Trace(model)
    with attach(model):
        expected = model(images)
        with Interruption() as interruption:
            model(images)
    places = [place for place in interruption.places if "tcnn_probe" in place[1]]
    assert len(places) > 10
    with attach(model):
        model(images)
        attached = Trace(model)
        for place in places:
            with pytest.raises(KeyboardInterrupt), Interruption(place):
                model(images)
            # The user goes on without a forward.
            assert (torch.ones(1, requires_grad=True) * 2).requires_grad, place
            assert torch._C._is_torch_function_enabled(), place
            torch.testing.assert_close(model(images), expected)
            assert Trace(model) == attached, place
    assert Trace(model) == trace


@pytest.mark.parametrize(
    "attach",
    [tcnn_probe.ablate, lambda model: tcnn_probe.attention_stream(model, lambda attention: None)],
    ids=["ablate", "attention_stream"],
)
def test_a_hook_whose_handle_was_not_kept_is_removed(
    attach: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, add_hook = vit(), calls.add_hook
    trace = Trace(model)
    for last in range(1, 10):
        count = 0

        def interrupted(*args: Any, **options: Any) -> hooks.RemovableHandle:
            nonlocal count
            handle = add_hook(*args, **options)
            count += 1
            if count == last:  # noqa: B023
                raise KeyboardInterrupt
            return handle

        monkeypatch.setattr(calls, "add_hook", interrupted)
        with pytest.raises(KeyboardInterrupt), attach(model):
            pass
        assert Trace(model) == trace, last


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_ablation_that_is_interrupted_as_it_begins_or_ends_has_ended() -> None:
    model, images = vit(), torch.randn(2, 2, 20, 28)
    trace, expected = Trace(model), model(images)
    with Interruption() as interruption, tcnn_probe.ablate(model):
        pass
    of_editor = [place for place in interruption.places if place[1] == head_editor.__file__]
    assert len(of_editor) > 5
    gc.freeze()
    for place in of_editor:
        with (
            pytest.raises(KeyboardInterrupt),
            Interruption(place),
            tcnn_probe.ablate(model),
        ):
            pass
        gc.collect()
        assert torch.equal(model(images), expected), place
        assert Trace(model) == trace, place
    gc.unfreeze()


def test_an_ablation_that_is_interrupted_as_it_leaves_the_model_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(forwards: ModelCalls) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    model = vit()
    trace = Trace(model)
    monkeypatch.setattr(ModelCalls, "detach", interrupt)
    with pytest.raises(KeyboardInterrupt), tcnn_probe.ablate(model):
        pass
    assert Trace(model) == trace


@pytest.mark.parametrize(
    "attach",
    [
        tcnn_probe.record,
        tcnn_probe.ablate,
        lambda model: tcnn_probe.attention_stream(model, lambda attention: None),
    ],
    ids=["record", "ablate", "attention_stream"],
)
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_a_mode_that_torch_has_set_aside_is_left(attach: Callable[[nn.Module], Any]) -> None:
    """Torch puts it back when the traceback is freed, after the ``with``."""
    model, images = vit(), torch.randn(2, 2, 20, 28)
    with attach(model), Interruption() as interruption:
        model(images)
    set_aside = torch.overrides.__file__
    places = [x for x in interruption.places if x[0] == "__exit__" and x[1] == set_aside]
    assert places
    for place in places:
        with pytest.raises(KeyboardInterrupt), attach(model), Interruption(place):
            model(images)
        assert not _get_current_function_mode_stack(), place


def with_references(model: nn.Module) -> None:
    images = torch.randn(2, 2, 20, 28)
    with tcnn_probe.ablate(model, "blocks.0.attn", "static", images=images) as ablation:
        assert ablation.heads


def marked(model: nn.Module) -> None:
    with tcnn_probe.record(model) as recorder:
        model(torch.randn(2, 2, 20, 28)).sum().backward()
        recorder.mark(epoch=0)


@pytest.mark.study(but=["with_references"])
@pytest.mark.parametrize("run", [marked, with_references])
@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_gradients_that_an_interruption_finds_switched_off_are_on(
    run: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, switch = vit(), torch.set_grad_enabled
    run(model)

    def interrupt_at(last: int) -> int:
        """Interrupt the last of so many calls of torch's switch, and return how many there were."""
        count = 0

        def interrupted(mode: bool) -> Any:
            nonlocal count
            count += 1
            result = switch(mode)
            if count == last:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(torch, "set_grad_enabled", interrupted)
            run(model)
        return count

    for last in range(1, interrupt_at(0)):
        with pytest.raises(KeyboardInterrupt):
            interrupt_at(last)
        assert torch.is_grad_enabled(), last


def test_compiled_code_runs_compiled_after_an_interruption(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation, "eager_switch", interrupt)
    with pytest.raises(KeyboardInterrupt), untouched(vit()):
        pass
    assert not compilation.is_eager()


def test_a_recorder_that_is_interrupted_as_it_begins_leaves_nothing() -> None:
    model = vit()
    trace = Trace(model)
    with Interruption() as interruption:
        recorder = tcnn_probe.record(model)
    recorder.remove()
    callers = "recording/recorder.py", "recording/collector.py", "attention/stream.py"
    places = [place for place in interruption.places if place[1].endswith(callers)]
    assert len(places) > 10
    for place in places:
        with pytest.raises(KeyboardInterrupt), Interruption(place):
            tcnn_probe.record(model)
        assert Trace(model) == trace, place


class Interrupting(nn.Module):
    """Module that raises KeyboardInterrupt the first time that it is set back to training mode."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and value and not getattr(self, name, value):
            self.__class__ = nn.Module  # type: ignore[assignment]
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_flags_and_gradients_are_restored_even_if_the_restoration_is_interrupted() -> None:
    model = nn.Sequential(Interrupting(), nn.Linear(2, 2))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(KeyboardInterrupt), untouched(model):
        assert not model[0].training
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is not None for parameter in model.parameters())
