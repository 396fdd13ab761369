"""Softmax attention, fused or not, in any module. Its logits are computed part by part."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from tcnn_model import kernels
from tcnn_model.kernels import RowStatistics, TokenGrid, trial
from tcnn_model.precision import at_least_float32
from tcnn_probe.attention.attention import Attention, ContentRows
from tcnn_probe.attention.segments import share_between_segments
from tcnn_probe.attention.softmax_statistics import SoftmaxMeasurements, measure_softmax
from tcnn_probe.attention.visibility import HIDDEN, Visibility, find_visibility
from tcnn_probe.hooks.score_modification import ScoreModification

__all__ = [
    "Block",
    "DeferredLogits",
    "GivenLogits",
    "Logits",
    "ProductLogits",
    "SoftmaxAttention",
]

# On a CPU, up to this number of rows, one product per row is faster than a batched product, which
# first copies queries and keys.
_FEW_ROWS = 32
_ALL = slice(None)

# Number of logits of which two buffers, 1 MiB each in float32, fit into the cache of a core
# together with the other operand: on DeiT-S and ViT-B the statistics are a tenth faster than in
# blocks of 4 MiB, which other cores share.
_IN_CACHE = 1 << 18
# From about this number of rows on, a matrix product no longer gets faster.
_MANY_QUERIES = 128

# A key is hidden by a mask of -100 (Swin) or less; in a fused mask a relative position bias may be
# added to it.
_HIDDEN_MASK = -80.0
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
        return _is_hidden(mask[rows[:, None], :, queries], _HIDDEN_MASK).all(2)

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
        return mask.any(1) if mask.dtype == torch.bool else _is_visible(mask)

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
    """

    def __init__(self, logits: Tensor) -> None:
        rows, heads, queries, keys = logits.shape
        super().__init__((rows, heads, queries, keys), logits, masked=True)

    def hidden(self, rows: Tensor, queries: Tensor) -> Tensor:
        """Return whether the model has masked keys, see :class:`Logits`."""
        rows, queries = rows.to(self.device), queries.to(self.device)
        logits = self.source[rows[:, None], :, queries]
        return _is_hidden(logits, _HIDDEN_LOGIT).all(2)

    def visible(self, rows: slice) -> Tensor:
        """Return which keys a mask among the logits may have left, see :class:`Logits`."""
        return _is_visible(self.source[rows])

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


def _is_visible(logits: Tensor) -> Tensor:
    """Return whether logits (rows, heads, N_query, N_key) show a key in any head;
    those of NaN do.
    """
    return ~(logits.amax(1) <= HIDDEN)


