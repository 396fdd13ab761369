"""Choosing layers of a model by names, globs or a predicate."""

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from torch import nn

__all__ = ["LayerFilter", "matching", "select_layers"]

LayerFilter = str | Collection[str] | Callable[[str, nn.Module], bool]

M = TypeVar("M", bound=nn.Module)


def select_layers(candidates: Mapping[str, M], wanted: LayerFilter, *, what: str) -> dict[str, M]:
    """The candidates that ``wanted`` names, in the candidates' order.

    Args:
        candidates: layers that can be chosen, by module name.
        wanted: a name, the name of a module that contains candidates, or a glob, or a collection of these; or a
            predicate ``(name, module) -> bool``.
        what: what the candidates are, in the plural, for error messages.

    Raises:
        ValueError: a name or glob that matches no candidate, or a predicate that matches none.
    """
    if callable(wanted):
        chosen = {name: module for name, module in candidates.items() if wanted(name, module)}
        if not chosen:
            raise ValueError(f"the predicate chose none of the {len(candidates)} {what}")
        return chosen
    chosen_names: set[str] = set()
    for pattern in (wanted,) if isinstance(wanted, str) else wanted:
        matches = set(matching(candidates, pattern))
        if not matches:
            raise ValueError(f"no {what} match {pattern!r}{_hint(pattern, candidates)}")
        chosen_names |= matches
    if not chosen_names:
        raise ValueError(f"layers is empty: name at least one of the {len(candidates)} {what}, or pass None")
    return {name: module for name, module in candidates.items() if name in chosen_names}


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that a name, that of a module which contains them, or a glob stands for."""
    return [n for n in names if n == pattern or n.startswith(f"{pattern}.") or fnmatch.fnmatchcase(n, pattern)]


def _hint(pattern: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or list(names)[-3:]
    return f"; did you mean {', '.join(map(repr, close))}?" if close else f": the model has none, so {pattern!r} cannot"
