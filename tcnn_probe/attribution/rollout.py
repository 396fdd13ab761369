"""Attention rollout: attention traced from layer to layer, back to the input."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tcnn_model import GPSA
from tcnn_model.pooling.attention_pool import PatchAttention
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import attention_stream
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
    """Compute the class token's row of A_L ... A_1; A_l = (W_l + I) / 2, W_l the attention of layer l, mean over heads.

    Layers are those on the path from the image to the output: a teacher beside a student, or a tower of text, does not
    count. Parallel layers that add to the same tokens (ViT-S 18x2) are one layer with the heads of all; if the output
    depends on towers side by side, as in an ensemble, there is no such product. A layer of class attention with the
    token as its only query (CaiT, attention pools) leaves the patches unchanged; a class token that joins the patches
    after some layers (ConViT) consists only of itself before. For CaiT's talking heads W is the softmax, before the
    heads are mixed. The model runs twice, and a few N x N matrices per image are stored, for any depth. (Abnar &
    Zuidema 2020, Quantifying Attention Flow in Transformers, §3.)

    Args:
        model: Vision transformer of one resolution with a class token.
        images: Images, shape (B, C, H, W).
        target: Classes, shape (B,); they have no effect.
        interpolation: Interpolation between patches, "bilinear" or "nearest".

    Returns:
        Map of shape (B, H, W), with the share of the patch at each pixel, and "" in place of a layer's name.

    Raises:
        ValueError: Attention is in windows or between different numbers of tokens, the output depends on towers side by
            side, or there is no class token.
    """
    flow = _TokenFlow(len(images), attention_path(model, images))
    size = images.shape[2], images.shape[3]
    with (
        ReceptiveFields(size) as fields,
        attention_stream(model, flow.follow),
    ):
        model(images)
    return to_pixels(flow.map(), size, interpolation, fields), ""


class _TokenFlow:
    """Shares of the input tokens in the tokens of each image, followed through the layers so far."""

    def __init__(self, images: int, path: Sequence[PathLayer]) -> None:
        self._images = images
        self._path = iter(path)
        # (B, N, N): shares of the first layer's tokens in each token.
        self._shares: Tensor | None = None
        # (B, 1 + N): shares of the initial class token and of these tokens in a class token that is not among the N.
        self._class_row: Tensor | None = None
        self._last: Attention | None = None
        # The tokens before the last layer, the sum of its heads' attention times these, and the number of heads.
        self._layer: tuple[Tensor, Tensor, int]

    def follow(self, attention: Attention) -> None:
        """Follow the tokens through one more layer."""
        name, layer = attention.name, next(self._path, None)
        if layer is None or layer.layer != name:
            raise UnsupportedMethodError(
                f"rollout needs the same layers in every forward; {name!r} did not run at this place in another one"
            )
        if not layer.on_path:
            return
        if isinstance(attention.module, GPSA):
            raise UnsupportedMethodError(
                f"rollout follows tokens through attention alone, and around the GPSA layer {name!r} convolutions move "
                f"them as well. {WITHOUT_CLASS_TOKEN}"
            )
        if attention.windows == 1 and not attention.shows_batch:
            reason = attention.without_maps or (
                f"it sees {attention.images} of {self._images}, or in another order"
            )
            raise UnsupportedMethodError(
                f"rollout needs all {self._images} images in every layer; {name!r} saw {attention.images}: {reason}"
            )
        if attention.windows > 1:
            raise UnsupportedMethodError(
                f"rollout needs attention over the whole image; {name!r} attends in windows. {WITHOUT_CLASS_TOKEN}"
            )
        tokens = None if self._shares is None else self._shares.shape[1]
        if tokens is None and (
            attention.queries == 1 or isinstance(attention.module, PatchAttention)
        ):
            raise UnsupportedMethodError(
                f"rollout follows tokens from layer to layer; here only {name!r} attends: use 'class_attention'"
            )
        is_square = attention.queries == attention.keys and self._class_row is None
        # A square layer mixes the tokens, perhaps with a class token that joins them here; a single query gathers them.
        if (
            is_square
            and tokens is not None
            and attention.keys == tokens + 1
            and attention.layout.prefix == 1
        ):
            self._join_class_token()
            tokens += 1
        if is_square and tokens in (None, attention.keys):
            self._mix(attention, joins=layer.beside is not None)
        elif (
            attention.queries == 1
            and tokens is not None
            and attention.keys in (tokens, tokens + 1)
        ):
            self._gather(attention)
        else:
            raise UnsupportedMethodError(
                f"rollout needs the same tokens in every layer: {name!r} has {attention.queries} queries and "
                f"{attention.keys} keys{f' after {tokens} tokens' if tokens else ''}. {WITHOUT_CLASS_TOKEN}"
            )

    def _join_class_token(self) -> None:
        """Prepend a class token, which consists only of itself, to the tokens; that of ConViT joins them late."""
        assert self._shares is not None
        self._shares = pad(self._shares, (1, 0, 1, 0))
        self._shares[:, 0, 0] = 1

    def _mix(self, attention: Attention, joins: bool) -> None:
        """Mix the tokens; a layer that joins the last one, in parallel, adds its heads to those of that layer."""
        if not joins:
            before = self._shares
            if before is None:
                eye = torch.eye(
                    attention.keys, dtype=attention.dtype, device=attention.device
                )
                before = eye.expand(self._images, -1, -1)
            # The format has to be contiguous because the first "before" is an identity expanded over images.
            total = torch.zeros_like(before, memory_format=torch.contiguous_format)
            self._layer = before, total, 0
        before, total, heads = self._layer
        step = max(
            1, attention.block // (attention.images * attention.heads * attention.keys)
        )
        for start in range(0, attention.queries, step):
            rows = slice(start, start + step)
            # Sums of blocks of queries, so that (heads, N, N) is never stored.
            total[:, rows] += attention.weights(rows)[:, 0].sum(1) @ before
        heads += attention.heads
        self._layer = before, total, heads
        # (W + I) / 2, where I is the residual branch.
        self._shares = (total / heads + before) / 2
        self._last = attention

    def _gather(self, attention: Attention) -> None:
        """Follow a class token that is the only query; the patches do not change."""
        assert self._shares is not None
        before = self._class_row
        if before is None:
            # (B, 1 + N): the token initially consists only of itself.
            before = pad(torch.zeros_like(self._shares[:, 0]), (1, 0), value=1.0)
        weights = attention.weights(slice(0, 1))[:, 0].mean(1)  # (B, 1, keys)
        # 1 if the class token attends to itself, too, as in CaiT, and 0 if only to patches, as in attention pools.
        is_among_keys = attention.keys - self._shares.shape[1]
        gathered = pad(weights[..., is_among_keys:] @ self._shares, (1, 0))[:, 0]
        if is_among_keys:
            gathered = gathered + weights[:, :, 0] * before
        self._class_row = (gathered + before) / 2

    def map(self) -> Tensor:
        """Return the map of the class token, shape (B, h, w)."""
        if self._last is None or self._shares is None:
            raise UnsupportedMethodError(
                f"no attention was seen in this model; {WITHOUT_CLASS_TOKEN}"
            )
        patches, query = self._last.layout.keys, self._last.class_query
        if patches is None:
            raise UnsupportedMethodError(
                f"the patches of {self._last.name!r} lie on no known grid: {self._last.layout.reason}"
            )
        if self._class_row is not None:
            # The share of the initial class token is left out.
            row = self._class_row[:, 1:]
        elif query is None:
            raise UnsupportedMethodError(
                f"rollout starts from a class token, and this model has none; {WITHOUT_CLASS_TOKEN}"
            )
        else:
            row = self._shares[:, query]
        return row[:, patches.prefix :].unflatten(-1, (patches.height, patches.width))
