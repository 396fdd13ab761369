"""Look-up of the facts that are known about a module's class."""

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
"""By the qualified name of the class: a name imports nothing, so a library may be absent."""

# These facts describe how a forward uses parts of the layer, so they do not hold if another forward replaces it.
_FACTS_OF_THE_FORWARD = frozenset({"branches", "head_parameters", "mixing"})

# torch, timm and transformers each have their own name for it.
_HEAD_COUNTS = (
    "num_heads",
    "n_heads",
    "nhead",
    "heads",
    "n_head",
    "num_attention_heads",
)


def known(module: nn.Module) -> LayerRecord:
    """Return the known facts about a module, each from the nearest class in its hierarchy that has this fact."""
    cls: Any = type(module)
    # A forward that is set on the instance is not passed on, because the cache would keep the module alive.
    forward = None if "forward" in vars(module) else getattr(cls, "forward", None)
    return _combined_record(cls, forward)


# Bounded, because torch makes a class for each parametrized module. The forward is part of the key, because users
# replace that of a class too.
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
    """Return whether a module's class is named like a class of attention."""
    return (
        # MHSA is what ConViT, BoTNet and others call it, XCA what XCiT does. A projection inside attention is not
        # itself attention.
        re.search("(Attn|Attention|MHSA|XCA)(?!.*Projection)", type(module).__name__)
        is not None
    )


def head_count(module: nn.Module) -> int | None:
    """Return the number of heads that a module says it has, None if it does not say."""
    sizes = (getattr(module, name, 0) for name in _HEAD_COUNTS)
    return next((n for n in sizes if isinstance(n, int) and n), None)


def heads_axis(
    leading: Sequence[int], module: nn.Module, known_axis: int | None = None
) -> tuple[int | str, int]:
    """Find the axis of heads among the sizes before N_query, and the number of heads.

    Args:
        leading: Sizes before (N_query, d).
        module: Module that attends.
        known_axis: The axis, where the call says so.

    Returns:
        The axis, "merged" if heads are part of the first axis, "grouped" if they are all axes after it, or "one" if
        there is none; and the number of heads.
    """
    axis: int | str | None = (
        known_axis if known_axis is not None else known(module).heads_axis
    )
    count = head_count(module) or 0
    if axis is None:
        if count and count in leading[1:]:
            # The last such axis: windows of the same number come before the heads.
            axis = len(leading) - 1 - leading[::-1].index(count)
        elif len(leading) > 2 and count == prod(leading[1:]):
            axis = "grouped"  # (B, groups, heads of a group, ...): those of a group have the same keys
        elif len(leading) > 1:
            axis = 1
        else:
            # (B * heads, N, N), as torch.bmm takes it.
            axis = "merged" if count and leading[0] % count == 0 else "one"
    if axis == "one":
        return axis, 1
    return axis, count if isinstance(axis, str) else leading[axis]


def as_rows(x: Tensor, module: nn.Module, known_axis: int | None = None) -> Tensor:
    """Return (..., N, d) as (rows, heads, N, d), a view where strides allow it."""
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
    """Return (rows, heads, N, d) as (..., N, d) with these leading sizes, the inverse of :func:`as_rows`."""
    axis, count = heads_axis(leading, module, known_axis)
    if axis in ("one", "grouped"):
        return rows.reshape(*leading, *rows.shape[-2:])
    place, sizes = (
        (1, [-1, count, *leading[1:]]) if axis == "merged" else (int(axis), [*leading])
    )
    x = rows.reshape(*sizes[:place], *sizes[place + 1 :], *rows.shape[1:]).movedim(
        -3, place
    )
    return x.flatten(0, 1) if axis == "merged" else x
