"""Softmax attention, fused or not, in any module."""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tcnn_probe.attention.attention import Attention, ContentRows
from tcnn_probe.attention.logits import Logits
from tcnn_probe.attention.segments import share_between_segments
from tcnn_probe.attention.softmax_statistics import SoftmaxMeasurements, measure_softmax
from tcnn_probe.attention.visibility import Visibility, find_visibility

__all__ = ["Block", "SoftmaxAttention"]

_ALL = slice(None)

# Number of logits of which two buffers, 1 MiB each in float32, fit into the cache of a core
# together with the other operand: on DeiT-S and ViT-B the statistics are a tenth faster than in
# blocks of 4 MiB, which other cores share.
_IN_CACHE = 1 << 18
# From about this number of rows on, a matrix product no longer gets faster.
_MANY_QUERIES = 128


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

    def query_row(self, query: int) -> tuple[Tensor, Tensor]:
        """Return the attention of one query and its entropy, see :class:`Attention`; for class and
        distillation tokens from the statistics, if these have been measured.
        """
        measured: SoftmaxMeasurements | None = self.shared.get(self._measurements_key)
        if measured is None or query not in measured.by_query.of_tokens:
            return super().query_row(query)
        rows = measured.by_query
        return self.by_image(rows.of_tokens[query]), self.by_image(rows.entropy[:, :, query])

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
        key = self._measurements_key
        if key not in self.shared:
            self.shared[key] = measure_softmax(self)
        return self.shared[key]

    @property
    def _measurements_key(self) -> Hashable:
        # Measurements depend on the limit and on details, so listeners that differ in them cannot
        # share these.
        return "measurements", self.limit, self.detailed

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
