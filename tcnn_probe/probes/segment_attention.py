"""Attention between segments of tokens: class tokens, registers, patches, and others."""

from collections.abc import Mapping

from torch import Tensor

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.segments import SEGMENTS
from tcnn_probe.probes.probe import NotMeasuredError, Probe
from tcnn_probe.probes.shared_variables import HEAD, MEAN
from tcnn_probe.schema import Variable

__all__ = ["SEGMENT_ATTENTION"]


def _measure(attention: Attention) -> Mapping[str, Tensor]:
    shares = attention.segment_attention()
    if shares is None:
        raise NotMeasuredError(
            attention.layout.reason or "its tokens are patches and padding alone"
        )
    return {"segment_attention": shares}


SEGMENT_ATTENTION = Probe(
    "segments",
    {
        "segment_attention": Variable(
            (*HEAD, "query_segment", "key_segment"),
            "1",
            "attention between segments",
            "Sum of A_ij over the keys j of a segment, mean over the queries i of a segment that "
            "see at least one key. Sums to one over the segments of keys. NaN where a layer has no "
            f"queries of the segment. {MEAN}",
            over_images="shares",
        )
    },
    attention=_measure,
    coords={"query_segment": SEGMENTS, "key_segment": SEGMENTS},
)
