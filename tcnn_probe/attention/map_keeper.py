"""Keeps the attention of one forward, of chosen heads and queries, on the grids of the layers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.gated import gated_attention
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import AttentionListener
from tcnn_probe.models import named_in_errors

__all__ = ["LayerMaps", "MapKeeper", "Wanted"]

Grid = tuple[int, int]
Pixels = Sequence[tuple[int, int]]
_AT_ONCE = 64  # queries


@dataclass(frozen=True)
class Wanted:
    """What was asked for.

    Args:
        queries: pixels (y, x) of the images; None for all queries, empty for class tokens alone.
        heads: None for all.
        fields: of the cells in the images.
    """

    queries: Pixels | None
    heads: Sequence[int] | None
    fields: ReceptiveFields

    def cells(self, grid: Grid) -> list[Grid]:
        """The cells of a grid over the images in which the queries lie."""
        assert self.queries is not None
        return [self.fields.cell(grid, pixel) for pixel in self.queries]

    def indices(self, grid: Grid, before: int = 0) -> range | list[int]:
        """Row-major indices of the queries in a grid that comes after so many tokens."""
        if self.queries is None:
            return range(before, before + grid[0] * grid[1])
        return [before + y * grid[1] + x for y, x in self.cells(grid)]

    def heads_of(self, count: int) -> list[int]:
        """Those of a layer's heads that are wanted."""
        return [head for head in range(count) if self.heads is None or head in self.heads]

    def of_heads(self, values: Tensor) -> Tensor:
        """Those of the heads, dimension 1, that are wanted."""
        return values if self.heads is None else values[:, self.heads_of(values.shape[1])]


@dataclass
class LayerMaps:
    """Maps of one layer: ``arrays`` of shape (B, heads, ..., rows, columns), by variable."""

    layer: str
    heads: int  # of the layer, also those that are not wanted
    keys: Grid
    queries: Grid | None
    arrays: dict[str, Tensor]
    gate: Tensor | None = None


class MapKeeper(AttentionListener):
    """Keeps the maps of one forward.

    Args:
        gated: layers whose attention is known from their input.
        copies: how many forwards there will be.
        most: bytes of maps that all of them may give.
    """

    def __init__(
        self, wanted: Wanted, gated: Collection[nn.Module], names: Mapping[nn.Module, str], *, copies: int, most: int
    ) -> None:
        self.found: list[LayerMaps] = []
        self.missing: dict[str, str] = {}
        self._wanted, self._gated, self._names, self._copies, self._most = wanted, gated, names, copies, most
        self._bytes = 0

    def check(self) -> None:
        """Refuse what is too large, after the forward, when it is known how large all of it is."""
        if self._bytes > self._most:
            raise ValueError(
                f"expected maps of at most {self._most / 1e9:.2f} GB (max_bytes), got {self._bytes / 1e9:.2f} GB: give "
                f"queries=[(y, x), ...] or queries='class', fewer layers, heads or images, or a larger max_bytes"
            )

    def attends(self, call: AttentionCall) -> LayerMaps | None:
        """Keep the maps of an attention."""
        keys, queries, why = _grids(call)
        rows = self._rows(call, queries)
        if not self._wanted.heads_of(call.heads):
            why, rows = f"it has {call.heads} heads", {}
        if keys is None or not rows:
            self.missing[call.name] = why or "it has no class token"
            return None
        if not self._has_room(call.images, call.heads, sum(map(len, rows.values())), keys):
            return None
        arrays = {}
        for name, some in rows.items():
            maps = (_of_windows if call.in_windows else _of_images)(call, some, self._wanted)
            arrays[name] = maps.unflatten(-1, keys)
        if "class_attention" in arrays:
            arrays["class_attention"] = arrays["class_attention"][:, :, 0]
        if "attention" in arrays and queries is not None and self._wanted.queries is None:
            arrays["attention"] = arrays["attention"].unflatten(2, queries)
        return LayerMaps(call.name, call.heads, keys, queries, arrays)

    def _rows(self, call: AttentionCall, queries: Grid | None) -> dict[str, range | list[int]]:
        """Which queries are kept, by variable: their indices or, in windows, their cells in the image."""
        rows: dict[str, range | list[int]] = {}
        if (token := call.class_query) is not None and not call.in_windows:
            rows["class_attention"] = range(token, token + 1)
        if call.layout.asking == "classes":
            rows["attention_by_class"] = range(call.queries)
        if queries is not None and self._wanted.queries != ():
            before = 0 if call.in_windows or call.layout.queries is None else call.layout.queries.prefix
            rows["attention"] = self._wanted.indices(queries, before)
        return rows

    def watches(self, module: nn.Module) -> bool:
        """Gated layers."""
        return module in self._gated

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """Keep the maps of a gated layer."""
        name = self._names[module]
        if self._wanted.queries == ():
            self.missing[name] = "it has no class token"
            return
        with named_in_errors(name):
            attention = gated_attention(module, inputs[0])
            keys, queries = (attention.y.length, attention.x.length), (attention.y.queries, attention.x.queries)
            images, heads = attention.query.shape[:2]
            if not self._wanted.heads_of(heads):
                self.missing[name] = f"it has {heads} heads"
                return
            which = torch.tensor(self._wanted.indices(queries), device=attention.query.device)
            if self._has_room(images, heads, len(which), keys):
                maps = self._wanted.of_heads(attention.on_pixels(which)).unflatten(-1, keys).cpu()
                maps = maps.unflatten(2, queries) if self._wanted.queries is None else maps
                gate = self._wanted.of_heads(attention.gate[None])[0].double().cpu()
                self.found.append(LayerMaps(name, heads, keys, queries, {"attention": maps}, gate))

    def ends(self, kept: Sequence[Any], output: Any) -> None:
        """Keep what turned out to be attention."""
        self.found += [one for one in kept if one is not None]

    def _has_room(self, images: int, heads: int, queries: int, keys: Grid) -> bool:
        """Count what this layer takes, in all forwards."""
        self._bytes += 4 * self._copies * images * len(self._wanted.heads_of(heads)) * queries * keys[0] * keys[1]
        return self._bytes <= self._most


