"""How class tokens spread over the patches: one for all classes, a distillation token, or one for each class."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern, pattern_of_query
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import CLASS_ENTROPY, HEAD, IMAGE_MEAN, MAP_DIMS, content_information
from tcnn_probe.schema import Variable

__all__ = ["ATTENTION_BY_CLASS", "CLASS_ATTENTION", "DISTILLATION_ATTENTION"]


def _of_token(
    kind: str, token: str, prefix: str, entropy: Variable, query_of: Callable[[Attention], int | None]
) -> Probe:
    """A probe of a class token of all classes, the latent of an attention pool, or a distillation token.

    Names begin with ``prefix``, but for the class token; ``query_of`` gives the token's place among the queries.
    """
    name = prefix or "class_"
    itself, others = f"{prefix}self_attention", f"{prefix}token_attention"

    def numbers(call: Attention) -> Mapping[str, Tensor | Pattern]:
        """Entropy of the token's row, what it keeps to the tokens before the grid, (B, heads) each; and its sum."""
        if (query := query_of(call)) is None:
            return {}
        weights = call.weights(slice(query, query + 1))[:, :, :, 0]  # (B, windows, heads, N_key)
        smallest = torch.finfo(weights.dtype).tiny
        row_entropy = -(weights * weights.clamp_min(smallest).log()).sum(-1)
        found: dict[str, Tensor | Pattern] = {f"{name}entropy": row_entropy.mean(1)}
        found[f"{name}content_information"] = pattern_of_query(call, weights, row_entropy)
        if before := call.layout.prefix:
            found[f"{name}prefix_attention"] = weights[..., :before].sum(-1).mean(1)
        return found

    def maps(call: Attention, which: Sequence[int]) -> Mapping[str, Tensor]:
        """The token's row cut in three: the grid (images, windows, heads, height, width), itself, other tokens."""
        query, keys = query_of(call), call.layout.keys
        if query is None or keys is None:
            return {}
        own = call.own_key(query)
        row = call.row(query, which)
        rest = [key for key in range(keys.prefix) if key != own]
        found = {f"{name}attention": call.on_grid(row), others: row[..., rest].sum(-1)}
        return found if own is None else found | {itself: row[..., own]}

    of_image = tuple(dim for dim in MAP_DIMS if dim not in ("y", "x"))
    variables = {
        f"{name}entropy": entropy,
        f"{name}content_information": content_information(f"of the {token}'s attention"),
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
            f"other tokens before the grid ({itself}, {others}) it sums to one.",
            dtype="float32",
        ),
        itself: Variable(
            of_image,
            "1",
            f"{token}'s attention to itself",
            "A_00. NaN where it is not among the keys.",
            dtype="float32",
        ),
        others: Variable(
            of_image,
            "1",
            f"{token}'s attention to other tokens",
            "A_0j, summed over the class, distillation and register tokens among the keys, without itself.",
            dtype="float32",
        ),
    }
    return Probe(kind, variables, group="", attention=numbers, maps=maps)


CLASS_ATTENTION = _of_token("class-attention", "class token", "", CLASS_ENTROPY, lambda call: call.class_query)
DISTILLATION_ATTENTION = _of_token(
    "distillation-attention",
    "distillation token",
    "distillation_",
    Variable(
        HEAD,
        "nat",
        "entropy of the distillation token's attention",
        f"-sum_j A_1j log A_1j of the distillation token, over all keys. {IMAGE_MEAN}",
    ),
    lambda call: call.distillation_query,
)


def _numbers_of_classes(call: Attention) -> Mapping[str, Tensor | Pattern]:
    if call.layout.asking != "classes":
        return {}
    statistics = call.statistics()
    return {
        "class_entropy": statistics["entropy"],
        "class_content_information": statistics["content_information"],
    }


def _maps_of_classes(call: Attention, which: Sequence[int]) -> Mapping[str, Tensor]:
    """Maps of all classes, (images, K, height, width): the recorder keeps those that are wanted."""
    if call.layout.keys is None or call.windows > 1:
        return {}
    rows = [call.weights(slice(None), image)[0, 0].mean(0) for image in which]  # (K, N_key): one head has the map
    return {"attention_by_class": call.on_grid(torch.stack(rows))}


_OF_CLASS = ("layer", "image", "class")
ATTENTION_BY_CLASS = Probe(
    "attention-by-class",
    {
        "class_entropy": CLASS_ENTROPY,
        "class_content_information": content_information("of the class tokens' attention"),
        "attention_by_class": Variable(
            (*_OF_CLASS, "y", "x"),
            "1",
            "attention of the class's token",
            "A_cj of the token of class c over the patches (PatchConvNet paper, Fig. 2). Sums to one.",
            dtype="float32",
        ),
        "class_index": Variable(
            _OF_CLASS, "1", "class", "Index c of the class; -1 where there is none.", dtype="int64"
        ),
        "class_score": Variable(
            _OF_CLASS, "1", "class score", "What the model's output gives for the class.", dtype="float32"
        ),
    },
    group="",
    attention=_numbers_of_classes,
    maps=_maps_of_classes,
)
