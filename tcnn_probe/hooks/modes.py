"""Forwards that compute no numbers for the user, and keeping our own computations out of everybody's sight."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_transformed", "unseen"]

_KEY = torch._C._TorchDispatchModeKey
_TRACERS = (_KEY.PROXY, _KEY.FAKE, _KEY.FUNCTIONAL)


def is_transformed(inputs: Iterable[Any]) -> bool:
    """Whether a call is none of the user's on numbers: run again by checkpointing, traced, compiled or vmapped.

    Args:
        inputs: of the call.
    """
    if torch._C._current_graph_task_id() != -1:  # in a backward pass
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
        return True
    if torch.compiler.is_compiling() or any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS):
        return True
    return any(isinstance(x, (Proxy, FakeTensor)) or (isinstance(x, Tensor) and x.is_meta) for x in inputs)


@contextmanager
def unseen() -> Iterator[None]:
    """Operations inside are plain: without gradients, and seen by no function mode or dispatch mode of anybody."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        if not torch._C._len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield
