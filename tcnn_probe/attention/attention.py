"""An attention of a forward: who attends, from where, to what, and with which weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32, widest_dtype
from tcnn_probe.architectures.grids import Windows
from tcnn_probe.attention.layout import Layout

__all__ = ["Attention", "ContentRows", "WholeLayers", "weigh"]


@dataclass(frozen=True)
class ContentRows:
    """Attention that images decide, the content part of gated layers, query by query and key by key.

    Args:
        entropy: -sum_j A_ij log A_ij of each query, shape (B, windows, heads, N_query).
        received: Mean over queries of A_ij, shape (B, windows, heads, N_key).
        similarity: Mean cosine of a head's rows A_i with those of the layer's other heads, of a sample of the queries,
            shape (B, heads); zeros for images beyond :attr:`Attention.limit`.
    """

    entropy: Tensor
    received: Tensor
    similarity: Tensor


@dataclass(frozen=True, kw_only=True)
class Attention(ABC):
    """The attention A of one call of a layer: B images, each in one or more windows, and a softmax for each head.

    A forward shows two kinds, ``SoftmaxAttention`` and ``GatedAttention``; readers such as recorders, maps and rollout
    work on what is below and need not tell them apart. A third kind (the kernel of linear attention, say) takes one
    file: a subclass with :attr:`shape`, :attr:`source`, :meth:`weights`, :meth:`statistics` and :meth:`discrepancy`,
    and a :class:`WholeLayers` that says of which layers it is and how it is described once they have run. The stream
    shows those that are listed in its ``WHOLE_LAYERS``.

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
    def discrepancy(self, output: Any) -> tuple[Tensor, float] | None:
        """Compare A with what the model computed from it, for the first image.

        Args:
            output: Output of the layer, for kinds that are compared with it.

        Returns:
            The largest difference as a share of the largest value, shape () in float32, and the largest share that
            rounding explains; None if nothing can be compared, as under dropout.
        """

    def content_rows(self) -> ContentRows | None:
        """Return entropies and received attention of the part of A that images decide, for :attr:`detailed` ones.

        None for kinds that do not measure them.
        """
        return None

    def values(self) -> Tensor | None:
        """Return the values, (rows, heads or 1, content_keys, d); None where they do not show."""
        return None

    def head_outputs(self) -> Tensor | None:
        """Return the heads' outputs A v, (rows, heads, N_query, d); None where they do not show."""
        return None

    def segment_attention(self) -> Tensor | None:
        """Return sums of A over the keys of each segment, as means over the queries of each segment.

        Returns:
            Shape (B, heads, segments of queries, segments of keys), see
            ``tcnn_probe.attention.segments.SEGMENTS``; 0 for segments without queries. None where the segments
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

    def uniform_scales(self) -> dict[str, Tensor]:
        """Return what entropy and distance would be if every query attended to all keys alike, for each image: (B,).

        Keys that a mask hides from a query count as keys, and so does padding. Where no grid is known there is no
        distance. Gated attention has ``uniform_content_entropy`` too, over real pixels.
        """
        scales = {"uniform_entropy": math.log(self.keys)}
        if self.gate is not None:
            scales["uniform_content_entropy"] = math.log(self.content_keys)
        distance = self.layout.uniform_distance
        if distance is not None:
            scales["uniform_distance"] = distance
        dtype, device = widest_dtype(self.device), self.device
        return {
            name: torch.full((self.images,), scale, dtype=dtype, device=device)
            for name, scale in scales.items()
        }

    def own_key(self, query: int) -> int | None:
        """Return the index among the keys of a class or distillation token that is a query; None if it is not one."""
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
class WholeLayers:
    """Layers whose attention is shown as a whole once they have run; softmaxes inside are parts of it.

    Args:
        classes: Classes of the layers.
        describe: Function (layer, input, formed, name, running) of a call that has returned, which gives its attention.
            ``formed`` has the outputs of the seams in this call, by role.
        seams: Function of a layer that gives the submodules whose outputs ``describe`` needs, with their roles.
    """

    classes: tuple[type[nn.Module], ...]
    describe: Callable[..., Attention]
    seams: Callable[[Any], Mapping[nn.Module, str]] = lambda layer: {}


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
