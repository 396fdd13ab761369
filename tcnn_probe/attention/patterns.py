"""Sums over images of the attention of each head, from which static pattern and content information are computed."""

import math
from collections.abc import Sequence
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
    "row_products",
    "sample_queries",
    "similarity_of_heads",
]

# Largest number of queries whose attention is summed. The sums take QUERIES * N_key numbers per head, in float64 100 kB
# for 196 keys.
QUERIES = 64

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
    """

    attention: Any
    entropy: Any
    images: Any
    queries: np.ndarray | None = None
    keys: np.ndarray | None = None
    size: object = None

    def plus(self, pattern: "Pattern") -> "Pattern | None":
        """Return the sums over the images of both patterns; None if these have different sizes."""
        if self.size != pattern.size or self.attention.shape != pattern.attention.shape:
            return None
        attention, entropy = (
            self.attention + pattern.attention,
            self.entropy + pattern.entropy,
        )
        return replace(
            self,
            attention=attention,
            entropy=entropy,
            images=self.images + pattern.images,
        )


@lru_cache(maxsize=64)
def sample_queries(windows: int, queries: int, limit: int) -> tuple[Tensor, Tensor]:
    """Sample queries of an image evenly and deterministically.

    Windows are sampled at equal distances, with different queries in each. The sampled queries are the multiples of s
    modulo N, for an s near 0.618 N that is coprime to N (a golden-ratio sequence), so that all rows and columns are
    represented.

    Args:
        windows: Number of windows.
        queries: Number of queries of each window.
        limit: Largest number of queries to sample.

    Returns:
        Indices of windows, shape (w,), and of queries in each of these, shape (w, n).
    """
    sampled_windows = min(windows, limit)
    per_window = min(queries, limit // sampled_windows)
    step = max(1, round(queries * _GOLDEN_RATIO))
    while math.gcd(step, queries) != 1:
        step += 1
    # As the step and the number of queries have no common divisor, no query comes twice before all have come.
    index = torch.arange(1, sampled_windows * per_window + 1) * step % queries
    index = index.view(sampled_windows, per_window).sort(-1).values
    return torch.arange(sampled_windows) * windows // sampled_windows, index


class PatternSum:
    """Sums over images of the attention of at most 64 queries, which are added block by block.

    Args:
        attention: Attention whose first ``limit`` images are added.
    """

    def __init__(self, attention: "SoftmaxAttention") -> None:
        self._attention, device = attention, attention.device
        limit = attention.images if attention.limit is None else attention.limit
        self._images = min(attention.images, limit)
        self._sampling = attention.windows, attention.queries, QUERIES
        self._windows, self._queries = sample_queries(*self._sampling)
        shape = attention.heads, self._queries.numel(), attention.keys
        self._sum = torch.zeros(shape, dtype=widest_dtype(device), device=device)
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
        sampled, index = _rows_of_block(
            self._sampling, images, len(self._sum), *spans, weights.device
        )
        if not index.numel():
            return
        rows = weights.flatten(0, 2).index_select(0, index)
        # This is in place on a copy that index_select has made.
        rows.mul_(factor.flatten().index_select(0, index)[:, None])
        rows.nan_to_num_()  # an image with NaN does not count, see pattern()
        by_image = rows.view(images, len(self._sum), -1, rows.shape[1])
        # (images, heads, queries, keys) summed over images; a sum over one image would only copy it.
        self._sum[:, sampled] += by_image[0] if images == 1 else by_image.sum(0)
        if self._products is not None:
            of_block = slice(block.images.start, block.images.start + images)
            self._products[of_block, sampled] = row_products(by_image)

    def add_sampled(self) -> None:
        """Add the sampled queries of all images, if the rest of the attention is not computed."""
        attention, windows = self._attention, len(self._windows)
        at_once = max(1, attention.block // self._sum.numel())
        for start in range(0, self._images, at_once):
            images = torch.arange(start, min(start + at_once, self._images))
            rows = images[:, None] * attention.windows + self._windows
            queries = self._queries.repeat(len(images), 1)
            logits = attention.logits.select(rows.flatten(), queries)
            # (images * w, heads, n, keys) -> (images, heads, w * n, keys)
            weights = logits.weights().unflatten(0, (-1, windows)).transpose(1, 2)
            by_image = weights.flatten(2, 3).nan_to_num()
            self._sum += by_image.sum(0)
            if self._products is not None:
                self._products[images.to(weights.device)] = row_products(by_image)

    def add_prefix(self, prefix: Tensor) -> None:
        """Add the attention to class and register tokens, which blocks leave out. Call this after all blocks.

        Args:
            prefix: Attention to each of these tokens, shape (rows, heads, N_query, prefix).
        """
        prefix = prefix.nan_to_num()
        self._sum[..., : prefix.shape[-1]] = self._sum_of_sampled(prefix)
        if self._products is not None:
            by_image = self._of_sampled(prefix).permute(1, 2, 0, 3)
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
        similarity = self._products.new_zeros(len(self._products), len(self._sum))
        similarity[: self._images] = similarity_of_heads(
            self._products[: self._images], sampled
        )
        return similarity

    def pattern(self, entropy: Tensor) -> Pattern:
        """Return the sums.

        Args:
            entropy: Entropy of all queries, shape (rows, heads, N_query), NaN where they do not count.
        """
        counted = entropy.isfinite()
        entropies = torch.stack([torch.where(counted, entropy, 0), counted], -1)
        total, images = self._sum_of_sampled(entropies).unbind(-1)
        pattern = Pattern(self._sum, total, images)
        queries, keys = self._attention.layout.queries, self._attention.layout.keys
        if queries is None or keys is None:
            return pattern
        return replace(
            pattern,
            queries=_places(queries)[self._queries.flatten().numpy()],
            keys=_places(keys),
        )

    def _sum_of_sampled(self, values: Tensor) -> Tensor:
        """Sum (rows, heads, N_query, n) over images, for the sampled queries: (heads, queries, n)."""
        sampled = self._of_sampled(values)
        return sampled.sum(1, dtype=self._sum.dtype).transpose(0, 1)

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
    sampling: tuple[int, int, int],
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

    Only real pixels count: the attention to padding is the same for all images.

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
    key_places = np.indices((y.length, x.length)).reshape(2, -1).T
    sampled = sampled.to(query.device)
    positional = attention.positional_on_pixels(sampled).to(
        at_least_float32(query.dtype)
    )
    whole_sum, content_sum = (_AttentionSum(positional.shape, query) for _ in range(2))
    step = max(1, block // positional.numel())
    for start in range(0, images, step):
        batch = slice(start, min(start + step, images))
        weights = replace(
            attention, query=query[batch], key=attention.key[batch]
        ).content(sampled)
        scratch = torch.empty_like(weights)
        content_sum.add(weights, scratch)
        # A = (1 - g) C + g P (T-CNN Eq. 7) overwrites C, which has been added by now.
        weights.lerp_(positional, attention.gate.to(weights)[:, None, None])
        whole_sum.add(weights, scratch)
    pattern = replace(whole_sum.pattern(), queries=query_places, keys=key_places)
    return pattern, content_sum.pattern()


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
    """Sum of attention over images in float64, to which (B, heads, queries, keys) are added.

    Args:
        shape: Sizes (heads, queries, keys).
        like: Tensor on the device of the sums.
    """

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self._attention = torch.zeros(
            shape, dtype=widest_dtype(like.device), device=like.device
        )
        self._entropy = self._attention.new_zeros(self._attention.shape[:2])
        self._images = torch.zeros_like(self._entropy)

    def add(self, weights: Tensor, scratch: Tensor) -> None:
        """Add the attention of some images; ``scratch``, with as many elements, is overwritten."""
        # A logit of NaN makes its whole row NaN, so one key shows which rows count.
        self._images += weights[..., 0].isfinite().sum(0)
        weights = weights.nan_to_num()
        self._attention += weights[0] if len(weights) == 1 else weights.sum(0)
        # The clamp gives 0 log 0 = 0, because the logarithm of the smallest normal number is finite.
        smallest = torch.finfo(weights.dtype).tiny
        logarithms = (
            scratch.view(weights.shape).copy_(weights).clamp_(min=smallest).log_()
        )
        self._entropy -= logarithms.mul_(weights).sum((0, 3))

    def pattern(self) -> Pattern:
        """Return the sums as a pattern."""
        return Pattern(self._attention, self._entropy, self._images)


@lru_cache(maxsize=64)
def _places(tokens: Tokens) -> np.ndarray:
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
