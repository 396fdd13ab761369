"""Layout of an attention: the grids of its queries and keys.

Feature maps of the forward show grids, and so do attributes and inputs of the layer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tcnn_probe.architectures.grids import MaskUnits, Tokens, Windows
from tcnn_probe.architectures.lookup import known
from tcnn_probe.architectures.record import LayerRecord
from tcnn_probe.attention.feature_maps import MOST_SPECIAL, FeatureMaps
from tcnn_probe.attention.layout import Arrangement, Layout
from tcnn_probe.hooks.forwards import Running

__all__ = ["find_layout", "find_windows", "is_in_pool", "token_counts"]

Grid = tuple[int, int]  # rows and columns


def find_layout(
    queries: int,
    keys: int,
    windows: int,
    running: Running,
    maps: FeatureMaps,
    *,
    tracked: Arrangement | None = None,
    queries_are_words: bool = False,
    not_on_grid: str = "",
) -> Layout:
    """Find the tokens of an attention: their grids,
    order and windows, and the tokens beside the grid.

    A grid is reported only if there is evidence for it: attributes or inputs of the layer or, if
    each token attends to the whole image, a feature map of this forward. A square number of tokens
    is no evidence of a square grid.

    Args:
        queries, keys: Numbers of queries and keys of each window.
        windows: Number of windows of an image.
        running: Running modules and their inputs.
        maps: Feature maps of the forward so far.
        tracked: Places of words and patches among the keys, if tokens were tracked.
        queries_are_words: Whether the queries are known to be words.
        not_on_grid: Reason why the tokens cannot lie on a grid, if the call of torch shows it.
    """
    cut, words = find_windows(running), 0
    of_keys = maps.arrange(keys, tracked)
    layout = _pool_layout(queries, keys, running, maps)
    records = [known(module) for module, _ in running]
    layout = _units_layout(queries, keys, windows, running, records) or layout
    if layout is None and not_on_grid:
        layout = Layout(None, None, not_on_grid)
    if layout is None:
        sides = of_keys if queries == keys else maps.arrange(queries, tracked), of_keys
        layout = _grids(queries, keys, windows, running, records, maps, sides)
        if layout.keys is None and cut and queries == keys == prod(cut.window):
            # No feature map has the size of a window, but the block that cuts windows has their
            # rows and columns.
            layout = Layout(Tokens(0, *cut.window), Tokens(0, *cut.window))
        orders = sides[0].order, sides[1].order
        is_moved = orders != (range(queries), range(keys))
        if is_moved and layout.keys is not None and windows == 1:
            order = torch.tensor(orders[0]), torch.tensor(orders[1])
            layout = replace(layout, order=order)
        if queries_are_words:
            reason = "the queries are words, which lie on no grid"
            reason = reason if layout.keys else layout.reason
            layout = Layout(None, layout.keys, reason, "words", order=layout.order)
        words = of_keys.words if layout.keys else layout.words
    cut = layout.cut or cut
    if windows == 1 and cut is not None and cut.grid == cut.window:
        cut = None  # the only window is the image
    return replace(
        layout,
        words=words,
        cut=cut,
        query_cut=layout.query_cut or cut,
        class_token=of_keys.class_token,
        distillation_token=maps.special.distillation_token,
    )


def find_windows(running: Running) -> Windows | None:
    """Return the windows of the innermost module
    that cuts its input into windows; None if no module does.
    """
    for module, inputs in reversed(running):
        if cut := known(module).windows:
            return cut(module, inputs)
    return None


def _grids(
    queries: int,
    keys: int,
    windows: int,
    running: Running,
    records: Sequence[LayerRecord],
    maps: FeatureMaps,
    sides: tuple[Arrangement, Arrangement],
) -> Layout:
    """Return the grids of queries and keys, see :func:`find_layout`."""
    (module, inputs), record = running[-1], records[-1]
    if record.not_in_raster_order:
        return Layout(None, None, record.not_in_raster_order)
    if record.own_grids:
        layout = Layout(*record.own_grids(module, keys))
        assert layout.queries is not None
        assert layout.keys is not None
        if (layout.queries.count, layout.keys.count) == (queries, keys):
            return layout
        reason = f"{queries} queries and {keys} keys: not the layer's own grids"
        return Layout(None, None, reason)
    # Windows are cut from the grid and contain no class and register tokens.
    of_queries, of_keys = (_prefixes(side) if windows == 1 else (0,) for side in sides)
    # A mask of queries and keys, (B, 1, N_query, N_key), is not a map.
    no_masks = [
        x
        for x in inputs
        if not (isinstance(x, Tensor) and x.ndim == 4 and x.shape[1::2] == (1, keys))
    ]
    grids = list(_shown(module, no_masks, windows, maps))
    # The innermost module with a known value decides.
    spreads = [outer.spread_evenly for outer in reversed(records)]
    spread = next((value for value in spreads if value is not None), None)
    if spread or (spread is not None and windows == 1):
        grids += [grid for before in of_keys for grid in maps.divisions(keys - before)]
    key_tokens = _find(keys, grids, of_keys)
    if windows == 1 and key_tokens is None:
        key_tokens = maps.frames(keys, of_keys)
    if record.latent_queries:
        return Layout(None, key_tokens, record.latent_queries, "latents")
    specials = max(key_tokens.prefix if key_tokens else 0, sum(maps.special.around or ()), 1)
    if queries != keys and queries <= specials:
        reason = "the queries are class tokens or latents, which lie on no grid"
        return Layout(None, key_tokens, reason)
    if key_tokens is None:
        return _no_grid(queries, keys, windows, maps, words=_is_given_words(running))
    if queries == keys:
        return Layout(key_tokens, key_tokens)
    counts = f"{queries} queries and {keys} keys"
    strided = record.strided is not None and record.strided(module)
    # If no input of the layer has the number of queries, they were pooled inside the layer in an
    # unknown way.
    if not strided and queries not in token_counts(inputs):
        reason = f"{counts}: the positions of the queries are unknown"
        return Layout(None, key_tokens, reason)
    query_tokens = _find(queries, grids, of_queries)
    if query_tokens is None:
        return Layout(None, key_tokens, f"{queries} queries: no grid found")
    if query_tokens.prefix != key_tokens.prefix and maps.special.around is None:
        reason = f"{counts}: it is unknown which of them are class tokens"
        return Layout(None, None, reason)
    aligned = _aligned(query_tokens, key_tokens, strided=strided)
    if aligned is None:
        return Layout(None, key_tokens, "one of the grids does not divide the other")
    return Layout(*aligned)


def is_in_pool(running: Running) -> bool:
    """Return whether an attention is that of a :class:`tcnn_model.AttentionPool2d`."""
    return any(isinstance(module, AttentionPool2d) for module, _ in running)


def _pool_layout(queries: int, keys: int, running: Running, maps: FeatureMaps) -> Layout | None:
    """Return the layout of an attention inside an attention pool; None for other attention."""
    pools = [call for call in running if isinstance(call.module, AttentionPool2d)]
    if not pools or queries != (pools[-1].module.num_classes or 1):
        return None
    pool, inputs = pools[-1]
    shown = [(x.shape[2], x.shape[3]) for x in inputs if isinstance(x, Tensor) and x.ndim == 4]
    prefix = 0 if pool.per_class else 1
    key_tokens = _find(keys, shown or maps.grids(), [prefix])
    reason = "the query is the class token, which lies on no grid"
    if pool.per_class:
        reason = "the queries are class tokens, one for each class, which lie on no grid"
    if key_tokens is None:
        reason = f"{keys} keys: no grid found"
    return Layout(None, key_tokens, reason, "classes" if pool.per_class else "tokens")


def _units_layout(
    queries: int, keys: int, windows: int, running: Running, records: Sequence[LayerRecord]
) -> Layout | None:
    """Return the layout of tokens that Hiera orders by mask units;
    None without units, or if some are left out.
    """
    stages = [
        units
        for record, (module, _) in zip(records, running, strict=True)
        if record.mask_units
        for units in record.mask_units(module)
    ]
    sides = [_units_side(count, windows, stages) for count in (queries, keys)]
    if sides[0] is None or sides[1] is None:
        return None
    (query_order, query_cut), (key_order, cut) = sides[0], sides[1]
    rows, columns = (
        length / pooled for length, pooled in zip(cut.window, query_cut.window, strict=True)
    )
    # A query is a maximum over tokens, and is placed at their centre.
    centre = (rows - 1) / 2, (columns - 1) / 2
    return Layout(
        Tokens(0, *query_cut.window, spacing=(rows, columns), origin=centre),
        Tokens(0, *cut.window),
        cut=cut,
        query_cut=query_cut,
        order=(query_order, key_order),
    )


def _units_side(count: int, windows: int, stages: list[MaskUnits]) -> tuple[Tensor, Windows] | None:
    """Return the order of the tokens of a window,
    and the windows; None if no stage has such tokens.
    """
    for units in stages:
        is_unit = windows == 1 or count == prod(map(prod, units.strides))
        if is_unit and prod(units.grid) == count * windows:
            cells = units.cells(windows)[0]
            rows = len((cells // units.grid[1]).unique())
            return cells.argsort(), Windows(units.grid, (rows, count // rows))
    return None


def token_counts(inputs: Iterable[Any]) -> set[int]:
    """Return all possible numbers of tokens of a layer's inputs."""
    counts: set[int] = set()
    for x in inputs:
        if isinstance(x, Tensor) and x.ndim == 3:
            counts.add(x.shape[1])
        # (B, C, H, W), (B, H, W, C), or (B, heads, N, d)
        elif isinstance(x, Tensor) and x.ndim == 4:
            counts |= {x.shape[2] * x.shape[3], x.shape[1] * x.shape[2], x.shape[2]}
    return counts


