"""Sums over images of the attention of each head,
from which its anatomy and content information are computed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tcnn_model.precision import widest, widest_dtype
from tcnn_probe.attention.layout import Tokens
from tcnn_probe.attention.sampled_queries import (
    QUERIES,
    rows_of_block,
    sample_queries,
    sampled_index,
)

if TYPE_CHECKING:
    from tcnn_probe.attention.attention import Attention
    from tcnn_probe.attention.softmax import Block, SoftmaxAttention

__all__ = [
    "Pattern",
    "PatternSum",
    "Sums",
    "entropy_of",
    "pattern_of_query",
    "places_on_grid",
    "row_products",
    "similarity_of_heads",
]


class Sums(NamedTuple):
    """Sums over images of a pattern.

    Args:
        attention: Sum of A, shape (heads, queries, keys).
        entropy: Sum of -sum_j A_ij log A_ij, shape (heads, queries).
        images: Number of images that count for each query, shape (heads, queries): those in which
            the query is no padding and its attention is not NaN.
        mean_entropy: Sum of the entropy of the mean of A over the queries of a window that count,
            shape (heads, windows); without windows unless the parts of selectivity are measured.
    """

    attention: Any
    entropy: Any
    images: Any
    mean_entropy: Any


@dataclass(frozen=True)
class Pattern:
    """Sums over images of the attention A of some queries,
    which content information is computed from.

    Args:
        attention: Sum of A over images with even and with odd numbers, from which the two halves
            are compared, or over all images, shape (2 or 1, heads, queries, keys); a tensor, or an
            array.
        rows: Sums of the other fields of :class:`Sums`, one after the other, (2 or 1, heads, 2
            queries + windows).
        batch: Number of images, whether they count or not.
        visible: Number of images in which a mask leaves each key visible to each query, shape
            (queries, keys), or a single number.
        queries, keys: Row and column of each query and key on the layer's grid, shape (n, 2), NaN
            for class and register tokens; None if no grid is known.
        size: Size of the images; only patterns with the same size can be added.
        population: Number of queries of each window from which the queries were sampled: equally
            many from each, one window after the other.
        shifted: Whether windows were shifted, so that queries in some of them do not see all keys.
        padding: Number of keys in the padding of gated layers, which come last.
        reason: Reason why there is no common grid; empty if there is one.
        finish: Function of the variable's name and the pattern of an epoch, in arrays, that returns
            the values of each head by variable, or the reason why there are none. None for content
            information.
    """

    attention: Any
    rows: Any
    batch: int
    visible: Any = 0
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    size: object = None
    population: int = 1
    shifted: bool = False
    padding: int = 0
    reason: str = ""
    finish: Callable[[str, Any], Mapping[str, np.ndarray | str]] | None = None

    def sums(self, half: int | None = None) -> Sums:
        """Return the sums over all images, or over those with even (0) or odd (1) numbers."""
        halves = slice(None) if half is None else slice(half, half + 1)
        attention, rows = self.attention[halves].sum(0), self.rows[halves].sum(0)
        queries = attention.shape[1]
        entropy, images = rows[:, :queries], rows[:, queries : 2 * queries]
        return Sums(attention, entropy, images, rows[:, 2 * queries :])

    def of_heads(self, heads: slice) -> "Pattern":
        """Return the sums of some heads."""
        return replace(self, attention=self.attention[:, heads], rows=self.rows[:, heads])

    def copy(self) -> "Pattern":
        """Return a pattern to which others can be added, in float64 (float32 on MPS)."""
        attention, rows = (
            x + 0 if isinstance(x, np.ndarray) else widest(x).clone()
            for x in (self.attention, self.rows)
        )
        return replace(self, attention=attention, rows=rows)

    def plus(self, pattern: "Pattern") -> "Pattern | None":
        """Return the sums over the images of both patterns; None if their sizes or grids differ.

        This pattern must not be used any more, because its sums are changed in place.
        """
        totals, added = (self.attention, self.rows), (pattern.attention, pattern.rows)
        shapes, added_shapes = ([x.shape for x in sums] for sums in (totals, added))
        if self.size != pattern.size or shapes != added_shapes:
            return None
        if not (_same(self.queries, pattern.queries) and _same(self.keys, pattern.keys)):
            return None
        for total, values in zip(totals, added, strict=True):
            # Images alternate between the halves, also across batches.
            swaps = self.batch % 2 and len(values) == 2
            total += values[[1, 0]] if swaps else values
        return replace(
            self,
            batch=self.batch + pattern.batch,
            visible=self.visible + pattern.visible,
        )

    def arrays(self) -> "Pattern":
        """Return the sums as arrays on the CPU."""
        sums = {name: getattr(self, name) for name in ("attention", "rows", "visible")}
        arrays: dict[str, Any] = {
            name: values.detach().double().cpu().numpy()
            for name, values in sums.items()
            if isinstance(values, Tensor)
        }
        return replace(self, **arrays)


class PatternSum:
    """Sums over images of the attention of at most 64 queries, which are added block by block.

    They are queries of patches, or, where there are none, all queries, such as class tokens.

    Args:
        attention: Attention whose first ``limit`` images are added.
    """

    def __init__(self, attention: "SoftmaxAttention") -> None:
        self._attention, device = attention, attention.device
        limit = attention.images if attention.limit is None else attention.limit
        self._images = min(attention.images, limit)
        limit = QUERIES
        if attention.is_padded and attention.windows == 1:
            # Some of these queries are padding, so more are sampled, as long as the sums take 512
            # kB per head.
            limit = max(QUERIES, 1024 * QUERIES // attention.keys)
        first = attention.first_patch_query or 0
        self._sampling = attention.windows, attention.queries, limit, first
        self._windows, self._queries = sample_queries(*self._sampling)
        shape = attention.heads, self._queries.numel(), attention.keys
        # Images with an even and with an odd number in the batch are summed separately, in the
        # dtype of the attention: only sums over many batches need float64.
        self._sums = torch.zeros((2, *shape), dtype=attention.dtype, device=device)
        # Sum over the sampled queries of each window.
        self._window_sums = torch.zeros(
            (self._images, attention.heads, len(self._windows), attention.keys),
            dtype=attention.dtype,
            device=device,
        )
        # Dot products A_ih . A_ig of the rows of heads h and g, for each image and sampled query i.
        self._products = None
        if attention.detailed:
            self._products = torch.zeros(
                (attention.images, shape[1], shape[0], shape[0]),
                dtype=attention.dtype,
                device=device,
            )

    def add(self, block: "Block", weights: Tensor, factor: Tensor) -> None:
        """Add a block.

        Args:
            block: Block of the attention.
            weights: A without a factor of each query, 0 for class and register tokens, shape (rows,
                heads, queries, keys).
            factor: Factor of each query, shape (rows, heads, queries).
        """
        images = max(0, min(block.images.stop, self._images) - block.images.start)
        spans = [(part.start, part.stop) for part in (block.windows, block.queries)]
        heads = self._sums.shape[1]
        sampled, index = rows_of_block(self._sampling, images, heads, *spans, weights.device)
        if not index.numel():
            return
        rows = weights.flatten(0, 2).index_select(0, index)
        # This is in place on a copy that index_select has made.
        rows.mul_(factor.flatten().index_select(0, index)[:, None])
        rows.nan_to_num_()  # an image with NaN does not count, see pattern()
        # Heads of a query are side by side, for products of their rows.
        by_image = rows.view(images, -1, heads, rows.shape[1]).transpose(1, 2)
        self._add_rows(slice(block.images.start, block.images.start + images), sampled, by_image)

    def add_sampled(self) -> None:
        """Add the sampled queries of all images, if the rest of the attention is not computed."""
        for images, rows, queries in self._rows_of_images():
            weights = self._attention.logits.select(rows, queries).weights()
            # (images * w, heads, n, keys) -> (images, heads, w * n, keys)
            by_window = weights.unflatten(0, (-1, len(self._windows))).transpose(1, 2)
            by_image = by_window.flatten(2, 3).nan_to_num()
            if self._attention.visibility is not None:
                counted = self._attention.visibility.queries.flatten(0, 1)
                sampled = self._of_sampled(counted[:, None])[images]
                by_image = by_image.where(sampled[..., None], 0)
            self._add_rows(images, slice(None), by_image)

    def _add_rows(self, images: slice, sampled: slice, by_image: Tensor) -> None:
        """Add the attention of some images and sampled queries, (images, heads, queries, keys)."""
        if len(by_image) == 1:  # a sum over one image would only copy it
            self._sums[images.start % 2][:, sampled].add_(by_image[0])
        else:  # not +=, which would copy the sums onto themselves
            self._sums[:, :, sampled].add_(_halves(by_image, images.start))
        # A block has whole windows, or a part of one.
        first, last, _ = sampled.indices(self._queries.numel())
        per_window = self._queries.shape[1]
        windows = slice(first // per_window, (last - 1) // per_window + 1)
        in_windows = by_image.unflatten(2, (windows.stop - windows.start, -1))
        self._window_sums[images, :, windows].add_(in_windows.sum(3))
        if self._products is not None:
            self._products[images, sampled] = row_products(by_image)

    def _rows_of_images(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield images, as many at a time as fit into a block,
        with their sampled rows and the queries of each row.
        """
        attention = self._attention
        at_once = max(1, attention.block // self._sums[0].numel())
        for start in range(0, self._images, at_once):
            images = slice(start, min(start + at_once, self._images))
            index = torch.arange(images.start, images.stop)
            rows = (index[:, None] * attention.windows + self._windows).flatten()
            yield images, rows, self._queries.repeat(len(index), 1)

    def add_prefix(self, prefix: Tensor) -> None:
        """Add the attention to class and register tokens,
        which blocks leave out. Call this after all blocks.

        Args:
            prefix: Attention to each of these tokens, shape (rows, heads, N_query, prefix).
        """
        by_image = self._of_sampled(prefix).nan_to_num_()
        count = prefix.shape[-1]
        self._sums[..., :count] = _halves(by_image)
        in_windows = by_image.unflatten(2, (len(self._windows), -1))
        self._window_sums[..., :count] = in_windows.sum(3)
        if self._products is not None:
            self._products[: self._images] += row_products(by_image)

    def similarity(self, entropy: Tensor) -> Tensor:
        """Return the mean cosine between each head's rows
        and those of the other heads: shape (B, heads).

        Args:
            entropy: Entropy of all queries, shape (rows, heads, N_query), NaN where they do not
                count.
        """
        assert self._products is not None
        counted = entropy.isfinite().all(1, keepdim=True)
        similarity = self._products.new_zeros(len(self._products), self._sums.shape[1])
        similarity[: self._images] = similarity_of_heads(
            self._products[: self._images], self._of_sampled(counted)[:, 0]
        )
        return similarity

    def pattern(self, entropy: Tensor) -> Pattern:
        """Return the sums. Call this once.

        Args:
            entropy: Entropy of all queries, shape (rows, heads, N_query), NaN where they do not
                count.
        """
        attention, layout = self._attention, self._attention.layout
        by_query = self._of_sampled(entropy)
        is_counted = by_query.isfinite()
        counts = is_counted.unflatten(2, (len(self._windows), -1)).sum(-1, keepdim=True)
        means = self._window_sums.div_(counts.clamp_min_(1))
        # Together, because each call of torch takes as long as these sums.
        by_image = (by_query.where(is_counted, 0), is_counted, entropy_of(means))
        places: dict[str, Any] = {}
        if layout.queries is not None and layout.keys is not None:
            places = {
                "queries": _sampled_places(layout.queries, self._sampling),
                "keys": places_on_grid(layout.keys),
            }
        return Pattern(
            self._sums,
            _halves(torch.cat(by_image, -1), dtype=widest_dtype(means.device)),
            self._images,
            self._visible(),
            population=attention.queries - self._sampling[-1],
            shifted=attention.cut is not None and any(attention.cut.shift),
            reason=layout.reason,
            **places,
        )

    def _visible(self) -> Tensor | int:
        """Return the number of images in which each key is visible to each sampled query:
        (queries, keys), or all.
        """
        logits = self._attention.logits
        if not logits.masked:
            return self._images
        dtype = widest_dtype(self._sums.device)
        total = self._sums.new_zeros(self._sums.shape[2:], dtype=dtype)
        for images, rows, queries in self._rows_of_images():
            hidden = logits.hidden(rows, queries)
            count = images.stop - images.start
            total += count - hidden.view(count, *total.shape).sum(0)
        return total

    def _of_sampled(self, values: Tensor) -> Tensor:
        """Return the values (rows, heads, N_query, ...) of the sampled queries:
        (images, heads, queries, ...).
        """
        by_window = self._attention.by_image(values)[: self._images].transpose(1, 2)
        index = sampled_index(self._sampling, values.device)
        return by_window.flatten(2, 3).index_select(2, index)


def _halves(by_image: Tensor, first: int = 0, **dtype: torch.dtype) -> Tensor:
    """Sum over images with even and with odd numbers,
    ``first`` and the following: (images, ...) -> (2, ...).
    """
    if len(by_image) % 2:
        by_image = F.pad(by_image, [0] * (2 * by_image.ndim - 1) + [1])
    halves = by_image.unflatten(0, (-1, 2)).sum(0, **dtype)
    return halves.flip(0) if first % 2 else halves


def entropy_of(attention: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return -sum_j A_j log A_j over the last axis;
    ``scratch``, of the same shape, is overwritten.
    """
    # The clamp gives 0 log 0 = 0, because the logarithm of the smallest normal number is finite.
    smallest = torch.finfo(attention.dtype).tiny
    logarithms = torch.clamp(attention, min=smallest, out=scratch).log_()
    return -logarithms.mul_(attention).sum(-1)


def row_products(rows: Tensor) -> Tensor:
    """Return dot products of the heads' rows:
    (images, heads, queries, keys) -> (images, queries, heads, heads).
    """
    by_query = rows.transpose(1, 2)
    return by_query @ by_query.mT


def similarity_of_heads(products: Tensor, counted: Tensor) -> Tensor:
    """Return the mean cosine between each head's rows and those of the layer's other heads.

    DeepViT (Zhou et al. 2021, arXiv 2103.11886) uses this cosine between attention maps, there
    between layers. The cosine is 0 for a row from which all keys are hidden.

    Args:
        products: Dot products of the rows of two heads, shape (images, queries, heads, heads).
        counted: Whether a query counts, shape (images, queries).

    Returns:
        Shape (images, heads); NaN for a single head, and for images without a query that counts.
    """
    lengths = products.diagonal(dim1=-2, dim2=-1).sqrt()
    sizes = lengths[..., :, None] * lengths[..., None, :]
    cosine = torch.where(sizes == 0, 0, products / sizes)
    heads = products.shape[-1]
    by_query = cosine.sum(-1) - cosine.diagonal(dim1=-2, dim2=-1)
    by_query = torch.where(counted[..., None], by_query, 0)
    total = by_query.sum(1) / counted.sum(1, keepdim=True)
    return total / (heads - 1) if heads > 1 else total * torch.nan


def pattern_of_query(attention: "Attention", weights: Tensor, entropy: Tensor) -> Pattern:
    """Return sums over the images within the limit
    for one query of each window, such as a class token.

    Args:
        attention: Attention with this query.
        weights: A of the query, shape (B, windows, heads, N_key).
        entropy: Entropy of these rows, shape (B, windows, heads).
    """
    weights, entropy = weights[: attention.limit], entropy[: attention.limit]
    dtype = widest_dtype(weights.device)
    is_counted = entropy.isfinite()
    weights = weights.where(is_counted[..., None], 0)
    # (B, entropies and images of the windows, heads)
    rows = torch.cat([entropy.where(is_counted, 0), is_counted], 1)
    total, rows = (values.sum(0, dtype=dtype) for values in (weights, rows))
    reason = attention.layout.reason
    return Pattern(total.transpose(0, 1)[None], rows.mT[None], len(weights), reason=reason)


def _same(places: np.ndarray | None, others: np.ndarray | None) -> bool:
    """Return whether tokens of two patterns have the same places, or none."""
    # Layers with the same grid share the array, unless it comes from another rank.
    if places is others or places is None or others is None:
        return places is others
    return np.array_equal(places, others, equal_nan=True)


@lru_cache(maxsize=64)
def places_on_grid(tokens: Tokens) -> np.ndarray:
    """Return row and column of each token, (count, 2); NaN for tokens before the grid."""
    places = torch.stack(tokens.positions(torch.float64, torch.device("cpu")), 1).numpy()
    frames = tokens.frame_numbers(torch.device("cpu")).numpy()
    # Frames are placed at distances of twice their height, so that different offsets in space and
    # time stay different.
    places[:, 0] += 2 * tokens.spacing[0] * tokens.rows * frames
    places[: tokens.prefix] = np.nan
    places.flags.writeable = False  # all attentions with this grid share the array
    return places


@lru_cache(maxsize=64)
def _sampled_places(tokens: Tokens, sampling: tuple[int, int, int, int]) -> np.ndarray:
    """Return row and column of each sampled query, one window after the other: (n, 2)."""
    _, queries = sample_queries(*sampling)
    return places_on_grid(tokens)[queries.flatten().numpy()]
