"""Attention of class tokens to the patches: a token for all classes, a distillation token, or a token a class."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern, pattern_of_query
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import (
    CLASS_ENTROPY,
    HEAD,
    IMAGE_MEAN,
    MAP_DIMS,
    content_information,
)
from tcnn_probe.schema import Variable

__all__ = ["ATTENTION_BY_CLASS", "CLASS_ATTENTION", "DISTILLATION_ATTENTION"]


def _probe_of_token(
    kind: str,
    token: str,
    prefix: str,
    entropy: Variable,
    query_of: Callable[[Attention], int | None],
) -> Probe:
    """Return a probe of a class token of all classes, the latent of an attention pool, or a distillation token.

    Args:
        kind: Name of the probe.
        token: The token in words.
        prefix: Beginning of the variables' names; "" for the class token.
        entropy: Description of its entropy.
        query_of: Function that finds the token among the queries.
    """
    name = prefix or "class_"
    to_itself, to_others = f"{prefix}self_attention", f"{prefix}token_attention"

    def numbers(attention: Attention) -> Mapping[str, Tensor | Pattern]:
        """Return the entropy of the token's row and what it keeps to the tokens before the grid, (B, heads)."""
        query = query_of(attention)
        if query is None:
            return {}
        # (B, windows, heads, 1, N_key), without the axis of the single query.
        weights = attention.weights(slice(query, query + 1))[:, :, :, 0]
        # 0 log 0 is 0: the logarithm has to be finite where the weight is 0.
        smallest = torch.finfo(weights.dtype).tiny
        row_entropy = -(weights * weights.clamp_min(smallest).log()).sum(-1)
        measured: dict[str, Tensor | Pattern] = {f"{name}entropy": row_entropy.mean(1)}
        measured[f"{name}content_information"] = pattern_of_query(
            attention, weights, row_entropy
        )
        if before := attention.layout.prefix:
            measured[f"{name}prefix_attention"] = weights[..., :before].sum(-1).mean(1)
        return measured

    def maps(attention: Attention, images: Sequence[int]) -> Mapping[str, Tensor]:
        """Cut the token's row in three: the grid (images, windows, heads, height, width), itself, other tokens."""
        query, keys = query_of(attention), attention.layout.keys
        if query is None or keys is None:
            return {}
        own_key = attention.own_key(query)
        row = attention.row(query, images)
        other_keys = [key for key in range(keys.prefix) if key != own_key]
        cut = {
            f"{name}attention": attention.on_grid(row),
            to_others: row[..., other_keys].sum(-1),
        }
        return cut if own_key is None else cut | {to_itself: row[..., own_key]}

    map_dims = tuple(dim for dim in MAP_DIMS if dim not in ("y", "x"))
    variables = {
        f"{name}entropy": entropy,
        f"{name}content_information": content_information(
            f"of the {token}'s attention"
        ),
        f"{name}prefix_attention": Variable(
            HEAD,
            "1",
            f"{token}'s attention to class and register tokens",
            f"What the {token} spends on itself and the other tokens before the grid. {IMAGE_MEAN}",
        ),
        f"{name}attention": Variable(
            MAP_DIMS,
            "1",
            f"{token.removesuffix(' token')} attention",
            f"A_0j of the {token} over the keys on the grid. With what it keeps to itself and what it spends on "
            f"other tokens before the grid ({to_itself}, {to_others}) it sums to one.",
            dtype="float32",
        ),
        to_itself: Variable(
            map_dims,
            "1",
            f"{token}'s attention to itself",
            "A_00. NaN where it is not among the keys.",
            dtype="float32",
        ),
        to_others: Variable(
            map_dims,
            "1",
            f"{token}'s attention to other tokens",
            "A_0j, summed over the class, distillation and register tokens among the keys, without itself.",
            dtype="float32",
        ),
    }
    return Probe(kind, variables, group="", attention=numbers, maps=maps)


CLASS_ATTENTION = _probe_of_token(
    "class-attention",
    "class token",
    "",
    CLASS_ENTROPY,
    lambda attention: attention.class_query,
)
DISTILLATION_ATTENTION = _probe_of_token(
    "distillation-attention",
    "distillation token",
    "distillation_",
    Variable(
        HEAD,
        "nat",
        "entropy of the distillation token's attention",
        f"-sum_j A_1j log A_1j of the distillation token, over all keys. {IMAGE_MEAN}",
    ),
    lambda attention: attention.distillation_query,
)


def _numbers_of_classes(attention: Attention) -> Mapping[str, Tensor | Pattern]:
    if attention.layout.asking != "classes":
        return {}
    statistics = attention.statistics()
    return {
        "class_entropy": statistics["entropy"],
        "class_content_information": statistics["content_information"],
    }


def _maps_of_classes(
    attention: Attention, images: Sequence[int]
) -> Mapping[str, Tensor]:
    """Return maps of all classes, (images, K, height, width); the recorder keeps those of a few."""
    # Rows of several windows are over different keys: they make no map of the image.
    if attention.layout.keys is None or attention.windows > 1:
        return {}
    # (heads, K, N_key) to (K, N_key): a pool has one head, and of several the mean is the map.
    rows = [attention.weights(slice(None), image)[0, 0].mean(0) for image in images]
    return {"attention_by_class": attention.on_grid(torch.stack(rows))}


_CLASS_DIMS = ("layer", "image", "class")
ATTENTION_BY_CLASS = Probe(
    "attention-by-class",
    {
        "class_entropy": CLASS_ENTROPY,
        "class_content_information": content_information(
            "of the class tokens' attention"
        ),
        "attention_by_class": Variable(
            (*_CLASS_DIMS, "y", "x"),
            "1",
            "attention of the class's token",
            "A_cj of the token of class c over the patches (PatchConvNet paper, Fig. 2). Sums to one.",
            dtype="float32",
        ),
        "class_index": Variable(
            _CLASS_DIMS,
            "1",
            "class",
            "Index c of the class; -1 where there is none.",
            dtype="int64",
        ),
        "class_score": Variable(
            _CLASS_DIMS,
            "1",
            "class score",
            "What the model's output gives for the class.",
            dtype="float32",
        ),
    },
    group="",
    attention=_numbers_of_classes,
    maps=_maps_of_classes,
)
