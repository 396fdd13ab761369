"""How a model is called: in parts, twice, by itself, by several recorders, under checkpointing, from threads."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import Trace, clean, entropies, entropy, images, recorded, vit


@pytest.mark.parametrize("first", [0, 1, 2])
def test_several_recorders_removed_in_any_order(first: int) -> None:
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)
    recorders = [
        tcnn_probe.record(model),
        tcnn_probe.record(model, layers="blocks.1", images=[1]),
        tcnn_probe.record(model, when="always", every=2),
    ]
    for epoch in range(2):
        for _ in range(2):
            model(images())
        for recorder in recorders:
            if recorder.epochs == tuple(range(epoch)) and recorder._collector.attached:
                recorder.mark(epoch=epoch)
        recorders[(first + epoch) % 3].remove()
    recorders[(first + 2) % 3].remove()
    assert before == Trace(model)
    assert clean()
    for place, (recorder, wanted) in enumerate(zip(recorders, (expected, expected[1:], expected), strict=True)):
        assert recorder.epochs == ((0,) if place == first else (0, 1))
        assert set(recorder.dataset.images.values.flatten()) == {3 if place == 2 else 6}
        for mark in range(len(recorder.epochs)):
            torch.testing.assert_close(recorded(recorder, mark), wanted, rtol=1e-5, atol=1e-6)


def test_recorder_removed_in_the_middle_of_a_forward() -> None:
    model = vit()
    before = Trace(model)
    inner = tcnn_probe.record(model)
    outer = tcnn_probe.record(model)
    handle = model.blocks[1].register_forward_hook(lambda *_: inner.remove())
    model(images())
    handle.remove()
    outer.mark(epoch=0)
    assert outer.dataset.images.values.tolist() == [[3, 3]]
    outer.remove()
    assert before == Trace(model)
    assert clean()


def test_recorder_attached_in_the_middle_of_a_forward() -> None:
    """It begins with the next."""
    model = vit()
    before, made = Trace(model), list[tcnn_probe.Recorder]()
    handle = model.blocks[0].register_forward_hook(lambda *_: made.append(tcnn_probe.record(model)))
    model(images())
    handle.remove()
    (recorder,) = made
    model(images(2))
    recorder.mark(epoch=0)
    recorder.remove()
    assert recorder.dataset.images.values.tolist()[0][1] == 2
    assert before == Trace(model)


@pytest.mark.parametrize("what", ["features", "features and head", "blocks", "one block", "norm and blocks"])
def test_parts_called_instead_of_the_model(what: str) -> None:
    model = vit()
    x = images()
    expected = entropies(model, x)
    with torch.no_grad():
        tokens = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    with tcnn_probe.record(model) as recorder:
        if what.startswith("features"):
            features = model.forward_features(x)
            if what.endswith("head"):
                model.forward_head(features)
        elif what == "one block":
            model.blocks[1](model.blocks[0](tokens))
        else:
            model.norm(model.blocks(tokens))
        if what == "one block":  # it is no direct part of the model: nobody looks
            with pytest.raises(RuntimeError, match="nothing to mark"):
                recorder.mark(epoch=0)
            return
        recorder.mark(epoch=0)
        assert recorder.dataset.images.values.tolist() == [[3, 3]]
        torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_the_flag_of_the_whole_model_decides(training: bool) -> None:
    """Not those of its parts, which users set for frozen layers, or forget."""
    model = vit()
    model.train(training)
    model.blocks[0].train(not training)
    modes = [module.training for module in model.modules()]
    with tcnn_probe.record(model) as recorder:
        model(images())
        assert [module.training for module in model.modules()] == modes
        if training:
            with pytest.raises(RuntimeError, match=r"\b1 forwards? in training mode"):
                recorder.mark(epoch=0)
        else:
            recorder.mark(epoch=0)
            assert recorder.dataset.images.values.tolist() == [[3, 3]]


class Holder(nn.Module):
    """Is never called itself."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)


class Around(nn.Module):
    """A model with attention, called as each test wants."""

    def __init__(self, forward: Callable[["Around", Tensor], Tensor]) -> None:
        super().__init__()
        blocks = vit().blocks
        self.one, self.two, self._how = blocks[0].attn, blocks[1].attn, forward
        self.eval()

    def forward(self, x: Tensor, again: int = 0) -> Tensor:
        if again:
            return self(0.5 * x, again - 1) + self._how(self, x)
        return self._how(self, x)


def tokens(count: int = 3) -> Tensor:
    return torch.randn(count, 7, 12, generator=torch.Generator().manual_seed(0))


def test_layer_called_twice_in_a_forward() -> None:
    """Each call counts: the mean is over both, ``images`` is twice as many."""
    model = Around(lambda m, x: m.two(m.one(x) + m.one(0.3 * x)))
    expected = (entropy(model.one, tokens()) + entropy(model.one, 0.3 * tokens())).mean(0) / 2
    with tcnn_probe.record(model) as recorder:
        model(tokens())
        recorder.mark(epoch=0)
        assert recorder.layers == ("one", "two")
        assert recorder.dataset.images.values.tolist() == [[6, 3]]
        torch.testing.assert_close(recorded(recorder)[0], expected, rtol=1e-5, atol=1e-6)


def test_shared_layer_has_its_first_name() -> None:
    model = Around(lambda m, x: m.two(m.one(x)))
    model.two = model.one
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        model(tokens())
        recorder.mark(epoch=0)
        assert recorder.layers == ("one",)
        assert recorder.dataset.images.values.tolist() == [[6]]
    assert before == Trace(model)


