"""The tokens of :class:`tcnn_model.AttentionPool2d`, whatever it is a part of: what they are is known by its class."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tcnn_probe.attention.feature_maps import Scene
from tcnn_probe.attention.layout import Layout, Tokens

__all__ = ["class_counts", "pool_layout"]

_CLASSES = "the queries are class tokens, one for each class, which lie on no grid"
_SINGLE = "the query is the class token, which lies on no grid"


def pool_layout(
    queries: int, keys: int, running: Sequence[tuple[nn.Module, Sequence[Any]]], scene: Scene
) -> Layout | None:
    """The grids of an attention call inside of such a pool; None if it is not inside of one.

    Args:
        queries, keys: how many tokens there are.
        running: the modules that are, the innermost last, and what each was called with.
        scene: what is known of the images.
    """
    pool, inputs = next(((m, given) for m, given in reversed(running) if isinstance(m, AttentionPool2d)), (None, ()))
    if pool is None or queries != (pool.num_classes or 1):
        return None
    prefix = 0 if pool.per_class else 1
    shown = [(x.shape[2], x.shape[3]) for x in inputs if isinstance(x, Tensor) and x.ndim == 4]
    grid = next((pair for pair in shown or scene.grids() if pair[0] * pair[1] == keys - prefix), None)
    tokens = None if grid is None else Tokens(prefix, *grid)
    why = (_CLASSES if pool.per_class else _SINGLE) if tokens else f"{keys} keys: no grid found"
    return Layout(None, tokens, why, "classes" if pool.per_class else "tokens")


def class_counts(names: Mapping[nn.Module, str]) -> dict[str, int]:
    """Of each such pool that has a token for each class, by name: how many classes."""
    pools = {name: module for module, name in names.items() if isinstance(module, AttentionPool2d)}
    return {name: pool.num_classes for name, pool in pools.items() if pool.num_classes is not None}
