"""torch.compile, before or after attaching:
recorded forwards run eagerly, others as if there were no recorder.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import xarray as xr
from torch import Tensor, nn

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


def compiled(model: nn.Module, way: str, **options: Any) -> nn.Module:
    """Compile a model, and return the module to call."""
    if way == "wrapper":
        return torch.compile(model, **options)
    if way == "in place":
        model.compile(**options)
    elif way == "forward":
        model.forward = torch.compile(model.forward, **options)
    elif way == "part":
        model.blocks[1] = torch.compile(model.blocks[1], **options)
    else:
        model.blocks[1].attn.compile(**options)
    return model


WAYS = ("wrapper", "in place", "forward", "part", "part in place")
HAS_COUNT = hasattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count")  # torch 2.15


# The wrapper, or the model itself, may be given to record(), before or after it is compiled.
GIVEN = [
    (way, order, fullgraph)
    for way in WAYS
    for order in ("compiled first", "attached first", "model of the wrapper")
    for fullgraph in (False, True)
    if way == "wrapper" or order != "model of the wrapper"
]
HOOKS_INSIDE = [
    case
    for case in GIVEN
    if case[0] == "in place" or (case[0] == "wrapper" and case[1] != "compiled first")
]
# A whole graph shows all that one in parts shows, but torch 2.15 refuses it with hooks inside.
ACCEPTED = [
    case for case in GIVEN if (not (case[2] and HAS_COUNT) if case in HOOKS_INSIDE else case[2])
]


def graphs_and_runs(way: str, fullgraph: bool, order: str = "") -> tuple[int, int]:
    """Train and evaluate, with a recorder if there is an order,
    and return how many graphs ran how often.
    """
    torch._dynamo.reset()
    # One block shows as much where all are compiled, and is traced in half of the time.
    x, original, backend = images(), vit(depth=2 if "part" in way else 1), Counting()
    expected = entropies(original, x)
    recorder = tcnn_probe.record(original) if order == "attached first" else None
    model = compiled(original, way, backend=backend, fullgraph=fullgraph)
    if order and recorder is None:
        recorder = tcnn_probe.record(model if order == "compiled first" else original)
    for epoch in range(2):
        model.train()
        for _ in range(2):
            model(x).sum().backward()
        if recorder is not None:
            model.eval()
            runs = backend.runs
            with torch.no_grad():
                model(x)
            assert backend.runs == runs
            recorder.mark(epoch=epoch)
            check_entropies(recorder, expected, images=3)
    if recorder is not None:
        recorder.remove()
    return backend.graphs, backend.runs


graphs_and_runs_alone = cache(graphs_and_runs)


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global")
@pytest.mark.parametrize(("way", "order", "fullgraph"), ACCEPTED)
def test_training_with_an_evaluation_after_each_epoch(
    way: str, order: str, fullgraph: bool
) -> None:
    """Recorded forwards run eagerly, and the others in the same graphs as without a recorder."""
    alone = graphs_and_runs_alone(way, fullgraph)
    assert alone == (1, 4)
    assert graphs_and_runs(way, fullgraph, order) == alone
    assert clean()


def test_recorders_that_follow_each_other_run_the_same_graph() -> None:
    """torch would compile another one for hooks with other numbers, but at most eight."""
    x, backend = images(), Counting()
    model = torch.compile(vit(depth=1), backend=backend, fullgraph=True)
    for _ in range(9):
        with tcnn_probe.record(model) as recorder:
            model.train()(x)
            model.eval()(x)
            recorder.mark(epoch=0)
    assert (backend.graphs, backend.runs) == (1, 9)
    for _ in range(2):  # without hooks
        model.train()(x)
    assert (backend.graphs, backend.runs) == (2, 11)


@pytest.mark.skipif(not HAS_COUNT, reason="torch does not refuse it")
@pytest.mark.parametrize("way", ["in place", "wrapper"])
def test_whole_graphs_with_the_hooks_inside_are_refused(way: str) -> None:
    original, x, backend = vit(), images(), Counting()
    expected = original(x)
    model = compiled(original, way, backend=backend, fullgraph=True)
    before = Trace(model)
    with (
        tcnn_probe.attention_stream(original, print),
        pytest.raises(RuntimeError, match=r"compiled = torch\.compile\(model, full"),
    ):
        model(x)
    torch.testing.assert_close(model(x), expected)
    assert backend.runs == 1
    assert before == Trace(model)
    assert clean()


@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global")
@pytest.mark.parametrize(
    ("way", "fullgraph"), [*((way, True) for way in WAYS), ("in place", False)]
)
def test_compiled_models_are_mapped_explained_and_ablated(way: str, fullgraph: bool) -> None:
    plain, x, backend = vit(), images(), Counting()
    model = compiled(vit(), way, backend=backend, fullgraph=fullgraph)
    before = Trace(model)
    with torch.no_grad():
        logits = model(x)
    runs = backend.runs
    assert runs > 0
    maps, of_plain = (
        tcnn_probe.attention_maps(m, x, queries="class")["3x5x7"].dataset for m in (model, plain)
    )
    xr.testing.assert_equal(maps, of_plain)
    saliency, of_plain = (
        tcnn_probe.saliency(m, x, method="gradcam", target=1) for m in (model, plain)
    )
    xr.testing.assert_equal(saliency, of_plain)
    if not (way == "in place" and fullgraph and HAS_COUNT):
        for mode in ("zero", "static"):
            options = {"images": images(seed=1)} if mode == "static" else {}
            with (
                tcnn_probe.ablate(model, {"blocks.1.attn": [0]}, mode, **options),
                tcnn_probe.ablate(plain, {"blocks.1.attn": [0]}, mode, **options),
                torch.no_grad(),
            ):
                ablated = model(x)
                torch.testing.assert_close(ablated, plain(x), rtol=0, atol=0)
            assert not torch.allclose(ablated, logits)
    assert (backend.graphs, backend.runs) == (runs, runs)
    with torch.no_grad():
        torch.testing.assert_close(model(x), logits, rtol=0, atol=0)
    assert (backend.graphs, backend.runs) == (runs, runs + 1)
    assert before == Trace(model)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


@pytest.mark.parametrize("fullgraph", [False, True])
def test_wrapper_of_a_class_of_torch_whose_hooks_are_compiled(fullgraph: bool) -> None:
    """torch.compile traces the call of nn.Sequential with its hooks,
    which are in no graph of a wrapper.
    """
    model = nn.Sequential(Attention(), Attention())
    wrapper = torch.compile(model, backend=Counting(), fullgraph=fullgraph)
    names = list[str]()
    with tcnn_probe.attention_stream(wrapper, lambda x: names.append(x.name)) as stream:
        wrapper(torch.randn(2, 7, 4))
        assert names == [*stream.layers] == ["0", "1"]
        stream.close()
        wrapper(torch.randn(2, 7, 4))
    assert names == ["0", "1"]


def test_model_compiled_after_a_recorder_and_a_stream_have_ended() -> None:
    original, x = vit(), images()
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
    assert clean()
