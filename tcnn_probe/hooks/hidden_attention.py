"""Attention that cannot be measured where it runs: in graphs,
which have no layers, and under function transforms.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from tcnn_probe.hooks.kernel_calls import OpOverload
from tcnn_probe.hooks.modes import leaves_of
from tcnn_probe.hooks.private_torch import HigherOrderOperator

__all__ = ["hidden_attention", "is_graph_operator"]

# Functions of a graph: "<function softmax at 0x...>", "softmax", "aten.softmax.int", but not
# log_softmax.
_ATTENTION = re.compile(r"\b_?softmax\b|attention")
_EXPORTED = re.compile(r"aten\._?(softmax|scaled_dot_product_attention)\.")


def is_graph_operator(func: Callable[..., Any]) -> bool:
    """Return whether a function runs graphs, or attends as a part of an exported graph."""
    if isinstance(func, HigherOrderOperator):
        return True
    return isinstance(func, OpOverload) and _EXPORTED.match(str(func)) is not None


def hidden_attention(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return why attention inside a call of a graph operator cannot be measured;
    "" if there is none.
    """
    if isinstance(func, OpOverload):
        # Attention has an axis of heads or images beside its matrix; class scores do not.
        is_attention = any(isinstance(x, Tensor) and x.ndim > 2 for x in args)
        return "it attends in a graph of torch.export" if is_attention else ""
    assert isinstance(func, HigherOrderOperator)
    graphs = [x for x in leaves_of(args) if isinstance(x, GraphModule)]
    for graph in graphs:
        # Operators can be nested.
        for part in graph.modules():
            nodes = part.graph.nodes if isinstance(part, GraphModule) else ()
            if any(_ATTENTION.search(str(node.target)) for node in nodes):
                return f"it attends in a function that torch.{func.name()} runs"
    return ""
