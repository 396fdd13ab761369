"""The attention of one call of a layer: its module, queries, keys, grids and weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32, widest_dtype
from tcnn_probe.architectures.grids import Windows
from tcnn_probe.attention.layout import Layout
from tcnn_probe.attention.patterns import entropy_of

if TYPE_CHECKING:
    from tcnn_probe.attention.visibility import Visibility

__all__ = ["Attention", "ContentRows", "WholeLayers", "weigh"]


@dataclass(frozen=True)
class ContentRows:
    """Statistics of content attention by query and by key:
    of A, or of the content part of gated layers.

    Args:
        entropy: -sum_j A_ij log A_ij of each query, shape (B, windows, heads, N_query).
        received: Mean over queries of A_ij, shape (B, windows, heads, N_key); 0 for windows of
            padding.
        similarity: Mean cosine between a head's rows A_i and those of the layer's other heads, over
            a sample of the queries, shape (B, heads); zeros for images beyond
            :attr:`Attention.limit`.
    """

    entropy: Tensor
    received: Tensor
    similarity: Tensor


@dataclass(frozen=True, kw_only=True)
class Attention(ABC):
    """The attention A of one call of a layer: B images,
    each in one or more windows, and a softmax for each head.

    There are two kinds, ``SoftmaxAttention`` and ``GatedAttention``. Recorders, maps and rollout
    use the interface of this class and need not tell them apart. A third kind, such as the kernel
    of linear attention, needs one file: a subclass with :attr:`shape`, :attr:`source`,
    :meth:`weights`, :meth:`statistics` and :meth:`discrepancy`, and a :class:`WholeLayers` that
    names its layers and describes their attention after they have run. The stream handles the kinds
    that are listed in its ``WHOLE_LAYERS``.

    The underlying tensors belong to the model and are valid only while the layer runs: keep copies
    of what you need.

    Args:
        module: Module that attends.
        name: Name of the layer, as in recordings; "name#1" for the second attention in one call of
            the module.
        images: Number of images B.
        windows: Number of windows of each image, 1 for attention over the whole image. Row b *
            windows + w of ``shape[0]`` is window w of image b.
        layout: Description of the tokens: the grids on which queries and keys lie, their order, and
            windows.
        number: Position of this attention among those of one call of the module, counted from 0.
        batch: Number of images in the model's batch; None if unknown.
        image_numbers: Number in that batch of each of the B images; None if unknown.
        without_maps: Reason why maps of this attention cannot be assigned to images; "" if they
            can.
        limit: Number of first images that count in sums over images; None for all.
        detailed: Whether the pass over the logits also computes :meth:`content_rows`.
        residual: Function that returns the tokens that enter the block around the layer, (B, N, C),
            including class and register tokens; it returns None if they are not found.
        shared: Results that the listeners of one forward share, also in copies of this attention.
    """

    BLOCK: ClassVar[int] = 1 << 20
    """Number of logits formed at a time on a CPU: 4 MiB in float32, which stay in its cache."""

    module: nn.Module
    images: int
    layout: Layout
    windows: int = 1
    name: str = ""
    number: int = 0
    batch: int | None = None
    image_numbers: Sequence[int] | None = None
    without_maps: str = ""
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
        """A tensor from which A is computed, for its device and dtype."""

    @abstractmethod
    def weights(self, queries: slice = slice(None), image: int | None = None) -> Tensor:
        """Return the attention of some queries.

        Args:
            queries: Slice of the N_query queries.
            image: Index of one image; None for all.

        Returns:
            Shape (B or 1, windows, heads, queries, N_key), at least in float32. Rows sum to one,
            except for queries from which all keys are hidden: their rows are 0, as in torch's fused
            attention.
        """

    @abstractmethod
    def statistics(self) -> Mapping[str, Any]:
        """Return the statistics of A that recordings keep,
        computed exactly and without an N x N tensor.

        Returns:
            Values by variable: tensors of shape (B, heads) or, for the scales of uniform attention,
            (B,), and a ``Pattern`` for variables that need sums over images.
        """

    @abstractmethod
    def discrepancy(self, output: Any) -> tuple[Tensor, float] | None:
        """Compare A with the model's own computation, for the first image.

        Args:
            output: Output of the layer, for kinds of attention that are compared with it.

        Returns:
            The largest difference relative to the largest value, shape () in float32, and the
            largest relative difference that rounding explains; None if nothing can be compared, for
            example under dropout.
        """

    def content_rows(self) -> ContentRows | None:
        """Return statistics of content attention if this attention is :attr:`detailed`.

        None for kinds of attention that do not measure them.
        """
        return None

    @property
    def visibility(self) -> "Visibility | None":
        """Keys that queries see, and which tokens are padding; None without a mask."""
        return None

    def values(self) -> Tensor | None:
        """Return the values, (rows, heads or 1, content_keys, d); None if they are unknown."""
        return None

    def head_outputs(self) -> Tensor | None:
        """Return the heads' outputs A v, (rows, heads, N_query, d); None if they are unknown."""
        return None

    def segment_attention(self) -> Tensor | None:
        """Return sums of A over the keys of each segment,
        as means over the queries of each segment.

        Returns:
            Shape (B, heads, segments of queries, segments of keys), see
            ``tcnn_probe.attention.segments.SEGMENTS``; 0 for segments without queries. None if the
            segments are unknown.
        """
        return None

    @property
    def shows_batch(self) -> bool:
        """True if its images are those of the model's batch, all of them in the same order."""
        numbers = self.image_numbers
        is_known = self.batch is None or numbers is not None
        return is_known and (numbers is None or list(numbers) == list(range(self.batch or 0)))

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
        """Number of rows, which are the windows of all images."""
        return self.shape[0]

    @property
    def content_keys(self) -> int:
        """Number of keys of content attention, see :meth:`content`."""
        return self.keys

    @property
    def device(self) -> torch.device:
        """Device of the layer."""
        return self.source.device

    @property
    def dtype(self) -> torch.dtype:
        """Float32, or float64 if the model is in float64."""
        return at_least_float32(self.source.dtype)

    @property
    def block(self) -> int:
        """Number of logits to compute at a time on this device."""
        return self.block_on(self.device)

    @classmethod
    def block_on(cls, device: torch.device) -> int:
        """Return how many logits to compute at a time:
        128 MiB on a GPU, where a block takes some forty kernel launches.
        """
        return cls.BLOCK << (0 if device.type == "cpu" else 5)

    @property
    def cut(self) -> Windows | None:
        """Positions of the windows in the image, see :class:`Layout`."""
        return self.layout.cut

    @property
    def query_cut(self) -> Windows | None:
        """Positions of the queries' windows, see :class:`Layout`."""
        return self.layout.query_cut

    @property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """Indices of the model's queries and keys
        in the order of this attention, see :class:`Layout`.
        """
        return self.layout.order

    @property
    def in_windows(self) -> bool:
        """True if there are several windows, or one that is larger than the image."""
        return self.windows > 1 or self.cut is not None

    @property
    def class_query(self) -> int | None:
        """Index of the class token among the queries;
        None if there is none, or one for each class.
        """
        return None

    @property
    def distillation_query(self) -> int | None:
        """Index of the distillation token among the queries; None without one."""
        return None

    @property
    def first_patch_query(self) -> int | None:
        """Index of the first query after class and register tokens;
        None if all queries are such tokens.
        """
        queries = self.layout.queries
        if queries is not None:
            return queries.prefix
        only_classes = self.layout.asking == "classes" or self.class_query is not None
        return None if only_classes else 0

    @property
    def class_tokens(self) -> int:
        """Number of class and distillation tokens among the tokens before the grid;
        the others are registers.
        """
        return 0

    @property
    def gate(self) -> Tensor | None:
        """Share of positional attention of each head,
        shape (heads,); None for attention without gates.
        """
        return None

    @property
    def map_size(self) -> tuple[int, int] | None:
        """Rows and columns of the maps that :meth:`on_grid` returns; None if no grid is known."""
        return None if self.layout.keys is None else self.layout.keys.size

    @property
    def cells(self) -> tuple[int, int] | None:
        """Rows and columns of the finer of the grids
        of queries and keys in the whole image; None if unknown.
        """
        if self.cut is not None:
            cuts = (self.cut, self.query_cut or self.cut)
            return max(cut.grid for cut in cuts)
        if self.windows > 1:
            return None
        tokens = (self.layout.queries, self.layout.keys)
        return max(
            ((side.rows, side.width) for side in tokens if side is not None),
            default=None,
        )

    def uniform_scales(self) -> dict[str, Tensor]:
        """Return entropy and distance of attention
        that is uniform over the visible keys, for each image: (B,).

        The zero padding of gated attention counts as keys. Without a known grid there is no
        distance. Gated attention also has ``uniform_content_entropy``, over real pixels.
        """
        scales = {"uniform_entropy": math.log(self.keys)}
        if self.gate is not None:
            scales["uniform_content_entropy"] = math.log(self.content_keys)
        distance = self.layout.uniform_distance
        if distance is not None:
            scales["uniform_distance"] = distance
        if is_shifted := self.cut is not None and any(self.cut.shift):
            assert self.cut is not None
            scales |= _uniform_in_regions(self.cut, self.layout)
        dtype, device = widest_dtype(self.device), self.device
        values = {
            name: torch.full((self.images,), scale, dtype=dtype, device=device)
            for name, scale in scales.items()
        }
        if not is_shifted and (visibility := self.visibility) is not None:
            entropy = visibility.seen.to(dtype).clamp_min(1).log().flatten(0, 1)
            values["uniform_entropy"] = visibility.mean(entropy[:, None])[:, 0]
            if visibility.distance is not None and self.layout.queries is not None:
                first = self.layout.queries.prefix
                far = visibility.distance[..., first:].flatten(0, 1)
                values["uniform_distance"] = visibility.mean(far[:, None], first)[:, 0]
        return values

    def visible_keys(self, query: int) -> Tensor:
        """Return the number of keys that no mask hides from a query,
        in each window of each image: (B, windows).
        """
        shape = self.images, self.windows
        return torch.full(shape, self.keys, device=self.device)

    def query_row(self, query: int) -> tuple[Tensor, Tensor]:
        """Return the attention of one query, shape (B, windows, heads, N_key), and its entropy in
        nats, shape (B, windows, heads).
        """
        row = self.weights(slice(query, query + 1))[:, :, :, 0]
        return row, entropy_of(row)

    def own_key(self, query: int) -> int | None:
        """Return the index among the keys of a class
        or distillation token that is a query; None if it is not one.
        """
        return query if self.layout.asking == "tokens" and query < self.layout.prefix else None

    def content(self) -> Tensor:
        """Return content attention, (rows, heads, N_query, keys):
        all of A, or the content part of gated attention.
        """
        return self.weights().flatten(0, 1)

    def row(self, query: int, images: Sequence[int]) -> Tensor:
        """Return the attention of one query in some images,
        NaN for padding: (images, windows, heads, N_key).
        """
        one_query = slice(query, query + 1)
        rows = torch.stack([self.weights(one_query, image)[0, :, :, 0] for image in images])
        if self.visibility is None:
            return rows
        counted = self.visibility.queries[list(images), :, query]
        return rows.where(counted[..., None, None], torch.nan)

    def received(self, images: Sequence[int]) -> Tensor:
        """Return the attention that keys receive,
        the mean of A_ij over queries: (images, windows, heads, N_key).

        Padding does not count as a query; the keys of windows of padding receive 0.
        """
        # The sum is over blocks of queries, because all of A can take gigabytes if an image has
        # many patches.
        step = max(1, self.block // (self.windows * self.heads * self.keys))
        blocks = [slice(start, start + step) for start in range(0, self.queries, step)]
        received = []
        for image in images:
            if self.visibility is None:
                sums = [self.weights(block, image)[0].sum(-2) for block in blocks]
                received.append(torch.stack(sums).sum(0) / self.queries)
                continue
            counted = self.visibility.queries[image][:, None, :, None]
            sums = [
                self.weights(block, image)[0].where(counted[:, :, block], 0).sum(-2)
                for block in blocks
            ]
            count = counted.sum(-2).clamp_min(1)
            received.append(torch.stack(sums).sum(0) / count)
        return torch.stack(received)

    def on_grid(self, rows: Tensor) -> Tensor:
        """Return the values (..., N_key) of the keys on the grid,
        without padding: shape (..., height, width).
        """
        keys = self.layout.keys
        assert keys is not None
        return rows[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))


