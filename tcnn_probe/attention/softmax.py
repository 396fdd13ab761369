"""Softmax attention, fused or not, in whatever module it is; its logits are formed part by part."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tcnn_model import kernels
from tcnn_model.kernels import RowStatistics, TokenGrid
from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.attention import Attention, ContentRows
from tcnn_probe.attention.segments import share_between_segments
from tcnn_probe.attention.softmax_statistics import SoftmaxMeasurements, measure_softmax
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = [
    "Block",
    "DeferredLogits",
    "GivenLogits",
    "Logits",
    "ProductLogits",
    "SoftmaxAttention",
]

# Up to so many rows one product for each row is quicker than a batched one, which copies queries and keys first.
_FEW_ROWS = 32
_ALL = slice(None)

Part = tuple[slice, slice, slice]
"""Slices of rows, queries and keys."""


class Logits(ABC):
    """Logits of some rows, queries and keys at a time; a row is an image, or a window of an image.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor that they are made of, for its device and dtype.
        masked: Whether logits may be minus infinity.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], source: Tensor, *, masked: bool
    ) -> None:
        self.shape = shape
        self.source = source
        self.masked = masked

    def __call__(
        self,
        rows: slice,
        queries: slice,
        keys: slice = _ALL,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a part of them, float32 or float64, contiguous, and free to be overwritten; in ``out`` if given."""
        return self._form((rows, queries, keys), out)

    @abstractmethod
    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        """Form a part of the logits, in ``out`` if given."""

    @property
    def on_kernel(self) -> bool:
        """Flag that :meth:`statistics` measures these logits on their GPU, and :meth:`select` forms some of them."""
        return False

    def statistics(
        self, queries: TokenGrid | None, keys: TokenGrid | None, received: bool
    ) -> RowStatistics:
        """Measure the rows of their softmax with the kernel, see :func:`tcnn_model.kernels.attention_statistics`."""
        raise NotImplementedError

    def select(self, rows: Tensor, queries: Tensor) -> "Logits":
        """Return the logits of some queries of some rows.

        Args:
            rows: Indices of the rows, shape (r,), on the CPU.
            queries: Indices of the queries of each of them, shape (r, n).
        """
        raise NotImplementedError

    def weights(self, rows: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Return their softmax; 0 for queries that may see no key at all, as torch's own attention has it."""
        logits = self(rows, queries)
        weights = torch.softmax(logits, -1)
        return (
            weights.masked_fill_(logits.amax(-1, keepdim=True) == -torch.inf, 0)
            # A row of minus infinity alone has the softmax NaN.
            if self.masked
            else weights
        )

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the model is in float64."""
        return at_least_float32(self.source.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self.source.device

    def new_empty(self, *shape: int) -> Tensor:
        """Allocate a tensor for statistics."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class ProductLogits(Logits):
    """Logits scale * q k^T + mask.

    Args:
        query: Shape (rows, heads, N_query, d).
        key: Shape (rows, heads, N_key, d).
        scale: Factor of the products.
        mask: Numbers to add, or True where a query may see a key; broadcasts to (rows, heads, N_query, N_key).
        modification: Function of flex_attention that changes the products, in the place of a mask.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scale: float,
        mask: Tensor | None,
        modification: ScoreModification | None = None,
    ) -> None:
        rows, heads, queries, _ = query.shape
        super().__init__(
            (rows, heads, queries, key.shape[2]),
            query,
            masked=mask is not None or modification is not None,
        )
        self._query = query
        self._key = key
        self._scale = scale
        self._modification = modification
        self._mask = None if mask is None else mask.expand(self.shape)

    @property
    def on_kernel(self) -> bool:
        """Flag that the kernel takes these queries and keys; it takes no functions that change the products."""
        is_product = self._modification is None
        return is_product and kernels.can_measure(self._query, self._key)

    def statistics(
        self, queries: TokenGrid | None, keys: TokenGrid | None, received: bool
    ) -> RowStatistics:
        """Measure the rows of their softmax with the kernel, see :class:`Logits`."""
        return kernels.attention_statistics(
            self._query,
            self._key,
            self._scale,
            self._mask,
            queries=queries,
            keys=keys,
            received=received,
        )

    def select(self, rows: Tensor, queries: Tensor) -> "ProductLogits":
        """Return the logits of some queries of some rows, see :class:`Logits`."""
        rows, queries = rows.to(self.device), queries.to(self.device)
        query, mask = (
            None if x is None else x[rows[:, None], :, queries].transpose(1, 2)
            for x in (self._query, self._mask)
        )
        assert query is not None
        return ProductLogits(query, self._key[rows], self._scale, mask)

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        rows, queries, keys = part
        # Only now, block by block: a copy of all queries and keys in float32 could be larger than the model's own.
        query = self._query[rows, :, queries].to(self.dtype)
        key = self._key[rows, :, keys].to(self.dtype)
        logits = query.new_empty(*query.shape[:3], key.shape[2]) if out is None else out
        by_row = (logits, query, key)
        if query.shape[0] > _FEW_ROWS:
            by_row = (
                logits.flatten(0, 1)[None],
                query.flatten(0, 1)[None],
                key.flatten(0, 1)[None],
            )
        for row, q, k in zip(*by_row, strict=True):
            # With beta=0 what lies in the buffer counts for nothing, not even NaN; alpha scales without another pass.
            torch.baddbmm(row, q, k.transpose(1, 2), beta=0, alpha=self._scale, out=row)
        if self._modification is not None:
            return logits.copy_(self._modification(logits, rows, queries, keys))
        if self._mask is None:
            return logits
        mask = self._mask[rows, :, queries, keys]
        return (
            logits.masked_fill_(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else logits.add_(mask)
        )


class GivenLogits(Logits):
    """Logits that a model gave to a softmax.

    Args:
        logits: Shape (rows, heads, N_query, N_key); perhaps with minus infinity, as nothing says that there is none.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, heads, queries, keys = logits.shape
        super().__init__((rows, heads, queries, keys), logits, masked=True)

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        rows, queries, keys = part
        logits = self.source[rows, :, queries, keys]
        return (self.new_empty(*logits.shape) if out is None else out).copy_(logits)


class DeferredLogits(Logits):
    """Logits that are rebuilt once they are asked for: most edits of heads never ask.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor for their device and dtype.
        rebuild: Function that gives the logits.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        source: Tensor,
        rebuild: Callable[[], Logits],
    ) -> None:
        super().__init__(shape, source, masked=True)
        self._rebuild = rebuild

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        return self._rebuilt._form(part, out)

    @cached_property
    def _rebuilt(self) -> Logits:
        return self._rebuild()


@dataclass(frozen=True)
class Block:
    """Images, windows of each of them, and queries of each window, whose attention is formed at once."""

    images: slice
    windows: slice
    queries: slice


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(Attention):
    """The softmax of logits, fused or not, in whatever module it is.

    Talking heads (CaiT) mix the heads after the softmax: A is the softmax's, before that.

    Args:
        logits: Logits of some rows and queries at a time.
        is_moved: Whether its tokens are in another order than the model's.
        class_token: Whether the first token before the grid, if there is any, is a class token, and no register.
        distillation_token: Whether the second one, if there is one, is a distillation token.
        compare: Comparison with what torch gave the model, see :meth:`discrepancy`; None without one.
        find_values, find_outputs: Functions behind :meth:`values` and :meth:`head_outputs`; None without values.
    """

    logits: Logits
    is_moved: bool = False
    class_token: bool = True
    distillation_token: bool = False
    compare: Callable[[], tuple[Tensor, float] | None] | None = None
    find_values: Callable[[], Tensor] | None = None
    find_outputs: Callable[[], Tensor] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (rows, heads, N_query, N_key), where rows = images * windows."""
        return self.logits.shape

    @property
    def source(self) -> Tensor:
        """The queries, or the logits."""
        return self.logits.source

    @property
    def class_query(self) -> int | None:
        """Index of the class token among the queries; None without one, or with one for each class.

        Also of a single latent, and of the first of several if the layer hands on that one alone.
        """
        if self.layout.asking in ("classes", "words"):
            return None
        # Class-attention layers (CaiT) ask for the class token alone; a window can have a single pixel without being
        # one, and a grid a single pooled query.
        alone = self.queries == 1 and self.keys > 1 and self.windows == 1
        alone &= self.layout.queries is None
        if self.layout.asking == "latents":
            # timm's AttentionPoolLatent: with pool="token" it hands on the first latent alone, with "avg" the mean of
            # all.
            return 0 if alone or getattr(self.module, "pool", None) == "token" else None
        queries = self.layout.queries
        # Queries that lie on no grid, and are no more than the tokens before the grid of the keys, are these tokens.
        leads = (
            queries.prefix > 0
            if queries is not None
            else self.queries <= self.layout.prefix
        )
        return 0 if alone or (leads and self.class_token) else None

    @property
    def distillation_query(self) -> int | None:
        """Index of the distillation token among the queries; None without one."""
        queries = self.layout.queries
        has_second = queries is not None and queries.prefix > 1
        return (
            1
            if has_second and self.distillation_token and self.class_query == 0
            else None
        )

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens among the tokens before the grid; the others are registers."""
        specials = self.layout.prefix - self.layout.words
        return min(specials, self.class_token + self.distillation_token)

    def weights(self, queries: slice = _ALL, image: int | None = None) -> Tensor:
        """Return the attention of some queries, see :class:`Attention`."""
        rows = (
            _ALL
            if image is None
            else slice(image * self.windows, (image + 1) * self.windows)
        )
        return self.logits.weights(rows, queries).unflatten(0, (-1, self.windows))

    def statistics(self) -> dict[str, Any]:
        """Return entropies and distances, the scale on which to read them, and sums for content information."""
        measured = self._measurements()
        information = {"content_information": measured.pattern}
        return {**measured.means, **self.uniform_scales(), **information}

    def content_rows(self) -> ContentRows:
        """Return entropies and received attention of A."""
        rows = self._measurements().rows
        assert rows is not None
        return rows

    def segment_attention(self) -> Tensor | None:
        """Return the attention between segments, see :class:`Attention`; None where no grid of the keys is known."""
        return share_between_segments(self, self._measurements().by_query)

    def values(self) -> Tensor | None:
        """Return the values, see :class:`Attention`; None of a softmax that is a call of its own."""
        return None if self.find_values is None else self.find_values()

    def head_outputs(self) -> Tensor | None:
        """Return the heads' outputs, see :class:`Attention`; None of a softmax that is a call of its own."""
        return None if self.find_outputs is None else self.find_outputs()

    def discrepancy(self, output: Any = None) -> tuple[Tensor, float] | None:
        """Compare A with what torch gave the model: the output of the layer has nothing to say here."""
        return None if self.compare is None else self.compare()

    def _measurements(self) -> SoftmaxMeasurements:
        """Measure once for all listeners that count the same images."""
        # What was measured depends on both of these: listeners that differ in them share nothing.
        key = "measurements", self.limit, self.detailed
        if key not in self.shared:
            self.shared[key] = measure_softmax(self)
        return self.shared[key]

    def blocks(self) -> Iterator[Block]:
        """Yield rows and queries that belong together: a block, or the logits of one query where these are more."""
        # So many queries of one row at a time, or so many queries of rows that are taken whole.
        at_once = max(1, self.block // (self.heads * self.keys))
        windows = min(self.windows, max(1, at_once // self.queries))
        images = (
            max(1, at_once // (self.queries * windows))
            if windows == self.windows
            else 1
        )
        sizes = (self.images, images), (self.windows, windows), (self.queries, at_once)
        for starts in product(*(range(0, count, step) for count, step in sizes)):
            ends = [
                min(start + step, count)
                for start, (count, step) in zip(starts, sizes, strict=True)
            ]
            yield Block(*map(slice, starts, ends))

    def rows_of(self, block: Block) -> slice:
        """Return the rows of a block, which are neighbours."""
        first = block.images.start * self.windows + block.windows.start
        last = (block.images.stop - 1) * self.windows + block.windows.stop
        return slice(first, last)

    def by_image(self, rows: Tensor) -> Tensor:
        """Return (rows, ...) as (images, windows, ...)."""
        return rows.unflatten(0, (self.images, self.windows))
