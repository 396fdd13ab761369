"""The model after recording is the model before, however the recording ends."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.networks import Chain


def images() -> Tensor:
    return torch.randn(3, 2, 5, 11)


class Trace:
    """Everything of a model that a recorder could leave changed."""

    def __init__(self, model: nn.Module) -> None:
        self.attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        self.hooks = {
            (name, kind): dict(hooks)
            for name, module in model.named_modules()
            for kind, hooks in vars(module).items()
            if "hooks" in kind and isinstance(hooks, dict)
        }
        self.training = {name: module.training for name, module in model.named_modules()}
        self.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self.gradients = {name for name, p in model.named_parameters() if p.grad is not None}
        self.state = {name: value.clone() for name, value in model.state_dict().items()}

    def __eq__(self, other: object) -> bool:
        mine, theirs = dict(vars(self)), dict(vars(other))
        before, after = mine.pop("state"), theirs.pop("state")
        return (
            mine == theirs and list(before) == list(after) and all(torch.equal(v, after[k]) for k, v in before.items())
        )


def busy_model() -> Chain:
    """With one part in training mode, a frozen parameter and a hook of somebody else."""
    model = Chain()
    model.far.train()
    model.near.value.requires_grad_(False)
    model.near.register_forward_hook(_nothing)
    return model


def _nothing(*args: Any) -> None:
    pass


def count_of(model: nn.Module, recorder: tcnn_probe.Recorder) -> float:
    """Images that one epoch with one forward of three images records."""
    model(images())
    recorder.mark(epoch=len(recorder.epochs))
    return recorder.dataset.images.values[-1].sum()


def test_trace_sees_a_hook_and_a_changed_flag() -> None:
    model = busy_model()
    before = Trace(model)
    assert before == Trace(model)
    handle = model.far.register_forward_pre_hook(_nothing)
    assert before != Trace(model)
    handle.remove()
    assert before == Trace(model)
    model.near.train()
    assert before != Trace(model)


def test_after_the_with_block() -> None:
    model = busy_model()
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        assert before != Trace(model)
        assert list(model.state_dict()) == list(before.state)
        with torch.no_grad():
            model(images())
        recorder.mark(epoch=0)
        model(images())
    assert before == Trace(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_after_an_exception_which_passes_through(error: type[BaseException]) -> None:
    model = busy_model()
    before = Trace(model)
    with pytest.raises(error, match="mine"), tcnn_probe.record(model):  # noqa: PT012
        model(images())
        raise error("mine")
    assert before == Trace(model)


def test_after_an_exception_in_the_forward_pass() -> None:
    def fail(module: nn.Module, args: tuple[Tensor]) -> None:
        raise RuntimeError("in far")

    model = busy_model()
    model.far.register_forward_pre_hook(fail)
    before = Trace(model)
    with pytest.raises(RuntimeError, match="in far"), tcnn_probe.record(model):
        model(images())
    assert before == Trace(model)


def test_after_an_error_of_mark() -> None:
    model = busy_model()
    before = Trace(model)
    with pytest.raises(RuntimeError, match="nothing to mark"), tcnn_probe.record(model) as recorder:
        recorder.mark(epoch=0)
    assert before == Trace(model)


def test_without_with_until_removed_and_remove_twice() -> None:
    model = busy_model()
    before = Trace(model)
    recorder = tcnn_probe.record(model)
    assert count_of(model, recorder) == 6
    recorder.remove()
    assert before == Trace(model)
    recorder.remove()
    assert before == Trace(model)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


def test_removed_inside_the_with_block() -> None:
    model = busy_model()
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        recorder.remove()
        assert before == Trace(model)
    assert before == Trace(model)


def test_refused_recording_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    model = busy_model()
    before = Trace(model)
    with pytest.raises(ValueError, match=r"notes\.txt"):
        tcnn_probe.record(model, tmp_path)
    assert before == Trace(model)


def test_failure_to_attach_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = busy_model()
    before = Trace(model)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("no room for a hook")

    monkeypatch.setattr(model.far, "register_forward_hook", fail)
    with pytest.raises(MemoryError, match="no room"):
        tcnn_probe.record(model)
    monkeypatch.undo()
    assert before == Trace(model)


def test_hooks_of_others_fire_as_often_and_stay() -> None:
    fired: list[str] = []
    model = Chain()

    def note(when: str) -> Any:
        return lambda *args: fired.append(when)

    model.near.register_forward_hook(note("before"))
    model.near.register_forward_pre_hook(note("pre"))
    model.far.register_full_backward_hook(note("backward"))
    with tcnn_probe.record(model):
        model.near.register_forward_hook(note("during"))
        model(images()).sum().backward()
    model(images()).sum().backward()
    assert fired == ["pre", "before", "during", "backward"] * 2
    assert len(model.near._forward_hooks) == 2


@pytest.mark.parametrize("first", [0, 1])
def test_two_recorders_removed_in_any_order(first: int) -> None:
    model = busy_model()
    before = Trace(model)
    recorders = [tcnn_probe.record(model), tcnn_probe.record(model, layers="near")]
    model(images())
    for recorder in recorders:
        recorder.mark(epoch=0)
    recorders[first].remove()
    assert count_of(model, recorders[1 - first]) == (3 if first == 0 else 6)
    recorders[1 - first].remove()
    assert before == Trace(model)
    one, other = (recorder.dataset.entropy.sel(epoch=0, layer="near", head=slice(0, 8)) for recorder in recorders)
    assert (one == other).all()
    assert recorders[first].epochs == (0,)


def test_nested_recorders() -> None:
    model = busy_model()
    before = Trace(model)
    with tcnn_probe.record(model) as outer:
        within = Trace(model)
        with tcnn_probe.record(model) as inner:
            assert count_of(model, inner) == 6
        assert within == Trace(model)
        assert count_of(model, outer) == 12
    assert before == Trace(model)


def test_recorded_again_after_removal() -> None:
    model = busy_model()
    for _ in range(2):
        with tcnn_probe.record(model) as recorder:
            assert count_of(model, recorder) == 6


def test_copy_made_while_recording_is_not_recorded() -> None:
    model = Chain()
    with tcnn_probe.record(model) as recorder:
        average = copy.deepcopy(model)  # as for an exponential moving average of the weights
        average(images())
        assert count_of(model, recorder) == 6


def test_layer_class_is_untouched() -> None:
    before = set(vars(GPSA))
    with tcnn_probe.record(Chain()):
        assert set(vars(GPSA)) == before
