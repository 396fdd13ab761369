"""Listener that keeps the attention maps of chosen heads
and queries in one forward, on the grids of the layers.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import Tokens
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.receptive_fields import Centres, ReceptiveFields
from tcnn_probe.models import module_name

__all__ = ["NO_CLASS_TOKEN", "LayerMaps", "MapKeeper", "MapSelection"]

NO_CLASS_TOKEN = "it has no class token"

# A grid has rows and columns, or frames, rows and columns.
Grid = tuple[int, ...]
Pixels = Sequence[tuple[int, ...]]
Indices = range | list[int]

# Number of queries whose weights are computed at once if all are kept, so that unselected heads
# take little memory.
_QUERIES_AT_ONCE = 64

# Largest memory in use at a time, relative to that of the result.
_PEAK = 1.2
_SMALLER = "give queries=[(y, x), ...] or queries='class', fewer layers, heads or images"


@dataclass(frozen=True)
class MapSelection:
    """Selection of queries and heads whose maps are kept.

    Args:
        queries: Pixels (y, x) of images, or (frame, y, x) of videos; None for all queries, empty
            for class tokens only.
        heads: Indices of heads; None for all.
        fields: Receptive fields, which give the positions of cells in the images.
        frames: Number of frames of the videos; 1 for images.
        mixing: Linear layers that mix heads, by name of the layer with these heads; others are not
            mixed.
    """

    queries: Pixels | None
    heads: Sequence[int] | None
    fields: ReceptiveFields
    frames: int = 1
    mixing: Mapping[str, nn.Linear] = field(default_factory=dict)

    def cells(self, grid: Grid) -> list[Grid]:
        """Return the cells of the queries in a grid over the images."""
        assert self.queries is not None
        cells = []
        for *frame, y, x in self.queries:
            row, column = self.fields.cell((grid[-2], grid[-1]), (y, x))
            # A token can span several frames.
            cell = *(number * grid[0] // self.frames for number in frame), row, column
            cells.append(cell[-len(grid) :])
        return cells

    def indices(self, grid: Grid, prefix: int = 0) -> Indices:
        """Return row-major indices of the queries in a grid that comes after ``prefix`` tokens."""
        if self.queries is None:
            return range(prefix, prefix + math.prod(grid))
        return [prefix + int(np.ravel_multi_index(cell, grid)) for cell in self.cells(grid)]

    def heads_of(self, count: int) -> list[int]:
        """Return the selected heads of a layer with ``count`` heads."""
        return [head for head in range(count) if self.heads is None or head in self.heads]

    def mixed(self, weights: Tensor, layer: str) -> Tensor:
        """Return attention (B, heads, n, keys) after the layer's mixing of heads, if it has one."""
        mixing = self.mixing.get(module_name(layer))
        if mixing is None:
            return weights
        # The linear layer is not called, because its hooks would take the call for a part of the
        # forward.
        bias = None if mixing.bias is None else mixing.bias.to(weights)
        by_head = F.linear(weights.movedim(1, -1), mixing.weight.to(weights), bias)
        return by_head.movedim(-1, 1)

    def select_heads(self, values: Tensor) -> Tensor:
        """Return values of the selected heads, which are along dimension 1."""
        return values if self.heads is None else values[:, self.heads_of(values.shape[1])]


@dataclass
class LayerMaps:
    """Maps of one layer.

    Args:
        layer: Name of the layer.
        heads: Number of heads of the layer, selected or not.
        keys, queries: Grids over the image or video; ``queries`` is None if the queries have no
            grid.
        places: Centres of rows and columns of the keys in the image.
        arrays: Maps by variable, shape (B, heads, ..., *keys).
        gate: Gates of the selected heads, shape (heads,); None if there are no gates.
    """

    layer: str
    heads: int
    keys: Grid
    queries: Grid | None
    places: tuple[Centres, Centres]
    arrays: dict[str, Tensor]
    gate: Tensor | None = None


