"""Looks up what is known about a module, by its class."""

import re
from functools import lru_cache
from typing import Any

from torch import nn

from tcnn_probe.architectures.own_layers import OWN_LAYERS
from tcnn_probe.architectures.record import LayerRecord
from tcnn_probe.architectures.timm_layers import TIMM_LAYERS
from tcnn_probe.architectures.torch_layers import TORCH_LAYERS
from tcnn_probe.architectures.torchvision_layers import TORCHVISION_LAYERS
from tcnn_probe.architectures.transformers_layers import TRANSFORMERS_LAYERS

__all__ = ["RECORDS", "head_count", "known", "looks_like_attention"]

RECORDS: dict[str, LayerRecord] = {
    **OWN_LAYERS,
    **TIMM_LAYERS,
    **TORCH_LAYERS,
    **TORCHVISION_LAYERS,
    **TRANSFORMERS_LAYERS,
}
"""By the qualified name of the class: a name imports nothing, so a library may be absent."""

# These say how a forward uses parts of the layer, so another forward makes them false.
_FACTS_OF_THE_FORWARD = frozenset({"branches", "head_parameters"})

# torch, timm and transformers each have their own name for it.
_HEAD_COUNTS = ("num_heads", "n_heads", "nhead", "heads", "n_head", "num_attention_heads")


def known(module: nn.Module) -> LayerRecord:
    """Return what is known about a module; each fact from the nearest class that has it."""
    cls: Any = type(module)
    # A forward of the module's own is not handed on: the cache would keep the module alive.
    forward = None if "forward" in vars(module) else getattr(cls, "forward", None)
    return _record(cls, forward)


# Bounded, because torch makes a class for each parametrized module. The forward is part of the key, because users
# replace that of a class too.
@lru_cache(maxsize=1024)
def _record(cls: type, forward: Any) -> LayerRecord:
    facts: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        record = RECORDS.get(f"{base.__module__}.{base.__qualname__}", LayerRecord())
        nearer = {name: fact for name, fact in vars(record).items() if fact is not None}
        if forward is not getattr(base, "forward", None):
            nearer |= dict.fromkeys(_FACTS_OF_THE_FORWARD & nearer.keys())
        facts |= nearer
    return LayerRecord(**facts)


def looks_like_attention(module: nn.Module) -> bool:
    """Tell whether a module's class is named as those of attention are."""
    return re.search("(Attn|Attention|MHSA|XCA)(?!.*Projection)", type(module).__name__) is not None


def head_count(module: nn.Module) -> int | None:
    """Return the number of heads that a module says it has, None if it does not say."""
    sizes = (getattr(module, name, 0) for name in _HEAD_COUNTS)
    return next((n for n in sizes if isinstance(n, int) and n), None)
