"""Probes of attention heads: in GPSA and ConViT layers,
in softmax attention, and separately for its class tokens.

The positional logits of a head in ConViT are ``w_0 dx + w_1 dy + w_2 (dx^2 + dy^2) + b``, where
(w_0, w_1, w_2) is the head's row of ``pos_proj``. They are ``-alpha ||delta - Delta||^2`` up to a
constant, with ``alpha = -w_2`` and ``Delta = -(w_1, w_0) / (2 w_2)`` (ConViT, Eqs. 5-7).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tcnn_model import GPSA as GPSALayer
from tcnn_probe.architectures.lookup import head_count
from tcnn_probe.architectures.timm_classes import ConViTLayer
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern, pattern_of_query
from tcnn_probe.probes.anatomy import (
    ANATOMY,
    content_information,
    finish_anatomy,
    finish_class_queries,
    selectivity,
)
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.shared_variables import (
    CLASS_ENTROPY,
    DISTANCE,
    ENTROPY,
    HEAD,
    IMAGE_MEAN,
    LOGIT,
    MAP_DIMS,
    MAPS,
    MEAN,
    UNIFORM,
)
from tcnn_probe.schema import Variable

__all__ = [
    "ATTENTION_BY_CLASS",
    "CLASS_ATTENTION",
    "CONVIT",
    "DISTILLATION_ATTENTION",
    "GPSA",
    "SOFTMAX",
    "VIDEO",
]


def _statistics(attention: Attention) -> Mapping[str, Any]:
    statistics = dict(attention.statistics())
    pattern = statistics.get("content_information")
    if pattern is not None:
        only_classes = attention.first_patch_query is None
        finish = finish_class_queries if only_classes else finish_anatomy
        statistics["content_information"] = replace(pattern, finish=finish)
    return statistics


def _statistics_of_softmax(attention: Attention) -> Mapping[str, Any]:
    if attention.gate is not None:  # gated layers have their own probes
        return {}
    statistics = dict(_statistics(attention))
    statistics.pop("frame_distance", None)  # videos have a probe of their own
    return statistics


def _maps(attention: Attention, images: Sequence[int]) -> dict[str, Tensor]:
    """Return maps over the grid of keys for selected images:
    (images, windows, heads, height, width).
    """
    queries = attention.layout.queries
    # Without a grid of keys there is no map.
    if attention.map_size is None:
        return {}
    maps = {"attention_received": attention.on_grid(attention.received(images))}
    if queries is not None:
        # If the number of rows or columns is even, the first one after the middle is taken.
        center = queries.index(0.5, 0.5)
        maps["center_attention"] = attention.on_grid(attention.row(center, images))
    return maps


# Numbers of heads in softmax and in gated layers alike.
_OF_ALL_HEADS: Mapping[str, Variable] = {
    "entropy": ENTROPY,
    "attention_distance": DISTANCE,
    "max_logit": LOGIT,
    **ANATOMY,
    **UNIFORM,
    **MAPS,
}
SOFTMAX = Probe(
    "softmax",
    {
        **_OF_ALL_HEADS,
        "prefix_attention": Variable(
            HEAD,
            "1",
            "attention to class and register tokens",
            f"Attention of queries on the grid to the class and register tokens before it. {MEAN}",
        ),
    },
    group="",
    attention=_statistics_of_softmax,
    maps=_maps,
    waits=True,
)


def _frame_distance(attention: Attention) -> Mapping[str, Any]:
    if not attention.layout.is_video or attention.gate is not None:
        return {}
    return {"frame_distance": attention.statistics()["frame_distance"]}


# A probe of its own, so that recordings of images have no empty variable.
VIDEO = Probe(
    "video",
    {
        "frame_distance": Variable(
            HEAD,
            "1",
            "distance in time",
            "sum_j A_ij |f_ij| between tokens of the grid, where f_ij is the number of frames of "
            f"tokens from i to j and rows are renormalised over these tokens. {MEAN}",
        ),
    },
    group="",
    attention=_frame_distance,
    waits=True,
)


_GATED_VARIABLES: Mapping[str, Variable] = {
    **_OF_ALL_HEADS,
    "gate": Variable(
        HEAD,
        "1",
        "gate",
        "sigma(lambda), share of positional attention (T-CNN Eq. 7), at the time of the mark.",
    ),
    "locality_strength": Variable(
        HEAD,
        "cell-2",
        "locality strength",
        "alpha of the positional attention (T-CNN Eq. 4), at the time of the mark.",
    ),
    "attention_span": Variable(
        HEAD,
        "cell2",
        "attention span",
        "1 / alpha (T-CNN Fig. 4B), at the time of the mark: the mean squared radius of a Gaussian "
        "in the plane, and of the attention on the grid only for alpha up to about 1 (see "
        "mean_squared_radius). NaN where alpha is not positive.",
        nan_reason="alpha is not positive, so that positional attention grows with the distance "
        "from its centre",
    ),
    "mean_squared_radius": Variable(
        HEAD,
        "cell2",
        "mean squared radius",
        "Mean over queries of the variance of the offset under positional attention, along both "
        f"axes together, over real and padding cells. {IMAGE_MEAN}",
    ),
    "center_y": Variable(
        HEAD,
        "cell",
        "centre of attention, y",
        "Delta_y, relative to the query (T-CNN Eq. 4), at the time of the mark.",
    ),
    "center_x": Variable(
        HEAD,
        "cell",
        "centre of attention, x",
        "Delta_x, relative to the query (T-CNN Eq. 4), at the time of the mark.",
    ),
    "content_entropy": Variable(
        HEAD,
        "nat",
        "entropy of content attention",
        f"Entropy of softmax(q k / sqrt(d)) over real cells. {MEAN}",
    ),
    "positional_entropy": Variable(
        HEAD,
        "nat",
        "entropy of positional attention",
        f"Entropy of softmax(-alpha ||delta - Delta||^2) over real and padding cells. {MEAN}",
    ),
    "content_part_information": content_information("of the content part of attention, C"),
    "uniform_content_entropy": Variable(
        ("layer",),
        "nat",
        "entropy of uniform content attention",
        "log N for the layer's N real cells: the content_entropy of queries that attend to all of "
        "them equally.",
    ),
}


def _state_of_gpsa(layer: GPSALayer) -> dict[str, Tensor]:
    alpha, center = layer.locality_strength, layer.center
    return _state(layer.gate, alpha, center[:, 0], center[:, 1])


def _state_of_convit(layer: Any) -> dict[str, Tensor]:
    weight = layer.pos_proj.weight
    # Rows are (dx, dy, dx^2 + dy^2): w_2 = -alpha and (w_0, w_1) = 2 alpha (Delta_x, Delta_y).
    alpha = -weight[:, 2]
    return _state(
        torch.sigmoid(layer.gating_param),
        alpha,
        weight[:, 1] / (2 * alpha),
        weight[:, 0] / (2 * alpha),
    )


def _state(gate: Tensor, alpha: Tensor, y: Tensor, x: Tensor) -> dict[str, Tensor]:
    return {
        "gate": gate,
        "locality_strength": alpha,
        # ConViT learns alpha without a bound.
        "attention_span": torch.where(alpha > 0, 1 / alpha, torch.nan),
        "center_y": y,
        "center_x": x,
    }


GPSA = Probe(
    "gpsa",
    _GATED_VARIABLES,
    GPSALayer,
    group="",
    facts=lambda layer: {"heads": head_count(layer)},
    state=_state_of_gpsa,
    attention=_statistics,
    maps=_maps,
)
# timm's layer has the same gate, strength and centre in other parameters.
CONVIT = replace(GPSA, kind="convit-gpsa", module_type=ConViTLayer, state=_state_of_convit)


def _probe_of_token(
    kind: str,
    token: str,
    prefix: str,
    entropy: Variable,
    query_of: Callable[[Attention], int | None],
) -> Probe:
    """Return a probe of a class token shared by all classes,
    the latent of an attention pool, or a distillation token.

    Args:
        kind: Name of the probe.
        token: Name of the token in descriptions.
        prefix: Prefix of the variables' names; "" for the class token.
        entropy: Variable of the token's entropy.
        query_of: Function that returns the index of the token among the queries, or None.
    """
    name = prefix or "class_"
    to_itself, to_others = f"{prefix}self_attention", f"{prefix}token_attention"

    def numbers(attention: Attention) -> Mapping[str, Tensor | Pattern]:
        """Return entropy, content information and attention to the tokens
        before the grid of the token's row.
        """
        query = query_of(attention)
        if query is None:
            return {}
        weights, row_entropy = attention.query_row(query)
        visible = attention.visible_keys(query).to(row_entropy).clamp_min(1).log()
        measured: dict[str, Tensor | Pattern] = {
            f"{name}entropy": row_entropy.mean(1),
            f"{name}selectivity": (visible[..., None] - row_entropy).mean(1),
        }
        measured[f"{name}content_information"] = pattern_of_query(attention, weights, row_entropy)
        if before := attention.layout.prefix:
            measured[f"{name}prefix_attention"] = weights[..., :before].sum(-1).mean(1)
        return measured

    def maps(attention: Attention, images: Sequence[int]) -> Mapping[str, Tensor]:
        """Split the token's row into the grid (images, windows, heads, height, width),
        itself and other tokens.
        """
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
        f"{name}content_information": content_information(f"of the {token}'s attention"),
        f"{name}selectivity": selectivity(f"of the {token}'s attention"),
        f"{name}prefix_attention": Variable(
            HEAD,
            "1",
            f"{token}'s attention to class and register tokens",
            f"Attention of the {token} to itself and to the other tokens before the grid. "
            f"{IMAGE_MEAN}",
        ),
        f"{name}attention": Variable(
            MAP_DIMS,
            "1",
            f"{token.removesuffix(' token')} attention",
            f"A_ij of the {token} i over the keys j on the grid. Together with its attention to "
            f"itself and to the other tokens before the grid ({to_itself}, {to_others}) it sums to "
            "one.",
            dtype="float32",
        ),
        to_itself: Variable(
            map_dims,
            "1",
            f"{token}'s attention to itself",
            f"A_ii of the {token} i. NaN if the {token} is not among the keys.",
            dtype="float32",
        ),
        to_others: Variable(
            map_dims,
            "1",
            f"{token}'s attention to other tokens",
            f"A_ij of the {token} i, summed over the other class, distillation and register tokens "
            "j among the keys.",
            dtype="float32",
        ),
    }
    return Probe(kind, variables, group="", attention=numbers, maps=maps, waits=True)


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
        "class_selectivity": statistics["uniform_entropy"][:, None] - statistics["entropy"],
    }


def _maps_of_classes(attention: Attention, images: Sequence[int]) -> Mapping[str, Tensor]:
    """Return maps of all classes, (images, K, height, width);
    the recorder keeps those of a few classes.
    """
    # Rows of several windows have different keys, and do not form a map of the image.
    if attention.layout.keys is None or attention.windows > 1:
        return {}
    # (heads, K, N_key) to (K, N_key): a pool usually has one head; the map of several heads is
    # their mean.
    rows = [attention.weights(slice(None), image)[0, 0].mean(0) for image in images]
    return {"attention_by_class": attention.on_grid(torch.stack(rows))}


_CLASS_DIMS = ("layer", "image", "class")
ATTENTION_BY_CLASS = Probe(
    "attention-by-class",
    {
        "class_entropy": CLASS_ENTROPY,
        "class_content_information": content_information("of the class tokens' attention"),
        "class_selectivity": selectivity("of the class tokens' attention"),
        "attention_by_class": Variable(
            (*_CLASS_DIMS, "y", "x"),
            "1",
            "attention of the class's token",
            "A_cj of the token of class c over the patches (PatchConvNet paper, Fig. 2). Sums to "
            "one.",
            dtype="float32",
        ),
        "class_index": Variable(
            _CLASS_DIMS,
            "1",
            "class",
            "Index c of the class; -1 if there is no class.",
            dtype="int64",
        ),
        "class_score": Variable(
            _CLASS_DIMS,
            "1",
            "class score",
            "Score of the class in the model's output.",
            dtype="float32",
        ),
    },
    group="",
    attention=_numbers_of_classes,
    maps=_maps_of_classes,
    waits=True,
)
