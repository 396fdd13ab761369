"""What each private name of torch does for this package:
torch may move or change them in any release.
"""

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import tcnn_probe
from tcnn_probe.hooks import private_torch as private
from tcnn_probe.hooks.kernel_calls import OpOverload


class Functions(TorchFunctionMode):
    """Mode that notes the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(private.TorchDispatchMode):
    """Mode that notes the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[type] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.types.append(type(func))
        return func(*args, **(kwargs or {}))


def in_function_mode() -> None:
    with Functions() as mode, torch.DisableTorchFunction():
        torch.ones(1)
        with private._EnableTorchFunction():
            torch.zeros(1)
        torch.ones(1)
    assert mode.names == ["zeros"]


def stack_of_function_modes() -> None:
    with Functions() as lower, Functions() as upper:
        assert private._get_current_function_mode_stack() == [lower, upper]


def stack_of_dispatch_modes() -> None:
    mode = Operators()
    # In torch 2.8 the end of an outer mode restores a flag that leaving the inner one late changes.
    with private._PreserveDispatchKeyGuard(), Operators() as outer:
        mode.__enter__()
        assert private._get_current_dispatch_mode_stack() == [outer, mode]
        with private._disable_current_modes():
            torch.ones(1)
        torch.ones(1)
        mode.__exit__(None, None, None)
    assert mode.types == [OpOverload]
    assert not private._get_current_dispatch_mode_stack()
    torch.ones(1)  # fails if the mode has left dispatch keys behind


def gradients() -> None:
    x = torch.ones(1, requires_grad=True)
    with private._InferenceMode(True), private._InferenceMode(False):
        torch.set_grad_enabled(False)
        private._set_fwd_grad_enabled(False)
        assert not (2 * x).requires_grad
        assert not (2 * x).is_inference()
        assert not forward_ad._is_fwd_grad_enabled()
    # The guard restores both flags.
    assert (2 * x).requires_grad
    assert forward_ad._is_fwd_grad_enabled()


def backward_pass() -> None:
    ids = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: ids.append(private._current_graph_task_id()))
    assert private._current_graph_task_id() == -1
    (2 * x).sum().backward()
    assert ids != [-1]
    assert len(ids) == 1


def transforms() -> None:
    def square(x: Tensor) -> Tensor:
        assert private.peek_interpreter_stack() is not None
        return x * x

    x = torch.ones(3)
    torch.vmap(square)(x)
    assert private.peek_interpreter_stack() is None


def hooks_of_a_module() -> None:
    module = nn.Identity()
    module.register_forward_pre_hook(lambda *call: None, with_kwargs=True)
    module.register_forward_hook(lambda *call: None, with_kwargs=True, always_call=True)
    before, with_kwargs, after, after_with_kwargs, always = private.hook_tables(module)
    assert len(before) == len(with_kwargs) == len(after) == 1
    assert after_with_kwargs.keys() == always.keys() == after.keys()
    twin = copy.deepcopy(module)
    for table in private.hook_tables(twin):
        table.clear()
    assert not twin._forward_hooks
    assert module._forward_hooks


def hooks_of_all_modules() -> None:
    hooks = torch.nn.modules.module
    handle = hooks.register_module_forward_hook(lambda *call: None, with_kwargs=True)
    handle.remove()
    private.forget_global_hook(handle.id)
    assert not hooks._global_forward_hooks_with_kwargs


def compiled_modules() -> None:
    module = nn.Linear(2, 2)
    wrapper: Any = torch.compile(module)
    assert wrapper._modules.keys() == {private.COMPILED_MODULE}
    assert getattr(module, private.COMPILED_CALL) is None
    module.compile()
    assert getattr(module, private.COMPILED_CALL) is not None
    function = torch.compile(torch.exp)
    assert getattr(function, private.UNCOMPILED_FUNCTION) is not None


def skipped_frames() -> None:
    """A frame that is skipped with its callees leaves only the function
    that called it to be compiled.
    """
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append("; ".join(str(x.target) for x in graph.graph.nodes))
        return graph.forward

    def inner(x: Tensor) -> Tensor:
        return x.sin()

    def skipped(x: Tensor) -> Tensor:
        return inner(x)

    break_graph = torch._dynamo.disable(lambda x: skipped(x), recursive=False)

    def outer(x: Tensor) -> Tensor:
        doubled = 2 * x
        torch._dynamo.graph_break()
        return doubled + break_graph(x)

    actions = private._FrameAction
    strategy = private._FrameExecStrategy(actions.SKIP, actions.SKIP)
    private.set_code_exec_strategy(skipped.__code__, strategy)
    torch.compile(outer, backend=backend)(torch.ones(2))
    assert compiled
    assert "sin" not in str(compiled)
    callback = private.set_eval_frame(None)
    private.set_eval_frame(callback)
    assert callback is None
    assert private.count_compiled_frames() == -1


def eager_code() -> None:
    switch = private.eager_switch()
    if torch.__version__ < "2.15":
        assert switch is None
        return
    calls: list[Any] = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    depth, switch.depth = switch.depth, 1
    try:
        torch.compile(function, backend="eager")(torch.ones(2))
    finally:
        switch.depth = depth
    assert calls == [False]


CHECKS: dict[Callable[[], None], str] = {
    in_function_mode: "_EnableTorchFunction",
    stack_of_function_modes: "_get_current_function_mode_stack",
    stack_of_dispatch_modes: "TorchDispatchMode _get_current_dispatch_mode_stack "
    "_disable_current_modes _PreserveDispatchKeyGuard",
    gradients: "_InferenceMode _set_fwd_grad_enabled",
    backward_pass: "_current_graph_task_id",
    transforms: "peek_interpreter_stack",
    hooks_of_a_module: "hook_tables",
    hooks_of_all_modules: "forget_global_hook",
    compiled_modules: "COMPILED_MODULE COMPILED_CALL UNCOMPILED_FUNCTION",
    skipped_frames: "set_code_exec_strategy _FrameAction _FrameExecStrategy set_eval_frame "
    "count_compiled_frames",
    eager_code: "eager_switch",
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_private_names_do_what_they_are_used_for(check: Callable[[], None]) -> None:
    check()


def test_every_name_is_checked() -> None:
    checked = [name for names in CHECKS.values() for name in names.split()]
    assert sorted(checked) == sorted(private.__all__)


TABLES = {"_modules", "_parameters", "_buffers", "_backward_hooks"}
"""Tables of a module that other files read."""


def test_no_other_file_uses_private_names() -> None:
    package = Path(tcnn_probe.__file__).parent
    uses = []
    of_modules = {name for name in vars(nn.Module()) if name.startswith("_")} - TABLES
    for path in package.rglob("*.py"):
        if path.name == "private_torch.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "")[:5] == "torch":
                names = [*node.module.split("."), *(x.name for x in node.names)]  # type: ignore[union-attr]
            elif isinstance(node, ast.Attribute):
                names = ast.unparse(node).split(".")
                names = names if names[0] == "torch" or node.attr in of_modules else []
            if any(x.startswith("_") and not x.endswith("__") for x in names):
                uses.append(f"{path.relative_to(package)}: {'.'.join(names)}")
    assert not uses
