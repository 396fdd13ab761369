"""Whether a recording that is continued is one of the same things."""

import json
from collections.abc import Mapping
from typing import Any

from tcnn_probe.schema import Group, Variable

__all__ = ["difference"]


def difference(there: Mapping[str, Group], here: Mapping[str, Group]) -> str | None:
    """The first difference between the groups of a store and those to be recorded, in words; None if they agree."""
    names = [{path: f"{len(group.variables)} variables" for path, group in side.items()} for side in (there, here)]
    if (found := _first("group", *names, names_only=True)) is not None:
        return found
    for path, group in here.items():
        if (found := _group_difference(there[path], group)) is not None:
            return f"in group {path!r}, {found}" if path else found
    return None


def _group_difference(there: Group, here: Group) -> str | None:
    sides = (there, here)
    layers = [_plain({name: dict(about) for name, about in side.layers.items()}) for side in sides]
    if (found := _first("layer", *layers)) is not None:
        return found
    if list(layers[0]) != list(layers[1]):
        return f"the layers are in another order: {list(layers[0])} there, {list(layers[1])} here"
    if (found := _first("dimension", *(_plain(side.sizes) for side in sides))) is not None:
        return found
    labels = [{name: list(side.coords[name]) for name in side.coords} for side in sides]
    if (found := _first("labels along", *labels)) is not None:
        return found
    return _first("variable", *({name: _say(about) for name, about in side.variables.items()} for side in sides))


def _say(about: Variable) -> str:
    return f"{about.dtype} of ({', '.join(about.dims)}), units {about.units!r}"


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(table)))


def _first(what: str, there: Mapping[str, Any], here: Mapping[str, Any], *, names_only: bool = False) -> str | None:
    for name in {**there, **here}:
        if name not in there or name not in here or (there[name] != here[name] and not names_only):
            return f"{what} {name!r}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
    return None
