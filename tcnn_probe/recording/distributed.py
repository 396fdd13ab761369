"""Several processes that train one model: each measures its own images, the first writes what all found."""

import sys
from collections.abc import Callable, Iterator
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

    def each(self, action: Callable[[], T]) -> list[T]:
        """What every rank returns, in the order of ranks.

        Raises:
            RuntimeError: on all ranks, if the action fails on one of them, which raises its own error.
        """
        if not self.together:
            return [action()]
        mine: tuple[T | None, str | None]
        problem: Exception | None = None
        try:
            mine = action(), None
        except Exception as error:
            mine, problem = (None, f"{type(error).__name__}: {error}"), error
        everyone = self.gather(mine)
        if problem is not None:
            raise problem
        for rank, (_, told) in enumerate(everyone):
            if told is not None:
                raise RuntimeError(f"rank {rank} failed with {told}")
        return [value for value, _ in everyone]  # type: ignore[misc]

    def writer(self, action: Callable[[], T]) -> T:
        """What the writing rank alone does and returns, which all are told; or its error, on all of them."""
        return self.each(lambda: action() if self.writes else None)[0]  # type: ignore[return-value]


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """While inside, layers of a model that is sharded over ranks have their parameters; all ranks enter it together."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    with ExitStack() as stack:
        if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
            stack.enter_context(fsdp.FullyShardedDataParallel.summon_full_params(model, writeback=False))
        for module in model.modules() if fsdp is not None else ():
            if isinstance(module, fsdp.FSDPModule):  # by fully_shard
                module.unshard()
                stack.callback(module.reshard)
        yield
