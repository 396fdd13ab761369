"""Lookup of the facts that are known about a module, by its class."""

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

from torch import Tensor, nn

from tcnn_probe.architectures.own_layers import OWN_LAYERS
from tcnn_probe.architectures.record import LayerRecord
from tcnn_probe.architectures.timm_layers import TIMM_LAYERS
from tcnn_probe.architectures.torch_layers import TORCH_LAYERS
from tcnn_probe.architectures.torchvision_layers import TORCHVISION_LAYERS
from tcnn_probe.architectures.transformers_layers import TRANSFORMERS_LAYERS

__all__ = [
    "RECORDS",
    "as_rows",
    "from_rows",
    "head_count",
    "heads_axis",
    "known",
    "looks_like_attention",
]

RECORDS: dict[str, LayerRecord] = {
    **OWN_LAYERS,
    **TIMM_LAYERS,
    **TORCH_LAYERS,
    **TORCHVISION_LAYERS,
    **TRANSFORMERS_LAYERS,
}
"""Records by the qualified name of the class. Names import nothing,
so a library need not be installed.
"""

# These facts describe how the forward method uses parts of the layer, so they do not hold if it is
# replaced.
_FACTS_OF_THE_FORWARD = frozenset({"branches", "head_parameters", "mixing"})

# Attributes with the number of heads, whose name differs between torch, timm and transformers.
_HEAD_COUNTS = (
    "num_heads",
    "n_heads",
    "nhead",
    "heads",
    "n_head",
    "num_attention_heads",
)


def known(module: nn.Module) -> LayerRecord:
    """Return what is known about a module; each fact comes from the nearest class that has it."""
    cls: Any = type(module)
    # A forward method of the instance is not passed on, because the cache would keep the module
    # alive.
    forward = None if "forward" in vars(module) else getattr(cls, "forward", None)
    return _combined_record(cls, forward)


# The cache is bounded because torch creates a class for each parametrized module. The forward
# method is part of the key because users may also replace that of a class.
@lru_cache(maxsize=1024)
def _combined_record(cls: type, forward: Any) -> LayerRecord:
    facts: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        record = RECORDS.get(f"{base.__module__}.{base.__qualname__}", LayerRecord())
        nearer = {name: fact for name, fact in vars(record).items() if fact is not None}
        if forward is not getattr(base, "forward", None):
            nearer |= dict.fromkeys(_FACTS_OF_THE_FORWARD & nearer.keys())
        facts |= nearer
    return LayerRecord(**facts)


def looks_like_attention(module: nn.Module) -> bool:
    """Return whether a module's class has a name that is usual for attention."""
    return (
        # ConViT, BoTNet and others call attention MHSA, and XCiT calls it XCA. A projection inside
        # attention is not itself attention.
        re.search("(Attn|Attention|MHSA|XCA)(?!.*Projection)", type(module).__name__) is not None
    )


def head_count(module: nn.Module) -> int | None:
    """Return the number of heads according to a module's attributes,
    or None if it has no such attribute.
    """
    sizes = (getattr(module, name, 0) for name in _HEAD_COUNTS)
    return next((n for n in sizes if isinstance(n, int) and n), None)


def heads_axis(
    leading: Sequence[int], module: nn.Module, known_axis: int | None = None
) -> tuple[int | str, int]:
    """Find the axis of heads among the sizes before N_query, and the number of heads.

    Args:
        leading: Sizes before (N_query, d).
        module: Module that computes the attention.
        known_axis: Axis of the heads, if it is known from the call.

    Returns:
        The axis, "merged" if heads are part of the first axis, "grouped" if all axes after the
        first are heads, or "one" if there is no axis of heads; and the number of heads.
    """
    axis: int | str | None = known_axis if known_axis is not None else known(module).heads_axis
    count = head_count(module) or 0
    if axis is None:
        if count and count in leading[1:]:
            # Of several axes of this size, the last is taken, because windows come before the
            # heads.
            axis = len(leading) - 1 - leading[::-1].index(count)
        elif len(leading) > 2 and count == prod(leading[1:]):
            # (B, groups, heads of a group, ...): the heads of a group share their keys.
            axis = "grouped"
        elif len(leading) > 1:
            axis = 1
        else:
            # (B * heads, N, N), the form that torch.bmm takes.
            axis = "merged" if count and leading[0] % count == 0 else "one"
    if axis == "one":
        return axis, 1
    return axis, count if isinstance(axis, str) else leading[axis]


def as_rows(x: Tensor, module: nn.Module, known_axis: int | None = None) -> Tensor:
    """Return (..., N, d) as (rows, heads, N, d), which is a view if strides allow it."""
    axis, count = heads_axis(x.shape[:-2], module, known_axis)
    if axis == "one":
        return x.flatten(0, -3).unsqueeze(1)
    if axis == "grouped":
        return x.flatten(1, -3)
    if axis == "merged":
        x, axis = x.unflatten(0, (-1, count)), 1
    x = x.movedim(int(axis), -3)
    return x.flatten(0, -4) if x.ndim > 4 else x


def from_rows(
    rows: Tensor,
    leading: Sequence[int],
    module: nn.Module,
    known_axis: int | None = None,
) -> Tensor:
    """Return (rows, heads, N, d) as (..., N, d) with these leading sizes,
    the inverse of :func:`as_rows`.
    """
    axis, count = heads_axis(leading, module, known_axis)
    if axis in ("one", "grouped"):
        return rows.reshape(*leading, *rows.shape[-2:])
    place, sizes = (1, [-1, count, *leading[1:]]) if axis == "merged" else (int(axis), [*leading])
    x = rows.reshape(*sizes[:place], *sizes[place + 1 :], *rows.shape[1:]).movedim(-3, place)
    return x.flatten(0, 1) if axis == "merged" else x
