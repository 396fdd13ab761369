"""Why layers, or some of their variables, are not recorded."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping

from torch import nn

from tcnn_probe.attention import known_layers as known

__all__ = ["Reasons"]


class Reasons:
    """In words.

    Attributes:
        unsupported: {layer: why} of layers that look like attention.
        missing: {variable: {layer: why}} of layers that are recorded without it.

    Args:
        names: of the modules, in the model's order.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.unsupported: dict[str, str] = {}
        self.missing: dict[str, dict[str, str]] = {}
        self._names = names
        self._explained: set[nn.Module] = set()

    def lacks(self, layer: str, variables: Iterable[str], why: str) -> None:
        """A layer has no such variables."""
        for variable in variables:
            self.missing.setdefault(variable, {})[layer] = why

    def explain(self, ran: Collection[nn.Module], recorded: Collection[str], wanted: Callable[[str], bool]) -> None:
        """Of modules that look like attention and were not recorded, though they ran; once for each.

        Args:
            ran: modules that did in a forward.
            recorded: names of the layers that are.
            wanted: whether the user asked for a layer.
        """
        new = set(ran) - self._explained
        self._explained |= new
        recorded = {name.split("#")[0] for name in recorded}
        for module, name in self._names.items() if new else ():
            if module not in new or name in self.unsupported or name in recorded or not wanted(name):
                continue
            if reason := known.lookup(known.NO_ATTENTION_MATRIX, module):
                self.unsupported[name] = reason
            elif re.search("Attn|Attention", type(module).__name__) and not _near(name, {*recorded, *self.unsupported}):
                self.unsupported[name] = "no softmax between tokens was seen while it ran"


def _near(name: str, others: Collection[str]) -> bool:
    """Whether one of the others is inside this layer, as all are inside the model itself."""
    return any(not name or other.startswith(f"{name}.") or other.split("#")[0] == name for other in others)
