"""The feature maps of a forward, which show the grids on which tokens can lie."""

from collections.abc import Iterable, Iterator, Sequence
from math import isqrt
from typing import Any

from torch import Tensor

from tcnn_probe.attention.layout import SpecialTokens

__all__ = ["FeatureMaps"]


class FeatureMaps:
    """The images of a forward and the sizes of the feature maps made of them so far.

    Attributes:
        images: number of images in the batch; None if unknown.
        size: their height and width; None if unknown.
        special: class and register tokens, as far as the model or the user says.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.images: int | None = None
        self.size: tuple[int, int] | None = None
        self.special = special
        self._joins: dict[int, tuple[int, ...]] = {}
        self._channels = 0
        self._maps: dict[tuple[int, int], None] = {}
        self._shapes: set[tuple[int, ...]] = set()

    def enter(self, inputs: Sequence[Any], *, whole_model: bool) -> None:
        """Begin a forward: of the model, or of one part, which may go on with the images of a part called before."""
        given = next((x for x in inputs if isinstance(x, Tensor)), None)
        is_map = given is not None and given.ndim == 4
        if whole_model or (is_map and given is not None and tuple(given.shape[2:]) not in self._maps):
            self.size, self._channels = None, 0
            self._maps.clear()
            self._shapes.clear()
            self._joins.clear()
        if is_map and given is not None:
            self.images = len(given)
            if self.size is None:
                self._channels, self.size = given.shape[1], (given.shape[2], given.shape[3])
                self._maps[self.size] = None
        elif given is not None and given.ndim > 4:
            self.images = len(given)
        elif whole_model or given is None or self.images != len(given):
            self.images = None

    def passes(self, values: Iterable[Any]) -> None:
        """Take note of the inputs and outputs of a module."""
        for value in values:
            if not isinstance(value, Tensor) or (shape := value.shape) in self._shapes:
                continue
            self._shapes.add(shape)
            if len(shape) == 4:
                self._maps |= {shape[2:]: None, shape[1:3]: None}  # (B, C, H, W), (B, H, W, C)
            elif len(shape) == 3 and (grid := self._cut(shape)) is not None:
                self._maps[grid] = None

    def joins(self, lengths: tuple[int, ...]) -> None:
        """Take note of tokens that are put behind each other: how many there are in each part."""
        if len(lengths) > 1:
            self._joins[sum(lengths)] = lengths

    def around(self, count: int) -> tuple[int, int] | None:
        """How many of so many tokens are before the grid, and after it; None if nothing shows it."""
        joined = self._joined_around(count)
        return (sum(joined[0]), sum(joined[1])) if joined and not self.special.given.around else self.special.around

    def has_class_token(self, count: int) -> bool:
        """Tell whether the first of so many tokens, or the last, is a class token, as far as it shows."""
        joined = self._joined_around(count)
        if joined is None or self.special.given.around or self.special.given.class_token is not None:
            return self.special.class_token
        # A model can hold its class token and its registers in a single parameter. Of several parts before the grid
        # the first one is a class token only if it is a single token: EoMT puts its queries before it.
        before, _ = joined
        can_be_first = len(before) == 1 or before[:1] == (1,)
        return self.special.class_token and (can_be_first or self.class_token_is_last(count))

    def class_token_is_last(self, count: int) -> bool:
        """Whether the last of so many tokens is the class token: it alone is put behind the others, and none before."""
        if self.special.given.around:
            return self.special.given.class_token == "last"
        before, after = self._joined_around(count) or ((), ())
        return 1 not in before and after[-1:] == (1,)

    def _joined_around(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Lengths of what was joined before the grid and after it."""
        parts = self._parts(count)
        cells = {rows * columns for rows, columns in self.grids()}
        largest = max((length for length in parts if length in cells), default=0)
        if len(parts) < 2 or not largest:
            return None
        place = parts.index(largest)
        return parts[:place], parts[place + 1 :]

    def _parts(self, count: int) -> tuple[int, ...]:
        """Lengths of the parts of which so many tokens were joined, down to those that were not."""
        parts = self._joins.get(count, ())
        return tuple(each for part in parts for each in (self._parts(part) or (part,)))

    def grids(self) -> Iterator[tuple[int, int]]:
        """Sizes of the maps that have the images' shape, the best match first; what the user says goes before."""
        if self.special.given.grid is not None:
            yield self.special.given.grid
        if self.size is not None:
            yield from self._sorted(self._maps, self.size)

    def divisions(self, count: int) -> Iterator[tuple[int, int]]:
        """Grids of ``count`` tokens with the images' shape, the best match first."""
        if self.size is not None and count > 0:
            pairs = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
            yield from self._sorted(pairs, self.size)

    def shows(self, grid: tuple[int, int]) -> bool:
        """Whether the images can be divided into such a grid of pixels or patches."""
        return self.size is None or _covers(*grid, *self.size)

    def _sorted(self, pairs: Iterable[tuple[int, int]], size: tuple[int, int]) -> list[tuple[int, int]]:
        fits = [pair for pair in pairs if self.shows(pair)]
        return sorted(fits, key=lambda pair: abs(size[0] / pair[0] - size[1] / pair[1]))

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The grid of patches, if this is the shape of images cut into patches: (B, N, side * side * C)."""
        if self.size is None or not self._channels:
            return None
        side = max(1, isqrt(shape[2] // self._channels))
        (rows, left), (columns, right) = (divmod(whole, side) for whole in self.size)
        fits = shape[1:] == (rows * columns, side * side * self._channels)
        return (rows, columns) if fits and not left and not right else None


def _covers(rows: int, columns: int, height: int, width: int) -> bool:
    """Whether a patch side s exists with rows = height / s and columns = width / s, both rounded down or both up."""
    if min(rows, columns) < 1:
        return False
    down = max(height / (rows + 1), width / (columns + 1)) < min(height / rows, width / columns)
    exact = height * columns == width * rows
    below = [n / (m - 1) if m > 1 else float("inf") for n, m in ((height, rows), (width, columns))]
    up = max(height / rows, width / columns) < min(below)
    return exact or down or up
