"""Selection of layers by names, globs or a predicate."""

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn

__all__ = ["LayerFilter", "matching", "select_layers"]

LayerFilter = str | Collection[str] | Callable[[str, nn.Module], bool]

M = TypeVar("M", bound=nn.Module)


def select_layers(candidates: Mapping[str, M], layers: LayerFilter, *, noun: str) -> dict[str, M]:
    """Return the candidates that ``layers`` selects, in the candidates' order.

    Args:
        candidates: Layers that can be selected, by module name.
        layers: A name, the name of a module that contains candidates, or a glob, or a collection of
            these; or a predicate ``(name, module) -> bool``.
        noun: Description of the candidates, in the plural, for error messages.

    Raises:
        TypeError: If ``layers`` has another type, such as a number.
        ValueError: If a name, a glob or the predicate matches no candidate.
    """
    if callable(layers):
        selected = {name: module for name, module in candidates.items() if layers(name, module)}
        if not selected:
            raise ValueError(f"the predicate chose none of the {len(candidates)} {noun}")
        return selected
    if not isinstance(layers, Collection) or not all(
        isinstance(pattern, str) for pattern in layers
    ):
        # The error shows the last name as an example: that of a layer called attention, if there is
        # one.
        called_attention = [name for name in candidates if name.endswith(("attn", "attention"))]
        example = called_attention or list(candidates)
        last = f"; the last of them is {example[-1]!r}" if example else ""
        raise TypeError(
            f"expected names or globs of {noun}, or a predicate (name, module) -> bool; got "
            f"{layers!r}{last}"
        )
    names: set[str] = set()
    for pattern in (layers,) if isinstance(layers, str) else layers:
        matches = matching(candidates, pattern)
        if not matches:
            raise ValueError(f"no {noun} match {pattern!r}{_hint(pattern, candidates)}")
        names.update(matches)
    if not names:
        raise ValueError(
            f"layers is empty: name at least one of the {len(candidates)} {noun}, or pass None"
        )
    return {name: module for name, module in candidates.items() if name in names}


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that equal the pattern,
    belong to a module of that name, or match the pattern as a glob.
    """
    return [
        n
        for n in names
        if n == pattern or n.startswith(f"{pattern}.") or fnmatch.fnmatchcase(n, pattern)
    ]


def _hint(pattern: str, names: Collection[str]) -> str:
    # The cutoff is lower than difflib's 0.6, because a user may give only the end of a long path.
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or list(names)[-3:]
    return f"; did you mean {', '.join(map(repr, close))}?" if close else ": the model has none"
