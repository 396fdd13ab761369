"""The private names of torch (2.8 to 2.15) that tcnn_probe uses,
with the reasons why no public ones will do.

Other files of tcnn_probe use no private names of torch but a module's own tables (``_modules``,
``_parameters``, ``_buffers`` and those of hooks) and the ``_backward_hooks`` of a parameter. So
this is the file to read when torch has moved one; tests/tcnn_probe/hooks/test_private_torch.py says
what each of them does. docs/maintaining.md says what torch would have to offer to make them
unnecessary.
"""

from types import ModuleType
from typing import Any

import torch
from torch import nn

# Guards of C++: Python handles no signal between their effect and their ``with``, unlike those of
# torch that are written in Python, so that Ctrl-C leaves neither gradients nor torch functions
# switched off.
from torch._C import (
    _current_graph_task_id,
    _EnableTorchFunction,
    _InferenceMode,
    _PreserveDispatchKeyGuard,
    _set_fwd_grad_enabled,
)

# torch.compile: publicly, compiled code can be made to run eagerly in all threads only, and not
# from inside.
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
    set_eval_frame,
)

# Transforms of torch.func hide images.
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules import module as global_hooks

# A recorder may be removed below the user's modes.
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

__all__ = [
    "COMPILED_CALL",
    "COMPILED_MODULE",
    "UNCOMPILED_FUNCTION",
    "TorchDispatchMode",
    "_EnableTorchFunction",
    "_FrameAction",
    "_FrameExecStrategy",
    "_InferenceMode",
    "_PreserveDispatchKeyGuard",
    "_current_graph_task_id",
    "_disable_current_modes",
    "_get_current_dispatch_mode_stack",
    "_get_current_function_mode_stack",
    "_set_fwd_grad_enabled",
    "count_compiled_frames",
    "eager_switch",
    "forget_global_hook",
    "hook_tables",
    "peek_interpreter_stack",
    "set_code_exec_strategy",
    "set_eval_frame",
]

COMPILED_MODULE = "_orig_mod"
"""Name under which the wrapper of torch.compile has the module that it compiles."""

COMPILED_CALL = "_compiled_call_impl"
"""Attribute of a module that ``module.compile()`` has compiled in place; None in others."""

UNCOMPILED_FUNCTION = "_torchdynamo_orig_callable"
"""Attribute of the function that torch.compile returns for another one."""


def eager_switch() -> Any:
    """Return the switch of torch 2.15 whose ``depth`` makes compiled code run eagerly
    in this thread, or None.
    """
    return getattr(torch._dynamo.eval_frame, "_force_eager_nested_compile", None)


def count_compiled_frames() -> int:
    """Return how many frames a call with fullgraph=True has compiled so far;
    -1 without it, and before torch 2.15.
    """
    eval_frame: ModuleType = torch._C._dynamo.eval_frame
    exchange_count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if exchange_count is None:
        return -1
    count = exchange_count(-1)
    exchange_count(count)
    return count


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return torch's tables of a module's hooks and of their options,
    by number; a copied hook has no handle.
    """
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


def forget_global_hook(number: int) -> None:
    """Forget an option of a hook of all modules, which removing its handle leaves behind."""
    global_hooks._global_forward_hooks_with_kwargs.pop(number, None)
