"""Logits of softmax attention, as (rows, heads, N_query, N_key), formed part by part."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from tcnn_model import kernels
from tcnn_model.kernels import RowStatistics, TokenGrid
from tcnn_model.precision import at_least_float32
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = ["DeferredLogits", "GivenLogits", "Logits", "ProductLogits"]

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
