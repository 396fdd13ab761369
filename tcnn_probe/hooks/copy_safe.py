"""Hooks on modules that act on the very model they were registered on, and on no copy of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["CopySafeHook", "add_hook"]


class CopySafeHook:
    """Hook that does nothing in a copy or a pickle of its module but go away when it is called there."""

    def __init__(self, act: Callable[..., Any] | None, *, after: bool = False) -> None:
        self._act, self._after = act, after
        self.number = -1
        """Under which torch keeps it."""

    @torch.compiler.disable
    def __call__(self, module: nn.Module, *call: Any) -> Any:
        """Act, as torch asks."""
        return self._do(module, *call)

    def _do(self, module: nn.Module, *call: Any) -> Any:
        if self._act is not None:
            if len(call) == 1 + self._after:  # torch leaves kwargs out while another thread adds or removes the hook
                call = (call[0], {}, *call[1:])
            return self._act(module, *call)
        for where in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs", "hooks_always_called"):
            getattr(module, f"_forward_{where}").pop(self.number, None)
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopySafeHook":
        return _without_effect(type(self), self.number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_effect, (type(self), self.number)


class _CompiledAway(CopySafeHook):
    """One that torch.compile leaves out, so that it breaks no graph."""

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        return None if torch.compiler.is_compiling() else self._do(module, *call)


def _without_effect(kind: type[CopySafeHook], number: int) -> CopySafeHook:
    """A hook from a pickle, under a number that this process is to give to no other hook."""
    RemovableHandle.next_id = max(RemovableHandle.next_id, number + 1)
    hook = kind(None)
    hook.number = number
    return hook


def add_hook(
    module: nn.Module,
    act: Callable[..., Any],
    *,
    after: bool = False,
    first: bool = False,
    always: bool = False,
    compiled: bool = False,
) -> RemovableHandle:
    """Call ``act(module, args, kwargs)`` before each call of a module, or ``act(module, args, kwargs, output)`` after.

    Args:
        module: to hook.
        act: what to call; a tensor that it returns after the call replaces the output.
        after: whether after the call.
        first: whether before the hooks that are there.
        always: whether, after the call, also where the module raised an exception.
        compiled: whether torch.compile may leave the hook out.
    """
    hook = (_CompiledAway if compiled else CopySafeHook)(act, after=after)
    if after:
        handle = module.register_forward_hook(hook, prepend=first, with_kwargs=True, always_call=always)
    else:
        handle = module.register_forward_pre_hook(hook, prepend=first, with_kwargs=True)
    hook.number = handle.id
    return handle
