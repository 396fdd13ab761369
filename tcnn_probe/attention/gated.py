"""Gated positional self-attention of our GPSA layers and of timm's ConViT:
A = (1 - g) C + g P (T-CNN Eq. 7).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tcnn_model
from tcnn_model import GPSA as GPSALayer
from tcnn_model.gpsa.functional import attend
from tcnn_model.gpsa.positional import Axis, apply_separable
from tcnn_model.gpsa.statistics import (
    AttentionStatistics,
    apply_and_measure,
    measure,
)
from tcnn_model.precision import widest_dtype, without_autocast
from tcnn_probe.architectures.timm_classes import ConViTLayer
from tcnn_probe.attention.attention import (
    Attention,
    ContentRows,
    WholeLayers,
    weigh,
)
from tcnn_probe.attention.gated_patterns import content_similarity, gated_patterns
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.reconstruction import relative_difference, tolerance
from tcnn_probe.attention.residual_stream import residual_tokens
from tcnn_probe.hooks.forwards import ModuleCall, Running

__all__ = [
    "GATED",
    "GATED_LAYERS",
    "ConViTLayer",
    "GatedAttention",
    "gated_attention_of",
    "gated_means",
    "grids_of_axes",
]

GATED_LAYERS = (GPSALayer, ConViTLayer)


@dataclass(frozen=True, kw_only=True)
class GatedAttention(Attention):
    """Attention of a gated layer over the grid with its zero padding, so that rows sum to one.

    Args:
        describe: Function that returns queries, keys, positions and gates; it is called once, when
            they are needed.
        sizes: Sizes (B, heads, N_query).
        x: Input of the layer.
        outputs: Outputs of the heads in this call, (B, heads, N_query, d); None if they are
            unknown.
    """

    describe: Callable[[], tcnn_model.GatedAttention]
    sizes: tuple[int, int, int]
    x: Tensor
    outputs: Tensor | None = None

    @cached_property
    def parts(self) -> tcnn_model.GatedAttention:
        """Queries, keys, positions and gates of the layer."""
        return self.describe()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (B, heads, N_query, N_key), including padding."""
        return *self.sizes, self.parts.y.keys * self.parts.x.keys

    @property
    def rows(self) -> int:
        """Number of images."""
        return self.sizes[0]

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.sizes[1]

    @property
    def content_keys(self) -> int:
        """Number of real pixels."""
        return self.parts.key.shape[2]

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.sizes[2]

    @property
    def source(self) -> Tensor:
        """The queries."""
        return self.parts.query

    @property
    def gate(self) -> Tensor:
        """Share of positional attention, sigma(lambda), shape (heads,)."""
        return self.parts.gate

    def weights(self, queries: slice = slice(None), image: int | None = None) -> Tensor:
        """Return the attention of some queries, see
        :class:`~tcnn_probe.attention.attention.Attention`.

        Returns:
            Shape (B or 1, 1, heads, queries, N_key), with keys in row-major order over the padded
            grid, as in :meth:`tcnn_model.GPSA.attention`. :meth:`on_grid` selects the real pixels.
        """
        parts = self._of_image(image)
        # Autocast would round the products of queries and keys, which the layer computes at least
        # in float32.
        with without_autocast(parts.query):
            content = parts.content(queries)
            y, x = parts.y, parts.x
            # F.pad starts with the last axis, the columns. Content attention has no keys in the
            # padding, so it is 0 there.
            padding = (x.before, x.after, y.before, y.after)
            content = F.pad(content.unflatten(-1, (y.length, x.length)), padding).flatten(-2)
            rows, columns = parts.factors()
            # Query i is in row i // columns. P is a product of one softmax over rows and one over
            # columns, because squared distances add up over the two axes.
            index = torch.arange(self.queries, device=content.device)[queries]
            positional = (
                rows[:, index // x.queries, :, None] * columns[:, index % x.queries, None, :]
            )
            positional = positional.flatten(2).to(content).expand_as(content)
            return torch.lerp(content, positional, parts.gate.to(content)[:, None, None]).unsqueeze(
                1
            )

    def statistics(self) -> Mapping[str, Any]:
        """Return entropies of A and its parts, distances,
        their values for uniform attention, and sums over images.
        """
        key = "patterns", self.limit
        if key not in self.shared:
            self.shared[key] = gated_patterns(self.parts, self.limit, self.block)
        attention, content = self.shared[key]
        patterns = {
            "content_information": attention,
            "content_part_information": content,
        }
        radius = {"mean_squared_radius": _mean_squared_radius(self.parts).expand(self.images, -1)}
        means = gated_means(self._measured())
        return {**means, **radius, **self.uniform_scales(), **patterns}

    def content_rows(self) -> ContentRows:
        """Return the statistics of the content part C, over real pixels."""
        measured = self._measured()
        assert measured.content_received is not None
        return ContentRows(
            entropy=measured.content_entropy.unsqueeze(1),
            received=(measured.content_received / self.queries).unsqueeze(1),
            similarity=content_similarity(self.parts, self.limit, self.block),
        )

    def values(self) -> Tensor:
        """Return the values, (B, heads or 1, H * W, d),
        without those of the padding, which are zero.
        """
        return _values(self.module, self.x)

    def discrepancy(self, output: Any) -> tuple[Tensor, float] | None:
        """Compare the layer's output for the first image
        with the output computed from A and the values.
        """
        layer: Any = self.module
        # With dropout of its attention or output, ConViT's output cannot be reproduced.
        of_convit = isinstance(layer, ConViTLayer)
        if of_convit and layer.training and (layer.attn_drop.p > 0 or layer.proj_drop.p > 0):
            return None
        gathered, _ = apply_and_measure(self._of_image(0), _values(layer, self.x[:1]))
        return relative_difference(self.output(gathered), output[:1]), tolerance(output.dtype)

    def received(self, images: Sequence[int]) -> Tensor:
        """Return the attention that keys receive,
        the mean of A_ij over queries: (images, 1, heads, N_key).

        The padding is set to zero, because no output depends on it.
        """
        which = torch.as_tensor(images, device=self.source.device)
        parts = replace(self.parts, query=self.parts.query[which], key=self.parts.key[which])
        y, x = parts.y, parts.x
        received = (measure(parts).received / self.queries).unflatten(-1, (y.length, x.length))
        return F.pad(received, (x.before, x.after, y.before, y.after)).flatten(-2).unsqueeze(1)

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the real pixels."""
        return self.parts.y.length, self.parts.x.length

    @property
    def cells(self) -> tuple[int, int]:
        """Rows and columns of the real pixels."""
        return self.map_size

    def on_grid(self, rows: Tensor) -> Tensor:
        """Return the values (..., N_key) of the real pixels: shape (..., height, width)."""
        y, x = self.parts.y, self.parts.x
        extended = rows.unflatten(-1, (y.keys, x.keys))
        return extended[..., y.before : y.before + y.length, x.before : x.before + x.length]

    def content(self) -> Tensor:
        """Return the content part C = softmax(q k^T / sqrt(d)):
        shape (B, heads, N_query, H * W), real pixels only.
        """
        return self.parts.content()

    def with_content(self, heads: Sequence[int], content: Tensor) -> Tensor:
        """Return the outputs of some heads, ((1 - g) C + g P) v, for another content part C.

        Args:
            heads: Indices of the heads.
            content: C, shape (B or 1, 1, len(heads), N_query, H * W); further images are ignored.

        Returns:
            Shape (B, len(heads), N_query, d).
        """
        parts, values, heads = self.parts, self._values_of(heads), list(heads)
        with without_autocast(values):
            rows, columns = parts.factors_on_pixels(values.dtype)
            pixels = values.unflatten(2, (parts.y.length, parts.x.length))
            positional = apply_separable(rows[heads], columns[heads], pixels).flatten(2, 3)
            gate = parts.gate[heads, None, None].to(values.dtype)
            return torch.lerp(weigh(content[: len(self.x)], values), positional, gate)

    def with_whole(self, heads: Sequence[int], attention: Tensor) -> Tensor:
        """Return the outputs of some heads, like :meth:`with_content`,
        for another A with keys in the padding.
        """
        # The values of the padding are zero.
        pixels = self.on_grid(attention[: len(self.x)]).flatten(-2)
        values = self._values_of(heads)
        with without_autocast(values):
            return weigh(pixels, values)

    def _values_of(self, heads: Sequence[int]) -> Tensor:
        values = _values(self.module, self.x)
        # The heads of a GPSA layer share their values (W_val of T-CNN Eq. 5); those of ConViT have
        # their own.
        return values if values.shape[1] == 1 else values[:, list(heads)]

    def head_outputs(self) -> Tensor:
        """Return the heads' outputs A v, shape (B, heads, N_query, d), differentiable."""
        if self.outputs is not None:
            return self.outputs
        return attend(self.parts, _values(self.module, self.x))

    def output(self, heads: Tensor) -> Tensor:
        """Return the layer's output for outputs of the heads, (B, heads, N_query, d)."""
        layer: Any = self.module
        if isinstance(layer, ConViTLayer):
            # forward() is used, because a call would run hooks on the projection a second time.
            return layer.proj.forward(heads.transpose(1, 2).flatten(2))
        return layer.combine(heads, self.parts)

    def _measured(self) -> AttentionStatistics:
        """Measure once for all listeners."""
        # All images are measured; unlike in softmax attention, the limit of images is applied
        # later, to the sums.
        key = "measured", self.detailed
        if key not in self.shared:
            self.shared[key] = measure(self.parts, content_received=self.detailed)
        return self.shared[key]

    def _of_image(self, image: int | None) -> tcnn_model.GatedAttention:
        if image is None:
            return self.parts
        which = slice(image, image + 1)
        return replace(self.parts, query=self.parts.query[which], key=self.parts.key[which])


@torch.no_grad()
def _mean_squared_radius(attention: tcnn_model.GatedAttention) -> Tensor:
    """Return the variance of the offset under P,
    the sum over both axes and mean over queries: (heads,).
    """
    radius = attention.position.new_zeros((), dtype=widest_dtype(attention.query.device))
    for axis, factor in zip((attention.y, attention.x), attention.factors(), strict=True):
        keys = axis.key_positions(factor)
        # Centred first, as a difference of large squares would lose precision.
        offsets = keys - (factor * keys).sum(-1, keepdim=True)
        radius = radius + (factor * offsets.square()).sum(-1).mean(-1)
    return radius


@torch.no_grad()
def gated_means(measured: AttentionStatistics) -> dict[str, Tensor]:
    """Return entropies, mean distance and largest logit of gated positional attention.

    These are means over queries of the fields of :class:`~tcnn_model.AttentionStatistics`; of
    logits, the maximum.

    Args:
        measured: Statistics of the attention of a batch of B images.

    Returns:
        ``entropy``, ``content_entropy`` and ``positional_entropy`` in nats, ``attention_distance``
        in input pixels of the layer and ``max_logit``, shape (B, heads), in float32 (float64 if the
        attention is in float64).
    """
    names = ("entropy", "content_entropy", "positional_entropy", "attention_distance")
    means = {name: getattr(measured, name).mean(-1) for name in names}
    means["positional_entropy"] = means["positional_entropy"].expand_as(means["entropy"])
    if measured.largest_logit is not None:
        means["max_logit"] = measured.largest_logit.amax(-1)
    return means


def _seams_of(layer: Any) -> dict[nn.Module, str]:
    """Return the submodules of a gated layer whose outputs the description uses,
    with their roles.
    """
    of_gpsa = ("head_queries", "head_keys", "head_outputs")
    names = ("qk",) if isinstance(layer, ConViTLayer) else of_gpsa
    return {getattr(layer, name): name for name in names}


def gated_attention_of(
    layer: Any,
    x: Tensor,
    formed: Mapping[str, Sequence[Tensor]] | None = None,
    name: str = "",
    running: Running = (),
) -> GatedAttention:
    """Describe the attention of a gated layer for an input.

    Args:
        layer: GPSA or ConViT layer.
        x: Input of the layer.
        formed: Outputs of the layer's seams in this call, by role. If each seam has run exactly
            once, they are used; otherwise queries and keys are computed again by ``forward`` of the
            submodules, so that hooks on these do not run twice. Outputs of heads are formed unless
            a depth-wise layer sums heads first.
        name: Name of the layer.
        running: Modules that are running around the layer, and their inputs.
    """
    formed_once = {
        role: tensors[0] for role, tensors in (formed or {}).items() if len(tensors) == 1
    }

    def describe() -> tcnn_model.GatedAttention:
        if isinstance(layer, ConViTLayer):
            from tcnn_model.gpsa.convit import convit_attention  # needs timm

            return convit_attention(
                layer, formed_once["qk"] if "qk" in formed_once else layer.qk.forward(x)
            )
        if "head_queries" in formed_once and "head_keys" in formed_once:
            return layer.attention_between(
                formed_once["head_queries"], formed_once["head_keys"], x.shape[2:]
            )
        return layer.gated_attention(x)

    parts = describe()
    batch, heads, count, _ = parts.query.shape
    layout = Layout(*grids_of_axes(parts.y, parts.x))
    return GatedAttention(
        module=layer,
        name=name,
        images=batch,
        layout=layout,
        describe=lambda: parts,
        sizes=(batch, heads, count),
        x=x,
        outputs=formed_once.get("head_outputs"),
        residual=partial(
            residual_tokens,
            [*running, ModuleCall(layer, [x])],
            batch,
            parts.y.length * parts.x.length,
        ),
    )


def grids_of_axes(y: Axis, x: Axis) -> tuple[Tokens, Tokens]:
    """Return the grids of the queries and of the keys,
    which include the padding, of a layer like a convolution.
    """
    queries = Tokens(
        0,
        y.queries,
        x.queries,
        (float(y.stride), float(x.stride)),
        (float(y.first_query), float(x.first_query)),
    )
    keys = Tokens(0, y.keys, x.keys, origin=(-float(y.before), -float(x.before)))
    return queries, keys


def _values(layer: Any, x: Tensor) -> Tensor:
    """Return the values of a gated layer, shape (B, heads or 1, N_key, d)."""
    if isinstance(layer, GPSALayer):
        return layer.values(x)
    # (B, N, heads * d) to (B, heads, N, d).
    return layer.v.forward(x).unflatten(2, (layer.num_heads, -1)).transpose(1, 2)


GATED = WholeLayers(GATED_LAYERS, gated_attention_of, _seams_of)
"""GPSA and ConViT layers, whose attention the stream describes as a whole."""
