"""What heads add to the output of their layer, measured by running a copy of it without the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.models import convit
from torch import Tensor, nn

from tcnn_model import GPSA
from tcnn_probe.attention.rebuild import tolerance
from tcnn_probe.hooks.copy_safe import CopySafeHook
from tcnn_probe.hooks.modes import aside
from tcnn_probe.interventions.edits import Edit, Heads
from tcnn_probe.interventions.layer_editor import LayerEditor

__all__ = ["Terms", "first_tensor", "images_first", "with_first_tensor"]


class Terms:
    """What heads of a layer add to its output in a call, in eval mode, its parameters constants; unseen by recorders.

    Args:
        module: the layer.
        layer: its name, for messages.
        number: of the attention in question, among those that the layer asks for in a call.
        args, kwargs: of the call.
        gates: edits of its gates that hold.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: str,
        number: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        gates: Sequence[Edit] = (),
    ) -> None:
        self._module, self._layer, self._number, self._gates = module, layer, number, gates
        self._args, self._kwargs = args, kwargs

    def of(self, *groups: Sequence[int]) -> list[Tensor]:
        """The term of each group of heads, of the output's shape, with the images along its first axis."""
        nothing = self._without(Heads())
        return [self._without(Heads(tuple(heads), others=True)) - nothing for heads in groups]

    @torch.no_grad()
    def check(self, heads: Sequence[int]) -> None:
        """Whether what some heads add depends on what the others give.

        Raises:
            ValueError: it does.
        """
        if isinstance(self._module, GPSA | convit.GPSA):
            return
        whole = self._without(Heads(()))
        off = whole - self._without(Heads(tuple(heads))) - self.of(heads)[0]
        off, size = (x.nan_to_num(0, 0, 0).abs().amax() for x in (off, whole))  # by what the model was given
        if bool(off > tolerance(whole.dtype) * size):
            raise ValueError(
                f"the heads of {self._layer!r} do not add up: something that mixes them, such as a norm, follows, so "
                f"that none has a term of its own; mode='zero', or 'mean' over queries, can be done"
            )

    def _without(self, heads: Heads) -> Tensor:
        twin = _frozen(self._module, {})
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            setattr(twin, hooks, type(getattr(twin, hooks))())
        zeroed = Edit(self._layer, self._layer, twin, self._number, heads, "zero", strict=False)
        editor = LayerEditor(twin, (*self._gates, zeroed))
        try:
            editor.attach()
            with aside():
                output = twin(*self._args, **self._kwargs)
        finally:
            editor.detach()
        return images_first(self._module, first_tensor(output, self._layer))


def _frozen(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy in eval mode with constants for parameters: it shares their memory, and what it writes is its own."""
    if module not in copies:
        copies[module] = twin = module.__new__(type(module))
        vars(twin).update(vars(module))
        parameters = {name: None if p is None else p.detach() for name, p in module._parameters.items()}
        children = {name: None if m is None else _frozen(m, copies) for name, m in module._modules.items()}
        vars(twin).update(training=False, _parameters=parameters, _buffers={**module._buffers}, _modules=children)
        for name in ("_forward_pre_hooks", "_forward_hooks"):  # the user's are part of what the layer computes
            hooks = getattr(module, name)
            theirs = [(number, hook) for number, hook in hooks.items() if not isinstance(hook, CopySafeHook)]
            vars(twin)[name] = type(hooks)(theirs)
    return copies[module]


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
