"""An attention of a forward: who attends, from where, to what, and with which weights."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.architectures.grids import Windows
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.segments import share_between_segments
from tcnn_probe.attention.statistics import (
    ContentRows,
    SoftmaxMeasurements,
    measure_softmax,
    softmax_statistics,
)

if TYPE_CHECKING:
    from tcnn_probe.attention.logits import Logits

__all__ = ["Attention", "Block", "SoftmaxAttention", "weigh"]

_ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Attention(ABC):
    """The attention A of one call of a layer: B images, each in one or more windows, and a softmax for each head.

    A forward shows two kinds, ``SoftmaxAttention`` and ``GatedAttention``; readers such as recorders, maps and rollout
    work on what is below and need not tell them apart. A third kind (the kernel of linear attention, say) takes one
    file: a subclass with :attr:`shape`, :attr:`source`, :meth:`weights`, :meth:`statistics` and :meth:`discrepancy`,
    shown by the stream where the layer has what it is made of.

    The tensors behind it are the model's own, valid while the layer runs: read what you need, and keep copies.

    Args:
        module: Module that attends.
        name: Name of the layer, as in recordings; "name#1" for the second attention in one call of the module.
        images: Number of images B.
        windows: Number of windows of each image, 1 for attention over the whole image. Row b * windows + w of
            ``shape[0]`` is window w of image b.
        layout: Grids on which queries and keys lie.
        number: Place of this attention among those of one call of the module, counted from 0.
        cut: Places of the windows in the image; None if unknown, or if the only window is the image.
        query_cut: The same of the queries' windows, where these lie on a grid of their own.
        order: Indices of the model's queries and keys in the order in which they are here, row by row, where that is
            another one; shapes (N_query,) and (N_key,).
        limit: Number of images, the first ones, that count in sums over images; None for all.
        detailed: Whether the pass over the logits keeps :meth:`content_rows`, too.
        residual: Function that returns the tokens that enter the block around the layer, (B, N, C), with class and
            register tokens where the model has them; it returns None where they are not found.
        shared: Results that the listeners of one forward share; copies of this attention share them too.
    """

    BLOCK: ClassVar[int] = 1 << 20
    """Number of logits formed at a time on a CPU: 4 MiB in float32, which stay in its cache."""

    module: nn.Module
    images: int
    layout: Layout
    windows: int = 1
    name: str = ""
    number: int = 0
    cut: Windows | None = None
    query_cut: Windows | None = None
    order: tuple[Tensor, Tensor] | None = None
    limit: int | None = None
    detailed: bool = False
    residual: Callable[[], Tensor | None] | None = None
    shared: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (rows, heads, N_query, N_key), where rows = images * windows."""

    @property
    @abstractmethod
    def source(self) -> Tensor:
        """A tensor that A is made of, for its device and dtype."""

    @abstractmethod
    def weights(self, queries: slice = slice(None), image: int | None = None) -> Tensor:
        """Return the attention of some queries.

        Args:
            queries: Slice of the N_query queries.
            image: Index of one image; None for all.

        Returns:
            Shape (B or 1, windows, heads, queries, N_key), in float32 at least. Rows sum to one, but for queries that
            may see no key at all: these are 0, as torch's own attention has it.
        """

    @abstractmethod
    def statistics(self) -> Mapping[str, Any]:
        """Return what recordings keep of A, exact and without an N x N tensor.

        Returns:
            ``{variable: tensor}``, shape (B, heads) or, for the scales of uniform attention, (B,); and for variables
            that need sums over images a ``Pattern``.
        """

    @abstractmethod
    def content_rows(self) -> ContentRows:
        """Return entropies and received attention of the part of A that images decide, for :attr:`detailed` ones."""

    @abstractmethod
    def values(self) -> Tensor | None:
        """Return the values, (rows, heads or 1, content_keys, d); None where the softmax does not show them."""

    @abstractmethod
    def head_outputs(self) -> Tensor | None:
        """Return the heads' outputs A v, (rows, heads, N_query, d); None where the softmax does not show them."""

    @abstractmethod
    def discrepancy(self, output: Any) -> tuple[Tensor, float] | None:
        """Compare A with what the model computed from it, for the first image.

        Args:
            output: Output of the layer, for kinds that are compared with it.

        Returns:
            The largest difference as a share of the largest value, shape () in float32, and the largest share that
            rounding explains; None if nothing can be compared, as under dropout.
        """

    def segment_attention(self) -> Tensor | None:
        """Return sums of A over the keys of each segment, as means over the queries of each segment.

        Returns:
            Shape (B, heads, segments of queries, segments of keys), see
            :data:`~tcnn_probe.attention.segments.SEGMENTS`; 0 for segments without queries. None where the segments
            are unknown.
        """
        return None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.shape[1]

    @property
    def queries(self) -> int:
        """Number of queries of each window."""
        return self.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys of each window."""
        return self.shape[3]

    @property
    def rows(self) -> int:
        """Number of rows: of windows of all images."""
        return self.shape[0]

    @property
    def content_keys(self) -> int:
        """Number of keys of the part that images decide, see :meth:`content`."""
        return self.keys

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self.source.device

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 where the model is in float64."""
        return at_least_float32(self.source.dtype)

    @property
    def block(self) -> int:
        """Number of logits to form at a time on this device."""
        return self.block_on(self.device)

    @classmethod
    def block_on(cls, device: torch.device) -> int:
        """Return how many logits to form at a time: 64 MiB on a GPU, where each block is a dozen kernel launches."""
        return cls.BLOCK << (0 if device.type == "cpu" else 4)

    @property
    def in_windows(self) -> bool:
        """Flag that there are several windows, or one that is larger than the image."""
        return self.windows > 1 or self.cut is not None

    @property
    def class_query(self) -> int | None:
        """Index of the class token among the queries; None without one, or with one for each class."""
        return None

    @property
    def distillation_query(self) -> int | None:
        """Index of the distillation token among the queries; None without one."""
        return None

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens among the tokens before the grid; the others are registers."""
        return 0

    @property
    def gate(self) -> Tensor | None:
        """Share of positional attention of each head, shape (heads,); None for attention without gates."""
        return None

    @property
    def map_size(self) -> tuple[int, int] | None:
        """Rows and columns of the maps that :meth:`on_grid` gives; None where no grid is known."""
        return None if self.layout.keys is None else self.layout.keys.size

    def own_key(self, query: int) -> int | None:
        """Index among the keys of a class or distillation token that is a query; None if it is not one of them."""
        return (
            query
            if self.layout.asking == "tokens" and query < self.layout.prefix
            else None
        )

    def content(self) -> Tensor:
        """Return the part of A that images decide: (rows, heads, N_query, keys). All of it, but for gated attention."""
        return self.weights().flatten(0, 1)

    def row(self, query: int, images: Sequence[int]) -> Tensor:
        """Return the attention of one query in some images: shape (images, windows, heads, N_key)."""
        one_query = slice(query, query + 1)
        return torch.stack(
            [self.weights(one_query, image)[0, :, :, 0] for image in images]
        )

    def received(self, images: Sequence[int]) -> Tensor:
        """Return the mean over queries of A_ij, how much each key is looked at: (images, windows, heads, N_key)."""
        # In blocks of queries: all of A at once can be gigabytes for an image of many patches.
        step = max(1, self.block // (self.windows * self.heads * self.keys))
        blocks = [slice(start, start + step) for start in range(0, self.queries, step)]
        received = []
        for image in images:
            sums = [self.weights(block, image)[0].sum(-2) for block in blocks]
            received.append(torch.stack(sums).sum(0) / self.queries)
        return torch.stack(received)

    def on_grid(self, rows: Tensor) -> Tensor:
        """Return the keys on the grid of (..., N_key): shape (..., height, width), without those of the padding."""
        keys = self.layout.keys
        assert keys is not None
        return rows[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))


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
        class_token: Whether the first token before the grid, if there is any, is a class token, and no register.
        distillation_token: Whether the second one, if there is one, is a distillation token.
        compare: Comparison with what torch gave the model, see :meth:`discrepancy`; None without one.
        find_values, find_outputs: Functions behind :meth:`values` and :meth:`head_outputs`; None without values.
    """

    logits: "Logits"
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
        if self.layout.asking == "classes":
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
        return min(self.layout.prefix, self.class_token + self.distillation_token)

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
        return softmax_statistics(self, self._measurements())

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


def weigh(attention: Tensor, values: Tensor) -> Tensor:
    """Weigh values, (rows, heads or 1, N_key, d), by attention, (images or 1, windows, heads, N_query, N_key).

    Returns:
        Shape (rows, heads, N_query, d).
    """
    # (rows, heads, N_key, d) to (B, windows, heads, N_key, d); einsum repeats axes of length 1, of B and of shared
    # heads.
    by_image = values.unflatten(0, (-1, attention.shape[1]))
    return torch.einsum(
        "bwhqk,bwhkd->bwhqd", attention.to(values.dtype), by_image
    ).flatten(0, 1)
