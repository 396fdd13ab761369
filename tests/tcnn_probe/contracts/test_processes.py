"""Tests in separate processes: two that record together (ranks.py), and one in a new state."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tcnn_probe
from tests.tcnn_probe.contracts import ranks


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_record_together(tmp_path: Path) -> None:
    """The ranks run on the CPU, with gloo."""
    # Forks of this process may be unable to run a backward pass, after what earlier tests did.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.tcnn_probe.contracts.ranks"])
    with context.Pool(2) as pool:
        # The timeout is minutes more than two busy cores need, and ends a deadlock.
        work = pool.starmap_async(ranks.main, [(rank, tmp_path) for rank in range(2)], chunksize=1)
        work.get(timeout=300)


LOADING = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
calls = []
modules = model, *model.layers
handles = [
    module.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    for module in modules
]
model(torch.randn(2, 7, 12))
assert calls == [1] * 3, calls
for module in model.modules():
    assert len(module._forward_pre_hooks) == (module in modules)
    assert not module._forward_pre_hooks_with_kwargs and not module._forward_hooks
"""


def test_a_model_saved_while_recording_is_loaded_in_another_process(
    tmp_path: Path,
) -> None:
    """A hook that is registered there first is called
    with the usual arguments, and is the only one.
    """
    layer = nn.TransformerEncoderLayer(12, 3, 17, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with tcnn_probe.record(model):
        torch.save(model, tmp_path / "model.pt")
    command = [sys.executable, "-c", LOADING, tmp_path / "model.pt"]
    root = Path(tcnn_probe.__file__).parents[1]
    subprocess.run(command, cwd=root, check=True)
