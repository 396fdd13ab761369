"""Copies of a model that is being recorded: they work, record nothing, and carry nothing of the recorder with them."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, clean, entropies, images, recorded, vit


def deep_copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def timm_average(model: nn.Module) -> nn.Module:
    average = ModelEmaV3(model, decay=0.9)
    average.update(model)
    return average.module


def torch_average(model: nn.Module) -> nn.Module:
    average = AveragedModel(model)
    average.update_parameters(model)
    return average


@pytest.mark.parametrize("make", [deep_copied, pickled, saved, timm_average, torch_average])
def test_copies_record_nothing(make: Callable[[nn.Module], nn.Module]) -> None:
    model = vit()
    expected, logits = entropies(model, images()), model(images())
    before = Trace(model)
    with tcnn_probe.record(model, when="always") as recorder:
        twin = make(model).eval()
        torch.testing.assert_close(twin(images()), logits)
        model(images())
        recorder.mark(epoch=0)
        twin(images())
        model(images())
        recorder.mark(epoch=1)
        assert recorder.dataset.images.values.tolist() == [[3, 3]] * 2
        torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
    assert before == Trace(model)
    twin(images())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in twin.modules())
    assert clean()


def test_copy_of_a_copy_and_of_its_hooks_that_never_ran() -> None:
    model = vit()
    with tcnn_probe.record(model):
        twin = pickled(pickled(copy.deepcopy(copy.copy(model))))
    torch.testing.assert_close(twin(images()), vit()(images()))
    assert all(not module._forward_hooks for module in twin.modules())


def test_copy_can_be_recorded_itself(tmp_path: Path) -> None:
    model = vit()
    with tcnn_probe.record(model) as outer:
        twin = copy.deepcopy(model)
        with tcnn_probe.record(twin) as inner:
            twin(images(2))
            inner.mark(epoch=0)
        model(images())
        outer.mark(epoch=0)
    assert inner.dataset.images.values.tolist() == [[2, 2]]
    assert outer.dataset.images.values.tolist() == [[3, 3]]


def test_state_dict_is_as_ever() -> None:
    model = vit()
    keys = list(model.state_dict())
    with tcnn_probe.record(model):
        assert list(model.state_dict()) == keys
        model.load_state_dict(vit(seed=1).state_dict())


def tensors() -> tuple[int, int]:
    """How many there are, and their numbers."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return len(found), sum(x.numel() for x in found)


@pytest.mark.parametrize("when", ["eval", "train"])
def test_memory_does_not_grow(when: str) -> None:
    model = vit().train(when == "train")
    with tcnn_probe.record(model, when=when, images=[0]) as recorder:
        held = []
        for forwards in (3, 30):
            for _ in range(forwards):
                model(images()).sum().backward()
            model.zero_grad()
            held.append(tensors())
        assert held[0] == held[1]
        recorder.mark(epoch=0)


def test_no_cycle_keeps_a_forward_alive() -> None:
    """Without the garbage collector: its activations go when the forward ends."""

    def count() -> int:
        return sum(type(x) is torch.Tensor for x in gc.get_objects())

    model, x = vit(), images()
    with tcnn_probe.record(model):
        model(x)
        gc.collect()
        before = count()
        gc.disable()
        try:
            for _ in range(5):
                model(x)
            assert count() == before
        finally:
            gc.enable()


def test_recorder_and_model_go_when_nobody_has_them() -> None:
    import weakref

    model = vit()
    with tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=0)
    gone = weakref.ref(model)
    del model, recorder
    gc.collect()
    assert gone() is None
