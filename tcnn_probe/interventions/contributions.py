"""What heads add to the output of their layer, measured by running a copy of it without the others."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.attention.rebuild import tolerance
from tcnn_probe.hooks.copy_safe import CopySafeHook
from tcnn_probe.hooks.modes import aside
from tcnn_probe.interventions.edits import Edit
from tcnn_probe.interventions.gates import gate_editor
from tcnn_probe.interventions.hook_points import Editing, Todo, edits_head_outputs, hook_point

__all__ = ["Terms", "first_tensor", "images_first", "with_first_tensor"]


@dataclass
class Terms:
    """What heads of a layer add to its output in a call: in eval mode, for constant parameters, unseen by recorders."""

    module: nn.Module
    layer: str  # its name
    number: int  # of the attention in question, among those that the layer asks for in a call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gates: Sequence[Edit] = ()

    def of(self, *groups: Sequence[int]) -> list[Tensor]:
        """The term of each group of heads, of the output's shape, with the images along its first axis."""
        nothing = self._run(only=())
        return [self._run(only=heads) - nothing for heads in groups]

    @torch.no_grad()
    def check(self, heads: Sequence[int]) -> None:
        """Refuse a layer in which what some heads add depends on what the others give."""
        if isinstance(self.module, GATED_LAYERS):
            return
        whole = self._run()
        off = whole - self._run(without=heads) - self.of(heads)[0]
        off, size = (x.nan_to_num(0, 0, 0).abs().amax() for x in (off, whole))  # by what the model was given
        if bool(off > tolerance(whole.dtype) * size):
            raise ValueError(
                f"the heads of {self.layer!r} do not add up: something that mixes them, such as a norm, follows, so "
                f"that none has a term of its own; mode='zero', or 'mean' over queries, can be done"
            )

    def _run(self, *, only: Sequence[int] | None = None, without: Sequence[int] = ()) -> Tensor:
        """What the layer gives with ``only`` some of its heads, or all, and ``without`` others."""

        def plan(number: int, count: int, queries: int) -> Todo:
            zeroed = [head for head in range(count) if head in without or (only is not None and head not in only)]
            return Todo(self.layer, number, zeroed if number == self.number else [])

        twin = _frozen(self.module, {})
        vars(twin).update(_forward_pre_hooks=OrderedDict(), _forward_hooks=OrderedDict())
        point = hook_point(twin, plan, [*self.args, *self.kwargs.values()])
        edits_head_outputs(twin, lambda: point)
        with aside(), Editing(gate_editor(twin, self.gates), point):
            output = twin(*self.args, **self.kwargs)
        return images_first(twin, first_tensor(output, self.layer))


def _frozen(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy in eval mode with constants for parameters: it shares their memory, and what it writes is its own."""
    if module not in copies:
        copies[module] = twin = module.__new__(type(module))
        vars(twin).update(vars(module))
        parameters = {name: None if p is None else p.detach() for name, p in module._parameters.items()}
        children = {name: None if m is None else _frozen(m, copies) for name, m in module._modules.items()}
        vars(twin).update(training=False, _parameters=parameters, _buffers={**module._buffers}, _modules=children)
        for name, hooks in vars(module).items():
            if name.startswith(("_forward_", "_backward_")):  # those before and after a forward can be part of it
                kept = [(n, h) for n, h in hooks.items() if "back" not in name and not isinstance(h, CopySafeHook)]
                vars(twin)[name] = OrderedDict(kept)
    return copies[module]


def first_tensor(output: Any, layer: str) -> Tensor:
    """The output of a layer, or the first of several."""
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
