"""What heads add to the output of their layer, measured by running it without the others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.models import convit
from torch import Tensor, nn
from torch.func import functional_call

from tcnn_model import GPSA
from tcnn_probe.hooks.modes import aside
from tcnn_probe.interventions.hook_points import Bare, seam_of

__all__ = ["Call", "check_adding_up", "first_tensor", "images_first", "term", "with_first_tensor"]

_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class Call:
    """A call of a layer, to be done again.

    Args:
        layer: its name, for messages.
        number: of the attention in question, among those that the layer asks for in a call.
        args, kwargs: of the call.
    """

    def __init__(self, layer: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer, self.number, self._args, self._kwargs = layer, number, args, kwargs

    def run(self, module: nn.Module, zeroed: Callable[[int], Sequence[int]], *, frozen: bool = False) -> Tensor:
        """What a layer gives in eval mode with some heads zeroed: of how many there are, which.

        Args:
            module: to run, past its own hooks, unseen by recorders.
            zeroed: from the number of heads to indices.
            frozen: whether its parameters are constants.
        """

        def plan(call: int, count: int, queries: int) -> tuple[Sequence[int], Sequence[int]]:
            return (zeroed(count) if call == self.number else ()), ()

        constants = {f"layer.{name}": p.detach() for name, p in module.named_parameters()} if frozen else {}
        bare = Bare(module)
        with aside(), _evaluating(module), seam_of(module, plan, [*self._args, *self._kwargs.values()]):
            return first_tensor(functional_call(bare, constants, self._args, self._kwargs), self.layer)


def term(call: Call, module: nn.Module, heads: Sequence[int], *, frozen: bool = False) -> Tensor:
    """What some heads of ``module`` add to its output, of the output's shape."""
    alone = call.run(module, lambda count: [head for head in range(count) if head not in heads], frozen=frozen)
    return alone - call.run(module, range, frozen=frozen)


@torch.no_grad()
def check_adding_up(call: Call, module: nn.Module, heads: Sequence[int]) -> None:
    """Whether what some heads add depends on what the others give.

    Raises:
        ValueError: it does.
    """
    if isinstance(module, GPSA | convit.GPSA):
        return
    whole = call.run(module, lambda count: ())
    off = whole - call.run(module, lambda count: heads) - term(call, module, heads)
    tolerance = _TOLERANCE.get(whole.dtype, 1e-3)
    off, whole = (x.nan_to_num(0, 0, 0).abs().amax() for x in (off, whole))  # by what the model was given
    if bool(off > tolerance * whole):
        raise ValueError(
            f"the heads of {call.layer!r} do not add up: something that mixes them, such as a norm, follows, so that "
            f"none has a term of its own; mode='zero', or 'mean' over queries, can be done"
        )


def first_tensor(output: Any, layer: str) -> Tensor:
    """The output of a layer, or the first of several.

    Raises:
        TypeError: it is no tensor.
    """
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise TypeError(f"expected {layer!r} to give a tensor, or several; got {type(first).__name__}")
    return first


def with_first_tensor(output: Any, first: Tensor) -> Any:
    """The output with that in the place of its first tensor."""
    return first if isinstance(output, Tensor) else type(output)([first, *output[1:]])


def images_first(module: nn.Module, output: Tensor) -> Tensor:
    """A layer's output with the images along its first axis; applied again, as it was."""
    swapped = isinstance(module, nn.MultiheadAttention) and not module.batch_first and output.ndim == 3
    return output.transpose(0, 1) if swapped else output


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """In eval mode, without dropout or statistics of batches."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True
