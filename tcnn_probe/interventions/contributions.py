"""Terms that heads add to the output of their layer,
measured by running a copy of the layer without other heads.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.attention.head_editor import (
    HeadEditor,
    first_tensor,
    images_first,
)
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.reconstruction import tolerance
from tcnn_probe.hooks.calls import CopySafeHook
from tcnn_probe.hooks.modes import hidden_from_recorders, without_gradients
from tcnn_probe.hooks.private_torch import (
    COMPILED_CALL,
    COMPILED_MODULE,
    UNCOMPILED_FUNCTION,
)

__all__ = ["Terms", "frozen_copy"]


@dataclass
class Terms:
    """Terms that heads add to the output of their layer in a call:
    in eval mode, with constant parameters, unrecorded.

    Args:
        module: The layer.
        layer: Name of the layer.
        number: Index of the attention in the call.
        args, kwargs: Arguments of the call.
        gates: Gates that ablations force, by head.
    """

    module: nn.Module
    layer: str
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    gates: Mapping[int, float] = field(default_factory=dict)

    def of(self, *groups: Sequence[int]) -> list[Tensor]:
        """Return the term of each group of heads,
        in the shape of the output, with images along the first axis.
        """
        without_heads = self._run(only=())
        # Without any heads, the output still has biases and residual inputs, which belong to no
        # head.
        return [self._run(only=heads) - without_heads for heads in groups]

    @without_gradients
    def check(self, heads: Sequence[int]) -> None:
        """Raise for a layer in which the term of some heads depends on the other heads."""
        # The heads of gated layers add up by construction (T-CNN Eq. 5).
        if isinstance(self.module, GATED_LAYERS):
            return
        # f(all) - f(all without h) = f(only h) - f(none), if the layer's output is linear in its
        # heads.
        output = self._run()
        difference = output - self._run(without=heads) - self.of(heads)[0]
        # Values that are not finite come from the model's input, not from the heads.
        difference, size = (x.nan_to_num(0, 0, 0).abs().amax() for x in (difference, output))
        if bool(difference > tolerance(output.dtype) * size):
            raise ValueError(
                f"the heads of {self.layer!r} do not add up: something that mixes them, such as a "
                "norm, follows, so that none has a term of its own; mode='zero' and 'mean' over "
                "queries are possible"
            )

    def _run(self, *, only: Sequence[int] | None = None, without: Sequence[int] = ()) -> Tensor:
        """Return the layer's output with ``only`` some
        of its heads (None for all), and ``without`` others.
        """
        twin = frozen_copy(self.module)
        vars(twin).update(
            # Hooks of the layer itself have run on the arguments already; hooks of its submodules
            # are part of its computation.
            _forward_pre_hooks=OrderedDict(),
            _forward_hooks=OrderedDict(),
        )
        listener = _ZeroOthers(self, only, without)
        with hidden_from_recorders(), HeadEditor.listening({listener: twin}):
            output = twin(*self.args, **self.kwargs)
        return images_first(twin, first_tensor(output, self.layer))


class _ZeroOthers(AttentionListener):
    """Listener that sets all heads of one attention to zero except ``only`` some,
    and those in ``without``.
    """

    def __init__(self, terms: Terms, only: Sequence[int] | None, without: Sequence[int]) -> None:
        self._terms = terms
        self._only = only
        self._without = without

    def gates(self) -> Mapping[int, float]:
        return self._terms.gates

    def attends(self, attention: Attention) -> HeadEdit | None:
        if attention.number != self._terms.number:
            return None
        included = range(attention.heads) if self._only is None else self._only
        zeroed = [
            head for head in range(attention.heads) if head not in included or head in self._without
        ]
        return HeadEdit(zeroed) if zeroed else None


def frozen_copy(module: nn.Module, copies: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return a copy in eval mode with constants for parameters,
    which shares their memory, but not its attributes.
    """
    copies = {} if copies is None else copies
    # The wrapper of torch.compile calls the module that was compiled, not a copy of it.
    if COMPILED_MODULE in module._modules:
        return frozen_copy(module.get_submodule(COMPILED_MODULE), copies)
    # A module that occurs twice has a single copy.
    if module not in copies:
        copies[module] = twin = module.__new__(type(module))
        parameters = {
            name: None if p is None else nn.Parameter(p.detach(), requires_grad=False)
            for name, p in module._parameters.items()
        }
        children = {
            name: None if m is None else frozen_copy(m, copies)
            for name, m in module._modules.items()
        }
        for name, value in vars(module).items():
            vars(twin)[name] = _bound_to_copy(value, copies)
        vars(twin).update(
            training=False,
            _parameters=parameters,
            _buffers={**module._buffers},
            _modules=children,
        )
        vars(twin)[COMPILED_CALL] = None
        for name, hooks in vars(module).items():
            if name.startswith(("_forward_", "_backward_")):
                # Forward hooks can be part of the computation (spectral norm, quantisation), but
                # our own are not.
                foreign = [
                    (n, h)
                    for n, h in hooks.items()
                    # Backward hooks are left out, because a measurement is not a backward pass of
                    # the user.
                    if "back" not in name and not isinstance(h, CopySafeHook)
                ]
                vars(twin)[name] = OrderedDict(foreign)
    return copies[module]


def _bound_to_copy(value: Any, copies: Mapping[nn.Module, nn.Module]) -> Any:
    """Return an attribute of a module for its copy:
    accelerate and torch.compile set ``forward`` to such methods.
    """
    value = getattr(value, UNCOMPILED_FUNCTION, value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        return MethodType(value.__func__, copies.get(value.__self__, value.__self__))
    if isinstance(value, partial):
        args = [copies.get(x, x) if isinstance(x, nn.Module) else x for x in value.args]
        return partial(_bound_to_copy(value.func, copies), *args, **value.keywords)
    return value