class MapKeeper(AttentionListener):
    """Keeps the maps of one forward.

    Args:
        selection: Queries and heads to keep.
        images: Number of images of the forward.
        copies: Number of forwards over all batches.
        max_bytes: Largest size of the maps of all these forwards.
        room: Number of bytes that the machine has free; None if it is unknown.
    """

    def __init__(
        self,
        selection: MapSelection,
        *,
        images: int,
        copies: int,
        max_bytes: int,
        room: float | None = None,
    ) -> None:
        self.maps: list[LayerMaps] = []
        self.missing: dict[str, str] = {}
        self._selection = selection
        self._images = images
        self._copies = copies
        self._max_bytes = max_bytes
        self._room = math.inf if room is None else room / _PEAK
        self._shown: list[LayerMaps] = []
        self._bytes = 0

    def check(self) -> None:
        """Raise ValueError, after the forward, if all maps together are too large."""
        if self._bytes > self._max_bytes:
            raise ValueError(
                f"expected maps of at most {self._max_bytes / 1e9:.2f} GB (max_bytes), got "
                f"{self._bytes / 1e9:.2f} GB: {_SMALLER}, or a larger max_bytes"
            )
        if self._bytes > self._room:
            raise ValueError(
                f"expected maps that fit into the {self._room * _PEAK / 1e9:.2f} GB of memory that "
                f"are free, got {self._bytes / 1e9:.2f} GB, for which {_PEAK} times as much is "
                f"needed: {_SMALLER}"
            )

    def attends(self, attention: Attention) -> None:
        """Keep the maps of an attention."""
        keys, queries, reason = _grids(attention)
        rows = self._rows(attention, queries)
        heads = self._selection.heads_of(attention.heads)
        if attention.without_maps and keys is not None:
            reason, rows = attention.without_maps, {}
        elif attention.images != self._images:
            reason = f"it saw {attention.images} of {self._images} images"
            rows = {}
        if not heads:
            reason, rows = f"it has {attention.heads} heads", {}
        if keys is None or not rows:
            self.missing[attention.name] = reason or NO_CLASS_TOKEN
            return
        per_image = len(heads) * sum(map(len, rows.values())) * math.prod(keys)
        count = self._copies * attention.images * per_image
        # Counting continues beyond the limit, so that the error can give the total size.
        self._bytes += attention.dtype.itemsize * count
        if self._bytes > min(self._max_bytes, self._room):
            return
        arrays = {}
        # The model may sort its images.
        numbers = attention.image_numbers or range(attention.images)
        in_order = torch.tensor(numbers).argsort()
        is_sorted = list(numbers) == sorted(numbers)
        maps_of = _maps_in_windows if attention.in_windows else _maps_of_images
        for name, indices in rows.items():
            values = maps_of(attention, indices, self._selection)
            values = values.flatten(-2).unflatten(-1, keys)
            arrays[name] = values if is_sorted else values[in_order]
        # The class token is a single query, whose axis is removed.
        if "class_attention" in arrays:
            arrays["class_attention"] = arrays["class_attention"][:, :, 0]
        if "attention" in arrays and queries is not None and self._selection.queries is None:
            arrays["attention"] = arrays["attention"].unflatten(2, queries)
        gate = attention.gate
        if gate is not None:
            gate = self._selection.select_heads(gate[None])[0].double().cpu()
        # Later stages may have maps of this size whose cells lie elsewhere, as in SegFormer, which
        # pools the keys of all stages to the grid of the last one.
        places = self._selection.fields.places((keys[-2], keys[-1]))
        self._shown.append(
            LayerMaps(attention.name, attention.heads, keys, queries, places, arrays, gate)
        )

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Keep the maps of softmaxes that turned out to be attention."""
        self.maps += [maps for maps in self._shown if maps.layer in layers]
        self._shown = []
        # The stream gives the reasons why other softmaxes are not attention.
        self.missing = {layer: reason for layer, reason in self.missing.items() if layer in layers}

    def _rows(self, attention: Attention, queries: Grid | None) -> dict[str, Indices]:
        """Return the queries to keep by variable,
        as indices or, in windows, as cells in the image.
        """
        rows: dict[str, Indices] = {}
        token = attention.class_query
        if token is not None and not attention.in_windows:
            rows["class_attention"] = range(token, token + 1)
        if attention.layout.asking == "classes":
            rows["attention_by_class"] = range(attention.queries)
        # The attention of object queries, latents and words can be drawn although these have no
        # place in the image.
        elif (
            queries is None
            and token is None
            and self._selection.queries != ()
            and not attention.in_windows
        ):
            rows["attention_by_query"] = range(attention.queries)
        if queries is not None and self._selection.queries != ():
            on_grid = attention.layout.queries
            prefix = 0 if attention.in_windows or on_grid is None else on_grid.prefix
            rows["attention"] = self._selection.indices(queries, prefix)
        return rows


def _grids(attention: Attention) -> tuple[Grid | None, Grid | None, str]:
    """Return the grids of keys and queries over the whole image,
    and the reason if a grid is unknown.
    """
    layout, cut = attention.layout, attention.cut
    if not attention.in_windows:
        queries = layout.queries
        return (
            _with_frames(attention.map_size, layout.keys),
            _with_frames(queries.size if queries else None, queries),
            layout.reason,
        )
    # If the windows known for the module's class are not those of this call, keys would be placed
    # wrongly.
    if cut is None or cut.cells().shape != (attention.windows, attention.keys):
        return (
            None,
            None,
            f"where its {attention.windows} windows lie in the image is unknown",
        )
    asking = attention.query_cut
    # Pooled queries have another grid than the keys, which is not known for all layers.
    has_queries = asking is not None and attention.queries == asking.cells().shape[1]
    return cut.grid, asking.grid if asking and has_queries else None, layout.reason


def _with_frames(size: Grid | None, tokens: Tokens | None) -> Grid | None:
    """Return the size of a grid, with the number
    of frames if these are stacked vertically in it.
    """
    if size is None or tokens is None or tokens.frames == 1:
        return size
    return tokens.frames, size[0] // tokens.frames, size[1]


def _maps_of_images(attention: Attention, queries: Indices, selection: MapSelection) -> Tensor:
    """Return attention of some queries to all cells of the image's grid:
    (B, heads, queries, rows, columns).
    """
    # Chosen queries are processed one by one; if all queries are kept, many consecutive ones are
    # processed at a time.
    slices = [slice(index, index + 1) for index in queries]
    if isinstance(queries, range):
        slices = [
            slice(start, min(start + _QUERIES_AT_ONCE, queries.stop))
            for start in queries[::_QUERIES_AT_ONCE]
        ]
    maps: Tensor | None = None
    start = 0
    for part in slices:
        weights = selection.mixed(attention.weights(part)[:, 0], attention.name)
        weights = selection.select_heads(weights)
        rows = attention.on_grid(weights)
        if maps is None:
            shape = (*rows.shape[:2], len(queries), *rows.shape[3:])
            maps = torch.empty(shape, dtype=rows.dtype)
        maps[:, :, start : start + rows.shape[2]] = rows
        start += rows.shape[2]
    assert maps is not None
    return maps


def _maps_in_windows(attention: Attention, queries: Indices, selection: MapSelection) -> Tensor:
    """Return attention of some cells of the image's grid to all its cells:
    (B, heads, queries, rows, columns).
    """
    assert attention.cut is not None
    assert attention.query_cut is not None
    cells, asking = attention.cut.cells(), attention.query_cut.cells()
    rows, columns = attention.cut.grid
    is_real, is_asking = cells >= 0, asking >= 0
    # For each cell, this is its index among the queries of all windows.
    place = torch.empty(int(is_asking.sum()), dtype=torch.long)
    place[asking[is_asking]] = torch.arange(asking.numel()).view_as(asking)[is_asking]
    tokens = place[list(queries)]
    window, token = tokens // attention.queries, tokens % attention.queries
    # Index tensors that are not adjacent move their axis to the front: (queries, B, heads, tokens).
    by_query = attention.weights().cpu()[:, window, :, token]
    weights = by_query.permute(1, 2, 0, 3)
    weights = selection.select_heads(weights)
    # An additional cell collects the attention to padding, and is removed at the end.
    maps = weights.new_zeros(*weights.shape[:3], rows * columns + 1)
    seen_cells = cells[window].where(is_real[window], rows * columns)
    maps.scatter_(-1, seen_cells.expand_as(weights), weights)
    return maps[..., :-1].unflatten(-1, (rows, columns))
