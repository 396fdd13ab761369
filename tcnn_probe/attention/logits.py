"""Logits of a softmax, computed part by part: products of queries and keys, or a model's own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from tcnn_model import kernels
from tcnn_model.kernels import RowStatistics, TokenGrid, trial
from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.visibility import HIDDEN, HIDDEN_BY_MASK
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = ["DeferredLogits", "GivenLogits", "Logits", "ProductLogits"]

# On a CPU, up to this number of rows, one product per row is faster than a batched product, which
# first copies queries and keys.
_FEW_ROWS = 32
_ALL = slice(None)

# Logits that a model has masked itself: libraries add -10000 or less, or fill with minus infinity.
_HIDDEN_LOGIT = -5000.0

Part = tuple[slice, slice, slice]
"""Slices of rows, queries and keys."""


class Logits(ABC):
    """Logits of some rows, queries and keys at a time; a row is an image, or a window of an image.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor from which the logits are computed, for its device and dtype.
        masked: Whether logits may be minus infinity.
    """

    def __init__(self, shape: tuple[int, int, int, int], source: Tensor, *, masked: bool) -> None:
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
        """Return a part of the logits in a contiguous tensor,
        float32 or float64, that the caller may overwrite.

        If ``out`` is given, it is this tensor.
        """
        return self._form((rows, queries, keys), out)

    @abstractmethod
    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        """Compute a part of the logits, in ``out`` if given."""

    def visible(self, rows: slice) -> Tensor | None:
        """Return whether a query may attend to a key in any head; None without a mask.

        Returns:
            Shape (rows or 1, N_query or 1, N_key).
        """
        return None

    @property
    def joint_form(self) -> Hashable:
        """What logits have in common that can be :meth:`joined`; None if these cannot be."""
        return None

    def kept(self) -> "Logits":
        """Return logits with copies of what they are computed from."""
        raise NotImplementedError

    def joined(self, logits: "Sequence[Logits]") -> "Logits":
        """Return the logits of the heads of several layers, of this one and others."""
        raise NotImplementedError

    @property
    def on_kernel(self) -> bool:
        """True if :meth:`statistics` and :meth:`select` are available,
        which need the kernel and a GPU.
        """
        return False

    @property
    def bound(self) -> float:
        """Bound on the sums of the absolute terms of logits that are :attr:`on_kernel`."""
        raise NotImplementedError

    def statistics(
        self, queries: TokenGrid | None, keys: TokenGrid | None, received: bool
    ) -> RowStatistics:
        """Measure the rows of the softmax with the kernel, see
        :func:`tcnn_model.kernels.attention_statistics`.
        """
        raise NotImplementedError

    def select(self, rows: Tensor, queries: Tensor) -> "Logits":
        """Return the logits of some queries of some rows.

        Args:
            rows: Indices of the rows, shape (r,), on the CPU.
            queries: Indices of the queries of each of these rows, shape (r, n).
        """
        raise NotImplementedError

    def hidden(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Return whether a mask hides each key from some queries of some rows,
        in all heads: shape (r, n, N_key).

        Args:
            rows, queries: Indices as in :meth:`select`.
        """
        pairs = zip(rows.tolist(), queries.to(self.device), strict=True)
        logits = [self(slice(row, row + 1), _ALL)[0, :, index] for row, index in pairs]
        return _is_hidden(torch.stack(logits), _HIDDEN_LOGIT).all(1)

    def weights(self, rows: slice = _ALL, queries: slice = _ALL) -> Tensor:
        """Return the softmax; 0 for queries from which all keys are hidden,
        as in torch's fused attention.
        """
        logits = self(rows, queries)
        if not self.masked:
            return torch.softmax(logits, -1)
        # The softmax of a row of minus infinity is NaN, and so is its derivative.
        is_hidden = logits.amax(-1, keepdim=True) == -torch.inf
        if torch.is_grad_enabled():
            weights = torch.softmax(logits.masked_fill(is_hidden, 0), -1)
            return weights.masked_fill(is_hidden, 0)
        return torch.softmax(logits, -1).masked_fill_(is_hidden, 0)

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 if the model is in float64."""
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
        mask: Numbers to add, or True where a query may attend to a key; broadcasts to (rows, heads,
            N_query, N_key).
        modification: Function of flex_attention that changes the products, in place of a mask.
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
    def joint_form(self) -> Hashable:
        """All sizes but the number of heads; None with a mask or a modification."""
        if self.masked:
            return None
        rows, _, queries, keys = self.shape
        source = self.source
        return rows, queries, keys, source.shape[-1], self._scale, source.dtype, source.device

    def kept(self) -> "ProductLogits":
        """Return logits of copies of the queries and keys."""
        query, key = (
            x.detach().clone(memory_format=torch.contiguous_format)
            for x in (self._query, self._key)
        )
        return ProductLogits(query, key, self._scale, None)

    def joined(self, logits: "Sequence[Logits]") -> "ProductLogits":
        """Return the logits of the heads of several layers, see :class:`Logits`."""
        products = cast("Sequence[ProductLogits]", logits)
        query = torch.cat([product._query for product in products], 1)
        key = torch.cat([product._key for product in products], 1)
        return ProductLogits(query, key, self._scale, None)

    @property
    def on_kernel(self) -> bool:
        """True if the kernel is switched on, and supports these queries
        and keys. It supports no modifications.
        """
        is_product = self._modification is None
        return is_product and trial.enabled() and kernels.can_measure(self._query, self._key)

    @property
    def bound(self) -> float:
        """Bound on the sums of the absolute terms of the products."""
        return trial.logit_bound(self._query, self._key, self._scale)

    def statistics(
        self, queries: TokenGrid | None, keys: TokenGrid | None, received: bool
    ) -> RowStatistics:
        """Measure the rows of the softmax with the kernel, see :class:`Logits`."""
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

    def hidden(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Return whether the mask hides keys, see :class:`Logits`."""
        if self._mask is None:
            return super().hidden(rows, queries)
        # A mask that rows or heads share is read once.
        shared = [slice(1) if self._mask.stride(dim) == 0 else _ALL for dim in (0, 1)]
        mask = self._mask[shared[0], shared[1]]
        rows, queries = rows.to(self.device) % len(mask), queries.to(self.device)
        # Index tensors that are not adjacent move their axes to the front: (r, n, heads, N_key).
        # A relative position bias may be added to a mask.
        return _is_hidden(mask[rows[:, None], :, queries], HIDDEN_BY_MASK).all(2)

    def visible(self, rows: slice) -> Tensor | None:
        """Return which keys the mask or the modification leaves, see :class:`Logits`."""
        if self._modification is not None:
            count, heads, queries, keys = self._query[rows].shape[:3] + self.shape[3:]
            scores = self.new_empty(count, heads, queries, keys).zero_()
            return _is_visible(self._modification(scores, rows, _ALL, _ALL))
        if self._mask is None:
            return None
        # Most masks are the same for all heads, and some for all rows or queries: stride 0.
        varying = [
            size if stride else 1
            for size, stride in zip(self.shape, self._mask.stride(), strict=True)
        ]
        mask = self._mask[rows if varying[0] > 1 else slice(1), : varying[1], : varying[2]]
        if mask.dtype == torch.bool:
            return mask.any(1)
        is_mask_alone = ((mask == 0) | (mask <= HIDDEN_BY_MASK)).all()
        return _is_visible(mask, torch.where(is_mask_alone, HIDDEN_BY_MASK, HIDDEN))

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        rows, queries, keys = part
        # Queries and keys are cast block by block, as float32 copies of all could be larger than
        # the model's own.
        query = self._query[rows, :, queries].to(self.dtype)
        key = self._key[rows, :, keys].to(self.dtype)
        if torch.is_grad_enabled() and out is None:
            # A product that is written into a buffer has no derivative.
            return self._modified(self._scale * query @ key.mT, part)
        logits = query.new_empty(*query.shape[:3], key.shape[2]) if out is None else out
        by_row = (logits, query, key)
        if query.shape[0] > _FEW_ROWS or query.device.type != "cpu":
            by_row = (
                logits.flatten(0, 1)[None],
                query.flatten(0, 1)[None],
                key.flatten(0, 1)[None],
            )
        for row, q, k in zip(*by_row, strict=True):
            # With beta=0 the contents of the buffer are ignored, even NaN; alpha scales without
            # another pass.
            torch.baddbmm(row, q, k.transpose(1, 2), beta=0, alpha=self._scale, out=row)
        return self._modified(logits, part)

    def _modified(self, logits: Tensor, part: Part) -> Tensor:
        """Return the products, which are overwritten, with the mask or the modification."""
        rows, queries, keys = part
        if self._modification is not None:
            modified = self._modification(logits, rows, queries, keys)
            return modified if torch.is_grad_enabled() else logits.copy_(modified)
        if self._mask is None:
            return logits
        mask = self._mask[rows, :, queries, keys]
        return (
            logits.masked_fill_(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else logits.add_(mask)
        )


def _is_hidden(values: Tensor, limit: float) -> Tensor:
    return values.logical_not() if values.dtype == torch.bool else values <= limit


class GivenLogits(Logits):
    """Logits that a model gave to a softmax.

    Args:
        logits: Shape (rows, heads, N_query, N_key). They may contain minus infinity, as the model
            may have masked them.
        mask: True where the mask that the model has added leaves a key, in the same shape; None if
            none is known.
    """

    def __init__(self, logits: Tensor, mask: Tensor | None = None) -> None:
        rows, heads, queries, keys = logits.shape
        super().__init__((rows, heads, queries, keys), logits, masked=True)
        self._mask = mask

    def hidden(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Return whether the model has masked keys, see :class:`Logits`."""
        rows, queries = rows.to(self.device), queries.to(self.device)
        hidden = _is_hidden(self.source[rows[:, None], :, queries], _HIDDEN_LOGIT)
        if self._mask is not None:
            hidden |= ~self._mask[rows[:, None], :, queries]
        return hidden.all(2)

    def visible(self, rows: slice) -> Tensor:
        """Return which keys a mask among the logits may have left, see :class:`Logits`."""
        visible = _is_visible(self.source[rows])
        return visible if self._mask is None else visible & self._mask[rows].any(1)

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        rows, queries, keys = part
        logits = self.source[rows, :, queries, keys]
        return (self.new_empty(*logits.shape) if out is None else out).copy_(logits)


class DeferredLogits(Logits):
    """Logits that are reconstructed only when they are needed; most edits of heads never need them.

    Args:
        shape: Sizes (rows, heads, N_query, N_key).
        source: Tensor with the device and dtype of the logits.
        rebuild: Function that returns the logits.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        source: Tensor,
        rebuild: Callable[[], Logits],
    ) -> None:
        super().__init__(shape, source, masked=True)
        self._rebuild = rebuild

    def visible(self, rows: slice) -> Tensor | None:
        """Return which keys are visible, see :class:`Logits`."""
        return self._rebuilt.visible(rows)

    def hidden(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Return whether a mask hides keys, see :class:`Logits`."""
        return self._rebuilt.hidden(rows, queries)

    def _form(self, part: Part, out: Tensor | None) -> Tensor:
        return self._rebuilt._form(part, out)

    @cached_property
    def _rebuilt(self) -> Logits:
        return self._rebuild()


def _is_visible(logits: Tensor, limit: float | Tensor = HIDDEN) -> Tensor:
    """Return whether logits (rows, heads, N_query, N_key) show a key in any head;
    those of NaN do.
    """
    return ~(logits.amax(1) <= limit)
