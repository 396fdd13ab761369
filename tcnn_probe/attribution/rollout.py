"""Attention rollout: attention followed from layer to layer, back to the input."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tcnn_model.pooling.attention_pool import PatchAttention
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.stream import attention_stream
from tcnn_probe.attribution.pixels import to_pixels
from tcnn_probe.attribution.unsupported import WITHOUT_CLASS_TOKEN, UnsupportedMethodError

__all__ = ["rollout"]


@torch.no_grad()
def rollout(model: nn.Module, images: Tensor, target: Tensor, *, interpolation: str = "bilinear") -> tuple[Tensor, str]:
    """Row of the class token in A_L ... A_1, where A_l = (W_l + I) / 2 and W_l is layer l's attention, mean over heads.

    One N x N matrix an image is held, whatever the depth. Class attention with the token as its only query (CaiT,
    attention pools) is a layer that leaves the patches as they are. For CaiT's talking heads W is the softmax, before
    the heads are mixed. (Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers, §3.)

    Args:
        model: a vision transformer of one resolution with a class token.
        images, target: shapes (B, C, H, W) and (B,); the target has no effect.
        interpolation: from patches to pixels, "bilinear" or "nearest".

    Returns:
        shape (B, H, W): the share of the patch at each pixel; and "".

    Raises:
        ValueError: attention in windows, or between different numbers of tokens, or no class token.
    """
    tokens = _Tokens(len(images))
    size = images.shape[2], images.shape[3]
    with ReceptiveFields(size) as fields, attention_stream(model, tokens.follow) as stream:
        model(images)
    if strange := [name for name in tokens.layers if name not in stream.layers]:
        raise UnsupportedMethodError(f"rollout followed a softmax that weighs no values: {strange}")
    return to_pixels(tokens.map(), size, interpolation, fields), ""


class _Tokens:
    """What the tokens of each image are made of, so far."""

    def __init__(self, images: int) -> None:
        self.layers: list[str] = []
        self._images = images
        self._product: Tensor | None = None  # (B, N, N)
        self._token: Tensor | None = None  # (B, 1 + N): of a class token that is none of the N, of itself and these
        self._last: AttentionCall | None = None

    def follow(self, call: AttentionCall) -> None:
        """One more layer."""
        if call.windows > 1 or call.images != self._images:
            raise UnsupportedMethodError(
                f"rollout needs attention over the whole image; {call.name!r} attends in windows. {WITHOUT_CLASS_TOKEN}"
            )
        self.layers.append(call.name)
        count = None if self._product is None else self._product.shape[1]
        if count is None and (call.queries == 1 or isinstance(call.module, PatchAttention)):
            raise UnsupportedMethodError(
                f"rollout follows tokens from layer to layer; here only {call.name!r} attends: use 'class_attention'"
            )
        if call.queries == call.keys and count in (None, call.keys) and self._token is None:
            self._mix(call)
        elif call.queries == 1 and count is not None and call.keys in (count, count + 1):
            self._gather(call)
        else:
            raise UnsupportedMethodError(
                f"rollout needs the same tokens in every layer: {call.name!r} has {call.queries} queries and "
                f"{call.keys} keys{f' after {count} tokens' if count else ''}. {WITHOUT_CLASS_TOKEN}"
            )

    def _mix(self, call: AttentionCall) -> None:
        before = self._product
        if before is None:
            eye = torch.eye(call.keys, dtype=call.logits.dtype, device=call.logits.device)
            before = eye.expand(self._images, -1, -1)
        after = torch.empty_like(before, memory_format=torch.contiguous_format)
        step = max(1, call.block // (call.images * call.heads * call.keys))
        for start in range(0, call.queries, step):
            rows = slice(start, start + step)
            after[:, rows] = (call.weights(rows)[:, 0].mean(1) @ before + before[:, rows]) / 2
        self._product, self._last = after, call

    def _gather(self, call: AttentionCall) -> None:
        """The token's row, in a matrix in which the other rows are those of the identity."""
        assert self._product is not None
        before = self._token
        if before is None:
            before = pad(torch.zeros_like(self._product[:, 0]), (1, 0), value=1.0)
        weights = call.weights(slice(0, 1))[:, 0].mean(1)  # (B, 1, keys)
        own = call.keys - self._product.shape[1]
        seen = pad(weights[..., own:] @ self._product, (1, 0))[:, 0]
        if own:
            seen = seen + weights[:, :, 0] * before
        self._token = (seen + before) / 2

    def map(self) -> Tensor:
        """The map of the class token, shape (B, h, w)."""
        if self._last is None or self._product is None:
            raise UnsupportedMethodError(f"no attention was seen in this model; {WITHOUT_CLASS_TOKEN}")
        patches, query = self._last.layout.keys, self._last.class_query
        if patches is None:
            raise UnsupportedMethodError(
                f"the patches of {self._last.name!r} lie on no known grid: {self._last.layout.reason}"
            )
        if self._token is not None:
            row = self._token[:, 1:]
        elif query is None:
            raise UnsupportedMethodError(
                f"rollout starts from a class token, and this model has none; {WITHOUT_CLASS_TOKEN}"
            )
        else:
            row = self._product[:, query]
        return row[:, patches.prefix :].unflatten(-1, (patches.height, patches.width))
