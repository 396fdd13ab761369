"""Recording on all ranks of a distributed training."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from tcnn_probe.models import split_weights

__all__ = ["Ranks", "repeats_images", "whole_parameters"]

T = TypeVar("T")


class Ranks:
    """The ranks that record together, or this process alone.

    Args:
        together: Whether to record on all ranks together; None to do so if torch.distributed is
            initialised.
    """

    def __init__(self, together: bool | None) -> None:
        running = dist.is_available() and dist.is_initialized()
        if together and not running:
            raise RuntimeError(
                "distributed=True needs torch.distributed.init_process_group() before record()"
            )
        self.together = (running if together is None else together) and dist.get_world_size() > 1

    @property
    def writes(self) -> bool:
        """True if this process stores the recording."""
        return not self.together or dist.get_rank() == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Run the code inside the ``with`` on all ranks, and fail on all if it fails on one.

        Otherwise the other ranks would wait for the one that failed.

        Raises:
            RuntimeError: Another rank failed. The rank that failed raises its own error.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.together:
                raise
            problem = error
        # A rank that has succeeded takes part, too: it must learn whether another one failed.
        messages = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed with {message}")


def repeats_images(model: nn.Module) -> bool:
    """Return whether another rank counts the same images, as under tensor parallelism.

    Call this inside :func:`whole_parameters`, where only tensor parallelism splits parameters.
    """
    for parameter in split_weights(model):
        coordinate = parameter.device_mesh.get_coordinate() or ()
        places = zip(coordinate, parameter.placements, strict=False)
        if any(index and placement.is_shard() for index, placement in places):
            return True
    return False


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Gather the parameters of a sharded model; all ranks must enter this together."""
    running = dist.is_available() and dist.is_initialized()
    # The module is not imported here: if a model is sharded, it has been imported already.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp") if running else None
    # torch has two implementations: FullyShardedDataParallel wraps modules, and fully_shard changes
    # their class.
    modules = [] if fsdp is None else list(model.modules())
    with ExitStack() as stack:
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            stack.enter_context(
                # The parameters are only read, so nothing needs to be written back to the shards.
                fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False)
            )
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):  # the class that fully_shard gives
                module.unshard()
                stack.callback(module.reshard)
        yield
