"""How the class tokens of a pool that has one for each class spread over the patches (PatchConvNet paper, Fig. 2)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.statistics import attention_statistics
from tcnn_probe.probes.probe import Probe
from tcnn_probe.probes.variables import CLASS_ENTROPY
from tcnn_probe.schema import Variable

__all__ = ["ATTENTION_BY_CLASS"]

_OF_CLASS = ("layer", "image", "class")


def _attention(call: AttentionCall) -> Mapping[str, Tensor]:
    if call.layout.asking != "classes":
        return {}
    return {"class_entropy": attention_statistics(call)["entropy"]}


def _maps(call: AttentionCall, which: Sequence[int]) -> Mapping[str, Tensor]:
    """Of all classes, (images, K, height, width): the recorder keeps those that are wanted."""
    keys = call.layout.keys
    if keys is None or call.windows > 1:
        return {}
    rows = [call.weights(slice(None), image)[0, 0].mean(0) for image in which]  # (K, N_key): one head has the map
    return {"attention_by_class": torch.stack(rows).unflatten(-1, (keys.height, keys.width))}


ATTENTION_BY_CLASS = Probe(
    "attention-by-class",
    {
        "class_entropy": CLASS_ENTROPY,
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
    attention=_attention,
    maps=_maps,
)