def test_model_that_calls_itself() -> None:
    model = Around(lambda m, x: m.both.two(m.both.one(x)))
    model.both = Holder(one=model.one, two=model.two)
    del model.one, model.two
    parts = [tokens() * 0.5**depth for depth in range(3)]
    expected = torch.stack([entropy(model.both.one, part).mean(0) for part in parts]).mean(0)
    before = Trace(model)
    with tcnn_probe.record(model) as recorder:
        model(tokens(), again=2)
        assert clean()
        recorder.mark(epoch=0)
        assert recorder.dataset.images.values.tolist() == [[9, 9]]
        torch.testing.assert_close(recorded(recorder)[0], expected, rtol=1e-5, atol=1e-6)
        model(tokens())
        recorder.mark(epoch=1)
        assert recorder.dataset.images.values[1].tolist() == [3, 3]
    assert before == Trace(model)


def test_model_called_in_the_handler_of_an_error() -> None:
    """That error is not the forward's."""
    model = vit()
    with tcnn_probe.record(model) as recorder:
        try:
            raise ValueError("earlier")
        except ValueError:
            model(images())
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[3, 3]]


def test_called_from_a_generator_that_is_left() -> None:
    def outputs(model: nn.Module) -> Iterator[Tensor]:
        while True:
            yield model(images())

    model = vit()
    with tcnn_probe.record(model) as recorder:
        stream = outputs(model)
        next(stream), next(stream)
        stream.close()
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[6, 6]]


class Whole(nn.Module):
    """A model whose inner model is checkpointed as a whole."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self._reentrant = vit(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self._reentrant)


def checkpointed(how: str, reentrant: bool) -> tuple[nn.Module, Callable[[Tensor], Tensor], str]:
    if how == "inside":
        model = Whole(reentrant=reentrant)
        return model, model, "inner."
    model = vit()
    if how == "timm":
        model.set_grad_checkpointing()
        return model, model, ""
    return model, lambda x: checkpoint(model, x, use_reentrant=reentrant), ""


@pytest.mark.parametrize("when", ["train", "always"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["inside", "timm", "around"])
def test_checkpointing_counts_nothing_twice(how: str, reentrant: bool, when: Any) -> None:
    x = images().requires_grad_()
    expected = entropies(vit(), images())
    model, call, prefix = checkpointed(how, reentrant)
    model.train()
    before = Trace(model)
    with tcnn_probe.record(model, when=when) as recorder:
        for epoch in range(2):
            for _ in range(2):
                call(x).sum().backward()
            recorder.mark(epoch=epoch)
            torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
        assert recorder.layers == (f"{prefix}blocks.0.attn", f"{prefix}blocks.1.attn")
    assert recorder.dataset.images.values.tolist() == [[6, 6]] * 2
    gradients = {name: p.grad for name, p in model.named_parameters()}
    alone, call, _ = checkpointed(how, reentrant)
    alone.train()
    for _ in range(4):
        call(x).sum().backward()
    torch.testing.assert_close(gradients, {name: p.grad for name, p in alone.named_parameters()})
    assert before == Trace(model)


def test_threads() -> None:
    """Two that run the recorded model, and one with a model of its own, at once."""
    model, other = vit(), vit(seed=1)
    expected = entropies(model, images())
    before = Trace(model)
    failures: list[BaseException] = []
    left_behind: list[bool] = []
    counts = {"mine": 0}
    start = threading.Barrier(3)

    def run(which: nn.Module) -> None:
        try:
            start.wait()
            for _ in range(40):
                with torch.no_grad():
                    which(images())
            left_behind.append(not clean_of_modes())
        except BaseException as error:
            failures.append(error)

    with tcnn_probe.record(model) as recorder:
        threads = [threading.Thread(target=run, args=(each,)) for each in (model, model, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert left_behind == [False] * 3
        model(images())
        recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.0.attn", "blocks.1.attn")
        torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
        counts["mine"] = int(recorder.dataset.images[0, 0])
    # While one thread's forward is measured, another's goes by.
    assert 0 < counts["mine"] <= 81 * 3
    assert counts["mine"] % 3 == 0
    assert before == Trace(model)
    assert clean()


def clean_of_modes() -> bool:
    return not torch.overrides._get_current_function_mode_stack()


def test_other_threads_and_models_while_a_forward_is_measured() -> None:
    """In the middle of a measured forward: another thread runs this model, and one of its own."""
    model, other = vit(), vit(seed=1)
    expected = entropies(model, images())
    modes: list[bool] = []

    def elsewhere() -> None:
        with torch.no_grad():
            model(images(5))
            other(images(5))
        modes.append(clean_of_modes())

    def hook(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            other(images(2))  # and this thread runs another model in the middle of it

    model.blocks[0].register_forward_hook(hook)
    with tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.0.attn", "blocks.1.attn")
        assert recorder.dataset.images.values.tolist() == [[3, 3]]
        torch.testing.assert_close(recorded(recorder), expected, rtol=1e-5, atol=1e-6)
    assert modes == [True]


def test_removed_by_another_thread_in_the_middle_of_a_forward() -> None:
    model = vit()
    before = Trace(model)
    recorder = tcnn_probe.record(model)

    def hook(*_: Any) -> None:
        thread = threading.Thread(target=recorder.remove)
        thread.start()
        thread.join()

    handle = model.blocks[0].register_forward_hook(hook)
    model(images())
    handle.remove()
    assert clean()
    assert before == Trace(model)
