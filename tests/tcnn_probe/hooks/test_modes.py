"""Modes that are entered and left in any order,
and calls that are not on the user's own numbers.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tcnn_probe.hooks.modes import (
    balanced_modes,
    hidden_depth,
    hidden_from_recorders,
    is_transformed,
    leave_mode,
    named_in_errors,
    run_in_modes,
    unseen,
)
from tests.tcnn_probe.contracts.helpers import clean


class Function(TorchFunctionMode):
    """Mode that counts the functions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_above_stay_on_in_their_order() -> None:
    lower, middle, upper = (Function() for _ in range(3))
    for mode in (lower, middle, upper):
        mode.__enter__()
    # The mode is below another one that stays on, and that an ordinary exit would remove.
    leave_mode(middle)
    assert _get_current_function_mode_stack() == [lower, upper]
    # A second removal has no effect.
    leave_mode(middle)
    assert _get_current_function_mode_stack() == [lower, upper]
    leave_mode(lower)
    leave_mode(upper)
    assert clean()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_modes_that_are_left_on_are_taken_off(
    error: type[BaseException] | None,
) -> None:
    outer = Function()

    def leave_on() -> None:
        with balanced_modes():
            Function().__enter__()
            if error is not None:
                raise error

    with outer:
        if error is None:
            leave_on()
        else:
            with pytest.raises(error):
                leave_on()
        assert _get_current_function_mode_stack() == [outer]
    assert clean()


@pytest.mark.parametrize("run", [run_in_modes, lambda function: unseen(function)()])
def test_outer_modes_see_nothing(run: Callable[[Callable[[], Tensor]], Tensor]) -> None:
    x = torch.ones(2)
    with Function() as outer:
        before = outer.count
        run(x.exp)
        assert outer.count == before
        x.exp()
        assert outer.count > before
    assert clean()


def test_own_modes_see_what_is_hidden_from_others() -> None:
    inner, x = Function(), torch.ones(2)
    with Function() as outer:
        unseen(run_in_modes)(x.exp, inner)
        assert (inner.count, outer.count) == (1, 0)


def test_unseen_disables_gradients_and_restores_the_flags() -> None:
    x = torch.ones(2, requires_grad=True)

    @unseen
    def check() -> None:
        total = 2 * x
        # A tensor of inference mode could not be changed outside of it.
        assert not total.is_inference()
        assert not total.requires_grad
        assert not forward_ad._is_fwd_grad_enabled()
        raise ValueError("inside")

    with torch.inference_mode(), pytest.raises(ValueError, match="inside"):
        check()
    assert (2 * x).requires_grad
    assert forward_ad._is_fwd_grad_enabled()


def test_hidden_depth_counts_nested_blocks() -> None:
    depths = [hidden_depth()]
    with hidden_from_recorders():
        depths.append(hidden_depth())
        with pytest.raises(ValueError, match="inside"), hidden_from_recorders():  # noqa: PT012
            depths.append(hidden_depth())
            raise ValueError("inside")
        depths.append(hidden_depth())
    depths.append(hidden_depth())
    assert depths == [0, 1, 2, 1, 0]


@pytest.mark.filterwarnings("ignore:.*jit.trace")
def test_calls_under_transforms_are_recognised() -> None:
    x = torch.ones(3, 2)
    answers = list[bool]()

    def ask(row: Tensor) -> Tensor:
        answers.append(is_transformed([row]))
        return row.sum()

    assert not is_transformed([x, "a string", None])
    assert is_transformed([torch.ones(2, device="meta")])
    assert is_transformed([{"pixels": [FakeTensorMode().from_tensor(x)]}])
    make_fx(ask, tracing_mode="symbolic")(x[0])
    torch.func.functionalize(ask)(x[0])
    torch.vmap(ask)(x)
    torch.func.grad(ask)(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert answers == [True] * 5
    # Checkpointing runs a forward again during a backward pass.
    y = x.clone().requires_grad_()
    y.register_hook(lambda gradient: answers.append(is_transformed([gradient])))
    y.sum().backward()
    assert answers[5:] == [True]


def test_errors_name_the_layer() -> None:
    with pytest.raises(ZeroDivisionError) as caught, named_in_errors("blocks.0.attn"):
        _ = 1 / 0
    assert caught.value.__notes__ == ["while tcnn_probe measured the layer 'blocks.0.attn'"]
