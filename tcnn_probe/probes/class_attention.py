"""How a class token, or the single latent of an attention pool, spreads over the patches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import HEAD, MAP_DIMS
from tcnn_probe.schema import Variable
from tcnn_probe.seeing.attention import AttentionCall

__all__ = ["CLASS_ATTENTION"]

_MEAN = "Mean over the images seen since the previous mark."


def _attention(call: AttentionCall) -> dict[str, Tensor]:
    """Entropy of the class token's row, and what it keeps to class and register tokens."""
    if call.class_query is None:
        return {}
    weights = call.weights(slice(call.class_query, call.class_query + 1))[:, :, :, 0]  # (B, windows, heads, N_key)
    smallest = torch.finfo(weights.dtype).tiny
    measured = {"class_entropy": -(weights * weights.clamp_min(smallest).log()).sum(-1).mean(1)}
    if call.layout.prefix:
        measured["class_prefix_attention"] = weights[..., : call.layout.prefix].sum(-1).mean(1)
    return measured


def _maps(call: AttentionCall, which: Sequence[int]) -> dict[str, Tensor]:
    if call.class_query is None or call.layout.keys is None:
        return {}
    return {"class_attention": call.maps_of_query(call.class_query, which)}


CLASS_ATTENTION = Probe(
    "class-attention",
    {
        "class_entropy": Variable(
            HEAD, "nat", "entropy of class attention", f"-sum_j A_0j log A_0j of the class token, all keys. {_MEAN}"
        ),
        "class_prefix_attention": Variable(
            HEAD,
            "1",
            "class token's attention to class and register tokens",
            f"What the class token spends on itself and the other tokens before the grid. {_MEAN}",
        ),
        "class_attention": Variable(
            MAP_DIMS, "1", "class attention", "A_0j of the class token over the keys on the grid.", dtype="float16"
        ),
    },
    group="",
    attention=_attention,
    maps=_maps,
)