@dataclass(frozen=True)
class WholeLayers:
    """Layers whose attention is described as a whole after they have run;
    softmaxes inside are only parts of it.

    Args:
        classes: Classes of the layers.
        describe: Function (layer, input, formed, name, running) -> attention of a call that has
            returned. ``formed`` has the outputs of the seams in this call, by role.
        seams: Function that returns the submodules of a layer whose outputs ``describe`` needs,
            with their roles.
    """

    classes: tuple[type[nn.Module], ...]
    describe: Callable[..., Attention]
    seams: Callable[[Any], Mapping[nn.Module, str]] = lambda layer: {}


def weigh(attention: Tensor, values: Tensor) -> Tensor:
    """Multiply attention, (images or 1, windows, heads, N_query, N_key),
    by values, (rows, heads or 1, N_key, d).

    Returns:
        Shape (rows, heads, N_query, d).
    """
    # (rows, heads, N_key, d) -> (B, windows, heads, N_key, d). einsum broadcasts axes of length 1:
    # images of the attention, and heads that share their values.
    by_image = values.unflatten(0, (-1, attention.shape[1]))
    return torch.einsum("bwhqk,bwhkd->bwhqd", attention.to(values.dtype), by_image).flatten(0, 1)


@lru_cache(maxsize=256)
def _uniform_in_regions(cut: Windows, layout: Layout) -> dict[str, float]:
    """Return the scales of shifted windows, whose regions do not see each other.

    Their mask of -100 is not found in logits to which the model has added it.
    """
    windows, counts = cut.regions().unique(dim=0, return_counts=True)
    seen = (windows[:, :, None] == windows[:, None]).double()
    by_query = {"uniform_entropy": seen.sum(-1).log()}
    if layout.queries is not None:  # a single window that is rolled is in the order of no grid
        distances = layout.distances(slice(None), torch.float64, torch.device("cpu"))
        by_query["uniform_distance"] = (seen * distances).sum(-1) / seen.sum(-1)
    shares = counts.double() / counts.sum()
    return {name: float((values.mean(-1) * shares).sum()) for name, values in by_query.items()}
