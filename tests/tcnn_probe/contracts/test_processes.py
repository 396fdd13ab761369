"""Tests in separate processes: two that record together (ranks.py), and one in a new state."""

import multiprocessing
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tcnn_probe
from tests.tcnn_probe.contracts import ranks


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """Return the means to start processes from one that has imported all and run nothing."""
    # Forks of this process may be unable to run a backward pass, after what earlier tests did.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tcnn_probe.contracts.ranks"])
    return context


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_record_together(context: ForkServerContext, tmp_path: Path) -> None:
    """The ranks run on the CPU, with gloo."""
    with context.Pool(2) as pool:
        # The timeout is minutes more than two busy cores need, and ends a deadlock.
        work = pool.starmap_async(ranks.main, [(rank, tmp_path) for rank in range(2)], chunksize=1)
        work.get(timeout=300)


def load(path: Path) -> None:
    """Check that a hook that is registered first is called as usual, and is the only one."""
    model = torch.load(path, weights_only=False)
    calls = []
    modules = (model, *model.layers)
    for module in modules:
        module.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    model(torch.randn(2, 7, 12))
    assert calls == [1] * 3
    for module in model.modules():
        assert len(module._forward_pre_hooks) == (module in modules)
        assert not module._forward_pre_hooks_with_kwargs
        assert not module._forward_hooks


def test_a_model_saved_while_recording_is_loaded_in_another_process(
    context: ForkServerContext, tmp_path: Path
) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with tcnn_probe.record(model):
        torch.save(model, tmp_path / "model.pt")
    with context.Pool(1) as pool:
        pool.apply(load, [tmp_path / "model.pt"])
