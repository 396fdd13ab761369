"""Attention that cannot be measured where it runs: in graphs,
which have no layers, and under function transforms.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tcnn_probe.hooks.kernel_calls import OpOverload
from tcnn_probe.hooks.modes import leaves_of

__all__ = ["hidden_attention", "is_graph_operator"]

# Functions of a graph: "<function softmax at 0x...>", "softmax", "aten.softmax.int", but not
# log_softmax.
_ATTENTION = re.compile(r"\b_?softmax\b|attention")
_EXPORTED = re.compile(r"aten\._?(softmax|scaled_dot_product_attention)\.")


def is_graph_operator(func: Callable[..., Any]) -> bool:
    """Return whether a function runs graphs, or attends as a part of an exported graph."""
    if isinstance(func, OpOverload):
        return _EXPORTED.match(str(func)) is not None
    return getattr(torch.ops.higher_order, getattr(func, "__name__", ""), None) is func


def hidden_attention(func: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return why attention inside a call of a graph operator cannot be measured;
    "" if there is none.
    """
    if isinstance(func, OpOverload):
        # Attention has an axis of heads or images beside its matrix; class scores do not.
        is_attention = any(isinstance(x, Tensor) and x.ndim > 2 for x in args)
        return "it attends in a graph of torch.export" if is_attention else ""
    graphs = [x for x in leaves_of(args) if isinstance(x, GraphModule)]
    for graph in graphs:
        # Operators can be nested.
        for part in graph.modules():
            nodes = part.graph.nodes if isinstance(part, GraphModule) else ()
            if any(_ATTENTION.search(str(node.target)) for node in nodes):
                return f"it attends in a function that torch.{func.__name__} runs"
    return ""
