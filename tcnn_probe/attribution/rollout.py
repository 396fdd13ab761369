"""Attention rollout: attention traced from layer to layer, back to the input."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tcnn_model import GPSA
from tcnn_model.pooling.attention_pool import PatchAttention
from tcnn_model.precision import without_autocast
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.logits import ProductLogits
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.attribution.attention_path import PathLayer, attention_path
from tcnn_probe.attribution.layer_choice import (
    WITHOUT_CLASS_TOKEN,
    UnsupportedMethodError,
)
from tcnn_probe.attribution.pixels import to_pixels

__all__ = ["rollout"]


@torch.no_grad()
def rollout(
    model: nn.Module, images: Tensor, target: Tensor, *, interpolation: str = "bilinear"
) -> tuple[Tensor, str]:
    """Compute the class token's row of A_L ... A_1;
    A_l = (W_l + I) / 2, W_l the attention of layer l, mean over heads.

    Layers are those on the path from the image to the output: a teacher beside a student, or a
    tower of text, does not count. Parallel layers that add to the same tokens (ViT-S 18x2) are one
    layer with the heads of all; if the output depends on towers side by side, as in an ensemble,
    there is no such product. A layer of class attention with the token as its only query (CaiT,
    attention pools) leaves the patches unchanged; a class token that joins the patches after some
    layers (ConViT) consists only of itself before. For CaiT's talking heads W is the softmax,
    before the heads are mixed. The model runs twice. Then the row is followed from the last layer
    back to the first, so that no matrices are multiplied: queries and keys of all layers are
    stored, or, if the model has formed its attention itself, their N x N matrices, means over
    heads. (Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers, §3.)

    Args:
        model: Vision transformer of one resolution with a class token.
        images: Images, shape (B, C, H, W).
        target: Classes, shape (B,); they have no effect.
        interpolation: Interpolation between patches, "bilinear" or "nearest".

    Returns:
        Map of shape (B, H, W), with the share of the patch at each pixel, and "" in place of a
        layer's name.

    Raises:
        ValueError: Attention is in windows or between different numbers of tokens, the output
            depends on towers side by side, or there is no class token.
    """
    flow = _TokenFlow(len(images), attention_path(model, images))
    size = images.shape[2], images.shape[3]
    fields = ReceptiveFields(size)
    stream = AttentionStream(model, flow, fields=fields)
    with stream.following():
        model(images)
    # Products of queries and keys are not rounded as the model's layers may be.
    with without_autocast(images):
        return to_pixels(flow.map(), size, interpolation, fields), ""


@dataclass
class _Mix:
    """Attention of one or several parallel layers, which mixes the tokens of each image.

    Args:
        tokens: Number of tokens.
        has_joined: Whether the first is a class token that consisted only of itself before, such as
            that of ConViT.
        layers: Attention of each layer, or its sum over heads, shape (B or 1, N, N).
        heads: Number of heads of all layers.
    """

    tokens: int
    has_joined: bool
    layers: list[Attention | Tensor] = field(default_factory=list)
    heads: int = 0

    def add(self, attention: Attention) -> None:
        """Add a parallel layer."""
        self.heads += attention.heads
        # Queries and keys take less than their products, unless the model has formed these. What
        # other attention is rebuilt from, such as the input of nn.MultiheadAttention, the model may
        # change later in the forward.
        is_small = attention.source.numel() < attention.images * self.tokens**2
        is_kept = not isinstance(attention, SoftmaxAttention) or isinstance(
            attention.logits, ProductLogits
        )
        if is_kept and is_small:
            self.layers.append(attention)
            return
        blocks = [attention.weights(rows)[:, 0].sum(1) for rows in self._blocks(attention)]
        self.layers.append(torch.cat(blocks, 1))

    def before(self, row: Tensor) -> Tensor:
        """Return a row of shares of the tokens, (B, N),
        as shares of the tokens before these layers.
        """
        total = torch.zeros_like(row)
        for layer in self.layers:
            if isinstance(layer, Tensor):
                total += (row[:, None] @ layer)[:, 0]
                continue
            for rows in self._blocks(layer):
                part = row[:, None, None, rows] @ layer.weights(rows)[:, 0]
                total += part.sum(1)[:, 0]
        # (W + I) / 2, where I is the residual branch.
        row = (total / self.heads + row) / 2
        return row[:, 1:] if self.has_joined else row

    def _blocks(self, attention: Attention) -> list[slice]:
        """Return blocks of queries, so that (heads, N, N) is never stored."""
        in_row = attention.images * attention.heads * self.tokens
        step = max(1, attention.block // in_row)
        return [slice(start, start + step) for start in range(0, self.tokens, step)]


class _TokenFlow(AttentionListener):
    """Attention of the layers so far, through which shares
    of the input tokens in the class token are followed.
    """

    def __init__(self, images: int, path: Sequence[PathLayer]) -> None:
        self._images = images
        self._path = iter(path)
        self._mixes: list[_Mix] = []
        # Attention of a class token that is not among the tokens, (B, keys), of each layer that
        # gathers them for it.
        self._gathers: list[Tensor] = []
        self._last: Attention | None = None

    def attends(self, attention: Attention) -> None:
        """Follow the tokens through one more layer."""
        name, layer = attention.name, next(self._path, None)
        if layer is None or layer.layer != name:
            raise UnsupportedMethodError(
                f"rollout needs the same layers in every forward; {name!r} did not run at this "
                "place in another one"
            )
        if not layer.on_path:
            return
        if isinstance(attention.module, GPSA):
            raise UnsupportedMethodError(
                "rollout follows tokens through attention alone, and around the GPSA layer "
                f"{name!r} convolutions move them as well. {WITHOUT_CLASS_TOKEN}"
            )
        if attention.windows == 1 and not attention.shows_batch:
            reason = attention.without_maps or (
                f"it sees {attention.images} of {self._images}, or in another order"
            )
            raise UnsupportedMethodError(
                f"rollout needs all {self._images} images in every layer; {name!r} saw "
                f"{attention.images}: {reason}"
            )
        if attention.windows > 1:
            raise UnsupportedMethodError(
                f"rollout needs attention over the whole image; {name!r} attends in windows. "
                f"{WITHOUT_CLASS_TOKEN}"
            )
        tokens = self._mixes[-1].tokens if self._mixes else None
        if tokens is None and (
            attention.queries == 1 or isinstance(attention.module, PatchAttention)
        ):
            raise UnsupportedMethodError(
                f"rollout follows tokens from layer to layer; here only {name!r} attends: use "
                "'class_attention'"
            )
        is_square = attention.queries == attention.keys and not self._gathers
        # A square layer mixes the tokens, perhaps with a class token that joins them here; a single
        # query gathers them.
        has_joined = (
            is_square
            and tokens is not None
            and attention.keys == tokens + 1
            and attention.layout.prefix == 1
        )
        if is_square and (has_joined or tokens in (None, attention.keys)):
            if layer.beside is None or not self._mixes:
                self._mixes.append(_Mix(attention.keys, has_joined))
            self._mixes[-1].add(attention)
            self._last = attention
        elif (
            attention.queries == 1 and tokens is not None and attention.keys in (tokens, tokens + 1)
        ):
            weights = attention.weights(slice(0, 1))[:, 0].mean(1)[:, 0]
            self._gathers.append(weights.expand(self._images, -1))
        else:
            raise UnsupportedMethodError(
                f"rollout needs the same tokens in every layer: {name!r} has {attention.queries} "
                f"queries and {attention.keys} keys{f' after {tokens} tokens' if tokens else ''}. "
                f"{WITHOUT_CLASS_TOKEN}"
            )

    def map(self) -> Tensor:
        """Return the map of the class token, shape (B, h, w)."""
        if self._last is None:
            raise UnsupportedMethodError(
                f"no attention was seen in this model; {WITHOUT_CLASS_TOKEN}"
            )
        patches, query = self._last.layout.keys, self._last.class_query
        if patches is None:
            raise UnsupportedMethodError(
                f"the patches of {self._last.name!r} lie on no known grid: "
                f"{self._last.layout.reason}"
            )
        if self._gathers:
            row = self._row_of_gathers(self._last.keys)
        elif query is None:
            raise UnsupportedMethodError(
                f"rollout starts from a class token, and this model has none; {WITHOUT_CLASS_TOKEN}"
            )
        else:
            row = self._last.source.new_zeros(
                (self._images, self._last.keys), dtype=self._last.dtype
            )
            row[:, query] = 1
        for mix in reversed(self._mixes):
            row = mix.before(row)
        return row[:, -patches.height * patches.width :].unflatten(
            -1, (patches.height, patches.width)
        )

    def _row_of_gathers(self, tokens: int) -> Tensor:
        """Return the shares of the tokens, before they are gathered,
        in a class token that is the only query.
        """
        row: Tensor | float = 0.0
        # Share of the class token as it was before the gathers that come later.
        share: Tensor | float = 1.0
        for weights in reversed(self._gathers):
            row = row + share * weights[:, -tokens:] / 2
            # The class token may attend to itself, too, as in CaiT, or only to patches, as in
            # attention pools.
            itself = weights[:, :-tokens].sum(1, keepdim=True)
            share = share * (1 + itself) / 2
        assert isinstance(row, Tensor)
        return row
