"""Layout of the tokens of an attention:
class and register tokens first, then words, then a grid in raster order.

Tokens are put in this order when an attention is reconstructed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.architectures.grids import Tokens, Windows
from tcnn_probe.models import whole_number

__all__ = [
    "Arrangement",
    "GivenTokens",
    "Layout",
    "SpecialTokens",
    "Tokens",
    "special_tokens",
]


@dataclass(frozen=True)
class Arrangement:
    """Places of special tokens, words and patches among the tokens of a sequence.

    Args:
        before, after: Numbers of tokens before and after the patches.
        order: Indices of the tokens in the order of a :class:`Layout`: a class token, other special
            tokens, words, and then patches.
        words: Number of words.
        class_token: Whether the first token in this order may be a class token.
    """

    before: int
    after: int
    order: Sequence[int]
    words: int = 0
    class_token: bool = True


@dataclass(frozen=True)
class Layout:
    """Description of the tokens of an attention:
    the grids of its queries and keys, and the other tokens.

    Args:
        queries, keys: Grids of queries and keys; None if a grid is unknown.
        reason: Reason why one of them is None; empty if both are known.
        advice: Options with which the user can give a grid that was not found; empty if there are
            none.
        asking: Kind of the queries: tokens of the image (or only its class token), learnt latents,
            words, or class tokens, one for each class.
        words: Number of words, which are the last ones of the tokens before the grid of keys.
        cut: Positions of the windows in the image; None if unknown, or if the only window is the
            image.
        query_cut: Positions of the queries' windows, which may lie on another grid than the keys.
        order: Indices of the model's queries and keys in the order of this layout, shapes
            (N_query,) and (N_key,); None if this is the model's own order.
        class_token: Whether the first token before the grid, if there is one, is a class token, not
            a register.
        distillation_token: Whether the second token before the grid, if there is one, is a
            distillation token.
    """

    queries: Tokens | None
    keys: Tokens | None
    reason: str = ""
    asking: Literal["tokens", "latents", "words", "classes"] = "tokens"
    advice: str = ""
    words: int = 0
    cut: Windows | None = None
    query_cut: Windows | None = None
    order: tuple[Tensor, Tensor] | None = field(default=None, compare=False)
    class_token: bool = field(default=True, compare=False)
    distillation_token: bool = field(default=False, compare=False)

    @property
    def prefix(self) -> int:
        """Number of tokens before the grid of keys: class and register tokens, and words."""
        return self.keys.prefix if self.keys else 0

    @property
    def is_video(self) -> bool:
        """True if the keys span several frames."""
        return self.keys is not None and self.keys.frames > 1

    @property
    def uniform_distance(self) -> float | None:
        """Mean distance between all queries and all keys on the grids,
        in float64; None if a grid is unknown.
        """
        if self.queries is None or self.keys is None:
            return None
        return _mean_distance(self.queries, self.keys)

    def distances(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return distances ``||delta_ij||`` from some queries to all keys, shape (queries, keys).

        Rows and columns of class and register tokens hold meaningless numbers.
        """
        # Callers need distances only if both grids are known.
        assert self.queries is not None
        assert self.keys is not None
        query_y, query_x = self.queries.positions(dtype, device)
        key_y, key_x = self.keys.positions(dtype, device)
        return torch.hypot(key_y - query_y[queries, None], key_x - query_x[queries, None])

    def frame_distances(self, queries: slice, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return distances in frames from some queries to all keys, like :meth:`distances`."""
        assert self.queries is not None
        assert self.keys is not None
        asking, keys = (side.frame_numbers(device) for side in (self.queries, self.keys))
        return (keys - asking[queries, None]).abs().to(dtype)


@lru_cache(maxsize=256)
def _mean_distance(queries: Tokens, keys: Tokens) -> float:
    (query_y, query_x), (key_y, key_x) = queries.axes(), keys.axes()
    offsets_y, pairs_y = _offsets(query_y, key_y)
    offsets_x, pairs_x = _offsets(query_x, key_x)
    total = pairs_y @ np.hypot(offsets_y[:, None], offsets_x[None, :]) @ pairs_x
    return float(total / (pairs_y.sum() * pairs_x.sum()))


def _offsets(queries: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct distances along one axis and their numbers of pairs,
    which avoids an N x N table.
    """
    distances, pairs = np.unique(np.abs(keys[None, :] - queries[:, None]), return_counts=True)
    return distances, pairs.astype(np.float64)


@dataclass(frozen=True)
class GivenTokens:
    """Facts about a model's tokens that the user gives because the model does not show them.

    Args:
        prefix: Number of class and register tokens before the grid.
        class_token: Position of the class token, the "first" or the "last" of all tokens, or
            "none".
        grid: Rows and columns of patches.

    Raises:
        TypeError, ValueError: A fact has an invalid type or value.
    """

    prefix: int | None = None
    class_token: Literal["first", "last", "none"] | None = None
    grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        grid = self.grid
        if self.prefix is not None:
            whole_number(self.prefix, "prefix_tokens")
        if self.class_token not in (None, "first", "last", "none"):
            raise ValueError(
                f"expected class_token='first', 'last' or 'none', got {self.class_token!r}"
            )
        if grid is not None and not (
            isinstance(grid, tuple)
            and len(grid) == 2
            and all(isinstance(n, int) and n > 0 for n in grid)
        ):
            raise ValueError(f"expected grid=(rows, columns) of patches, got {grid!r}")

    @property
    def around(self) -> tuple[int, int] | None:
        """Numbers of tokens before and after the grid; None if the user does not give them."""
        if self.class_token == "last":
            # The class token comes after the grid, and prefix_tokens counts registers before the
            # grid.
            return self.prefix or 0, 1
        if self.prefix is None:
            return (1, 0) if self.class_token == "first" else None
        return self.prefix, 0


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens of a model other than patches.

    Args:
        around: Numbers of these tokens before and after the grid; None if unknown.
        class_token: Whether the first of these tokens is a class token.
        distillation_token: Whether the second of these tokens is a distillation token, as in DeiT.
        user_facts: Facts that the user gives.
    """

    around: tuple[int, int] | None = None
    class_token: bool = True
    distillation_token: bool = False
    user_facts: GivenTokens = GivenTokens()


def special_tokens(modules: Iterable[nn.Module], user: GivenTokens) -> SpecialTokens:
    """Find the tokens of a model other than patches; facts that the user gives take precedence."""
    modules = list(modules)
    # In timm, transformers count class and register tokens in this attribute.
    model = next((m for m in modules if hasattr(m, "num_prefix_tokens")), None)
    count = getattr(model, "num_prefix_tokens", None)
    around = user.around or ((count, 0) if isinstance(count, int) else None)
    class_token = bool(
        getattr(model, "has_class_token", getattr(model, "cls_token", True) is not None)
    )
    # A model with parameters for registers but no other tokens, such as AuraFlow, has no class
    # token. Models with a class token call it "cls", "class_token" or, in users' models, "token".
    parameters = {x for m in modules for x, _ in m.named_parameters(recurse=False)}
    registers = {name for name in parameters if "register" in name}
    tokens = " ".join(parameters - registers)
    if registers and not any(word in tokens for word in ("cls", "class", "token")):
        class_token = False
    if user.class_token is not None:
        class_token = user.class_token != "none"
    # These are the names in timm and in transformers.
    names = ("dist_token", "distillation_token")
    distilled = any(isinstance(getattr(m, name, None), Tensor) for m in modules for name in names)
    return SpecialTokens(around, class_token, distilled, user)
