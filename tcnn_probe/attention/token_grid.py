"""Layout of an attention: the grids of its queries and keys.

Feature maps of the forward show grids, and so do attributes and inputs of the layer.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tcnn_probe.architectures.lookup import known
from tcnn_probe.attention.layout import (
    Arrangement,
    Layout,
    SpecialTokens,
    Tokens,
)
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.images import batch_of, channel_axis, input_tensors

__all__ = [
    "MOST_SPECIAL",
    "FeatureMaps",
    "find_layout",
    "pool_layout",
    "token_counts",
]

Grid = tuple[int, int]  # rows and columns
# Largest number of class and register tokens that is guessed: DINOv3 has 5, and the largest number in timm is 13.
MOST_SPECIAL = 16


class FeatureMaps:
    """Images of a forward, and sizes of its feature maps so far.

    Attributes:
        images: Number of images in the batch; None if unknown.
        size: Height and width of the images; None if unknown.
        is_deep: Whether the model was called with videos or volumes, for example of shape (B, T, C, H, W).
        patches: Number of patches if the model was called with patches in place of an image, else None.
        special: Class and register tokens, as far as the model shows them or the user gives them.
        arrangement: Positions of words and patches among the keys of an attention, if known.
        words_ask: Whether the queries of this attention are known to be words.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.images: int | None = None
        self.size: tuple[int, int] | None = None
        self.is_deep = False
        self.patches: int | None = None
        self.special = special
        self.arrangement: Arrangement | None = None
        self.words_ask = False
        self._joins: dict[int, tuple[int, ...]] = {}
        # The module that embeds patches: the first one with weights that gets an image.
        self._embedding: nn.Module | None = None
        self._seeks = False
        self._picture_channels: set[int] = set()
        self._channels = 0
        self._maps: dict[tuple[int, int], None] = {}
        self._videos: dict[tuple[int, int, int], None] = {}
        self._shapes: set[tuple[int, ...]] = set()
        self._numberings: dict[tuple[int, ...], Grid | None] = {}
        # Grids in the order of grids(), by the number of maps, which only grows, and the size of the images.
        self._grids: dict[tuple[int, Grid], list[Grid]] = {}

    def of_attention(
        self, arrangement: Arrangement | None, *, words_ask: bool
    ) -> "FeatureMaps":
        """Return the same maps for an attention of which more is known."""
        maps = copy.copy(self)
        maps.arrangement, maps.words_ask = arrangement, words_ask
        return maps

    def enter(
        self, inputs: Sequence[Any], *, whole_model: bool, continues: bool = False
    ) -> None:
        """Begin a call of the model, or of a part that may continue with the images of an earlier part."""
        tensors = input_tensors(inputs)
        x = tensors[0] if tensors else None
        if whole_model and x is not None and x.ndim < 4:
            # Words can come before the images. A tensor with a single channel is a mask.
            x = next((x for x in tensors if x.ndim == 4 and x.shape[1] > 1), x)
        # An input with the size of an earlier feature map belongs to the images before, as in a head that is called by
        # itself; other images start a new forward.
        is_map = x is not None and x.ndim == 4
        self.is_deep = x is not None and x.ndim > 4
        if whole_model or (
            is_map
            and x is not None
            and not continues
            and tuple(x.shape[2:]) not in self._maps
        ):
            self._restart()
            self._embedding, self._picture_channels = None, _channels_of(inputs)
            # Called with NumPy arrays, photographs or paths, the model makes the image itself.
            may_be_seen = bool(self._picture_channels) or not tensors
            self._seeks = may_be_seen and not self.is_deep
        self._seeks &= not continues
        if is_map and x is not None:
            self.images = len(x)
            if self.size is None:
                self._channels = x.shape[1]
                self.size = (x.shape[2], x.shape[3])
                self._maps[self.size] = None
        elif x is not None and x.ndim > 4:
            self.images = len(x)
        # The first axis of tokens may be windows: it counts images only if it has the known number of images.
        elif whole_model or x is None or self.images != len(x):
            self.images = None
        if whole_model and self.size is None:
            self.size = self._numbered(tensors)
        if self.size is not None and whole_model and not is_map:
            self._maps[self.size] = None
            self.patches = self.size[0] * self.size[1]

    def _restart(self) -> None:
        """Forget the feature maps of another image."""
        self.size = self.patches = None
        self._channels = 0
        for shapes in (
            self._maps,
            self._videos,
            self._shapes,
            self._joins,
            self._grids,
        ):
            shapes.clear()

    def seeks(self, module: nn.Module) -> bool:
        """Return whether a module that is called may show the image that enters the patch embedding."""
        return self._seeks or module is self._embedding

    def called(self, module: nn.Module, inputs: Sequence[Any]) -> Tensor | None:
        """Note the image (n, C, H, W) that a module gets, and return it, if it is what the model makes patches of.

        The image can stand anywhere among the inputs of the model, which may also crop it or make several views of it.
        Whatever enters the patch embedding is the image.
        """
        x = next((x for x in inputs if isinstance(x, Tensor)), None)
        if x is None or not x.is_floating_point():
            return None
        is_image = x.ndim == 4 and x.shape[1] in self._picture_channels
        # A stem that unfolds the image has no weights.
        is_layer = isinstance(module, nn.Unfold) or (
            not module._modules
            and any(weight is not None for weight in module._parameters.values())
        )
        if self._seeks and is_layer and x.ndim > 2:
            self._embedding, self._seeks = module, False
            # A model can add channels to the image, such as coordinates, before it embeds patches.
            is_image |= x.ndim == 4 and isinstance(module, nn.Conv2d)
        if not is_image:
            return None
        size = (x.shape[2], x.shape[3])
        if (self.images, self.size) != (len(x), size):
            self._restart()
            self.images, self.size = len(x), size
            self._maps[size] = None
        self._channels = x.shape[1]
        return x

    def _numbered(self, inputs: Sequence[Tensor]) -> Grid | None:
        """Return the grid of patches if the model gets their rows and columns as an input, as FLUX does."""
        for positions in inputs:
            # Positions are (N, 3) or (B, N, 4), for example, with numbers of images or frames beside row and column.
            if positions.ndim not in (2, 3) or positions.shape[-1] not in (2, 3, 4):
                continue
            count = positions.shape[-2]
            tokens = [
                x
                for x in inputs
                if x.ndim == 3 and x.shape[1] == count and x is not positions
            ]
            # If there are as many words as patches, it is unknown which tokens are the patches.
            if len(tokens) != 1:
                continue
            if positions.shape not in self._numberings:
                # Positions are read once for each shape, as reading waits for the device.
                self._numberings[positions.shape] = _raster(positions)
            if grid := self._numberings[positions.shape]:
                return grid
        return None

    def passes(self, values: Iterable[Any]) -> None:
        """Note the shapes of inputs and outputs of a module."""
        for value in values:
            if not isinstance(value, Tensor) or (shape := value.shape) in self._shapes:
                continue
            self._shapes.add(shape)
            if len(shape) == 4:
                # (B, C, H, W), or (B, H, W, C).
                self._maps[shape[1:3]] = None
                # A mask, (B, 1, N_query, N_key), is not a map. Only toy models, for images with one channel, have maps
                # with one channel.
                if shape[1] > 1 or self._channels == 1:
                    self._maps[shape[2:]] = None
            elif len(shape) == 5 and self.is_deep:
                # (B, C, T, H, W), or (B, T, H, W, C).
                self._videos |= {shape[2:]: None, shape[1:4]: None}
            elif len(shape) == 3 and (grid := self._cut(shape)) is not None:
                self._maps[grid] = None

    def joins(self, lengths: tuple[int, ...]) -> None:
        """Note the numbers of tokens of parts that are concatenated."""
        # A masked autoencoder without masked patches concatenates an empty tensor of mask tokens.
        lengths = tuple(length for length in lengths if length)
        if len(lengths) > 1:
            self._joins[sum(lengths)] = lengths

    def around(self, count: int) -> tuple[int, int] | None:
        """Return how many of ``count`` tokens come before and after the grid; None if this is unknown."""
        if arrangement := self._arranged(count):
            return arrangement.around
        joined = self._joined_around(count)
        # The user's facts take precedence over those of the forward, and these over the model's attributes.
        if not joined or self.special.user_facts.around:
            return self.special.around
        before, after = joined
        return sum(before), sum(after)

    def has_class_token(self, count: int) -> bool:
        """Return whether the first or the last of ``count`` tokens is a class token, as far as this is known."""
        if arrangement := self._arranged(count):
            return self.special.class_token and bool(arrangement.specials)
        joined = self._joined_around(count)
        if (
            joined is None
            or self.special.user_facts.around
            or self.special.user_facts.class_token is not None
        ):
            return self.special.class_token
        # A model can have one parameter for its class token and registers; a part longer than MOST_SPECIAL is words.
        # If there are several parts before the grid, the first one is a class token only if it is a single token: EoMT
        # puts its queries before the class token.
        before, _ = joined
        can_be_first = before[:1] == (1,) or (
            len(before) == 1 and before[0] <= MOST_SPECIAL
        )
        return self.special.class_token and (
            can_be_first or self.class_token_is_last(count)
        )

    def class_token_is_last(self, count: int) -> bool:
        """Return whether the last of ``count`` tokens is the class token: a single one after the grid, none before."""
        if self.special.user_facts.around:
            return self.special.user_facts.class_token == "last"
        before, after = self._joined_around(count) or ((), ())
        return 1 not in before and after[-1:] == (1,)

    def order(self, count: int) -> Sequence[int]:
        """Return the indices of ``count`` tokens in the order of a layout: the grid last, a class token first."""
        if arrangement := self._arranged(count):
            return arrangement.order
        before, after = self.around(count) or (0, 0)
        indices = range(count)
        if not after or count <= before + after:
            return indices
        grid, behind = indices[before:-after], indices[-after:]
        if self.class_token_is_last(count):
            return [*behind[-1:], *indices[:before], *behind[:-1], *grid]
        return [*indices[:before], *behind, *grid]

    def words(self, count: int) -> int:
        """Return how many of ``count`` tokens are known to be words."""
        arrangement = self._arranged(count)
        return len(arrangement.words) if arrangement else 0

    def _arranged(self, count: int) -> Arrangement | None:
        # The user's facts take precedence.
        if self.arrangement is None or self.special.user_facts.around:
            return None
        return self.arrangement if len(self.arrangement.order) == count else None

    def _joined_around(
        self, count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the lengths of the concatenated parts before and after the grid; None if they are unknown."""
        parts = self._parts(count)
        if len(parts) < 2:
            return None
        # The grid is the longest part with as many tokens as a feature map has cells: registers and masks are fewer.
        cells = {prod(size) for size in (*self.grids(), *self._videos)}
        largest = max((length for length in parts if length in cells), default=0)
        if not largest:
            return None
        place = parts.index(largest)
        return parts[:place], parts[place + 1 :]

    def _parts(self, count: int) -> tuple[int, ...]:
        """Return the lengths of the parts of which ``count`` tokens were concatenated, with nested parts resolved."""
        lengths: list[int] = []
        for length in self._joins.get(count, ()):
            lengths += self._parts(length) or (length,)
        return tuple(lengths)

    def grids(self) -> Iterator[tuple[int, int]]:
        """Yield the user's grid, then sizes of maps with the images' aspect ratio, the best match first."""
        if self.special.user_facts.grid is not None:
            yield self.special.user_facts.grid
        if self.size is not None:
            key = len(self._maps), self.size
            if key not in self._grids:
                self._grids[key] = self._sorted(self._maps, self.size)
            yield from self._grids[key]

    def frames(self, count: int, prefixes: Sequence[int]) -> Tokens | None:
        """Return the grid of a video's tokens if a map of the video has as many cells; else None."""
        parts = self._parts(count)
        for prefix in prefixes:
            for frames, rows, columns in self._videos:
                cells = frames * rows * columns
                # Visible patches and mask tokens of a masked autoencoder are together as many as all patches.
                if count - prefix == cells and (not parts or cells in parts):
                    return Tokens(prefix, frames * rows, columns, frames=frames)
        return None

    def divisions(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield grids of ``count`` tokens with the images' aspect ratio, the best match first."""
        if self.size is not None and count > 0:
            pairs = [
                (rows, count // rows)
                for rows in range(1, count + 1)
                if count % rows == 0
            ]
            yield from self._sorted(pairs, self.size)

    def shows(self, grid: tuple[int, int]) -> bool:
        """Return whether the images can be divided into this grid of square pixels or patches."""
        return self.size is None or _covers(*grid, *self.size)

    def _sorted(
        self, pairs: Iterable[tuple[int, int]], size: tuple[int, int]
    ) -> list[tuple[int, int]]:
        fits = [pair for pair in pairs if self.shows(pair)]
        # Patches are square in nearly all models, so grids with the most nearly square patches come first.
        return sorted(fits, key=lambda pair: abs(size[0] / pair[0] - size[1] / pair[1]))

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the grid of patches if the shape is that of images cut into patches, (B, N, side * side * C)."""
        if self.size is None or not self._channels:
            return None
        side = max(1, isqrt(shape[2] // self._channels))
        rows, columns = self.size[0] // side, self.size[1] // side
        fits = shape[1:] == (rows * columns, side * side * self._channels)
        return (
            (rows, columns)
            if fits and self.size == (rows * side, columns * side)
            else None
        )


def _channels_of(inputs: Sequence[Any]) -> set[int]:
    """Return the numbers of channels of images among the inputs, (B, C, H, W), (B, H, W, C) or lists of (C, H, W)."""
    batch = batch_of(inputs)
    channels = {x.shape[0] for x in batch} if isinstance(batch, list) else set()
    for x in input_tensors(inputs):
        if x.ndim == 4:
            channels |= {x.shape[1], x.shape[channel_axis(x)]}
    return channels


def _raster(positions: Tensor) -> Grid | None:
    """Return the grid if positions, except for constant columns, are rows and columns in raster order; else None."""
    if positions.ndim == 3:
        if bool((positions != positions[:1]).any()):
            return None
        positions = positions[0]
    moving = [x.long() for x in positions.unbind(-1) if bool((x != x[0]).any())]
    if len(moving) != 2:
        return None
    y, x = (numbers - numbers.min() for numbers in moving)
    height, width = int(y.max()) + 1, int(x.max()) + 1
    places = torch.arange(len(y), device=y.device)
    is_raster = height * width == len(y) and bool((y * width + x == places).all())
    return (height, width) if is_raster else None


def _covers(rows: int, columns: int, height: int, width: int) -> bool:
    """Return whether rows = height / s and columns = width / s for some patch side s, both rounded in the same way.

    Convolutions without padding round down, those with padding round up.
    """
    if min(rows, columns) < 1:
        return False
    rounds_down = max(height / (rows + 1), width / (columns + 1)) < min(
        height / rows, width / columns
    )
    upper_bounds = [
        n / (m - 1) if m > 1 else float("inf")
        for n, m in ((height, rows), (width, columns))
    ]
    rounds_up = max(height / rows, width / columns) < min(upper_bounds)
    return rounds_down or rounds_up


def find_layout(
    queries: int, keys: int, windows: int, running: Running, maps: FeatureMaps
) -> Layout:
    """Find the grids of an attention.

    A grid is reported only if there is evidence for it: attributes or inputs of the layer or, if each token attends to
    the whole image, a feature map of this forward. A square number of tokens is no evidence of a square grid.

    Args:
        queries, keys: Numbers of queries and keys of each window.
        windows: Number of windows of an image.
        running: Running modules and their inputs.
        maps: Feature maps of the forward so far.
    """
    module, inputs = running[-1]
    record = known(module)
    if record.not_in_raster_order:
        return Layout(None, None, record.not_in_raster_order)
    if record.own_grids:
        own_queries, own_keys = record.own_grids(module, keys)
        layout = Layout(Tokens(0, *own_queries), Tokens(0, *own_keys))
        fits = (
            layout.queries
            and layout.keys
            and (layout.queries.count, layout.keys.count) == (queries, keys)
        )
        return (
            layout
            if fits
            else Layout(
                None,
                None,
                f"{queries} queries and {keys} keys: not the layer's own grids",
            )
        )
    # Windows are cut from the grid and contain no class and register tokens.
    prefixes = _prefixes(maps, keys) if windows == 1 else (0,)
    # A mask of queries and keys, (B, 1, N_query, N_key), is not a map.
    no_masks = [
        x
        for x in inputs
        if not (isinstance(x, Tensor) and x.ndim == 4 and x.shape[1::2] == (1, keys))
    ]
    grids = list(_shown(module, no_masks, windows, maps))
    # The innermost module with a known value decides.
    spreads = [known(outer).spread_evenly for outer, _ in reversed(running)]
    spread = next((value for value in spreads if value is not None), None)
    if spread or (spread is not None and windows == 1):
        grids += [grid for before in prefixes for grid in maps.divisions(keys - before)]
    key_tokens = _find(keys, grids, prefixes)
    if windows == 1 and key_tokens is None:
        key_tokens = maps.frames(keys, prefixes)
    if record.latent_queries:
        return Layout(None, key_tokens, record.latent_queries, "latents")
    if queries != keys and queries <= max(
        key_tokens.prefix if key_tokens else 0, sum(maps.special.around or ()), 1
    ):
        return Layout(
            None,
            key_tokens,
            "the queries are class tokens or latents, which lie on no grid",
        )
    if key_tokens is None:
        return _no_grid(queries, keys, windows, maps, words=_is_given_words(running))
    if queries == keys:
        return Layout(key_tokens, key_tokens)
    strided = record.strided is not None and record.strided(module)
    # If no input of the layer has the number of queries, they were pooled inside the layer in an unknown way.
    if not strided and queries not in token_counts(inputs):
        return Layout(
            None,
            key_tokens,
            f"{queries} queries and {keys} keys: the positions of the queries are unknown",
        )
    query_tokens = _find(
        queries, grids, _prefixes(maps, queries) if windows == 1 else (0,)
    )
    if query_tokens is None:
        return Layout(None, key_tokens, f"{queries} queries: no grid found")
    if query_tokens.prefix != key_tokens.prefix and maps.special.around is None:
        return Layout(
            None,
            None,
            f"{queries} queries and {keys} keys: it is unknown which of them are class tokens",
        )
    aligned = _aligned(query_tokens, key_tokens, strided=strided)
    return (
        Layout(*aligned)
        if aligned
        else Layout(None, key_tokens, "one of the grids does not divide the other")
    )


def pool_layout(
    queries: int, keys: int, running: Running, maps: FeatureMaps
) -> Layout | None:
    """Return the grids of an attention inside a :class:`tcnn_model.AttentionPool2d`; None for other attention."""
    pools = [
        (module, inputs)
        for module, inputs in running
        if isinstance(module, AttentionPool2d)
    ]
    pool, inputs = pools[-1] if pools else (None, ())
    if pool is None or queries != (pool.num_classes or 1):
        return None
    prefix = 0 if pool.per_class else 1
    shown = [
        (x.shape[2], x.shape[3])
        for x in inputs
        if isinstance(x, Tensor) and x.ndim == 4
    ]
    key_tokens = _find(keys, shown or maps.grids(), [prefix])
    if key_tokens is None:
        reason = f"{keys} keys: no grid found"
    elif pool.per_class:
        reason = (
            "the queries are class tokens, one for each class, which lie on no grid"
        )
    else:
        reason = "the query is the class token, which lies on no grid"
    return Layout(None, key_tokens, reason, "classes" if pool.per_class else "tokens")


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


def _no_grid(
    queries: int, keys: int, windows: int, maps: FeatureMaps, *, words: bool
) -> Layout:
    """Return a layout without grids, with advice if the tokens of an image all attend to each other."""
    reason = f"{keys} keys: no grid found"
    if maps.is_deep:
        reason += " (the input is a video or a volume)"
    elif not maps.size:
        reason += " (the images' size is unknown)"
    if windows > 1:
        reason += f"; {windows} windows per image, or as many heads if the layer has no attribute num_heads"
        return Layout(None, None, reason)
    smaller = [
        grid for grid in maps.grids() if 0 < keys - grid[0] * grid[1] <= MOST_SPECIAL
    ]
    if queries == keys and smaller:
        height, width = max(smaller, key=lambda grid: grid[0] * grid[1])
        prefix = keys - height * width
        reason += f"; if they are patches of the image, prefix_tokens={prefix} gives a grid of {height} x {width}"
        if prefix == 1:
            reason += " with a class token before the patches, class_token='last' with one after them"
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


def _aligned(
    queries: Tokens, keys: Tokens, *, strided: bool
) -> tuple[Tokens, Tokens] | None:
    """Return both grids in cells of the finer one; None if the cells of the coarser grid differ in size.

    A coarse token is placed at the first pixel of its cell if it is strided, else at the centre of the cell.
    """
    finer = max(queries.height, keys.height), max(queries.width, keys.width)
    aligned = []
    for tokens in (queries, keys):
        sides = tokens.height, tokens.width
        steps = [-(-length // n) for length, n in zip(finer, sides, strict=True)]
        if strided and any(
            -(-length // step) != n
            for length, step, n in zip(finer, steps, sides, strict=True)
        ):
            return None
        if not strided and any(
            length % n for length, n in zip(finer, sides, strict=True)
        ):
            return None
        spacing = float(steps[0]), float(steps[1])
        origin = (0.0, 0.0) if strided else ((spacing[0] - 1) / 2, (spacing[1] - 1) / 2)
        aligned.append(replace(tokens, spacing=spacing, origin=origin))
    return aligned[0], aligned[1]


def _prefixes(maps: FeatureMaps, tokens: int) -> Sequence[int]:
    """Return the possible numbers of special tokens among these tokens, the most likely number first."""
    # 0 is always possible: in CaiT the class token joins the patches only in the last blocks.
    special = sum(maps.around(tokens) or ())
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
