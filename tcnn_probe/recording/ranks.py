"""Recording with all ranks of a distributed training together."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

__all__ = ["Ranks", "whole_parameters"]

T = TypeVar("T")


class Ranks:
    """The processes that record together, or this one alone.

    Args:
        together: Whether to record with the others; None if torch.distributed is initialised.
    """

    def __init__(self, together: bool | None) -> None:
        running = dist.is_available() and dist.is_initialized()
        if together and not running:
            raise RuntimeError(
                "distributed=True needs torch.distributed.init_process_group() before record()"
            )
        self.together = (
            running if together is None else together
        ) and dist.get_world_size() > 1

    @property
    def writes(self) -> bool:
        """True if this process keeps the recording."""
        return not self.together or dist.get_rank() == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if not self.together:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Do something on all ranks together, so that none waits for a rank that failed.

        Raises:
            RuntimeError: On all ranks, if one fails, which raises its own error.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.together:
                raise
            problem = error
        # Also where all is well: a rank that failed would leave the others waiting for its next message.
        messages = self.gather(
            None if problem is None else f"{type(problem).__name__}: {problem}"
        )
        if problem is not None:
            raise problem
        for rank, message in enumerate(messages):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed with {message}")


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """Give the layers of a model that is sharded over ranks their parameters; all ranks enter it together."""
    running = dist.is_available() and dist.is_initialized()
    # Not imported here: whoever shards a model has imported it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp") if running else None
    # Both of torch's kinds: wrappers that keep flat parameters, and fully_shard, which changes a module's class.
    modules = [] if fsdp is None else list(model.modules())
    with ExitStack() as stack:
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            stack.enter_context(
                # Read only: without writeback nothing is copied to the shards again.
                fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False)
            )
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):  # made by fully_shard
                module.unshard()
                stack.callback(module.reshard)
        yield
