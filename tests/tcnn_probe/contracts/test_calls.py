"""Ways to call a model: in parts, twice, by itself, with several recorders, under checkpointing."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    entropy,
    images,
    vit,
)


@pytest.mark.parametrize("first", [0, 1])
def test_several_recorders_removed_in_any_order(first: int) -> None:
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)
    recorders = [
        tcnn_probe.record(model),
        tcnn_probe.record(model, layers="blocks.1", images=[1]),
        tcnn_probe.record(model, when="always", every=2),
    ]
    attached = list(recorders)
    for epoch in range(2):
        # There are two forwards, and every=2 takes the first.
        model(images())
        model(images())
        for recorder in attached:
            recorder.mark(epoch=epoch)
        # One recorder is removed after each epoch, in an order that depends on ``first``.
        attached.remove(recorders[(first + epoch) % 3])
        recorders[(first + epoch) % 3].remove()
    recorders[(first + 2) % 3].remove()
    assert before == Trace(model)
    assert clean()
    for place, (recorder, layer_entropies) in enumerate(
        zip(recorders, (expected, expected[1:], expected), strict=True)
    ):
        assert recorder.epochs == ((0,) if place == first else (0, 1))
        for mark in range(len(recorder.epochs)):
            check_entropies(
                recorder, layer_entropies, mark, images=3 if place == 2 else 6
            )


def test_attached_and_removed_in_the_middle_of_a_forward() -> None:
    """A recorder removed during a forward records nothing of it; one attached during a forward starts with the next."""
    model = vit()
    before = Trace(model)
    late = list[tcnn_probe.Recorder]()
    outer, inner = tcnn_probe.record(model), tcnn_probe.record(model)
    handles = [
        model.blocks[0].register_forward_hook(
            lambda *_: late.append(tcnn_probe.record(model))
        ),
        model.blocks[1].register_forward_hook(lambda *_: inner.remove()),
    ]
    model(images())
    for handle in handles:
        handle.remove()
    model(images(2))
    for recorder, count in ((outer, [5, 5]), (late[0], [2, 2])):
        recorder.mark(epoch=0)
        recorder.remove()
        assert recorder.dataset.images.values.tolist() == [count]
    assert before == Trace(model)
    assert clean()


@pytest.mark.parametrize("what", ["features", "blocks", "one block"])
def test_parts_called_instead_of_the_model(what: str) -> None:
    model, x = vit(), images()
    expected = entropies(model, x)
    with torch.no_grad():
        tokens = model.norm_pre(
            model.patch_drop(model._pos_embed(model.patch_embed(x)))
        )
    with tcnn_probe.record(model) as recorder:
        if what == "features":
            model.forward_head(model.forward_features(x))
        elif what == "blocks":
            model.norm(model.blocks(tokens))
        else:  # recorders do not watch calls of indirect parts
            model.blocks[1](model.blocks[0](tokens))
            with pytest.raises(RuntimeError, match="nothing to mark"):
                recorder.mark(epoch=0)
            return
        recorder.mark(epoch=0)
        check_entropies(recorder, expected, images=3)


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_the_whole_model_decides(training: bool) -> None:
    """Modes of its parts, which users set for frozen layers or forget, do not count."""
    model = vit().train(training)
    # One part has the opposite mode.
    model.blocks[0].train(not training)
    modes = [module.training for module in model.modules()]
    with tcnn_probe.record(model, when="train" if training else "eval") as recorder:
        model(images())
        assert [module.training for module in model.modules()] == modes
        recorder.mark(epoch=0)
        assert recorder.dataset.images.values.tolist() == [[3, 3]]


class Around(nn.Module):
    """Two attention layers, which each test calls as it needs."""

    def __init__(self, forward: Callable[["Around", Tensor], Tensor]) -> None:
        super().__init__()
        blocks = vit().blocks
        self.parts = nn.Module()  # this container is never called
        self.parts.one = blocks[0].attn
        self.parts.two = blocks[1].attn
        self._how = forward
        self.eval()

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        return (
            self(0.5 * x, again - 1) + self._how(self.parts, x)
            if again
            else self._how(self.parts, x)
        )


TOKENS = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(0))


def test_layer_called_twice_in_a_forward_counts_twice() -> None:
    """The mean is over both calls, and ``images`` is twice as many. A shared layer has its first name."""
    model = Around(lambda parts, x: parts.two(parts.one(x) + parts.one(0.3 * x)))
    model.parts.again = model.parts.one
    expected = (
        entropy(model.parts.one, TOKENS) + entropy(model.parts.one, 0.3 * TOKENS)
    ).mean(0) / 2
    with tcnn_probe.record(model) as recorder:
        model(TOKENS)
        recorder.mark(epoch=0)
        assert recorder.layers == ("parts.one", "parts.two")
        assert recorder.dataset.images.values.tolist() == [[6, 3]]
        # The second layer is not under test, so its own number serves as the expected one.
        check_entropies(
            recorder,
            torch.stack(
                [expected, torch.as_tensor(recorder.dataset.entropy.values[0, 1])]
            ),
        )


def test_model_that_calls_itself() -> None:
    model = Around(lambda parts, x: parts.two(parts.one(x)))
    # The layer sees the tokens, half of them and a quarter of them.
    by_depth = [entropy(model.parts.one, TOKENS * 0.5**depth) for depth in range(3)]
    expected = torch.stack(by_depth).mean((0, 1))
    before = Trace(model)
    with tcnn_probe.record(model, layers="parts.one") as recorder:
        model(TOKENS, again=2)
        assert clean()
        recorder.mark(epoch=0)
        check_entropies(recorder, expected[None], images=9)
        model(TOKENS)
        recorder.mark(epoch=1)
        assert recorder.dataset.images.values[1].tolist() == [3]
    assert before == Trace(model)


def test_recording_in_the_handler_of_an_error_and_after_an_abandoned_generator() -> (
    None
):
    def outputs(model: nn.Module) -> Iterator[Tensor]:
        while True:
            yield model(images())

    model = vit()
    with tcnn_probe.record(model) as recorder:
        try:
            raise ValueError("not the forward's")
        except ValueError:
            model(images())
        stream = outputs(model)
        next(stream)
        next(stream)
        # The generator is closed at its yield, between two forwards.
        stream.close()
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[9, 9]]


class Inside(nn.Module):
    """Model whose inner model is checkpointed as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed(how: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = Inside() if how == "inside" else vit()
    if how == "timm":
        model.set_grad_checkpointing()
    return model.train(), (
        lambda x: checkpoint(model, x, use_reentrant=True)
    ) if how == "around" else model


@pytest.mark.parametrize("how", ["inside", "timm", "around"])
def test_checkpointing_counts_nothing_twice(how: str) -> None:
    x = images().requires_grad_()
    expected = entropies(vit(), images())
    model, call = checkpointed(how)
    before = Trace(model)
    with tcnn_probe.record(model, when="train") as recorder:
        for epoch in range(2):
            call(x).sum().backward()
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=3)
    assert before == Trace(model)
    # Without a recorder, the same passes must give gradients that are equal bit for bit.
    alone, call = checkpointed(how)
    for _ in range(2):
        call(x).sum().backward()
    for parameter, reference in zip(
        model.parameters(), alone.parameters(), strict=True
    ):
        assert torch.equal(parameter.grad, reference.grad)