def _no_grid(queries: int, keys: int, windows: int, maps: FeatureMaps, *, words: bool) -> Layout:
    """Return a layout without grids, with advice
    if the tokens of an image all attend to each other.
    """
    reason = f"{keys} keys: no grid found"
    if maps.is_deep:
        reason += " (the input is a video or a volume)"
    elif not maps.size:
        reason += " (the images' size is unknown)"
    if windows > 1:
        reason += (
            f"; {windows} windows per image, or as many heads if the layer has no attribute "
            "num_heads"
        )
        return Layout(None, None, reason)
    smaller = [grid for grid in maps.grids() if 0 < keys - grid[0] * grid[1] <= MOST_SPECIAL]
    if queries == keys and smaller:
        height, width = max(smaller, key=lambda grid: grid[0] * grid[1])
        prefix = keys - height * width
        reason += (
            f"; if they are patches of the image, prefix_tokens={prefix} gives a grid of "
            f"{height} x {width}"
        )
        if prefix == 1:
            reason += (
                " with a class token before the patches, class_token='last' with one after them"
            )
    elif not maps.is_deep:
        reason += "; if they are patches of the image, give grid=(rows, columns) and prefix_tokens="
    return Layout(
        None,
        None,
        reason,
        advice=reason if queries == keys and maps.size and not words else "",
    )


