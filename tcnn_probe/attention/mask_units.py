"""Row-by-row order of tokens that Hiera orders by mask units."""

from dataclasses import dataclass
from math import prod

from torch import Tensor

from tcnn_probe.architectures.grids import MaskUnits, Windows
from tcnn_probe.architectures.lookup import known
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.hooks.forwards import Running

__all__ = ["UnitOrder", "find_unit_order"]


@dataclass(frozen=True)
class UnitOrder:
    """Row-by-row order of the queries and keys of each window.

    Args:
        queries, keys: Indices of the model's queries and keys in row-by-row order, shapes (N_query,) and (N_key,).
        layout: Grids of queries and keys in this order.
        cut, query_cut: Windows of the grids of keys and of queries.
    """

    queries: Tensor
    keys: Tensor
    layout: Layout
    cut: Windows
    query_cut: Windows


def find_unit_order(
    queries: int, keys: int, windows: int, running: Running
) -> UnitOrder | None:
    """Find the order of tokens in units; None if no running module has units, or if some units are left out."""
    records = [(known(module).mask_units, module) for module, _ in running]
    stages = [units for find, model in records if find for units in find(model)]
    queries_side, keys_side = (
        _side(count, windows, stages) for count in (queries, keys)
    )
    if queries_side is None or keys_side is None:
        return None
    (query_order, query_cut), (key_order, cut) = queries_side, keys_side
    spacing = [
        length / pooled_length
        for length, pooled_length in zip(cut.window, query_cut.window, strict=True)
    ]
    # A query is a maximum over tokens, and is placed at their centre.
    pooled = Tokens(
        0,
        *query_cut.window,
        spacing=(spacing[0], spacing[1]),
        origin=((spacing[0] - 1) / 2, (spacing[1] - 1) / 2),
    )
    layout = Layout(pooled, Tokens(0, *cut.window))
    return UnitOrder(query_order, key_order, layout, cut, query_cut)


def _side(
    count: int, windows: int, stages: list[MaskUnits]
) -> tuple[Tensor, Windows] | None:
    """Return the order of the tokens of a window, and the windows; None if no stage has such tokens."""
    for units in stages:
        is_unit = windows == 1 or count == prod(map(prod, units.strides))
        if is_unit and prod(units.grid) == count * windows:
            cells = units.cells(windows)[0]
            rows = len((cells // units.grid[1]).unique())
            return cells.argsort(), Windows(units.grid, (rows, count // rows))
    return None
