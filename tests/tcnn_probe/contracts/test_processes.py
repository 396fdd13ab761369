"""Tests in separate processes: two that record together (ranks.py), and one in a new state."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tcnn_probe
from tests.tcnn_probe.contracts import ranks
from tests.tcnn_probe.contracts.helpers import fresh_processes, images, vit


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_record_together(tmp_path: Path) -> None:
    """The ranks run on the CPU, with gloo."""
    with fresh_processes(2) as pool:
        # The timeout is minutes more than two busy cores need, and ends a deadlock.
        passed = pool.starmap_async(
            ranks.main, [(rank, tmp_path) for rank in range(2)], chunksize=1
        ).get(timeout=300)
    assert passed == [[scenario.__name__ for scenario in ranks.SCENARIOS]] * 2


def hooks_of(file: Path) -> tuple[bool, bool, bool]:
    """Load a model; return whether new hooks are called,
    whether they are the only ones, and whether others stayed.
    """
    model = torch.load(file, weights_only=False)
    calls = list[int]()
    modules = (model, *model.children())
    handles = [
        module.register_forward_pre_hook(lambda module, args: calls.append(len(args)))
        for module in modules
    ]
    model(images())
    registered = sum(len(module._forward_pre_hooks) for module in model.modules())
    foreign = any(
        module._forward_pre_hooks_with_kwargs or module._forward_hooks for module in model.modules()
    )
    return len(calls) > 5, registered == len(handles), foreign


def test_a_model_saved_while_recording_is_loaded_in_another_process(
    tmp_path: Path,
) -> None:
    """A hook that is registered there first is called
    with the usual arguments, and is the only one.
    """
    model = vit()
    with tcnn_probe.record(model):
        torch.save(model, tmp_path / "model.pt")
    with fresh_processes(1) as pool:
        assert pool.apply(hooks_of, (tmp_path / "model.pt",)) == (True, True, False)
