"""Evidence for the grids of tokens in a forward:
feature maps, concatenations of tokens, and the image itself.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attention.layout import Arrangement, SpecialTokens, Tokens
from tcnn_probe.images import batch_of, channel_axis, input_tensors

__all__ = ["MOST_SPECIAL", "FeatureMaps"]

Grid = tuple[int, int]  # rows and columns
# Largest number of class and register tokens that is guessed: DINOv3 has 5, and the largest number
# in timm is 13.
MOST_SPECIAL = 16


class FeatureMaps:
    """Images of a forward, and sizes of its feature maps so far.

    Attributes:
        images: Number of images in the batch; None if unknown.
        size: Height and width of the images; None if unknown.
        is_deep: Whether the model was called with videos or volumes, for example of shape (B, T, C,
            H, W).
        patches: Number of patches if the model was called with patches in place of an image, else
            None.
        numbers_differ: Whether the model was called with other rows and columns of patches for each
            image.
        special: Class and register tokens, as far as the model shows them or the user gives them.
        embedding: Module that embeds patches: the first one with weights that gets an image.
        is_seeking: Whether that module is still to be called.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.images: int | None = None
        self.size: tuple[int, int] | None = None
        self.is_deep = False
        self.patches: int | None = None
        self.numbers_differ = False
        self.special = special
        self._joins: dict[int, tuple[int, ...]] = {}
        self.embedding: nn.Module | None = None
        self.is_seeking = False
        self._picture_channels: set[int] = set()
        self._channels = 0
        self._maps: dict[tuple[int, int], None] = {}
        self._videos: dict[tuple[int, int, int], None] = {}
        self._shapes: set[tuple[int, ...]] = set()
        # Grids in the order of grids(), by the number of maps, which only grows, and the size of
        # the images.
        self._grids: dict[tuple[int, Grid], list[Grid]] = {}

    def enter(self, inputs: Sequence[Any], *, whole_model: bool, continues: bool = False) -> None:
        """Begin a call of the model, or of a part
        that may continue with the images of an earlier part.
        """
        tensors = input_tensors(inputs)
        x = tensors[0] if tensors else None
        if whole_model and x is not None and x.ndim < 4:
            # Words can come before the images. A tensor with a single channel is a mask.
            x = next((x for x in tensors if x.ndim > 4 or (x.ndim == 4 and x.shape[1] > 1)), x)
        # An input with the size of an earlier feature map belongs to the images before, as in a
        # head that is called by itself; other images start a new forward.
        is_map = x is not None and x.ndim == 4
        self.is_deep = x is not None and x.ndim > 4
        if whole_model or (
            is_map and x is not None and not continues and tuple(x.shape[2:]) not in self._maps
        ):
            self._restart()
            self.embedding, self._picture_channels = None, _channels_of(inputs)
            # Called with NumPy arrays, photographs or paths, the model makes the image itself. The
            # views or frames of a deep input are images if it embeds them one by one.
            self.is_seeking = bool(self._picture_channels) or not tensors or self.is_deep
        self.is_seeking &= not continues
        if is_map and x is not None:
            self.images = len(x)
            if self.size is None:
                self._channels = x.shape[1]
                self.size = (x.shape[2], x.shape[3])
                self._maps[self.size] = None
        elif x is not None and x.ndim > 4:
            self.images = len(x)
        # The first axis of tokens may be windows: it counts images only if it has the known number
        # of images.
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
        self.numbers_differ = False
        self._channels = 0
        for shapes in (
            self._maps,
            self._videos,
            self._shapes,
            self._joins,
            self._grids,
        ):
            shapes.clear()

    def called(self, module: nn.Module, inputs: Sequence[Any]) -> Tensor | None:
        """Note the image (n, C, H, W) that a module gets,
        and return it, if it is what the model makes patches of.

        The image can stand anywhere among the inputs of the model, which may also crop it or make
        several views of it. Whatever enters the patch embedding is the image.
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
        if self.is_seeking and is_layer and x.ndim > 2:
            self.embedding, self.is_seeking = module, False
        # A model can add channels to the image, such as coordinates, before it embeds patches.
        is_image |= module is self.embedding and x.ndim == 4 and isinstance(module, nn.Conv2d)
        if not is_image:
            return None
        size = (x.shape[2], x.shape[3])
        # Layers that join the views or frames of a deep input have a row for each input.
        images = self.images if self.is_deep else len(x)
        if (self.images, self.size) != (images, size):
            self._restart()
            self.images, self.size = images, size
            self._maps[size] = None
        self._channels = x.shape[1]
        return x

    def _numbered(self, inputs: Sequence[Tensor]) -> Grid | None:
        """Return the grid of patches if the model gets their rows
        and columns as an input, as FLUX does.
        """
        for positions in inputs:
            # Positions are (N, 3) or (B, N, 4), for example, with numbers of images or frames
            # beside row and column.
            if positions.ndim not in (2, 3) or positions.shape[-1] not in (2, 3, 4):
                continue
            count = positions.shape[-2]
            tokens = [
                x for x in inputs if x.ndim == 3 and x.shape[1] == count and x is not positions
            ]
            # If there are as many words as patches, it is unknown which tokens are the patches.
            if len(tokens) != 1:
                continue
            # They are read in each forward, because upright images have as many patches as wide
            # ones. Reading waits for the device, so they are copied at once.
            numbers = positions.cpu()
            if numbers.ndim == 3:
                self.numbers_differ |= bool((numbers != numbers[:1]).any())
                numbers = numbers[0]
            if not self.numbers_differ and (grid := _raster(numbers)):
                return grid
        return None

    def passes(self, inputs: Sequence[Any], output: Any) -> None:
        """Note the shapes of inputs and outputs of a module."""
        for value in (*inputs, output):
            if not isinstance(value, Tensor) or value.is_nested:
                continue
            if (shape := value.shape) in self._shapes:
                continue
            self._shapes.add(shape)
            if len(shape) == 4:
                # (B, C, H, W), or (B, H, W, C).
                self._maps[shape[1:3]] = None
                # A mask, (B, 1, N_query, N_key), is not a map. Only toy models, for images with one
                # channel, have maps with one channel.
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

    def arrange(self, count: int, tracked: Arrangement | None = None) -> Arrangement:
        """Return the places of ``count`` tokens,
        as far as they are known, by default those of patches alone.

        Args:
            count: Number of tokens.
            tracked: Places of words and patches, if tokens were tracked.
        """
        given, special = self.special.user_facts, self.special
        # The user's facts take precedence over those of the forward, and these over the model's
        # attributes.
        if tracked is not None and not given.around and len(tracked.order) == count:
            has_class = special.class_token and tracked.class_token
            return replace(tracked, class_token=has_class)
        joined = None if given.around else self._joined_around(count)
        before, after = special.around or (0, 0)
        is_last, class_token = given.class_token == "last", special.class_token
        if joined:
            parts, parts_after = joined
            before, after = sum(parts), sum(parts_after)
            # A single token after the grid is a class token if there is none before.
            is_last = 1 not in parts and parts_after[-1:] == (1,)
            # A model can have one parameter for its class token and registers; a part longer than
            # MOST_SPECIAL is words. If there are several parts before the grid, the first one is a
            # class token only if it is a single token: EoMT puts its queries before the class
            # token.
            is_first = parts[:1] == (1,)
            is_first |= len(parts) == 1 and parts[0] <= MOST_SPECIAL
            if given.class_token is None:
                class_token &= is_first or is_last
        indices = range(count)
        order: Sequence[int] = indices
        if after and count > before + after:
            grid, behind = indices[before:-after], indices[-after:]
            first = behind[-1:] if is_last else ()
            rest = behind[:-1] if is_last else behind
            order = [*first, *indices[:before], *rest, *grid]
        return Arrangement(before, after, order, class_token=class_token)

    def _joined_around(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the lengths of the concatenated parts
        before and after the grid; None if they are unknown.
        """
        parts = self._parts(count)
        if len(parts) < 2:
            return None
        # The grid is the longest part with as many tokens as a feature map has cells: registers and
        # masks are fewer.
        cells = {prod(size) for size in (*self.grids(), *self._videos)}
        largest = max((length for length in parts if length in cells), default=0)
        if not largest:
            return None
        place = parts.index(largest)
        return parts[:place], parts[place + 1 :]

    def _parts(self, count: int) -> tuple[int, ...]:
        """Return the lengths of the parts of which ``count`` tokens were concatenated,
        with nested parts resolved.
        """
        lengths: list[int] = []
        for length in self._joins.get(count, ()):
            lengths += self._parts(length) or (length,)
        return tuple(lengths)

    def grids(self) -> Iterator[tuple[int, int]]:
        """Yield the user's grid, then sizes of maps
        with the images' aspect ratio, the best match first.
        """
        if self.special.user_facts.grid is not None:
            yield self.special.user_facts.grid
        if self.size is not None:
            key = len(self._maps), self.size
            if key not in self._grids:
                self._grids[key] = self._sorted(self._maps, self.size)
            yield from self._grids[key]

    def frames(self, count: int, prefixes: Sequence[int]) -> Tokens | None:
        """Return the grid of a video's tokens if a map
        of the video has as many cells; else None.
        """
        parts = self._parts(count)
        for prefix in prefixes:
            for frames, rows, columns in self._videos:
                cells = frames * rows * columns
                # Visible patches and mask tokens of a masked autoencoder are together as many as
                # all patches.
                if count - prefix == cells and (not parts or cells in parts):
                    return Tokens(prefix, frames * rows, columns, frames=frames)
        return None

    def divisions(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield grids of ``count`` tokens with the images' aspect ratio, the best match first."""
        if self.size is not None and count > 0:
            pairs = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
            yield from self._sorted(pairs, self.size)

    def shows(self, grid: tuple[int, int]) -> bool:
        """Return whether the images can be divided into this grid of square pixels or patches."""
        return self.size is None or _covers(*grid, *self.size)

    def _sorted(
        self, pairs: Iterable[tuple[int, int]], size: tuple[int, int]
    ) -> list[tuple[int, int]]:
        fits = [pair for pair in pairs if self.shows(pair)]
        # Patches are square in nearly all models, so grids with the most nearly square patches come
        # first.
        return sorted(fits, key=lambda pair: abs(size[0] / pair[0] - size[1] / pair[1]))

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return the grid of patches if the shape is that
        of images cut into patches, (B, N, side * side * C).
        """
        if self.size is None or not self._channels:
            return None
        side = max(1, isqrt(shape[2] // self._channels))
        rows, columns = self.size[0] // side, self.size[1] // side
        fits = shape[1:] == (rows * columns, side * side * self._channels)
        return (rows, columns) if fits and self.size == (rows * side, columns * side) else None


def _channels_of(inputs: Sequence[Any]) -> set[int]:
    """Return the numbers of channels of images among the inputs,
    (B, C, H, W), (B, H, W, C) or lists of (C, H, W).
    """
    batch = batch_of(inputs)
    channels = {x.shape[0] for x in batch} if isinstance(batch, list) else set()
    for x in input_tensors(inputs):
        if x.ndim == 4:
            channels |= {x.shape[1], x.shape[channel_axis(x)]}
    return channels


def _raster(positions: Tensor) -> Grid | None:
    """Return the grid if positions (N, n), except for constant columns,
    are rows and columns in raster order; else None.
    """
    moving = [x.long() for x in positions.unbind(-1) if bool((x != x[0]).any())]
    if len(moving) != 2:
        return None
    y, x = (numbers - numbers.min() for numbers in moving)
    height, width = int(y.max()) + 1, int(x.max()) + 1
    places = torch.arange(len(y), device="cpu")
    is_raster = height * width == len(y) and bool((y * width + x == places).all())
    return (height, width) if is_raster else None


def _covers(rows: int, columns: int, height: int, width: int) -> bool:
    """Return whether rows = height / s and columns = width / s
    for some patch side s, both rounded in the same way.

    Convolutions without padding round down, those with padding round up.
    """
    if min(rows, columns) < 1:
        return False
    rounds_down = max(height / (rows + 1), width / (columns + 1)) < min(
        height / rows, width / columns
    )
    upper_bounds = [
        n / (m - 1) if m > 1 else float("inf") for n, m in ((height, rows), (width, columns))
    ]
    rounds_up = max(height / rows, width / columns) < min(upper_bounds)
    return rounds_down or rounds_up
