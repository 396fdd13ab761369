"""Ablated models in several threads: outputs are the same as in one thread,
and every model is restored.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import Trace
from tests.tcnn_probe.networks import scatter

# The models run on the images over which attention was averaged.
pytestmark = pytest.mark.filterwarnings("ignore:.*among images=")


class Both(nn.Module):
    """Gated attention, then softmax attention: (B, 2, H, W) -> (B, H * W, 6)."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.gated = scatter(GPSA(2, 6, 3, padding=1), seed)
        self.softmax = nn.MultiheadAttention(6, 3, batch_first=True)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.gated(x).flatten(2).mT
        return self.softmax(tokens, tokens, tokens, need_weights=False)[0]


X = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0))


def ablated(model: Both, *, terms: bool = True) -> ExitStack:
    """Combine all modes, or only those that do not run a layer again."""
    stack = ExitStack()
    stack.enter_context(tcnn_probe.ablate(model, {"gated": [0, 1, 2]}, "positional"))
    stack.enter_context(tcnn_probe.ablate(model, {"gated": 3}, "content"))
    stack.enter_context(tcnn_probe.ablate(model, {"gated": 4, "softmax": 0}))
    stack.enter_context(tcnn_probe.ablate(model, {"gated": 5}, "mean"))
    stack.enter_context(tcnn_probe.ablate(model, {"gated": [3, 7]}, "static", images=X))
    stack.enter_context(tcnn_probe.ablate(model, {"softmax": 1}, "shuffled", images=X))
    if terms:
        stack.enter_context(tcnn_probe.ablate(model, {"softmax": 1}, "mean", images=X))
        stack.enter_context(
            tcnn_probe.ablate(model, {"gated": 6, "softmax": 2}, "replaced", source=Both(1))
        )
    return stack


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    """Let threads switch very often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Terms run their layers again, so there are fewer forwards.
@pytest.mark.study
@pytest.mark.parametrize(
    ("terms", "forwards"), [(False, 8), (True, 3)], ids=["gates and heads", "terms too"]
)
def test_three_threads_at_once(terms: bool, forwards: int) -> None:
    model = Both()
    equal = []
    before = Trace(model)
    with ablated(model, terms=terms), torch.no_grad():
        expected = model(X)

    @torch.no_grad()
    def work() -> None:
        equal.extend(torch.equal(model(X), expected) for _ in range(forwards))

    with ablated(model, terms=terms):
        run([threading.Thread(target=work) for _ in range(3)])
        with tcnn_probe.record(model) as recorder:
            run([threading.Thread(target=work) for _ in range(3)])
            recorder.mark(epoch=0)
    assert equal == [True] * 6 * forwards  # two runs of three threads
    # The first three heads attend by position, and the fourth one by content.
    assert recorder.dataset.gate.sel(layer="gated").values[0, :4].tolist() == [
        1,
        1,
        1,
        0,
    ]
    assert before == Trace(model)


@pytest.mark.parametrize(
    "error",
    [SystemExit(), KeyboardInterrupt(), None],
    ids=["exit", "interrupt", "returns"],
)
def test_a_thread_in_the_middle_of_a_forward_when_an_ablation_ends(
    error: BaseException | None,
) -> None:
    """Its layer ends as it started, and a forward that was interrupted leaves nothing behind."""
    model = Both()
    outputs = []
    before = Trace(model)
    inside = threading.Event()
    ended = threading.Event()

    def stop(module: nn.Module, args: tuple[Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            if error is not None:
                raise error
            inside.set()
            ended.wait()

    @torch.no_grad()
    def work() -> None:
        with suppress(SystemExit, KeyboardInterrupt):
            outputs.append(model(X))
        inside.set()
        ended.wait()
        outputs.append(model(X))

    thread = threading.Thread(target=work)
    with torch.no_grad():
        plain = model(X)
        with ablated(model), model.softmax.register_forward_pre_hook(stop):
            expected = model(X)
            thread.start()
            inside.wait()
            assert torch.equal(model(X), expected)
        assert torch.equal(model(X), plain)
        ended.set()
        thread.join()
        assert all(map(torch.equal, outputs, [expected, plain] if error is None else [plain]))
        assert torch.equal(model(X), plain)
    assert before == Trace(model)


def test_hooks_of_an_ended_thread_are_removed_at_the_next_call() -> None:
    """The forward runs when the ablation ends,
    and then ends by an exception for which torch calls no hook.
    """
    model = Both()
    inside = threading.Event()
    ended = threading.Event()
    before = Trace(model)

    def stop(module: nn.Module, args: tuple[Tensor]) -> None:
        inside.set()
        ended.wait()
        raise SystemExit

    def work() -> None:
        with suppress(SystemExit):
            model(X)

    thread = threading.Thread(target=work)
    with ablated(model), model.softmax.register_forward_pre_hook(stop):
        thread.start()
        inside.wait()
    ended.set()
    thread.join()
    model(X)
    assert before == Trace(model)


def tiny_vit(seed: int) -> VisionTransformer:
    """Return a ViT with one block of 3 heads on 1 + 2 x 3 tokens."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=(8, 12),
        patch_size=4,
        in_chans=1,
        num_classes=5,
        embed_dim=12,
        depth=1,
        num_heads=3,
    )
    return model.eval()


@pytest.mark.study
def test_ablated_recorded_and_attributed_at_once() -> None:
    """Three models run in three threads, for 25 forwards each."""
    sys.setswitchinterval(1e-4)  # threads switch often enough
    models = ablated, recorded, attributed = [tiny_vit(seed) for seed in range(3)]
    # Maps take a forward per image, so all three threads run as many forwards.
    x = torch.randn(25, 1, 8, 12, generator=torch.Generator().manual_seed(7))
    before = [Trace(model) for model in models]

    def logits(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(x[:2])

    def maps(model: nn.Module) -> Tensor:
        """Compute maps with one forward per image."""
        return torch.from_numpy(
            tcnn_probe.saliency(model, x, 1, batch_size=1, progress=False).values
        )

    jobs: list[tuple[Callable[[nn.Module], Tensor], nn.Module, int]]
    jobs = [(logits, ablated, 25), (logits, recorded, 25), (maps, attributed, 1)]
    equal = []
    with (
        tcnn_probe.ablate(ablated, {"blocks.0.attn": [0, 2]}),
        tcnn_probe.record(recorded) as recorder,
    ):
        alone = [job(model) for job, model, _ in jobs]
        recorder.mark(epoch=0)

        def work(number: int) -> None:
            job, model, times = jobs[number]
            equal.extend(torch.equal(job(model), alone[number]) for _ in range(times))

        run([threading.Thread(target=work, args=(number,)) for number in range(3)])
        recorder.mark(epoch=1)
    assert equal == [True] * 51
    first, second = recorder.dataset.entropy.values
    # Statistics are summed in the order in which threads bring the images.
    np.testing.assert_allclose(second, first, rtol=1e-6)
    assert [Trace(model) for model in models] == before
