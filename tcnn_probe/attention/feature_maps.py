"""The images of a forward: how many, how large, and which feature maps have been made of them so far."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from tcnn_probe.attention.prefix import Prefix

__all__ = ["Scene"]


class Scene:
    """What shows, during a forward, which grids of tokens there are.

    Attributes:
        images: how many are passing, if known.
        size: their height and width, if known.
        prefix: class and register tokens, if the model or the user says how many.
        class_token, distillation_token: whether the first of them is a class token, and the second the other.
        spread: if the running layer's tokens are known to be spread evenly over the image: whether even those of each
            of several windows are. None if that is not known.
    """

    def __init__(self, prefix: Prefix) -> None:
        self.images: int | None = None
        self.size: tuple[int, int] | None = None
        self.prefix = prefix.count
        self.class_token, self.distillation_token = prefix.class_token, prefix.distillation_token
        self.spread: bool | None = None
        self._channels = 0
        self._maps: dict[tuple[int, int], None] = {}

    def enter(self, inputs: Sequence[Any], *, whole_model: bool) -> None:
        """The model is called, or a part of it by itself, which may go on with images that another part was given."""
        given = next((x for x in inputs if isinstance(x, Tensor)), None)
        is_map = given is not None and given.ndim == 4
        if whole_model or (is_map and given is not None and tuple(given.shape[2:]) not in self._maps):
            self.size, self._channels = None, 0
            self._maps.clear()
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
        """What a module was given, or returned."""
        for value in values:
            if not isinstance(value, Tensor):
                continue
            if value.ndim == 4:
                self._maps[value.shape[2], value.shape[3]] = None  # (B, C, H, W)
                self._maps[value.shape[1], value.shape[2]] = None  # (B, H, W, C)
            elif value.ndim == 3 and (grid := self._cut(value)) is not None:
                self._maps[grid] = None

    def grids(self) -> Iterator[tuple[int, int]]:
        """Of feature maps that have the images' shape, those first that have it best."""
        if self.size is not None:
            height, width = self.size
            maps = [pair for pair in self._maps if self.shows(pair)]
            yield from sorted(maps, key=lambda pair: abs(height / pair[0] - width / pair[1]))

    def divisions(self, count: int) -> Iterator[tuple[int, int]]:
        """Grids of so many tokens that have the images' shape, the best first, if the tokens are spread over these."""
        if self.spread is not None and self.size is not None and count > 0:
            height, width = self.size
            pairs = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
            fits = [pair for pair in pairs if _covers(*pair, height, width)]
            yield from sorted(fits, key=lambda pair: abs(height / pair[0] - width / pair[1]))

    def shows(self, grid: tuple[int, int]) -> bool:
        """Whether a grid may be one of pixels or patches of the images."""
        return self.size is None or _covers(*grid, *self.size)

    def _cut(self, tokens: Tensor) -> tuple[int, int] | None:
        """The grid of patches into which the images were cut, if these are all their values: (B, N, s * s * C)."""
        if (
            self.size is None
            or not self._channels
            or tokens.shape[1] * tokens.shape[2] != (self.size[0] * self.size[1] * self._channels)
        ):
            return None
        side = round((tokens.shape[2] / self._channels) ** 0.5)
        if side * side * self._channels != tokens.shape[2] or self.size[0] % side or self.size[1] % side:
            return None
        return self.size[0] // side, self.size[1] // side


def _covers(rows: int, columns: int, height: int, width: int) -> bool:
    """Whether some patch side s gives this grid, with height / s and width / s both rounded down or both up."""
    if min(rows, columns) < 1:
        return False
    down = max(height / (rows + 1), width / (columns + 1)) < min(height / rows, width / columns)
    exact = height * columns == width * rows
    below = [n / (m - 1) if m > 1 else float("inf") for n, m in ((height, rows), (width, columns))]
    up = max(height / rows, width / columns) < min(below)
    return exact or down or up