@dataclass(frozen=True)
class Block:
    """A block of images, windows of each image,
    and queries of each window, whose attention is computed at once.
    """

    images: slice
    windows: slice
    queries: slice


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(Attention):
    """The softmax of logits, fused or not, in any module.

    If heads are mixed after the softmax, as in talking heads (CaiT), A is the attention before
    mixing.

    Args:
        logits: Logits of some rows and queries at a time.
        is_padded: Whether there was padding in the first forward with inputs of these sizes.
        compare: Function for :meth:`discrepancy`, which compares A with torch's output; None if
            there is none.
        find_values, find_outputs: Functions for :meth:`values` and :meth:`head_outputs`; None if
            there are no values.
    """

    logits: Logits
    is_padded: bool = False
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
        """Index of the class token among the queries; None if there is none, or one for each class.

        A single latent counts as a class token, and so does the first latent if the layer returns
        only this one.
        """
        if self.layout.asking in ("classes", "words"):
            return None
        # In class-attention layers (CaiT) the class token is the only query. The single pixel of a
        # window, or the single pooled query of a grid, is not a class token.
        is_single_query = self.queries == 1 and self.keys > 1 and self.windows == 1
        is_single_query &= self.layout.queries is None
        if self.layout.asking == "latents":
            # timm's AttentionPoolLatent returns the first latent with pool="token", and the mean
            # with pool="avg".
            hands_on_first_latent = getattr(self.module, "pool", None) == "token"
            return 0 if is_single_query or hands_on_first_latent else None
        queries = self.layout.queries
        # Queries without a grid are the tokens before the grid of keys if there are no more than
        # these.
        starts_with_specials = (
            queries.prefix > 0 if queries is not None else self.queries <= self.layout.prefix
        )
        has_class_token = starts_with_specials and self.layout.class_token
        return 0 if is_single_query or has_class_token else None

    @property
    def distillation_query(self) -> int | None:
        """Index of the distillation token among the queries; None without one."""
        queries = self.layout.queries
        has_second = queries is not None and queries.prefix > 1
        return (
            1 if has_second and self.layout.distillation_token and self.class_query == 0 else None
        )

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens among the tokens before the grid;
        the others are registers.
        """
        specials = self.layout.prefix - self.layout.words
        layout = self.layout
        return min(specials, layout.class_token + layout.distillation_token)

    def weights(self, queries: slice = _ALL, image: int | None = None) -> Tensor:
        """Return the attention of some queries, see :class:`Attention`."""
        rows = _ALL if image is None else slice(image * self.windows, (image + 1) * self.windows)
        return self.logits.weights(rows, queries).unflatten(0, (-1, self.windows))

    def visible_keys(self, query: int) -> Tensor:
        """Return the number of visible keys, see :class:`Attention`."""
        if not self.logits.masked:
            return super().visible_keys(query)
        queries = torch.full((self.rows, 1), query)
        hidden = self.logits.hidden(torch.arange(self.rows), queries)
        return self.by_image(hidden.logical_not()[:, 0].sum(-1))

    def statistics(self) -> dict[str, Any]:
        """Return entropies, distances, their values for uniform attention,
        and sums for content information.
        """
        measured = self._measurements()
        information = {"content_information": measured.pattern}
        return {**measured.means, **self.uniform_scales(), **information}

    def content_rows(self) -> ContentRows:
        """Return entropies, received attention and similarity of heads of A."""
        rows = self._measurements().rows
        assert rows is not None
        return rows

    def segment_attention(self) -> Tensor | None:
        """Return the attention between segments,
        see :class:`Attention`; None if the grid of keys is unknown.
        """
        return share_between_segments(self, self._measurements().by_query)

    @property
    def visibility(self) -> Visibility | None:
        """Keys that queries see, and which tokens are padding; None without a mask."""
        if not self.logits.masked:
            return None
        if "visibility" not in self.shared:
            self.shared["visibility"] = find_visibility(self)
        return self.shared["visibility"]

    @property
    def is_small(self) -> bool:
        """True if calls of torch take much of the time in which this attention is measured."""
        return math.prod(self.shape) <= (_IN_CACHE if self.device.type == "cpu" else self.block)

    @property
    def joint_form(self) -> Hashable:
        """What attentions have in common whose heads can be measured together, see :meth:`joined`;
        None if this one has to be measured by itself.
        """
        form = self.logits.joint_form
        if form is None or self.detailed or self.layout.is_video:
            return None
        tokens = self.class_query, self.distillation_query, self.first_patch_query
        return form, self.images, self.windows, self.layout, *tokens

    @cached_property
    def nbytes(self) -> int:
        """Size of queries and keys, and of the logits of the tokens before the grid,
        which are measured all at once.
        """
        products = self.source.nbytes // self.queries * (self.queries + self.keys)
        before_grid = math.prod(self.shape[:3]) * self.layout.prefix
        return products + before_grid * self.dtype.itemsize

    def kept(self) -> "SoftmaxAttention":
        """Return an attention with copies of the logits' sources, and without values and outputs,
        for when the layer has run.
        """
        return replace(
            self,
            logits=self.logits.kept(),
            compare=None,
            find_values=None,
            find_outputs=None,
            residual=None,
        )

    @staticmethod
    def joined(attentions: "Sequence[SoftmaxAttention]") -> "SoftmaxAttention":
        """Return an attention with the heads of all, which have one :attr:`joint_form`."""
        first = attentions[0]
        if len(attentions) == 1:
            return first
        logits = first.logits.joined([attention.logits for attention in attentions])
        return replace(first, logits=logits, shared={})

    def values(self) -> Tensor | None:
        """Return the values, see :class:`Attention`;
        None if the softmax is not fused with the values.
        """
        return None if self.find_values is None else self.find_values()

    def head_outputs(self) -> Tensor | None:
        """Return the heads' outputs, see :class:`Attention`;
        None if the softmax is not fused with the values.
        """
        return None if self.find_outputs is None else self.find_outputs()

    def discrepancy(self, output: Any = None) -> tuple[Tensor, float] | None:
        """Compare A with the output of torch's function; the output of the layer is not used."""
        return None if self.compare is None else self.compare()

    def _measurements(self) -> SoftmaxMeasurements:
        """Measure once for all listeners with the same limit of images and the same details."""
        # Measurements depend on the limit and on details, so listeners that differ in them cannot
        # share these.
        key = "measurements", self.limit, self.detailed
        if key not in self.shared:
            self.shared[key] = measure_softmax(self)
        return self.shared[key]

    @property
    def queries_at_once(self) -> int:
        """Number of queries of a block, which has at most :attr:`block` logits,
        or a single query if this has more.
        """
        logits = self.heads * self.keys
        at_once = max(1, self.block // logits)
        if self.device.type != "cpu":
            return at_once
        # A smaller block stays in the cache of a core, but products of few queries are slow.
        return min(at_once, max(_IN_CACHE // logits, _MANY_QUERIES))

    def blocks(self) -> Iterator[Block]:
        """Yield blocks of :attr:`queries_at_once`."""
        # A block has this number of queries: of one window, or of several complete windows or
        # images.
        at_once = self.queries_at_once
        windows = min(self.windows, max(1, at_once // self.queries))
        images = max(1, at_once // (self.queries * windows)) if windows == self.windows else 1
        sizes = (self.images, images), (self.windows, windows), (self.queries, at_once)
        for starts in product(*(range(0, count, step) for count, step in sizes)):
            ends = [
                min(start + step, count) for start, (count, step) in zip(starts, sizes, strict=True)
            ]
            yield Block(*map(slice, starts, ends))

    def rows_of(self, block: Block) -> slice:
        """Return the rows of a block, which are contiguous."""
        first = block.images.start * self.windows + block.windows.start
        last = (block.images.stop - 1) * self.windows + block.windows.stop
        return slice(first, last)

    def by_image(self, rows: Tensor) -> Tensor:
        """Return (rows, ...) as (images, windows, ...)."""
        return rows.unflatten(0, (self.images, self.windows))
