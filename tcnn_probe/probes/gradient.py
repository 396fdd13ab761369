"""How strongly each attention head is being trained: the norm of the gradient of the parameters that are its own.

How queries, keys and values of the heads lie in one matrix differs between layers that look alike (LeViT interleaves
them head by head; Nest interleaves the heads in each channel). So a layer is read by its class, whose source was read;
one that is not known here is left out, and named in ``recorder.missing``.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model import GPSA
from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.attention import known_layers as known
from tcnn_probe.attention.reconstruction import head_count
from tcnn_probe.probes.probe import NotMeasuredError, Probe
from tcnn_probe.probes.variables import HEAD
from tcnn_probe.schema import Variable

__all__ = ["GRADIENT"]

Own = Iterator[tuple[Tensor | None, int]]
"""Parameters, and how many blocks of (heads, ...) each consists of."""


def _by_head(gradient: Tensor, blocks: int, heads: int) -> Tensor:
    """Sum of squares for each head: shape (blocks * heads * d, ...) or (blocks, heads * d) -> (heads,)."""
    each = gradient.reshape(blocks, heads, -1)
    return torch.linalg.vector_norm(each, dim=(0, 2), dtype=at_least_float32(gradient.dtype)).square()


_LAYERS = ("q", "k", "v", "q_proj", "k_proj", "v_proj")
_KINDS: Mapping[str, int] = {**dict.fromkeys(_LAYERS, 1), "qk": 2, "kv": 2, "qkv": 3}
_LINEAR = frozenset(
    f"timm.{name}"
    for name in (
        "layers.attention.Attention",
        "layers.attention.AttentionRope",
        "layers.attention_pool.AttentionPoolLatent",
        "models.beit.Attention",
        "models.cait.ClassAttn",
        "models.cait.TalkingHeadAttn",
        "models.convit.GPSA",
        "models.convit.MHSA",
        "models.davit.WindowAttention",
        "models.eva.EvaAttention",
        "models.fastvit.Attention",
        "models.metaformer.Attention",
        "models.mvitv2.MultiScaleAttention",
        "models.pvt_v2.Attention",
        "models.swin_transformer.WindowAttention",
        "models.swin_transformer_v2.WindowAttention",
        "models.tnt.Attention",
        "models.twins.GlobalSubSampleAttn",
        "models.twins.LocallyGroupedAttn",
        "models.vision_transformer.Attention",
        "models.vision_transformer_relpos.RelPosAttention",
        "models.vision_transformer_sam.Attention",
        "models.volo.Attention",
        "models.volo.ClassAttention",
    )
)
"""Rows of qkv are (3, heads, d), of kv (2, heads, d), and so on; columns of proj are (heads, d)."""


def _of_linear(layer: Any) -> Own:
    heads = layer.num_heads
    out = layer.proj
    if not isinstance(out, (nn.Linear, nn.Identity)):
        raise NotMeasuredError(f"its output projection is {type(out).__name__}, no nn.Linear")
    for name, kinds in _KINDS.items():
        part = getattr(layer, name, None)
        if part is None or isinstance(part, nn.Identity):
            continue
        if not isinstance(part, nn.Linear):
            raise NotMeasuredError(f"{name} is {type(part).__name__}, no nn.Linear")
        rows = part.out_features
        # Where all are in one matrix their sizes follow; queries and keys by themselves may have another one.
        if rows % (kinds * heads) or (kinds == 3 and isinstance(out, nn.Linear) and rows != 3 * out.in_features):
            raise NotMeasuredError(f"{rows} rows of {name} are not {kinds} x {heads} heads of one size")
        yield from ((part.weight, kinds), (part.bias, kinds))
    for name in ("q_bias", "k_bias", "v_bias"):
        if isinstance(bias := getattr(layer, name, None), nn.Parameter):
            yield bias, 1
    if isinstance(out, nn.Linear):
        yield from _columns(out, heads)
    if known.lookup({"timm.models.convit.GPSA": True}, layer):
        yield from ((own, 1) for own in (layer.pos_proj.weight, layer.pos_proj.bias, layer.gating_param))


def _of_multihead(layer: nn.MultiheadAttention) -> Own:
    yield from ((together, 3) for together in (layer.in_proj_weight, layer.in_proj_bias))
    yield from ((own, 1) for own in (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight))
    yield from ((own, 1) for own in (layer.bias_k, layer.bias_v))
    yield from _columns(layer.out_proj, layer.num_heads)


def _of_gpsa(layer: GPSA) -> Own:
    yield from ((own, 1) for own in (layer.query, layer.key, layer.raw_locality, layer.center, layer.gating))
    yield layer.weight, layer.weight.shape[:2].numel()  # (C_out, C_in, k_h, k_w): a tap is a head


def _columns(layer: nn.Linear, heads: int) -> Own:
    if layer.in_features % heads:
        raise NotMeasuredError(f"{layer.in_features} columns of the output projection do not divide into {heads} heads")
    yield layer.weight, layer.out_features


_READERS: Mapping[str, Callable[[Any], Own]] = {
    **dict.fromkeys(_LINEAR, _of_linear),
    "torch.nn.modules.activation.MultiheadAttention": _of_multihead,
    "tcnn_model.gpsa.layer.GPSA": _of_gpsa,
}


def _is_expected(layer: nn.Module) -> bool:
    """Whether it is known, or has heads and looks like attention."""
    says = head_count(layer) is not None
    return known.lookup_unchanged(_READERS, layer) is not None or (says and known.looks_like_attention(layer))


def _gradients(layer: nn.Module) -> dict[str, list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]]:
    reader = known.lookup_unchanged(_READERS, layer)
    if reader is None:
        raise NotMeasuredError(f"how the heads of {type(layer).__name__} share its parameters is not known")
    heads: Any = head_count(layer)  # whoever is known here says it
    own: list[tuple[nn.Parameter, Callable[[Tensor], Tensor]]] = []
    for parameter, blocks in reader(layer):
        if isinstance(parameter, nn.Parameter):
            own.append((parameter, partial(_by_head, blocks=blocks, heads=heads)))
        elif parameter is not None:
            raise NotMeasuredError("a weight is computed from other parameters")
    return {"gradient_norm": own}


GRADIENT = Probe(
    "gradient",
    {
        "gradient_norm": Variable(
            HEAD,
            "1",
            "gradient norm of the head",
            "Euclidean norm of the gradient of the parameters that are the head's own: weights and biases of its "
            "queries, keys and values, its columns of the output projection; of GPSA its tap of the weight in place of "
            "these columns, its locality strength (before the softplus), centre and gate; of ConViT its position "
            "weights and gate. Root mean square over the backward passes since the previous mark, of the gradient that "
            "each added, of each process by itself, as large as a loss scaler makes it.",
        )
    },
    _is_expected,
    facts=lambda layer: {"heads": head_count(layer)},
    gradients=_gradients,
)
