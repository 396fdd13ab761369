"""Which paths and names a recording may have."""

from collections.abc import Mapping

from tcnn_probe.schema import Group
from tcnn_probe.storage.place import ROOT

__all__ = ["HEADS", "check_names", "is_name"]

HEADS = "heads"


def check_names(groups: Mapping[str, Group], along: str) -> None:
    """Every path and name stands for one thing, and no group lies inside another but the root; else ValueError."""
    if "" not in groups:
        raise ValueError("expected a root group, '', which may be without variables")
    nodes = [path for path in groups if path]
    parts = [part for path in nodes for part in path.split("/")]
    for path, group in groups.items():
        names = [along, *(["layer"] if group.layers else []), *group.sizes, *group.variables]
        parts += names
        nodes += [f"{path}/{name}" if path else name for name in names]
    if strange := [part for part in parts if not is_name(part)]:
        raise ValueError(f"expected paths such as 'maps/6x14x14' and names such as 'gate', got {strange[0]!r}")
    if any(path.split("/")[0] == HEADS for path in nodes):
        raise ValueError(f"expected other names than {HEADS!r}, under which the tree has the numbers of the root")
    twice = [path for path in nodes if nodes.count(path) > 1]
    inside = [path for path in groups if any(path.startswith(f"{node}/") for node in nodes)]
    if twice or inside:
        raise ValueError(f"expected every name to stand for one thing, got twice or in each other: {twice + inside}")


def is_name(text: str) -> bool:
    """Whether a text may be a part of a path: never one that leads out of the store."""
    return bool(text) and not text.startswith(".") and not {*text} & {*"/\\\0"} and text != ROOT
