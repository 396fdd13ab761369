"""The report of an epoch: the measurements since the previous mark, and facts about the model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tcnn_model import AttentionPool2d
from tcnn_probe.architectures.lookup import looks_like_attention
from tcnn_probe.hooks.private_torch import COMPILED_CALL
from tcnn_probe.probes import Probe
from tcnn_probe.recording.collector import Collector, RankSums
from tcnn_probe.recording.options import Sampling
from tcnn_probe.recording.sums import EpochSums

__all__ = ["MAPS_OF_CLASSES", "EpochReport", "LayerReport", "report_epoch"]

MAPS_OF_CLASSES = "maps/classes/"
"""Prefix of the paths of groups with maps of classes."""


@dataclass(frozen=True)
class LayerReport:
    """Measurements of a layer by a probe.

    Args:
        name: Name of the layer.
        probe: Probe that measured it.
        facts: Further entries of the layer table.
        sums: Sums over all ranks.
        images: Number of images that this process saw.
        maps: Maps by variable, for each chosen image that this process saw.
    """

    name: str
    probe: Probe
    facts: Mapping[str, Any]
    sums: EpochSums = field(default_factory=EpochSums)
    images: int = 0
    maps: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class EpochReport:
    """Measurements since the previous mark, and facts about the model.

    Args:
        layers: Measurements of each layer by each probe.
        probes: Probes of the recording.
        sampling: Forwards, images and classes to measure.
        model_class: Name of the model's class.
        order: Positions of the layers in the model, by name.
        missing: Reasons why layers are recorded without a variable: {variable: {layer: reason}}.
        unsupported: Reasons why layers that look like attention cannot be recorded, by layer.
        class_counts: Number of classes of each pool that has a token for each class.
        image_hashes: Hashes of the images whose maps are kept, by number.
        training_forwards: Number of forwards in training mode.
        missed_attention: Whether attention should be measured, but no forward with attention to measure has begun.
        attention_like: Names of layers that look like attention; empty if something was measured.
        called_parts: Names of the parts that were called from outside of the model.
        compiled_parts: Names of the parts whose calls from outside are not seen, because they are compiled in place.
    """

    layers: Sequence[LayerReport]
    probes: Sequence[Probe]
    sampling: Sampling
    model_class: str
    order: Mapping[str, int]
    missing: Mapping[str, Mapping[str, str]]
    unsupported: Mapping[str, str]
    class_counts: Mapping[str, int]
    image_hashes: Mapping[str, str]
    training_forwards: int
    missed_attention: bool
    attention_like: Sequence[str]
    called_parts: Sequence[str]
    compiled_parts: Sequence[str]


def report_epoch(collector: Collector, ranks: Sequence[RankSums] = ()) -> EpochReport:
    """Return the report of the epoch, and note in the collector what is missing.

    Args:
        collector: Collector of this process.
        ranks: Sums of all ranks; empty for a report before the first forward, of the layers that are known by then.
    """
    # Every rank reports the layers of all ranks, even if it has seen no image.
    for rank in ranks:
        for layer, kind in rank.sums:
            collector.expect(layer, kind)
    layers = []
    for key, accumulator in collector.accumulators.items():
        sums = EpochSums.together(rank.sums[key] for rank in ranks if key in rank.sums)
        probe = accumulator.probe
        for name, reason in sums.reasons(probe.variables).items():
            collector.note_missing(accumulator.name, [name], reason)
        facts = dict(probe.facts(accumulator.module)) if probe.facts else {}
        images, maps = accumulator.images, accumulator.maps
        layers.append(LayerReport(accumulator.name, probe, facts, sums, images, maps))
    names = collector.names.items()
    return EpochReport(
        layers=layers,
        probes=collector.probes,
        sampling=collector.sampling,
        model_class=collector.model_class,
        order=collector.order,
        missing={name: dict(reasons) for name, reasons in collector.missing.items()},
        unsupported=dict(collector.stream.unsupported),
        class_counts=_class_counts(collector),
        image_hashes=collector.forwards.image_hashes.read(),
        training_forwards=collector.forwards.training_forwards,
        missed_attention=all(rank.missed_attention for rank in ranks),
        attention_like=[]
        if layers or not ranks
        else [name for module, name in names if name and looks_like_attention(module)],
        called_parts=list(collector.forwards.called_parts),
        compiled_parts=[
            name
            for module, name in names
            if name and getattr(module, COMPILED_CALL, None) is not None
        ],
    )


def _class_counts(collector: Collector) -> dict[str, int]:
    """Return the number of classes of each pool with a token per class, if it or a part of it is measured."""
    layers = collector.order if collector.layers is None else collector.layers
    counts = {}
    for module, name in collector.names.items():
        if not isinstance(module, AttentionPool2d) or module.num_classes is None:
            continue
        # The dots prevent that "pool2" is taken for a part of "pool".
        if any(f"{layer}.".startswith(f"{name}.") for layer in layers):
            counts[name] = module.num_classes
    return counts
