"""Keeps the attention of one forward, of chosen heads and queries, on the grids of the layers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
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

    def indices(self, grid: Grid) -> Tensor:
        """Row-major indices of the queries in a grid."""
        if self.queries is None:
            return torch.arange(grid[0] * grid[1])
        return torch.tensor([y * grid[1] + x for y, x in self.cells(grid)], dtype=torch.long)

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
        wanted: which heads and queries.
        gated: layers whose attention is known from their input.
        names: of all modules.
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
        keys = _grid_of_keys(call) if self._wanted.heads_of(call.heads) else f"it has {call.heads} heads"
        if isinstance(keys, str):
            self.missing[call.name] = keys
            return None
        arrays = {}
        if (token := call.class_query) is not None and not _in_windows(call):
            arrays["class_attention"] = self._global(call, keys, [slice(token, token + 1)], 1)
        if call.layout.asking == "classes":
            arrays["attention_by_class"] = self._global(call, keys, _in_blocks(0, call.queries), call.queries)
        queries = _grid_of_queries(call)
        if queries is not None and self._wanted.queries != ():
            arrays["attention"] = self._from_queries(call, keys, queries)
        if not arrays:
            self.missing[call.name] = call.layout.reason or "it has no class token"
        present = {name: maps for name, maps in arrays.items() if maps is not None}
        if "class_attention" in present:
            present["class_attention"] = present["class_attention"][:, :, 0]
        return LayerMaps(call.name, call.heads, keys, queries, present) if present else None

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
            indices = self._wanted.indices(queries)
            if self._has_room(images, heads, len(indices), keys):
                maps = self._wanted.of_heads(attention.on_pixels(indices.to(attention.query.device)))
                gate = self._wanted.of_heads(attention.gate[None])[0]
                arrays = {"attention": self._shaped(maps, keys, queries)}
                self.found.append(LayerMaps(name, heads, keys, queries, arrays, gate.double().cpu()))

    def ends(self, kept: Sequence[Any], output: Any) -> None:
        """Keep what turned out to be attention."""
        self.found += [one for one in kept if one is not None]

    def _from_queries(self, call: AttentionCall, keys: Grid, queries: Grid) -> Tensor | None:
        indices = self._wanted.indices(queries)
        if _in_windows(call):
            if not self._has_room(call.images, call.heads, len(indices), keys):
                return None
            return self._shaped(self._wanted.of_heads(_of_windows(call, indices)), keys, queries)
        assert call.layout.queries is not None
        before = call.layout.queries.prefix
        if self._wanted.queries is None:
            slices = _in_blocks(before, before + len(indices))
        else:
            slices = [slice(before + at, before + at + 1) for at in indices.tolist()]
        maps = self._global(call, keys, slices, len(indices))
        return None if maps is None else self._shaped(maps.flatten(-2), keys, queries)

    def _global(self, call: AttentionCall, keys: Grid, slices: Iterable[slice], queries: int) -> Tensor | None:
        """Attention of some queries, each to the whole image: (B, heads, queries, rows, columns)."""
        if not self._has_room(call.images, call.heads, queries, keys):
            return None
        rows = (call.weights(one)[:, 0, :, :, call.layout.prefix :] for one in slices)
        return torch.cat([self._wanted.of_heads(some).cpu() for some in rows], 2).unflatten(-1, keys)

    def _shaped(self, maps: Tensor, keys: Grid, queries: Grid) -> Tensor:
        maps = maps.unflatten(-1, keys).cpu()
        return maps.unflatten(2, queries) if self._wanted.queries is None else maps

    def _has_room(self, images: int, heads: int, queries: int, keys: Grid) -> bool:
        """Count what this layer takes, in all forwards."""
        self._bytes += 4 * self._copies * images * len(self._wanted.heads_of(heads)) * queries * keys[0] * keys[1]
        return self._bytes <= self._most


def _in_windows(call: AttentionCall) -> bool:
    """Whether there are several windows, or one that is larger than the image."""
    return call.windows > 1 or call.cut is not None


def _grid_of_keys(call: AttentionCall) -> Grid | str:
    """Over the whole image; or why there is none."""
    if not _in_windows(call):
        keys = call.layout.keys
        return call.layout.reason if keys is None else (keys.height, keys.width)
    if call.cut is None or call.cut.cells().shape != (call.windows, call.keys):
        return f"where its {call.windows} windows lie in the image is unknown"
    return call.cut.grid


def _grid_of_queries(call: AttentionCall) -> Grid | None:
    if _in_windows(call):
        return call.cut.grid if call.cut is not None and call.queries == call.keys else None
    queries = call.layout.queries
    return None if queries is None else (queries.height, queries.width)


def _of_windows(call: AttentionCall, queries: Tensor) -> Tensor:
    """Attention of some cells of the image's grid to all of its cells: (B, heads, queries, cells)."""
    assert call.cut is not None
    cells = call.cut.cells()
    count = call.cut.grid[0] * call.cut.grid[1]
    place = torch.empty(count, dtype=torch.long)  # of each cell, among the tokens of all windows
    place[cells[cells >= 0]] = torch.arange(cells.numel()).view_as(cells)[cells >= 0]
    window, token = place[queries] // call.keys, place[queries] % call.keys
    rows = call.weights(slice(None)).cpu()[:, window, :, token].permute(1, 2, 0, 3)  # (B, heads, queries, tokens)
    maps = rows.new_zeros(*rows.shape[:3], count + 1)  # the last for the padding
    seen = cells[window].where(cells[window] >= 0, count)
    return maps.scatter_(-1, seen.expand_as(rows), rows)[..., :count]


def _in_blocks(first: int, last: int, most: int = 64) -> list[slice]:
    return [slice(at, min(at + most, last)) for at in range(first, last, most)]
