"""FSDP2: every process has a part of each parameter, its gradient and its optimizer's state.

Checkpoints hold whole tensors, as those of a training that is not sharded.
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
    """Spread a model over the processes, in place: its blocks, each gathered when it runs, and all that remains."""
    # Slow to import, and needed by no run on one process.
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        # timm keeps blocks in either.
        if not isinstance(child, nn.Sequential | nn.ModuleList):
            continue
        for block in child:
            # A block without parameters has nothing to gather, and would only get hooks.
            if next(block.parameters(), None) is not None:
                fully_shard(block)
    # The root comes last: it takes the parameters that no block has.
    fully_shard(model)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep the whole model in each process, within; all processes enter and leave together.

    They validate different numbers of batches, so no forward may gather parameters.
    """
    from torch.distributed.fsdp import FSDPModule

    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        # Otherwise the first forward would give the parameters back.
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            # torch's default, for a root and for the others.
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """Add gradients up in each process and not over processes, within."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def gather_state(state: Any) -> Any:
    """Return a state with the whole of each tensor, in every process; all call it together."""

    def gather(value: Any) -> Any:
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    return tree_map(gather, state)


def shard_state(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state for a model, each tensor spread as the model's is."""
    pattern = model.state_dict()
    return {
        name: _like(value, pattern[name]) if name in pattern else value
        for name, value in state.items()
    }


def shard_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Spread the state that an optimizer has loaded as its parameters are."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # Adam's step, a whole scalar beside the moments, is not spread.
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = _like(value, parameter)


def _like(value: Tensor, pattern: Tensor) -> Tensor:
    # A DTensor has this method; buffers are plain tensors.
    if not hasattr(pattern, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, pattern.device_mesh, pattern.placements)  # type: ignore[attr-defined]
