"""Where tokens lie: the grid behind a sequence of queries or keys, found from what the layer was given."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tcnn_probe.attention import known_layers as known
from tcnn_probe.attention.feature_maps import Scene
from tcnn_probe.attention.layout import Layout, Tokens

__all__ = ["find_layout", "token_counts"]


def find_layout(
    queries: int, keys: int, windows: int, module: nn.Module, inputs: Iterable[Any], scene: Scene
) -> Layout:
    """The grids of an attention call.

    A grid is reported where something shows it: the layer's attributes or inputs, or, for attention over the whole
    image, a feature map of this forward. A number of tokens alone shows nothing, be it a square.

    Args:
        queries, keys: how many tokens there are, in each window.
        windows: into which an image is divided.
        module: that called attention.
        inputs: what it was called with.
        scene: what is known of the images.
    """
    if reason := known.lookup(known.NOT_IN_RASTER_ORDER, module):
        return Layout(None, None, reason)
    if own := known.lookup(known.OWN_GRIDS, module):
        return _own(queries, keys, *own(module, keys))
    inputs = list(inputs)
    hints = list(_hints(module, inputs, windows, scene))
    prefix = _prefixes(scene.prefix if windows == 1 else 0)
    if windows == 1 or scene.spread:
        hints += [grid for before in prefix for grid in scene.divisions(keys - before)]
    key_tokens = _find(keys, hints, prefix)
    class_tokens = max(key_tokens.prefix if key_tokens else 0, scene.prefix or 0, 1)
    if reason := known.lookup(known.LATENT_QUERIES, module):
        return Layout(None, key_tokens, reason, "latents")
    if queries != keys and queries <= class_tokens:
        return Layout(None, key_tokens, "the queries are class tokens or latents, which lie on no grid")
    if key_tokens is None:
        unknown = "" if scene.size else " (the images' size is unknown)"
        if windows > 1:
            unknown += f"; {windows} windows of each image, or as many heads, if the layer has no num_heads to say so"
        return Layout(None, None, f"{keys} keys: no grid found{unknown}")
    if queries == keys:
        return Layout(key_tokens, key_tokens)
    is_strided = known.lookup(known.FIRST_OF_EACH_CELL, module)
    strided = is_strided is not None and is_strided(module)
    if not strided and queries not in token_counts(inputs):
        return Layout(None, key_tokens, f"{queries} queries and {keys} keys: which places the queries have is unknown")
    query_tokens = _find(queries, hints, prefix)
    if query_tokens is None:
        return Layout(None, key_tokens, f"{queries} queries: no grid found")
    if query_tokens.prefix != key_tokens.prefix and scene.prefix is None:
        return Layout(None, None, f"{queries} queries and {keys} keys: which of them are class tokens is unknown")
    aligned = _aligned(query_tokens, key_tokens, strided=strided)
    return Layout(*aligned) if aligned else Layout(None, key_tokens, "one of the grids does not divide the other")


def _own(queries: int, keys: int, of_queries: Tokens, of_keys: Tokens) -> Layout:
    if (of_queries.count, of_keys.count) != (queries, keys):
        return Layout(None, None, f"{queries} queries and {keys} keys: not the layer's own grids")
    return Layout(of_queries, of_keys)


def _aligned(queries: Tokens, keys: Tokens, *, strided: bool) -> tuple[Tokens, Tokens] | None:
    """Both over the same image, in cells of the finer grid; None if the coarser one's cells are not all alike."""
    finer = max(queries.height, keys.height), max(queries.width, keys.width)
    aligned = []
    for tokens in (queries, keys):
        sides = tokens.height, tokens.width
        steps = [-(-whole // n) for whole, n in zip(finer, sides, strict=True)]
        if strided and any(-(-whole // step) != n for whole, step, n in zip(finer, steps, sides, strict=True)):
            return None
        if not strided and any(whole % n for whole, n in zip(finer, sides, strict=True)):
            return None
        spacing = float(steps[0]), float(steps[1])
        origin = (0.0, 0.0) if strided else ((spacing[0] - 1) / 2, (spacing[1] - 1) / 2)
        aligned.append(replace(tokens, spacing=spacing, origin=origin))
    return aligned[0], aligned[1]


def _prefixes(prefix: int | None) -> Sequence[int]:
    """How many tokens may stand before the grid, the likeliest first."""
    return (0, 1) if prefix is None else (prefix, 0) if prefix else (0,)


def _find(count: int, hints: Iterable[tuple[int, int]], prefix: Sequence[int]) -> Tokens | None:
    for before in prefix:
        for height, width in hints:
            if count - before == height * width:
                return Tokens(before, height, width)
    return None


def _hints(module: nn.Module, inputs: list[Any], windows: int, scene: Scene) -> Iterator[tuple[int, int]]:
    """Heights and widths that something shows, the surest first."""
    for name in ("window_size", "resolution"):
        if (pair := _pair(getattr(module, name, None))) is not None:
            yield pair
    for given in inputs:
        if isinstance(given, Tensor) and given.ndim == 4:
            maps = [(given.shape[2], given.shape[3]), (given.shape[1], given.shape[2])]  # (B, C, H, W), (B, H, W, C)
            if windows == 1:
                yield from (pair for pair in maps if scene.shows(pair))
            elif scene.images is not None and len(given) == scene.images * windows:
                yield from (pair for pair in maps if min(pair) > 1)
        elif not isinstance(given, int) and (pair := _pair(given)) is not None and windows == 1:
            yield pair
    if windows == 1:
        yield from scene.grids()


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value):
        return value[0], value[1]
    return None


def token_counts(inputs: Iterable[Any]) -> set[int]:
    """How many tokens the layer's inputs hold."""
    counts: set[int] = set()
    for given in inputs:
        if isinstance(given, Tensor) and given.ndim == 3:
            counts.add(given.shape[1])
        elif isinstance(given, Tensor) and given.ndim == 4:
            counts |= {given.shape[2] * given.shape[3], given.shape[1] * given.shape[2], given.shape[2]}
    return counts
