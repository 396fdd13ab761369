"""Several processes that train one model: each measures its own images, the first writes what all found."""

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
        together: whether to record with the others; None: if torch.distributed is initialised.
    """

    def __init__(self, together: bool | None) -> None:
        running = dist.is_available() and dist.is_initialized()
        if together and not running:
            raise RuntimeError("distributed=True needs torch.distributed.init_process_group() before record()")
        self.together = (running if together is None else together) and dist.get_world_size() > 1

    @property
    def writes(self) -> bool:
        """Whether this process keeps the recording."""
        return not self.together or dist.get_rank() == 0

    def gather(self, value: T) -> list[T]:
        """Everyone's, in the order of ranks."""
        if not self.together:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What all ranks do together; none waits for one that failed.

        Raises:
            RuntimeError: on all ranks, if one fails, which raises its own error.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            if not self.together:
                raise
            problem = error
        told = self.gather(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        for rank, message in enumerate(told):
            if message is not None:
                raise RuntimeError(f"rank {rank} failed with {message}")


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """While inside, layers of a model that is sharded over ranks have their parameters; all ranks enter it together."""
    running = dist.is_available() and dist.is_initialized()
    fsdp: Any = sys.modules.get("torch.distributed.fsdp") if running else None
    modules = [] if fsdp is None else list(model.modules())
    with ExitStack() as stack:
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
            stack.enter_context(fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False))
        for module in modules:
            if isinstance(module, fsdp.FSDPModule):  # by fully_shard
                module.unshard()
                stack.callback(module.reshard)
        yield
