"""Several threads that run one model: one forward at a time is measured, and nothing is left in any of them."""

import _thread
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tcnn_probe
from tcnn_probe.attention.stream import AttentionListener, AttentionStream
from tcnn_probe.hooks.modes import hidden_depth, hidden_from_recorders
from tcnn_probe.models import untouched
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    images,
    vit,
)


def in_thread(action: Callable[[], Any]) -> list[BaseException]:
    """Run to its end; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def no_modes() -> bool:
    return not torch.overrides._get_current_function_mode_stack()


def test_at_once() -> None:
    """Two threads run the recorded model, and one a model of its own; while one is measured, others go by."""
    model = vit()
    second = vit(seed=1)
    expected = entropies(model, images())
    before = Trace(model)
    left: list[bool] = []
    start = threading.Barrier(3)

    def run(which: nn.Module) -> None:
        start.wait()
        with torch.no_grad():
            # Enough that forwards of the threads overlap.
            for _ in range(15):
                which(images())
        left.append(not no_modes())

    with tcnn_probe.record(model) as recorder:
        threads = [
            threading.Thread(target=run, args=(network,))
            for network in (model, model, second)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert left == [False] * 3
        recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.0.attn", "blocks.1.attn")
        check_entropies(recorder, expected)
        count = int(recorder.dataset.images[0, 0])
    # How many forwards are measured depends on how the threads meet; each is measured whole, or not.
    # Two threads with 15 forwards each, of three images.
    assert 0 < count <= 30 * 3
    assert count % 3 == 0
    assert before == Trace(model)
    assert clean()


def test_other_threads_and_models_in_the_middle_of_a_forward() -> None:
    model = vit()
    second = vit(seed=1)
    modes = list[bool]()
    expected = entropies(model, images())

    def elsewhere() -> None:
        with torch.no_grad():
            # Five images and not three, so that those measured by mistake are counted.
            model(images(5))
            second(images(5))
        modes.append(no_modes())

    def hook(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert not in_thread(elsewhere)
            second(images(2))  # and this thread runs another model in the middle of it

    model.blocks[0].register_forward_hook(hook)
    with tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=0)
        assert recorder.layers == ("blocks.0.attn", "blocks.1.attn")
        check_entropies(recorder, expected, images=3)
    assert modes == [True]


def test_removed_by_another_thread_in_the_middle_of_a_forward() -> None:
    model = vit()
    before = Trace(model)
    recorder = tcnn_probe.record(model)
    handle = model.blocks[0].register_forward_hook(
        lambda *_: (in_thread(recorder.remove), None)[1]
    )
    model(images())
    handle.remove()
    assert clean()
    assert before == Trace(model)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_exceptions_that_torch_tells_no_hook_of(error: type[BaseException]) -> None:
    """The forward that one ends is let go, by the next forward of any thread and at the end of the ``with``."""
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)

    def fail(*_: Any) -> None:
        raise error("in a thread")

    def interrupted() -> None:
        handle = model.blocks[1].register_forward_pre_hook(fail)
        assert [
            type(exception) for exception in in_thread(lambda: model(images(5)))
        ] == [error]
        handle.remove()

    with tcnn_probe.record(model) as recorder:
        interrupted()
        model(images())
        recorder.mark(epoch=0)
        check_entropies(recorder, expected, images=3)
        interrupted()
    assert before == Trace(model)
    assert clean()


@pytest.mark.parametrize("finish", ["remove", "forward"])
def test_removed_before_such_an_exception(finish: str) -> None:
    """A second remove() finishes the job, and so does the next forward."""
    model = vit()
    before = Trace(model)
    recorder = tcnn_probe.record(model)

    def fail(*_: Any) -> None:
        assert not in_thread(recorder.remove)
        raise SystemExit

    handle = model.blocks[1].register_forward_pre_hook(fail)
    assert in_thread(lambda: model(images()))
    handle.remove()
    assert before != Trace(model)
    recorder.remove() if finish == "remove" else model(images())
    assert before == Trace(model)
    assert clean()


def test_mark_in_the_middle_of_another_thread_s_forward() -> None:
    """A forward under way at a mark belongs to no epoch: its numbers and maps are not split between two."""
    model = vit()
    entered = threading.Event()
    marked = threading.Event()
    expected = entropies(model, images())

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            # A test that hangs would say nothing; a minute is beyond any load.
            assert marked.wait(60)

    model.blocks[1].register_forward_pre_hook(wait)
    with torch.no_grad(), tcnn_probe.record(model, images=[0, 1]) as recorder:
        for epoch in range(2):
            model(images())
            thread = threading.Thread(target=model, args=(images(5, seed=1),))
            thread.start()
            assert entered.wait(60)
            recorder.mark(epoch=epoch)
            marked.set()
            thread.join()
            entered.clear()
            marked.clear()
        for mark in range(2):
            check_entropies(recorder, expected, mark, images=3)
        maps = recorder.tree["maps/3x5x7"].to_dataset().class_attention
    assert maps.notnull().all()
    assert bool((maps[0] == maps[1]).all())


def test_hooks_that_another_thread_is_adding_or_removing() -> None:
    """torch keeps a hook and its wish for keyword arguments apart: between the two it is called without them."""
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model._forward_hooks_with_kwargs.clear()
        model._forward_pre_hooks_with_kwargs.clear()
        model(images())
        recorder.mark(epoch=0)
    check_entropies(recorder, entropies(vit(), images()), images=3)


def test_what_one_thread_does_aside_sees_no_other_s_forwards() -> None:
    model = vit()
    names = list[str]()
    with (
        torch.no_grad(),
        untouched(model),
        tcnn_probe.attention_stream(model, lambda call: names.append(call.name)),
    ):
        assert not in_thread(lambda: model(images()))
        assert names == []
        model(images())
        assert names == ["blocks.0.attn", "blocks.1.attn"]


def test_autograd_s_own_threads_are_aside_with_any_other() -> None:
    """Gradients of a GPU come in threads that Python did not start, and that know no context."""
    depths = list[int]()
    done = threading.Event()

    def alien() -> None:
        depths.append(hidden_depth())
        done.set()

    for around in (nullcontext, hidden_from_recorders):
        done.clear()
        with around():
            # Below threading, which would give the thread a context.
            _thread.start_new_thread(alien, ())
            assert done.wait(60)
    assert depths == [0, 1]
    assert not in_thread(lambda: depths.append(hidden_depth()))
    assert depths[-1] == 0


def test_a_forward_that_goes_on_is_not_given_up() -> None:
    """Its stack changes while another thread reads it, to see whether the forward still runs."""
    model = vit()
    image = images()[:1]
    failed = []

    class Listener(AttentionListener):
        def fails(self) -> None:
            failed.append(1)

    @torch.no_grad()
    def work() -> None:
        for _ in range(60):
            model(image)

    stream = AttentionStream(model, Listener())
    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        # Threads change over at nearly every instruction, while stacks are read.
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        stream.close()
    assert not failed
