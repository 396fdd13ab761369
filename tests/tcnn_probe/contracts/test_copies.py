"""Copies of a recorded model work, record nothing
and keep nothing of the recorder; memory does not grow.
"""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    images,
    vit,
)


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


def copied_again_and_again(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(copy.deepcopy(copy.copy(model))))))


@pytest.mark.parametrize("make", [copied_again_and_again, saved, timm_average, torch_average])
def test_copies_record_nothing(make: Callable[[nn.Module], nn.Module]) -> None:
    model = vit()
    expected = entropies(model, images())
    logits = model(images())
    before = Trace(model)
    # The probe of gradients has hooks on parameters, which a copy could keep.
    with tcnn_probe.record(
        model, probes=[*tcnn_probe.DEFAULT, "gradient"], when="always"
    ) as recorder:
        # If the recorder added a key, every checkpoint would contain it.
        assert [*model.state_dict()] == [*before.state]
        twin = make(model).eval()
        torch.testing.assert_close(twin(images()), logits)
        for epoch in range(2):
            model(images())
            twin(images())
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=3)
    assert before == Trace(model)
    twin(images())
    assert not any(
        value
        for module in twin.modules()
        for name, value in vars(module).items()
        if "forward" in name
    )
    assert not any(parameter._backward_hooks for parameter in twin.parameters())
    assert clean()


@pytest.mark.parametrize("make", [copy.deepcopy, pickle.dumps])
def test_a_recorder_is_not_copied(make: Callable[[object], object]) -> None:
    model: Any = vit()
    message = "a recorder cannot be copied or pickled"
    with tcnn_probe.record(model) as model.recorder, pytest.raises(TypeError, match=message):
        make(model)


def test_a_copy_can_be_recorded() -> None:
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


def adapted(model: nn.Module) -> nn.Module:
    """Return a model as peft wraps it: an adapted layer contains the original one."""

    class Adapted(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.base_layer = part

        def forward(self, x: Tensor, **options: Any) -> Tensor:
            return self.base_layer(x, **options)

    class LoraModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    class PeftModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model = LoraModel()
            self.prompts = nn.Linear(2, 2)

        def get_base_model(self) -> nn.Module:
            return self.base_model.model

        def forward(self, x: Tensor) -> Tensor:
            return self.get_base_model().forward(x)

    for kind in (Adapted, LoraModel, PeftModel):
        kind.__module__ = "peft.peft_model"
    for block in model.blocks:
        block.attn = Adapted(block.attn)
    return PeftModel()


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (AveragedModel, "module"),
        (ModelEmaV3, "module"),
        (lambda model: adapted(AveragedModel(model).module), "base_model.model"),
    ],
    ids=["torch", "timm", "peft"],
)
def test_wrappers_have_the_names_of_the_plain_model(
    wrap: Callable[[nn.Module], nn.Module], prefix: str
) -> None:
    """Names with the wrapper's prefix select the same layers. peft calls ``forward``,
    not the model.
    """
    plain, x = vit(), images()
    model = wrap(plain).eval()
    for layers in ("blocks.1.attn", f"{prefix}.*.1.attn"):
        with torch.no_grad(), tcnn_probe.record(model, layers=layers) as recorder:
            model(x)
            recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.1.attn",)
        assert recorder.dataset.attrs["model_class"] == "VisionTransformer"
        check_entropies(recorder, entropies(plain, x)[1:], images=3)
    outputs = []
    for name in ("blocks.1.attn", f"{prefix}.blocks.1.attn"):
        with torch.no_grad(), tcnn_probe.ablate(model, {name: [0]}):
            outputs.append(model(x))
    with torch.no_grad(), tcnn_probe.ablate(plain, {"blocks.1.attn": [0]}):
        expected = plain(x)
    for output in outputs:
        torch.testing.assert_close(output, expected)


@torch.no_grad()
def test_the_mode_of_a_wrapped_model_is_that_of_the_model_inside() -> None:
    """timm's average is in eval mode from the beginning, but its wrapper is not."""
    model = ModelEmaV3(vit())
    assert model.training
    with tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=0)
        model.module.train()
        model(images())
        with pytest.raises(RuntimeError, match="forwards in training mode: 1"):
            recorder.mark(epoch=1)


@pytest.mark.parametrize(
    ("wrap", "prefix"), [(AveragedModel, "module"), (adapted, "base_model.model")]
)
@torch.no_grad()
def test_wrappers_inside_a_model_have_no_part_in_names(
    wrap: Callable[[nn.Module], nn.Module], prefix: str
) -> None:
    """As in a LightningModule whose network is adapted by peft."""
    model = nn.Sequential(wrap(vit())).eval()
    for layers in (None, f"0.{prefix}.blocks.1.attn"):
        with tcnn_probe.record(model, layers=layers) as recorder:
            model(images())
            recorder.mark(epoch=0)
        names = ("0.blocks.0.attn", "0.blocks.1.attn")
        assert recorder.layers == (names if layers is None else names[1:])


def tensors() -> tuple[int, int]:
    """Count the tensors that are alive, and their elements."""
    alive = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return len(alive), sum(x.numel() for x in alive)


@pytest.mark.study
def test_memory_does_not_grow() -> None:
    model = vit().train()
    with tcnn_probe.record(model, when="train", images=[0]) as recorder:
        held = []
        # After two forwards, everything that is kept permanently exists.
        for forwards in (2, 5):
            for _ in range(forwards):
                model(images()).sum().backward()
            model.zero_grad()
            gc.collect()
            held.append(tensors())
        # What earlier tests have left may go meanwhile.
        assert all(np.less_equal(held[1], held[0]))
        recorder.mark(epoch=0)


@pytest.mark.study
def test_no_reference_cycle_keeps_a_forward_or_the_model_alive() -> None:
    """Activations are freed at the end of a forward without the garbage collector,
    and recorder and model with it.
    """
    model, x = vit(), images()
    with tcnn_probe.record(model) as recorder:
        model(x)
        gc.collect()
        before = tensors()
        # Reference counts alone must free the activations.
        gc.disable()
        try:
            for _ in range(5):
                model(x)
            assert all(now <= then for now, then in zip(tensors(), before, strict=True))
        finally:
            gc.enable()
        recorder.mark(epoch=0)
    gone = weakref.ref(model)
    del model, recorder
    gc.collect()
    assert gone() is None