def _grids(call: AttentionCall) -> tuple[Grid | None, Grid | None, str]:
    """The grids of keys and queries over the whole image; and why there is none."""
    if not call.in_windows:
        tokens = call.layout.keys, call.layout.queries
        keys, queries = (None if one is None else (one.height, one.width) for one in tokens)
        return keys, queries, call.layout.reason
    if call.cut is None or call.cut.cells().shape != (call.windows, call.keys):
        return None, None, f"where its {call.windows} windows lie in the image is unknown"
    return call.cut.grid, call.cut.grid if call.queries == call.keys else None, call.layout.reason


def _of_images(call: AttentionCall, queries: range | list[int], wanted: Wanted) -> Tensor:
    """Attention of some queries to all cells of the image's grid: (B, heads, queries, cells)."""
    slices = [slice(n, n + 1) for n in queries]
    if isinstance(queries, range):  # all of them, a few at a time: heads that are not wanted need no room then
        slices = [slice(n, min(n + _AT_ONCE, queries.stop)) for n in queries[::_AT_ONCE]]
    rows = (call.weights(some)[:, 0, :, :, call.layout.prefix :] for some in slices)
    return torch.cat([wanted.of_heads(some).cpu() for some in rows], 2)


def _of_windows(call: AttentionCall, queries: range | list[int], wanted: Wanted) -> Tensor:
    """Attention of some cells of the image's grid to all of its cells: (B, heads, queries, cells)."""
    assert call.cut is not None
    cells = call.cut.cells()
    count = call.cut.grid[0] * call.cut.grid[1]
    place = torch.empty(count, dtype=torch.long)  # of each cell, among the tokens of all windows
    place[cells[cells >= 0]] = torch.arange(cells.numel()).view_as(cells)[cells >= 0]
    at = place[list(queries)]
    window, token = at // call.keys, at % call.keys
    rows = call.weights(slice(None)).cpu()[:, window, :, token].permute(1, 2, 0, 3)  # (B, heads, queries, tokens)
    rows = wanted.of_heads(rows)
    maps = rows.new_zeros(*rows.shape[:3], count + 1)  # the last for the padding
    seen = cells[window].where(cells[window] >= 0, count)
    return maps.scatter_(-1, seen.expand_as(rows), rows)[..., :count]
