"""Softmax attention of any model, fused or not, in whatever module it is."""

from collections.abc import Sequence

from torch import Tensor

from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.statistics import attention_received, attention_statistics
from tcnn_probe.attention.uniform import uniform_softmax_attention
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import CONTENT, DISTANCE, ENTROPY, HEAD, MAPS, MEAN, UNIFORM
from tcnn_probe.schema import Variable

__all__ = ["SOFTMAX"]


def _numbers(call: AttentionCall) -> dict[str, Tensor | Pattern]:
    statistics, pattern = attention_statistics(call)
    return {**statistics, **uniform_softmax_attention(call), "content_information": pattern}


def _maps(call: AttentionCall, which: Sequence[int]) -> dict[str, Tensor]:
    keys, queries = call.layout.keys, call.layout.queries
    if keys is None:
        return {}
    maps = {"attention_received": call.on_grid(attention_received(call, which))}
    if queries is not None:
        at = queries.prefix + queries.height // 2 * queries.width + queries.width // 2
        maps["center_attention"] = call.on_grid(call.row(at, which))
    return maps


SOFTMAX = Probe(
    "softmax",
    {
        "entropy": ENTROPY,
        "attention_distance": DISTANCE,
        "prefix_attention": Variable(
            HEAD,
            "1",
            "attention to class and register tokens",
            f"What queries on the grid spend on the class and register tokens before it. {MEAN}",
        ),
        **CONTENT,
        **UNIFORM,
        **MAPS,
    },
    group="",
    attention=_numbers,
    maps=_maps,
)
