"""FSDP2: every process has a part of each parameter, its gradient and its optimizer's state.

Checkpoints hold whole tensors, as those of a training that is not sharded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = ["gathered", "shard", "spread", "spread_state", "whole", "without_sync"]


def shard(model: nn.Module) -> None:
    """Spread a model over the processes, in place: its blocks, each gathered when it runs, and what is beside them."""
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        for block in child if isinstance(child, nn.Sequential | nn.ModuleList) else ():
            if next(block.parameters(), None) is not None:
                fully_shard(block)
    fully_shard(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within, each process has the whole model, and may call it as often as it likes; all enter and leave together."""
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """Within, gradients are added up in each process and not over processes."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole(state: Any) -> Any:
    """A state with the whole of each tensor, in every process; all call it together."""
    return tree_map(lambda value: value.full_tensor() if hasattr(value, "full_tensor") else value, state)


def spread(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A state for a model, each tensor spread as the model's own is."""
    own = model.state_dict()
    return {name: _like(value, own[name]) if name in own else value for name, value in state.items()}


def spread_state(optimizer: torch.optim.Optimizer) -> None:
    """Spread what an optimizer has loaded as its parameters are."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = _like(value, parameter)


def _like(value: Tensor, own: Tensor) -> Tensor:
    if not hasattr(own, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, own.device_mesh, own.placements)  # type: ignore[attr-defined]
