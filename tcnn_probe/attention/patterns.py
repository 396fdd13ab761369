"""Sums over images of the attention of each head, from which its anatomy and content information are computed."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.precision import at_least_float32, widest_dtype
from tcnn_probe.attention.layout import Tokens

if TYPE_CHECKING:
    from tcnn_probe.attention.attention import Attention
    from tcnn_probe.attention.softmax import Block, SoftmaxAttention

__all__ = [
    "QUERIES",
    "Pattern",
    "PatternSum",
    "content_similarity",
    "gated_patterns",
    "pattern_of_query",
    "places_on_grid",
    "row_products",
    "sample_queries",
    "similarity_of_heads",
]

# Largest number of queries whose attention is summed. The sums take QUERIES * N_key numbers per head, in float64 100 kB
# for 196 keys.
QUERIES = 64

# Smallest number of queries that are sampled from a window, if it has as many: their mean is compared between images.
_LEAST_QUERIES = 8

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Pattern:
    """Sums over images of the attention A of some queries, which content information is computed from.

    Args:
        attention: Sum of A, shape (heads, queries, keys); a tensor in float64 (float32 on MPS), or an array.
        entropy: Sum over images of -sum_j A_ij log A_ij, shape (heads, queries).
        images: Number of images that count for each query, shape (heads, queries): those in which the query is no
            padding and its attention is not NaN.
        queries, keys: Row and column of each query and key on the layer's grid, shape (n, 2), NaN for class and
            register tokens; None if no grid is known.
        size: Size of the images; only patterns with the same size can be added.
        batch: Number of images, whether they count or not.
        mean_entropy: Sum over images of the entropy of the mean of A over the queries of a window that count, shape
            (heads, windows). None unless the parts of selectivity are measured.
        visible: Number of images in which a mask leaves each key visible to each query, (queries or 1, keys or 1).
        windows: Number of windows that the queries are from, with equally many from each, one window after the other.
        population: Number of queries of each window from which the queries were sampled.
        shifted: Whether windows were shifted, so that queries in some of them do not see all keys.
        padding: Number of keys in the padding of gated layers, which come last.
        reason: Reason why there is no common grid; empty if there is one.
        odd: Sums over every second image, from which the two halves of the images are compared; without ``visible``.
        finish: Function of the variable's name and the pattern of an epoch, in arrays, that returns the values of each
            head by variable, or the reason why there are none. None for content information.
    """

    attention: Any
    entropy: Any
    images: Any
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    size: object = None
    batch: int = 0
    mean_entropy: Any = None
    visible: Any = None
    windows: int = 1
    population: int = 1
    shifted: bool = False
    padding: int = 0
    reason: str = ""
    odd: "Pattern | None" = None
    finish: Callable[[str, Any], Mapping[str, np.ndarray | str]] | None = None

    def plus(self, pattern: "Pattern") -> "Pattern | None":
        """Return the sums over the images of both patterns; None if these have different sizes."""
        if self.size != pattern.size or self.attention.shape != pattern.attention.shape:
            return None
        odd = pattern.odd
        if odd is not None and self.odd is not None:
            # Images alternate between the halves, also across batches.
            odd = pattern.minus(odd) if self.batch % 2 else odd
            odd = self.odd._combine(odd, 1, None)
        return self._combine(pattern, 1, odd)

    def minus(self, pattern: "Pattern") -> "Pattern":
        """Return the sums over the images that are not in a pattern of some of these images."""
        return self._combine(pattern, -1, None)

    def arrays(self) -> "Pattern":
        """Return the sums as arrays on the CPU."""
        arrays: dict[str, Any] = {
            name: value.detach().double().cpu().numpy()
            for name, value in self._sums().items()
            if isinstance(value, Tensor)
        }
        return replace(self, **arrays, odd=self.odd and self.odd.arrays())

    def _combine(
        self, pattern: "Pattern", sign: int, odd: "Pattern | None"
    ) -> "Pattern":
        theirs = pattern._sums()
        sums = {
            name: value + sign * theirs[name]
            for name, value in self._sums().items()
            if name in theirs
        }
        batch = self.batch + sign * pattern.batch
        return replace(self, **sums, batch=batch, odd=odd)

    def _sums(self) -> dict[str, Any]:
        names = ("attention", "entropy", "images", "mean_entropy", "visible")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


@lru_cache(maxsize=64)
def sample_queries(
    windows: int, queries: int, limit: int, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Sample queries of an image evenly and deterministically.

    Of each sampled window at least eight queries are sampled, or all if there are fewer, because the mean over the
    queries of a window is measured, too. Different queries are sampled in each window. The sampled queries are the
    multiples of s modulo N, for an s near 0.618 N that is coprime to N (a golden-ratio sequence), so that all rows and
    columns are represented; and so are the sampled windows.

    Args:
        windows: Number of windows.
        queries: Number of queries of each window.
        limit: Largest number of queries to sample.
        first: Index of the first query to sample; class and register tokens come before it.

    Returns:
        Indices of windows, shape (w,), and of queries in each of these, shape (w, n).
    """
    count = queries - first
    sampled_windows = min(windows, max(1, limit // min(count, _LEAST_QUERIES)))
    per_window = min(count, limit // sampled_windows)
    index = _golden_sequence(count, sampled_windows * per_window)
    index = index.view(sampled_windows, per_window).sort(-1).values + first
    return _golden_sequence(windows, sampled_windows).sort().values, index


def _golden_sequence(size: int, count: int) -> Tensor:
    """Return the first numbers of a sequence that visits 0, ..., size - 1 evenly, again and again: shape (count,)."""
    step = max(1, round(size * _GOLDEN_RATIO))
    while math.gcd(step, size) != 1:
        step += 1
    # As the step and the size have no common divisor, no number comes twice before all have come.
    return torch.arange(1, count + 1) * step % size


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
            # Some of these queries are padding, so more are sampled, as long as the sums take 512 kB per head.
            limit = max(QUERIES, 1024 * QUERIES // attention.keys)
        first = attention.first_patch_query or 0
        self._sampling = attention.windows, attention.queries, limit, first
        self._windows, self._queries = sample_queries(*self._sampling)
        shape = attention.heads, self._queries.numel(), attention.keys
        # Images with an even and with an odd number in the batch are summed separately.
        self._sums = torch.zeros((2, *shape), dtype=widest_dtype(device), device=device)
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
            weights: A without a factor of each query, 0 for class and register tokens, shape (rows, heads, queries,
                keys).
            factor: Factor of each query, shape (rows, heads, queries).
        """
        images = max(0, min(block.images.stop, self._images) - block.images.start)
        spans = [(part.start, part.stop) for part in (block.windows, block.queries)]
        heads = self._sums.shape[1]
        sampled, index = _rows_of_block(
            self._sampling, images, heads, *spans, weights.device
        )
        if not index.numel():
            return
        rows = weights.flatten(0, 2).index_select(0, index)
        # This is in place on a copy that index_select has made.
        rows.mul_(factor.flatten().index_select(0, index)[:, None])
        rows.nan_to_num_()  # an image with NaN does not count, see pattern()
        by_image = rows.view(images, heads, -1, rows.shape[1])
        self._add_rows(
            slice(block.images.start, block.images.start + images), sampled, by_image
        )

    def add_sampled(self) -> None:
        """Add the sampled queries of all images, if the rest of the attention is not computed."""
        for images, rows, queries in self._rows_of_images():
            weights = self._attention.logits.select(rows, queries).weights()
            # (images * w, heads, n, keys) -> (images, heads, w * n, keys)
            by_window = weights.unflatten(0, (-1, len(self._windows))).transpose(1, 2)
            by_image = by_window.flatten(2, 3).nan_to_num()
            if self._attention.visibility is not None:
                counted = self._attention.visibility.queries.flatten(0, 1)
                sampled = self._of_sampled(counted[:, None, :, None])[:, images]
                by_image = by_image.where(sampled.permute(1, 2, 0, 3), 0)
            self._add_rows(images, slice(None), by_image)

    def _add_rows(self, images: slice, sampled: slice, by_image: Tensor) -> None:
        """Add the attention of some images and sampled queries, (images, heads, queries, keys)."""
        for offset in range(min(2, len(by_image))):
            half = by_image[offset::2]
            # A sum over one image would only copy it.
            total = half[0] if len(half) == 1 else half.sum(0)
            self._sums[(images.start + offset) % 2][:, sampled] += total
        # A block has whole windows, or a part of one.
        first, last, _ = sampled.indices(self._queries.numel())
        per_window = self._queries.shape[1]
        windows = slice(first // per_window, (last - 1) // per_window + 1)
        in_windows = by_image.unflatten(2, (windows.stop - windows.start, -1))
        self._window_sums[images, :, windows] += in_windows.sum(3)
        if self._products is not None:
            self._products[images, sampled] = row_products(by_image)

    def _rows_of_images(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield images, as many at a time as fit into a block, with their sampled rows and the queries of each row."""
        attention = self._attention
        at_once = max(1, attention.block // self._sums[0].numel())
        for start in range(0, self._images, at_once):
            images = slice(start, min(start + at_once, self._images))
            index = torch.arange(images.start, images.stop)
            rows = (index[:, None] * attention.windows + self._windows).flatten()
            yield images, rows, self._queries.repeat(len(index), 1)

    def add_prefix(self, prefix: Tensor) -> None:
        """Add the attention to class and register tokens, which blocks leave out. Call this after all blocks.

        Args:
            prefix: Attention to each of these tokens, shape (rows, heads, N_query, prefix).
        """
        by_image = self._of_sampled(prefix.nan_to_num()).permute(1, 2, 0, 3)
        count = prefix.shape[-1]
        self._sums[..., :count] = self._halves(by_image)
        in_windows = by_image.unflatten(2, (len(self._windows), -1))
        self._window_sums[..., :count] = in_windows.sum(3)
        if self._products is not None:
            self._products[: self._images] += row_products(by_image)

    def similarity(self, entropy: Tensor) -> Tensor:
        """Return the mean cosine between each head's rows and those of the other heads: shape (B, heads).

        Args:
            entropy: Entropy of all queries, shape (rows, heads, N_query), NaN where they do not count.
        """
        assert self._products is not None
        counted = entropy.isfinite().all(1)[:, None, :, None]
        # (queries, images, 1, 1) -> (images, queries)
        sampled = self._of_sampled(counted)[..., 0, 0].mT
        similarity = self._products.new_zeros(len(self._products), self._sums.shape[1])
        similarity[: self._images] = similarity_of_heads(
            self._products[: self._images], sampled
        )
        return similarity

    def pattern(self, entropy: Tensor) -> Pattern:
        """Return the sums.

        Args:
            entropy: Entropy of all queries, shape (rows, heads, N_query), NaN where they do not count.
        """
        layout, windows = self._attention.layout, len(self._windows)
        # (images, heads, queries)
        by_query = self._of_sampled(entropy[..., None])[..., 0].movedim(0, -1)
        is_counted = by_query.isfinite()
        counts = is_counted.unflatten(2, (windows, -1)).sum(-1).clamp_min(1)
        by_image = (
            torch.where(is_counted, by_query, 0),
            is_counted.to(by_query),
            entropy_of(self._window_sums / counts[..., None]),
        )
        # Together, because each call of torch takes as long as these sums.
        halves = self._halves(torch.cat(by_image, -1))
        sizes = [values.shape[-1] for values in by_image]
        entropy_sum, image_sum, mean_entropy_sum = halves.sum(0).split(sizes, -1)
        odd_entropy, odd_images, odd_mean_entropy = halves[1].split(sizes, -1)
        places: dict[str, Any] = {}
        if layout.queries is not None and layout.keys is not None:
            queries = places_on_grid(layout.queries)[self._queries.flatten().numpy()]
            places = {"queries": queries, "keys": places_on_grid(layout.keys)}
        cut = self._attention.cut
        odd = Pattern(
            self._sums[1],
            odd_entropy,
            odd_images,
            batch=self._images // 2,
            mean_entropy=odd_mean_entropy,
            windows=windows,
            population=self._attention.queries - self._sampling[-1],
            shifted=cut is not None and any(cut.shift),
            reason=layout.reason,
            **places,
        )
        return replace(
            odd,
            attention=self._sums.sum(0),
            entropy=entropy_sum,
            images=image_sum,
            batch=self._images,
            mean_entropy=mean_entropy_sum,
            visible=self._visible(),
            odd=odd,
        )

    def _visible(self) -> Tensor:
        """Return the number of images in which each key is visible to each sampled query, (queries or 1, keys or 1)."""
        logits = self._attention.logits
        if not logits.masked:
            return torch.full((1, 1), float(self._images), device=logits.device)
        shape = self._sums.shape[2:]
        total = self._sums.new_zeros(shape)
        for _, rows, queries in self._rows_of_images():
            hidden = logits.hidden(rows, queries)
            total += (
                hidden.logical_not_()
                .unflatten(0, (-1, len(self._windows)))
                .sum(0)
                .view(shape)
            )
        return total

    def _halves(self, by_image: Tensor) -> Tensor:
        """Sum over images with even and odd numbers: (images, ...) -> (2, ...)."""
        return torch.stack(
            [by_image[half::2].sum(0, dtype=self._sums.dtype) for half in range(2)]
        )

    def _of_sampled(self, values: Tensor) -> Tensor:
        """Return (rows, heads, N_query, n) for the sampled queries: (queries, images, heads, n)."""
        windows, queries = (
            self._windows[:, None].to(values.device),
            self._queries.to(values.device),
        )
        by_image = self._attention.by_image(values)
        # Index tensors that are not adjacent move their axes to the front: (w, q, images, heads, n).
        sampled = by_image[: self._images, windows, :, queries]
        return sampled.flatten(0, 1)


def entropy_of(attention: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Return -sum_j A_j log A_j over the last axis; ``scratch``, of the same shape, is overwritten."""
    # The clamp gives 0 log 0 = 0, because the logarithm of the smallest normal number is finite.
    smallest = torch.finfo(attention.dtype).tiny
    logarithms = torch.clamp(attention, min=smallest, out=scratch).log_()
    return -logarithms.mul_(attention).sum(-1)


def row_products(rows: Tensor) -> Tensor:
    """Return dot products of the heads' rows: (images, heads, queries, keys) -> (images, queries, heads, heads)."""
    by_query = rows.transpose(1, 2)
    return by_query @ by_query.mT


def similarity_of_heads(products: Tensor, counted: Tensor) -> Tensor:
    """Return the mean cosine between each head's rows and those of the layer's other heads.

    DeepViT (Zhou et al. 2021, arXiv 2103.11886) uses this cosine between attention maps, there between layers. The
    cosine is 0 for a row from which all keys are hidden.

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


@lru_cache(maxsize=64)
def _rows_of_block(
    sampling: tuple[int, int, int, int],
    images: int,
    heads: int,
    windows: tuple[int, int],
    queries: tuple[int, int],
    device: torch.device,
) -> tuple[slice, Tensor]:
    """Return the sampled queries in a block, and their rows in its attention, by image and head.

    Args:
        sampling: Arguments of :func:`sample_queries`.
        images, heads: Numbers of images and heads of the block.
        windows, queries: Start and stop of the block's windows and of its queries.
        device: Device of the rows.
    """
    window, query = sample_queries(*sampling)
    window, query = window[:, None] - windows[0], query - queries[0]
    block_windows, block_queries = windows[1] - windows[0], queries[1] - queries[0]
    in_block = (
        (window >= 0)
        & (window < block_windows)
        & (query >= 0)
        & (query < block_queries)
    )
    # The sampled queries of a block are contiguous, as blocks cut windows and queries in order.
    sampled = in_block.flatten().nonzero()[:, 0].tolist()
    row = (
        torch.arange(images)[:, None] * block_windows
        + window.expand_as(query)[in_block]
    )
    index = (
        row[:, None] * heads + torch.arange(heads)[:, None]
    ) * block_queries + query[in_block]
    return slice(sampled[0], sampled[-1] + 1) if sampled else slice(
        0
    ), index.flatten().to(device)


def pattern_of_query(
    attention: "Attention", weights: Tensor, entropy: Tensor
) -> Pattern:
    """Return sums over the images within the limit for one query of each window, such as a class token.

    Args:
        attention: Attention with this query.
        weights: A of the query, shape (B, windows, heads, N_key).
        entropy: Entropy of these rows, shape (B, windows, heads).
    """
    weights, entropy = weights[: attention.limit], entropy[: attention.limit]
    counted, dtype = entropy.isfinite(), widest_dtype(weights.device)
    total, entropies, images = (
        torch.where(counted if x.ndim == 3 else counted[..., None], x, 0)
        .sum(0, dtype=dtype)
        .transpose(0, 1)
        for x in (weights, entropy, torch.ones_like(entropy))
    )
    return Pattern(total, entropies, images)


@torch.no_grad()
def gated_patterns(
    attention: GatedAttention, limit: int | None, block: int
) -> tuple[Pattern, Pattern]:
    """Return sums over the first ``limit`` images, or all, of gated attention A and of its content part C.

    The keys of A are the real pixels, and after them the padding. Those of C are the real pixels.

    Args:
        attention: Attention of a batch.
        limit: Number of images; None for all.
        block: Number of weights to compute at a time.
    """
    query, images = attention.query, len(attention.query[:limit])
    y, x = attention.y, attention.x
    # The image is the only window, so its queries are in the first row of indices.
    sampled = sample_queries(1, query.shape[2], QUERIES)[1][0]
    query_cells = np.indices((y.queries, x.queries)).reshape(2, -1).T[sampled.numpy()]
    query_places = query_cells * [y.stride, x.stride] + [y.first_query, x.first_query]
    extended = np.indices((y.keys, x.keys)).reshape(2, -1).T - [y.before, x.before]
    is_real = ((extended >= 0) & (extended < [y.length, x.length])).all(1)
    key_places = np.concatenate([extended[is_real], extended[~is_real]])
    sampled, real = (i.to(query.device) for i in (sampled, torch.from_numpy(is_real)))
    rows, columns = attention.factors()
    along_y, along_x = rows[:, sampled // x.queries], columns[:, sampled % x.queries]
    both = (along_y[..., :, None] * along_x[..., None, :]).flatten(2)
    gate = attention.gate[:, None, None]
    positional = both[..., real].to(at_least_float32(query.dtype))
    whole_sum = _AttentionSum(positional.shape, gate.to(both) * both[..., ~real], 2)
    content_sum = _AttentionSum(positional.shape, both[..., :0], 1)
    step = max(1, block // positional.numel())
    for start in range(0, images, step):
        batch = slice(start, min(start + step, images))
        weights = replace(
            attention, query=query[batch], key=attention.key[batch]
        ).content(sampled)
        scratch = torch.empty_like(weights)
        content_sum.add(weights, scratch, start)
        # A = (1 - g) C + g P (T-CNN Eq. 7) overwrites C, which has been added by now.
        weights.lerp_(positional, gate.to(weights))
        whole_sum.add(weights, scratch, start)
    odd, whole = (
        replace(
            whole_sum.pattern(half),
            queries=query_places,
            keys=key_places,
            padding=len(extended) - int(is_real.sum()),
            population=query.shape[2],
            batch=count,
        )
        for count, half in ((images // 2, 1), (images, None))
    )
    visible = torch.full((1, 1), float(images), device=query.device)
    whole = replace(whole, visible=visible, odd=odd)
    return whole, replace(content_sum.pattern(), mean_entropy=None)


@torch.no_grad()
def content_similarity(
    attention: GatedAttention, limit: int | None, block: int
) -> Tensor:
    """Return the mean cosine between each head's rows of C and those of the other heads, over the sampled queries.

    Args:
        attention: Attention of a batch of B images.
        limit: Number of first images to compare; None for all.
        block: Number of weights to compute at a time.

    Returns:
        Shape (B, heads), zeros for images beyond the limit.
    """
    query, key = attention.query, attention.key
    sampled = sample_queries(1, query.shape[2], QUERIES)[1][0].to(query.device)
    images, heads = query.shape[:2]
    shape = images, len(sampled), heads, heads
    products = torch.zeros(
        shape, dtype=at_least_float32(query.dtype), device=query.device
    )
    step = max(1, block // (heads * len(sampled) * key.shape[2]))
    for start in range(0, len(query[:limit]), step):
        batch = slice(start, min(start + step, len(query[:limit])))
        part = replace(attention, query=query[batch], key=key[batch])
        products[batch] = row_products(part.content(sampled))
    # A row of content attention has a positive length, unless it is NaN.
    return similarity_of_heads(
        products, products.diagonal(dim1=2, dim2=3).isfinite().all(-1)
    )


class _AttentionSum:
    """Sums over images of attention in float64, to which (B, heads, queries, keys) are added.

    Args:
        shape: Sizes (heads, queries, keys) without the padding.
        padding: Attention to the padding, the same for all images, shape (heads, queries, n).
        halves: 2 to sum images with even and with odd numbers separately.
    """

    def __init__(self, shape: Sequence[int], padding: Tensor, halves: int) -> None:
        # An image with NaN does not count, and gates of NaN make all images so.
        self._padding = padding.to(widest_dtype(padding.device)).nan_to_num()
        self._sums = self._padding.new_zeros((halves, *shape))
        self._entropies = self._padding.new_zeros((halves, *shape[:2]))
        self._images = torch.zeros_like(self._entropies)
        self._mean_entropies = self._padding.new_zeros((halves, shape[0], 1))

    def add(self, weights: Tensor, scratch: Tensor, start: int) -> None:
        """Add the attention of images from number ``start`` on; ``scratch``, with as many elements, is overwritten."""
        # A logit of NaN makes its whole row NaN, so one key shows which rows count.
        is_counted = weights[..., 0].isfinite()
        weights = weights.nan_to_num()
        entropies = entropy_of(weights, scratch.view(weights.shape))
        counts = is_counted.sum(2, keepdim=True).clamp_min(1)
        mean_entropies = entropy_of(weights.sum(2) / counts)[..., None]
        halves = len(self._sums)
        for offset in range(min(halves, len(weights))):
            half, images = (start + offset) % halves, slice(offset, None, halves)
            part = weights[images]
            # A sum over one image would only copy it.
            self._sums[half] += part[0] if len(part) == 1 else part.sum(0)
            self._images[half] += is_counted[images].sum(0)
            self._entropies[half] += entropies[images].sum(0)
            self._mean_entropies[half] += mean_entropies[images].sum(0)

    def pattern(self, half: int | None = None) -> Pattern:
        """Return the sums over all images, or over a half of them."""
        sums, images, entropy, mean_entropy = (
            total.sum(0) if half is None else total[half]
            for total in (
                self._sums,
                self._images,
                self._entropies,
                self._mean_entropies,
            )
        )
        padding, most = self._padding, images.amax(-1, keepdim=True)
        return Pattern(
            torch.cat([sums, images[..., None] * padding], -1),
            entropy + images * entropy_of(padding),
            images,
            mean_entropy=mean_entropy + most * entropy_of(padding.mean(1))[:, None],
        )


@lru_cache(maxsize=64)
def places_on_grid(tokens: Tokens) -> np.ndarray:
    """Return row and column of each token, (count, 2); NaN for tokens before the grid."""
    places = torch.stack(
        tokens.positions(torch.float64, torch.device("cpu")), 1
    ).numpy()
    frames = tokens.frame_numbers(torch.device("cpu")).numpy()
    # Frames are placed at distances of twice their height, so that different offsets in space and time stay different.
    places[:, 0] += 2 * tokens.spacing[0] * tokens.rows * frames
    places[: tokens.prefix] = np.nan
    places.flags.writeable = False  # all attentions with this grid share the array
    return places
