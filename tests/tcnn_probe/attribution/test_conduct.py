"""Attribution leaves the model and torch unchanged:
after an exception, in any mode, and with several threads.
"""

import sys
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attribution import METRICS
from tcnn_probe.models import progress_bar
from tests.tcnn_probe.attribution.models import CONVOLVED, patchconvnet, transformer
from tests.tcnn_probe.contracts.helpers import Trace

# captum gives this warning for DeepLift.
pytestmark = pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
METHODS = [
    "class_attention",
    "rollout",
    "gradcam",
    "integrated_gradients",
    "occlusion",
    "DeepLift",
]
OPTIONS: dict[str, dict[str, Any]] = {
    # Windows are few and large, so that the method takes few forwards.
    "occlusion": {"window": 24},
    "integrated_gradients": {"n_steps": 2},
}


def model_for(method: str) -> tuple[nn.Module, Tensor]:
    rollout = method == "rollout"
    model, size = (
        (transformer("deit_tiny_patch16_224"), (24, 40)) if rollout else (patchconvnet(), CONVOLVED)
    )
    return model, torch.randn(2, 3, *size)


def maps_of(model: nn.Module, x: Tensor, method: str) -> xr.DataArray:
    return tcnn_probe.saliency(model, x, 1, method, **OPTIONS.get(method, {}))


def busy(method: str) -> tuple[nn.Module, Tensor]:
    """Return a model with parts in training mode, dropout,
    frozen parameters, gradients and a user's hook.
    """
    model, x = model_for(method)
    model.train()
    model.blocks[0].eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    for name, parameter in model.named_parameters():
        # Some parameters are frozen, and there are gradients that an optimizer has not used yet.
        parameter.requires_grad_("bias" not in name)
        parameter.grad = torch.full_like(parameter, 0.5) if "weight" in name else None
    model.blocks.register_forward_hook(_nothing)
    return model, x


def _nothing(*args: Any) -> None:
    pass


class Everything:
    """State that a method could change, in the model, in torch and in the images."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.trace = Trace(model)
        self.gradients = {
            n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()
        }
        self.images = images.tolist(), images.requires_grad, images.grad
        self.random = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002

    def check(self, model: nn.Module, images: Tensor) -> None:
        for name, value in vars(Everything(model, images)).items():
            assert value == getattr(self, name), name


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("method", METHODS)
def test_attribution_leaves_no_trace(method: str) -> None:
    """This holds also after an exception in the forward
    that finds the targets (1), or in the method's own (2).
    """
    model, x = busy(method)
    calls = failing = 0

    def fail(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise BrokenError

    model.blocks[-1].register_forward_hook(fail)
    expected = maps_of(model_for(method)[0], x, method)
    before = Everything(model, x)
    np.testing.assert_array_equal(maps_of(model, x, method), expected)  # dropout is off
    before.check(model, x)
    for number in (1, 2):
        calls = 0
        failing = number
        with pytest.raises(BrokenError):
            maps_of(model, x, method)
        before.check(model, x)


def backward(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    model(x.requires_grad_()).gather(1, target[:, None]).sum().backward()
    assert x.grad is not None
    return x.grad.sum(1)


def test_faithfulness_leaves_no_trace() -> None:
    model, x = busy("gradcam")
    before = Everything(model, x)
    masks = torch.zeros(2, *CONVOLVED, dtype=torch.bool)
    masks[:, 3:9] = True
    scores = tcnn_probe.faithfulness(model, x, ["class_attention", backward], masks=masks, steps=3)
    assert set(scores) == set(METRICS)
    before.check(model, x)

    def broken(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        raise BrokenError

    with pytest.raises(BrokenError):
        tcnn_probe.faithfulness(model, x, broken)
    before.check(model, x)


@pytest.mark.parametrize("method", ["gradcam", backward])
def test_threads_wait_for_each_other(method: Any) -> None:
    model, x = busy("gradcam")
    before = Everything(model, x)
    expected = tcnn_probe.saliency(model, x, 1, method).values
    # All threads start together, or the first would end before the second starts.
    barrier = Barrier(3)
    results = []

    def attribute() -> None:
        barrier.wait()
        results.extend(
            tcnn_probe.saliency(model, x, 1, method, batch_size=1).values for _ in range(2)
        )

    threads = [Thread(target=attribute) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for maps in results:
        # Single images as batches change the order of float32 sums.
        np.testing.assert_allclose(maps, expected, atol=1e-5 * abs(expected).max())
    before.check(model, x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", ["rollout", "gradcam", "occlusion"])
def test_gradient_mode_of_the_caller_does_not_matter(method: str, mode: Any) -> None:
    model, x = model_for(method)
    outside = maps_of(model, x, method)
    with mode():
        inside = maps_of(model, x.clone(), method)
    np.testing.assert_array_equal(inside, outside)


@pytest.mark.parametrize("method", METHODS)
def test_attribution_in_half_precision(method: str) -> None:
    model, x = model_for(method)
    usual = maps_of(model, x, method)
    half = maps_of(model.bfloat16(), x, method)
    assert half.dtype == "float32"
    # bfloat16 has 8 significant bits, and gradients amplify its rounding; unrelated maps have a
    # correlation near 0.
    assert np.corrcoef(half.values.ravel(), usual.values.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("method", ["class_attention", "rollout", "gradcam"])
def test_attribution_is_not_recorded(method: str) -> None:
    """Nor do recorders lose any of their own forwards."""
    model, x = model_for(method)
    probes = (
        ["softmax", "class-attention", "gradient"]
        if method == "rollout"
        else ["class-attention", "gradient"]
    )
    expected = maps_of(model, x, method)
    trees = []
    for meanwhile in (True, False):
        with tcnn_probe.record(model, probes=probes, when="always") as recorder:
            model(x)
            if meanwhile:
                np.testing.assert_array_equal(maps_of(model, x, method), expected)
                tcnn_probe.faithfulness(model, x, [method], metrics="deletion_auc", steps=2)
            model(x[:1]).sum().backward()
            recorder.mark(epoch=0)
        trees.append(recorder.tree.load())
    # Recorders saw two images and one, without those of the attribution.
    assert max(int(node.images.max()) for node in trees[0].subtree if "images" in node) == 3
    xr.testing.assert_equal(*trees)


@pytest.mark.parametrize("notebook", [False, True])
def test_progress_bars_of_long_calls_are_shown_in_notebooks(
    notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shell of a terminal has no kernel.
    shell = SimpleNamespace(kernel=1) if notebook else None
    fake = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", fake)
    with progress_bar(3, "maps", None) as bar:
        assert bar.disable == (not notebook)


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_bar(
    progress: bool | None, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = model_for("class_attention")
    tcnn_probe.faithfulness(
        model, x, "class_attention", metrics="deletion_auc", steps=2, progress=progress
    )
    assert ("faithfulness" in capsys.readouterr().err) == shown
