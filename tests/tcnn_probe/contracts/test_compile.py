"""torch.compile after attaching: recorded forwards run uncompiled, and all others as if there were no recorder."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import (
    Trace,
    check_entropies,
    clean,
    entropies,
    images,
    vit,
)

# torch._dynamo suppresses this warning of its own, but a filter that raises brings it back.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


# torch 2.8 does not compile a forward any more once it has been recorded through the compiled wrapper.
OLD = torch.__version__ < (2, 9)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    # Graphs of other tests would count towards dynamo's limit of recompilations.
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """Backend that compiles nothing, and counts graphs and their runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled(what: str, backend: Any = "eager", **options: Any) -> nn.Module:
    model = vit()
    if what == "the model":
        return torch.compile(model, backend=backend)
    if what == "a part":
        model.blocks[1] = torch.compile(model.blocks[1], backend=backend, **options)
    elif what == "a part in place":
        model.blocks[1].attn.compile(backend=backend, **options)
    else:
        model.compile(backend=backend)
    return model


@pytest.mark.parametrize("what", ["the model", "the model in place"])
def test_a_compiled_model_is_refused(what: str) -> None:
    model = compiled(what)
    before = Trace(model)
    with pytest.raises(
        TypeError,
        match=r"compiled.*record the original model, or attach before torch\.compile",
    ):
        tcnn_probe.record(model)
    with (
        pytest.raises(TypeError, match="compiled"),
        tcnn_probe.attention_stream(model, print),
    ):
        pass
    assert before == Trace(model)


@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global"
)
@pytest.mark.parametrize(
    "fullgraph",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                OLD, reason="torch 2.8 has no switch that lets whole graphs run eagerly"
            ),
        ),
    ],
)
@pytest.mark.parametrize("what", ["a part", "a part in place"])
def test_parts_may_be_compiled_before_attaching(what: str, fullgraph: bool) -> None:
    plain, x, backend = vit(), images(), Counting()
    model = compiled(what, backend, fullgraph=fullgraph)
    before = Trace(model)
    with torch.no_grad():
        expected = model(x)
        runs = backend.runs
        assert runs > 0
        with tcnn_probe.record(model, probes=["softmax", "features"]) as recorder:
            torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
            recorder.mark(epoch=0)
        check_entropies(recorder, entropies(plain, x), images=3)
        features = recorder.tree["features"].dataset
        assert (
            features["images"] == 3
        ).all()  # a wrapper is not a second call of the layer
        maps = tcnn_probe.attention_maps(model, x, queries="class")
        of_plain = tcnn_probe.attention_maps(plain, x, queries="class")
        xr.testing.assert_equal(maps["3x5x7"].dataset, of_plain["3x5x7"].dataset)
        with (
            tcnn_probe.ablate(model, {"blocks.1.attn": [0]}),
            tcnn_probe.ablate(plain, {"blocks.1.attn": [0]}),
        ):
            torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
        assert backend.runs == runs
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        assert backend.runs > runs or OLD
    with pytest.raises(TypeError, match=r"the part .blocks\.1.* is compiled"):
        tcnn_probe.saliency(model, x, method="gradcam", target=1)
    assert before == Trace(model)


def through(model: nn.Module, way: str, backend: Any, **options: Any) -> nn.Module:
    if way == "in place":
        model.compile(backend=backend, **options)
        return model
    if way == "part":
        model.blocks.compile(backend=backend, **options)
        return model
    return torch.compile(model, backend=backend, **options)


@pytest.mark.parametrize(
    ("way", "first"),
    [
        ("wrapped", "eval"),
        ("wrapped", "train"),
        ("in place", "eval"),
        ("part", "train"),
    ],
)
def test_model_may_be_compiled_after_attaching(way: str, first: str) -> None:
    original, x = vit(), images()
    expected = entropies(original, x)
    logits = original(x)
    backend = Counting()
    with tcnn_probe.record(original) as recorder:
        model = through(original, way, backend)
        for epoch in range(2):
            if first == "train" or epoch:
                model.train()
                # The first pass compiles, and the second runs the compiled graph.
                for _ in range(2):
                    model(x).sum().backward()
            model.eval()
            with torch.no_grad():
                torch.testing.assert_close(model(x), logits)
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=3)
    assert backend.runs > 0 or OLD


def test_training_forwards_stay_compiled_in_one_graph() -> None:
    original, x = vit(), images()
    alone = Counting()
    torch.compile(vit().train(), backend=alone)(x)
    assert alone.graphs == 1
    torch._dynamo.reset()
    backend = Counting()
    with tcnn_probe.record(original) as recorder:
        model = torch.compile(original, backend=backend)
        model.train()
        for _ in range(3):
            model(x)
        assert backend.graphs == 1
        assert backend.runs == 3
        model.eval()
        model(x)
        recorder.mark(epoch=0)
        assert backend.runs == 3  # the recorded forward was not compiled
        model.train()
        model(x)
        assert backend.graphs == 1
        assert backend.runs == (3 if OLD else 4)
    model(x)
    assert backend.runs == (3 if OLD else 5)


def test_model_compiled_after_a_recorder_and_a_stream_have_ended() -> None:
    original, x = vit(), images()
    # Once a function has been compiled, recorded forwards stop torch from compiling.
    torch.compile(nn.Linear(2, 2), backend=Counting())(torch.ones(2))
    with (
        tcnn_probe.record(original) as recorder,
        tcnn_probe.attention_stream(original, lambda attention: None),
    ):
        original(x)
        recorder.mark(epoch=0)
    backend = Counting()
    torch.compile(original, backend=backend)(x)
    assert backend.graphs == 1
    # torch 2.8 uses flags to stop compiling, of which torch 2.15 only keeps a count.
    assert clean()


def test_fullgraph_with_recorded_forwards() -> None:
    model, x = vit(), images()
    expected = entropies(model, x)
    backend = Counting()
    with tcnn_probe.record(model) as recorder:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        model.train()
        compiled(x)
        compiled(x)
        assert backend.graphs == 1
        assert backend.runs == 2
        model.eval()
        model(x)  # the original, which shares the weights
        recorder.mark(epoch=0)
        # A recorded forward is a graph break, which fullgraph refuses.
        with torch.compiler.set_stance("force_eager"):
            compiled(x)
        recorder.mark(epoch=1)
    assert backend.runs == 2
    for mark in range(2):
        check_entropies(recorder, expected, mark)
