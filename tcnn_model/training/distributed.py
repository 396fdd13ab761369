"""Training on several processes: ``torchrun --nproc-per-node N -m tcnn_model.training ...``."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Processes", "joined"]


@dataclass(frozen=True)
class Processes:
    """The processes that train together, as seen from one of them.

    Args:
        rank: Number of this process.
        count: Number of processes.
        device: Device of this process.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True for rank 0, the process that writes files."""
        return self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over processes."""
        if self.count == 1:
            return tensor
        shared = tensor.detach().to(self.device, copy=True)  # NCCL reduces on GPUs only
        dist.all_reduce(shared)
        return shared

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set in any process."""
        return flag if self.count == 1 else bool(self.total(torch.tensor(float(flag))) > 0)

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self.count > 1:
            dist.barrier()


@contextmanager
def joined(device: str | None) -> Iterator[Processes]:
    """Join the processes that ``torchrun`` started; without it, this process trains alone.

    Raises:
        ValueError: The device is not on this machine.
    """
    count = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"device: expected cpu, as torch finds no GPU with CUDA on this machine, got {name}"
        )
    try:
        # A rank has the GPU of its own number.
        target = torch.device("cuda", local) if name == "cuda" else torch.device(name)
    except RuntimeError as error:  # an unknown name
        raise ValueError(f"device: {error}") from error
    if target.type == "cuda":
        torch.cuda.set_device(target)
    if count == 1:
        yield Processes(0, 1, target)
        return
    dist.init_process_group("nccl" if target.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), count, target)
    finally:
        dist.destroy_process_group()