def _is_given_words(running: Running) -> bool:
    """Return whether a module inside the model has integer inputs, as text models do."""
    tensors = (x for _, inputs in running[1:] for x in inputs if isinstance(x, Tensor))
    return any(not x.is_floating_point() and x.ndim > 1 for x in tensors)


def _aligned(queries: Tokens, keys: Tokens, *, strided: bool) -> tuple[Tokens, Tokens] | None:
    """Return both grids in cells of the finer one;
    None if the cells of the coarser grid differ in size.

    A coarse token is placed at the first pixel of its cell if it is strided, else at the centre of
    the cell.
    """
    finer = max(queries.height, keys.height), max(queries.width, keys.width)
    aligned = []
    for tokens in (queries, keys):
        sides = tokens.height, tokens.width
        steps = [-(-length // n) for length, n in zip(finer, sides, strict=True)]
        if strided and any(
            -(-length // step) != n for length, step, n in zip(finer, steps, sides, strict=True)
        ):
            return None
        if not strided and any(length % n for length, n in zip(finer, sides, strict=True)):
            return None
        spacing = float(steps[0]), float(steps[1])
        origin = (0.0, 0.0) if strided else ((spacing[0] - 1) / 2, (spacing[1] - 1) / 2)
        aligned.append(replace(tokens, spacing=spacing, origin=origin))
    return aligned[0], aligned[1]


def _prefixes(side: Arrangement) -> Sequence[int]:
    """Return the possible numbers of tokens before the grid, the most likely number first."""
    # 0 is always possible: in CaiT the class token joins the patches only in the last blocks.
    special = side.before + side.after
    return (special, 0) if special else (0,)


def _find(count: int, grids: Iterable[Grid], prefixes: Sequence[int]) -> Tokens | None:
    grids = list(grids)
    for prefix in prefixes:
        for height, width in grids:
            if count - prefix == height * width:
                return Tokens(prefix, height, width)
    return None


def _shown(
    module: nn.Module, inputs: Sequence[Any], windows: int, maps: FeatureMaps
) -> Iterator[Grid]:
    """Yield the grids for which there is evidence, the strongest evidence first."""
    for name in ("window_size", "resolution"):
        if (pair := _pair(getattr(module, name, None))) is not None:
            yield pair
    for x in inputs:
        if isinstance(x, Tensor) and x.ndim == 4:
            # (B, C, H, W), or (B, H, W, C).
            pairs = [(x.shape[2], x.shape[3]), (x.shape[1], x.shape[2])]
            if windows == 1:
                yield from (pair for pair in pairs if maps.shows(pair))
            elif maps.images is not None and len(x) == maps.images * windows:
                yield from (pair for pair in pairs if min(pair) > 1)
        elif not isinstance(x, int) and windows == 1:
            pair = _pair(x)
            if pair is not None:
                yield pair
    if windows == 1:
        yield from maps.grids()


def _pair(value: Any) -> Grid | None:
    # window_size=7 stands for 7 x 7.
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, value
    if (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(v, int) and v > 0 for v in value)
    ):
        return value[0], value[1]
    return None
