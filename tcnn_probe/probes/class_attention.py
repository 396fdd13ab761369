"""How a class token, the latent of an attention pool, or a distillation token spreads over the patches."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import CLASS_ENTROPY, HEAD, IMAGE_MEAN, MAP_DIMS
from tcnn_probe.schema import Variable

__all__ = ["CLASS_ATTENTION", "DISTILLATION_ATTENTION"]


def _numbers(call: AttentionCall, query: int) -> tuple[Tensor, Tensor]:
    """Entropy of a token's row, and what it keeps to the tokens before the grid: (B, heads) each."""
    weights = call.weights(slice(query, query + 1))[:, :, :, 0]  # (B, windows, heads, N_key)
    smallest = torch.finfo(weights.dtype).tiny
    entropy = -(weights * weights.clamp_min(smallest).log()).sum(-1).mean(1)
    return entropy, weights[..., : call.layout.prefix].sum(-1).mean(1)


def _maps(call: AttentionCall, query: int, which: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor]:
    """A token's row cut in three: over the grid (images, windows, heads, height, width), itself, other tokens."""
    keys, own = call.layout.keys, call.own_key(query)
    assert keys is not None
    row = torch.stack([call.weights(slice(query, query + 1), image)[0, :, :, 0] for image in which])
    others = [key for key in range(keys.prefix) if key != own]
    on_grid = row[..., keys.prefix :].unflatten(-1, (keys.height, keys.width))
    return on_grid, None if own is None else row[..., own], row[..., others].sum(-1)


def _probe(
    kind: str, prefix: str, token: str, entropy: Variable, query_of: Callable[[AttentionCall], int | None]
) -> Probe:
    """Of one kind of token.

    Args:
        kind: of the probe.
        prefix: of the names of variables that are not the class token's.
        token: in words.
        entropy: the variable.
        query_of: the token's place among the queries, None if there is none.
    """
    name = prefix or "class_"
    of_image = tuple(dim for dim in MAP_DIMS if dim not in ("y", "x"))

    def attention(call: AttentionCall) -> Mapping[str, Tensor]:
        if (query := query_of(call)) is None:
            return {}
        spread, kept = _numbers(call, query)
        return {f"{name}entropy": spread} | ({f"{name}prefix_attention": kept} if call.layout.prefix else {})

    def maps(call: AttentionCall, which: Sequence[int]) -> Mapping[str, Tensor]:
        query = query_of(call)
        if query is None or call.layout.keys is None:
            return {}
        on_grid, own, others = _maps(call, query, which)
        found = {f"{name}attention": on_grid, f"{prefix}token_attention": others}
        return found if own is None else found | {f"{prefix}self_attention": own}

    variables = {
        f"{name}entropy": entropy,
        f"{name}prefix_attention": Variable(
            HEAD,
            "1",
            f"{token}'s attention to class and register tokens",
            f"What the {token} spends on itself and the other tokens before the grid. {IMAGE_MEAN}",
        ),
        f"{name}attention": Variable(
            MAP_DIMS,
            "1",
            f"{name[:-1]} attention",
            f"A_0j of the {token} over the keys on the grid. With what it keeps to itself and what it spends on other "
            f"tokens before the grid ({prefix}self_attention, {prefix}token_attention) it sums to one.",
            dtype="float32",
        ),
        f"{prefix}self_attention": Variable(
            of_image,
            "1",
            f"{token}'s attention to itself",
            "A_00. NaN where it is not among the keys.",
            dtype="float32",
        ),
        f"{prefix}token_attention": Variable(
            of_image,
            "1",
            f"{token}'s attention to other tokens",
            "A_0j, summed over the class, distillation and register tokens among the keys, without itself.",
            dtype="float32",
        ),
    }
    return Probe(kind, variables, group="", attention=attention, maps=maps)


CLASS_ATTENTION = _probe("class-attention", "", "class token", CLASS_ENTROPY, lambda call: call.class_query)
DISTILLATION_ATTENTION = _probe(
    "distillation-attention",
    "distillation_",
    "distillation token",
    Variable(
        HEAD,
        "nat",
        "entropy of the distillation token's attention",
        f"-sum_j A_1j log A_1j of the distillation token, over all keys. {IMAGE_MEAN}",
    ),
    lambda call: call.distillation_query,
)
