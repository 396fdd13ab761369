"""Which paths and names a recording may have."""

from collections.abc import Mapping

from tcnn_probe.schema import Group
from tcnn_probe.storage.place import ROOT

__all__ = ["HEADS", "check_names", "is_name"]

HEADS = "heads"
"""Where a tree has the numbers of the root."""


def check_names(groups: Mapping[str, Group], along: str) -> None:
    """Every path and name stands for one thing, and no group lies inside another but the root; else ValueError."""
    nodes = [HEADS, *(path for path in groups if path)]
    for path, group in groups.items():
        names = [along, *(["layer"] if group.layers else []), *group.sizes, *group.variables]
        nodes += [f"{path}/{name}" if path else name for name in names]
    twice = [path for path in nodes if nodes.count(path) > 1]
    inside = [path for path in groups if any(path.startswith(f"{node}/") for node in nodes)]
    if twice or inside:
        raise ValueError(f"expected every name to stand for one thing, got twice or in each other: {twice + inside}")


def is_name(text: str) -> bool:
    """Whether a text may be a part of a path: never one that leads out of the store."""
    return bool(text) and not text.startswith(".") and not {*text} & {*"/\\\0"} and text != ROOT
