"""Sharding by FSDP2: every process holds a part of each parameter,
of its gradient and of its optimizer state.

Checkpoints hold full tensors, like those of an unsharded training.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

__all__ = [
    "gather_state",
    "gathered",
    "shard",
    "shard_optimizer",
    "shard_state",
    "without_sync",
]


def shard(model: nn.Module) -> None:
    """Shard a model over the processes in place:
    each block by itself, then all other parameters.
    """
    # This import is slow, and runs on one process do not need it.
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        # timm keeps the blocks of a model in one of these two types.
        if not isinstance(child, nn.Sequential | nn.ModuleList):
            continue
        for block in child:
            # A block without parameters has nothing to gather, and would only get hooks.
            if next(block.parameters(), None) is not None:
                fully_shard(block)
    # The root is sharded last: it takes the parameters that belong to no block.
    fully_shard(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold the full model in each process inside the ``with``;
    all processes enter and leave together.

    Processes may validate different numbers of batches. A forward that gathers parameters would
    wait for processes that have finished.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        # By default FSDP reshards the parameters after a forward, and the next forward would have
        # to gather them.
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            # These are torch's defaults: the root stays unsharded after a forward, other modules
            # are resharded.
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """Accumulate gradients in each process without reducing them over processes,
    inside the ``with``.
    """
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def gather_state(state: Any) -> Any:
    """Return a state with full tensors in every process; all processes must call this together."""

    def gather(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return tree_map(gather, state)


def shard_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state with its tensors sharded like those of a model."""
    pattern = model.state_dict()
    return {
        name: _like(value, pattern[name]) if name in pattern else value
        for name, value in state.items()
    }


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Shard the state that an optimizer has loaded, like its parameters."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # Adam also keeps the number of steps, a scalar, which is not sharded.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = _like(value, parameter)


def _like(value: Tensor, pattern: Tensor) -> Tensor:
    # Only a DTensor has this method; buffers are plain tensors.
    if not hasattr(pattern, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, pattern.device_mesh, pattern.placements)  # type: ignore[attr-defined]
