"""Heads that a network could do without: sinks,
and heads that attend like another head of their layer.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.sampled_queries import QUERIES
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.shared_variables import HEAD, IMAGE_MEAN
from tcnn_probe.schema import Variable

__all__ = ["REDUNDANCY"]

# Weight and share of queries that make a key a sink (arXiv 2606.08105).
_WEIGHT, _SHARE = 0.5, 0.9


def _measure(attention: Attention) -> Mapping[str, Tensor]:
    first = attention.first_patch_query
    if first is None or attention.queries - first < 2:
        return {}
    queries = slice(first, None, _stride(attention, attention.queries - first))
    measured = [_of_image(attention, queries, image) for image in range(attention.images)]
    sinks, cosines = map(torch.stack, zip(*measured, strict=True))
    return {"sink_images": sinks, "head_cosine": cosines}


def _stride(attention: Attention, count: int) -> int:
    """Return a step between queries that leaves at most 64 of them,
    and that visits all columns of the grid.
    """
    stride = math.ceil(count / QUERIES)
    width = 1 if attention.layout.queries is None else attention.layout.queries.width
    while math.gcd(stride, width) > 1:
        stride += 1
    return stride


def _of_image(attention: Attention, queries: slice, image: int) -> tuple[Tensor, Tensor]:
    """Return the share of windows with a sink,
    (heads,), and cosines between heads, (heads, heads).
    """
    rows = attention.weights(queries, image)[0]
    counted = rows.new_ones(len(rows), rows.shape[2])
    if attention.visibility is not None:
        counted = attention.visibility.queries[image][:, queries].to(rows)
    in_window = counted.sum(1)
    above = (rows >= _WEIGHT).to(rows) * counted[:, None, :, None]
    # A window of padding has no queries, and a NaN makes the image NaN.
    share = above.sum(2) / in_window.clamp_min(1)[:, None, None] + 0 * rows.sum(2)
    is_sink = (share.amax(-1) >= _SHARE).to(rows) + 0 * share.amax(-1)
    is_real = (in_window > 0).to(rows)
    sinks = (is_sink * is_real[:, None]).sum(0) / is_real.sum()
    unit = normalize(rows, dim=-1)
    by_query = torch.einsum("whqk,wgqk->wqhg", unit, unit)
    cosines = (by_query * counted[:, :, None, None]).sum((0, 1)) / counted.sum()
    return sinks, cosines


_QUERIES = f"Uses at most {QUERIES} queries of patches of each window, evenly spread."
REDUNDANCY = Probe(
    "redundancy",
    {
        "sink_images": Variable(
            HEAD,
            "1",
            "share of images with a sink",
            f"Share of images (in windowed attention, of windows) in which at least {_SHARE:g} of "
            f"the queries put at least {_WEIGHT:g} of their attention on the same key (the sink of "
            f"arXiv 2606.08105). {_QUERIES} {IMAGE_MEAN}",
        ),
        "head_cosine": Variable(
            (*HEAD, "other_head"),
            "1",
            "cosine with another head",
            "Mean cosine between the rows A_i of two heads of a layer, for the same image and "
            f"query. {_QUERIES} {IMAGE_MEAN}",
        ),
    },
    group="",
    attention=_measure,
)
