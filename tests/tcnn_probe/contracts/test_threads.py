"""Several threads run one model: one forward at a time is recorded,
and nothing is left behind in any thread.
"""

import _thread
import gc
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import tcnn_probe
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.stream import AttentionStream
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
    """Run an action to its end in another thread, and return the exceptions that it raised."""
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


def test_three_threads_at_once() -> None:
    """Two threads run the recorded model, and one another model;
    during a recorded forward others are not recorded.
    """
    model = vit()
    second = vit(seed=1)
    expected = entropies(model, images())
    before = Trace(model)
    left: list[bool] = []
    start = threading.Barrier(3)

    def run(which: nn.Module) -> None:
        start.wait()
        with torch.no_grad():
            # There are enough forwards for those of the threads to overlap.
            for _ in range(15):
                which(images())
        left.append(not no_modes())

    with tcnn_probe.record(model) as recorder:
        threads = [
            threading.Thread(target=run, args=(network,)) for network in (model, model, second)
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
    # The number of recorded forwards depends on timing, but each is recorded completely or not at
    # all. At most 2 x 15 forwards of three images are.
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
            # These are five images instead of three, so that they would show in the count.
            model(images(5))
            second(images(5))
        modes.append(no_modes())

    def hook(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            assert not in_thread(elsewhere)
            # This thread also runs another model in the middle of the forward.
            second(images(2))

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
    handle = model.blocks[0].register_forward_hook(lambda *_: (in_thread(recorder.remove), None)[1])
    model(images())
    handle.remove()
    assert clean()
    assert before == Trace(model)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_exceptions_for_which_torch_calls_no_hook(error: type[BaseException]) -> None:
    """A forward that ends so is released by the next forward of any thread,
    or at the end of the ``with``.
    """
    model = vit()
    expected = entropies(model, images())
    before = Trace(model)

    def fail(*_: Any) -> None:
        raise error("in a thread")

    def interrupted() -> None:
        handle = model.blocks[1].register_forward_pre_hook(fail)
        assert [type(exception) for exception in in_thread(lambda: model(images(5)))] == [error]
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
def test_recorder_removed_before_such_an_exception(finish: str) -> None:
    """The removal is completed by a second remove() or by the next forward."""
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
    """A forward that is running at a mark belongs to no epoch:
    its statistics and maps are not split.
    """
    model = vit()
    entered = threading.Event()
    marked = threading.Event()
    expected = entropies(model, images())

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            # The timeout ends a deadlock, and exceeds any delay under load.
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
    """torch stores a hook and its request for keyword arguments separately:
    in between, it is called without them.
    """
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model._forward_hooks_with_kwargs.clear()
        model._forward_pre_hooks_with_kwargs.clear()
        model(images())
        recorder.mark(epoch=0)
    check_entropies(recorder, entropies(vit(), images()), images=3)


def test_a_stream_in_one_thread_sees_no_forwards_of_others() -> None:
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


def test_autograds_own_threads_inherit_the_hidden_depth() -> None:
    """Gradients on a GPU are computed in threads
    that Python did not start, and that have no context.
    """
    depths = list[int]()
    done = threading.Event()

    def alien() -> None:
        depths.append(hidden_depth())
        done.set()

    for around in (nullcontext, hidden_from_recorders):
        done.clear()
        with around():
            # threading would give the thread a context.
            _thread.start_new_thread(alien, ())
            assert done.wait(60)
    assert depths == [0, 1]
    assert not in_thread(lambda: depths.append(hidden_depth()))
    assert depths[-1] == 0


def test_a_running_forward_is_not_taken_for_an_abandoned_one() -> None:
    """The stack of the forward changes while another thread reads it to see whether the forward
    still runs.
    """
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
    stream.attach()
    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=work) for _ in range(4)]
    try:
        # Threads switch at nearly every instruction while stacks are read.
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        stream.close()
    assert not failed


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_of_threads_are_read(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python before 3.12 can deadlock there."""
    read, enabled = sys._current_frames, list[bool]()

    def frames() -> Any:
        enabled.append(gc.isenabled())
        return read()

    monkeypatch.setattr(sys, "_current_frames", frames)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with tcnn_probe.attention_stream(vit(), lambda attention: None):
            assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()
    assert enabled
    assert not any(enabled)
