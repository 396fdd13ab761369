"""Errors of ``record()`` and ``mark()``: what was asked for and is not there, and what a store holds instead."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence

from tcnn_model.conversion.selection import LayerFilter, matching
from tcnn_probe.architectures.lookup import looks_like_attention
from tcnn_probe.probes import DEFAULT
from tcnn_probe.recording.accumulator import EpochSums
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.dataset import MAPS_OF_CLASSES
from tcnn_probe.schema import Group, difference
from tcnn_probe.storage import EpochStore, StoreError

__all__ = [
    "check_epoch",
    "check_order",
    "check_probes",
    "check_resumed",
    "check_same_recording",
    "check_scalars",
    "idle_probes",
]

Groups = Mapping[str, Group]
Everything = Mapping[tuple[str, str], EpochSums]  # by layer and probe


def check_probes(collector: Collector, *, chose_layers: bool) -> None:
    """Refuse probes that no layer is for, as far as this is known before a forward, and maps that none has."""
    probes, sampling, classes = collector.probes, collector.sampling, collector.sampling.classes
    kinds = [probe.kind for probe in probes]
    if sampling.images and not any(probe.maps and probe.images is None for probe in probes):
        raise ValueError(f"images= keeps maps, and none of the probes {kinds} has any")
    if classes.chosen:
        counts = collector.class_counts
        if not (counts and any(probe.of_classes for probe in probes)):
            raise ValueError(f"classes={classes.plain} chooses maps, and no layer or probe has one for each class")
        if not sampling.images:
            raise ValueError(f"classes={classes.plain} chooses maps, and there are none without images=")
        for pool, count in counts.items():
            classes.check(pool, count)
    if probes and not collector.sums and not collector.sees_forwards:
        where = " among those asked for" if chose_layers else ""
        why = f": {collector.missing}" if collector.missing else ""
        raise ValueError(f"{collector.model_class} has no layer{where} for the probes {kinds}{why}")


def check_same_recording(store: EpochStore, about: Mapping[str, str], collector: Collector) -> None:
    """Refuse a store of another model, other layers, images or classes, as far as these are known before a forward."""
    groups, attrs, sampling = store.groups, store.attrs, collector.sampling
    if groups is None or attrs is None:
        return
    for name, what in (("model_class", "class"), ("model_architecture", "architecture")):
        then, now = attrs.get(name), about.get(name)
        if now is not None and then is not None and then != now:
            raise StoreError(f"the store is a recording of another model (of {what} {then!r}, not {now!r})")
    if (kept := json.loads(attrs["images"])) != list(sampling.images):
        raise StoreError(f"the store keeps maps of the images {kept}, and images= asks for {list(sampling.images)}")
    if not store.has_layers:
        return
    for path, group in groups.items():
        for layer, table in group.layers.items() if path.startswith(MAPS_OF_CLASSES) else ():
            if (chosen := table["classes"]) != (classes := sampling.classes.plain):
                raise StoreError(f"the store has maps of {layer!r} with classes={chosen}, got classes={classes}")
    for layer in (layer for group in groups.values() for layer in group.layers):
        if layer.split("#")[0] not in collector.order:
            raise StoreError(f"the store is a recording of other layers ({layer!r} there, absent in this model)")
    for one in collector.sums.values():
        table = groups[one.probe.place].layers if one.probe.place in groups else {}
        here = {"kind": one.probe.kind} | (dict(one.probe.facts(one.module)) if one.probe.facts else {})
        there = {key: table[one.name].get(key) for key in here} if one.name in table else "absent"
        kept = groups[one.probe.place].coords.get("image") if one.probe.place in groups else None
        if one.probe.images is not None and kept is not None and list(kept) != list(one.probe.images):
            raise StoreError(f"the store has {one.probe.kind} of {len(kept)} other images than are asked for")
        if there != here:
            raise StoreError(f"the store is a recording of other layers ({one.name!r}: {there} there, {here} here)")


def check_resumed(there: Groups, here: Groups) -> None:
    """Refuse to add layers or numbers to a store that has others. Maps of a further size are no difference."""
    numbers = [{path: group for path, group in side.items() if not group.maps} for side in (there, here)]
    if (found := difference(*numbers)) is not None:
        raise StoreError(f"the store is a recording of something else ({found}): choose another path")


def check_scalars(names: Iterable[str], groups: Groups) -> None:
    """Refuse names of scalars that stand for something else in the recording."""
    variables = {name for group in groups.values() for name in group.variables}
    others = {name for path, group in groups.items() for name in (path.split("/")[0], *group.sizes)} | {"heads"}
    for name in names:
        if name in variables | others:
            what = "a recorded variable" if name in variables else "something else in the recording"
            raise ValueError(f"{name!r} is the name of {what}: give the scalar another one")


def check_order(along: str, number: int | float, marks: Sequence[int | float]) -> None:
    """Refuse a mark that is there already, or that comes before the last one."""
    if number in marks:
        raise ValueError(
            f"{along} {number} is already marked: record(..., mode='w') replaces the recording that is there; to "
            f"continue it, leave out what is in recorder.epochs, or mark(..., if_marked='skip')"
        )
    if marks and number < marks[-1]:
        raise ValueError(f"expected {along} to be later than the last one marked, {marks[-1]}, got {number}")


def idle_probes(named: Collection[str], found: Everything, collector: Collector) -> list[str]:
    """Probes that were named and found no layer, or none with the parameters that they read, in words.

    One of the default probes is enough.
    """
    busy = {kind for _, kind in collector.sums}
    idle = [kind for kind in named if kind not in busy and not (kind in DEFAULT and busy & {*DEFAULT})]
    told = [f"no layer was found for the probes {idle}"] if idle else []
    for probe in collector.probes:
        ones = [one for (_, kind), one in found.items() if kind == probe.kind]
        lacking = sorted(probe.variables.keys() - probe.of_images - {name for one in ones for name in one.sums})
        if probe.kind in named and probe.state and ones and lacking and not any(one.state for one in ones):
            told.append(f"{collector.model_class} has no {lacking} for the probe {probe.kind!r} to read")
    return told


def check_epoch(
    found: Everything, collector: Collector, asked: LayerFilter | None, groups: Groups | None, *, missed: bool
) -> None:
    """Refuse to mark an epoch of which something is missing, with why, and what to do.

    Args:
        found: by all ranks.
        collector: of this one.
        asked: for which layers.
        groups: of the recording, None before its first mark.
        missed: whether attention is to be measured and no forward that could show any has begun.
    """
    if not collector.probes:
        return
    sampling, training = collector.sampling, f"{collector.training_forwards} forwards in training mode"
    advice = "run some before mark()"
    if sampling.when == "eval":
        advice = "run the validation, with model.eval(), before mark()"
    recorded = None if groups is None else {layer for group in groups.values() for layer in group.layers}
    probes = {key: collector.sums[key].probe for key in found}
    idle = [name for (name, kind), one in found.items() if probes[name, kind].runs and not one.images]
    if idle := [name for name in dict.fromkeys(idle) if recorded is None or name in recorded]:
        raise RuntimeError(
            f"nothing to mark: no image in {sampling.mode} reached {_some(idle)} since the previous mark ({training}); "
            f"{advice}"
        )
    if found and not any(probe.runs or probe.state or found[key].squares for key, probe in probes.items()):
        raise RuntimeError(
            f"nothing to mark: no gradient reached {_some([name for name, _ in found])} since the previous mark; run "
            f"some backward passes before mark(), and see that the parameters are not frozen"
        )
    if missed:
        alternative = ", or leave the probes of attention out" if found else ""
        raise RuntimeError(
            f"nothing to mark: attention is to be measured, and no forward in {sampling.mode} began since the previous "
            f"mark ({training}); {advice}{alternative}"
        )
    unsupported = collector.stream.unsupported
    if not found:
        seen = f"; layers that look like attention: {unsupported}" if unsupported else ""
        if asked is not None:
            known = [name for module, name in collector.names.items() if name and looks_like_attention(module)]
            others = f": such layers of this model are {_some(known)}" if known else ""
            raise RuntimeError(
                f"nothing to mark: no attention was seen in the layers asked for, {asked!r}{seen}{others}"
            )
        raise RuntimeError(
            f"nothing to mark: no attention was seen in {collector.model_class} (with {training}, which are not "
            f"measured){seen}. If it did see images in {sampling.mode}, it has no layer that can be recorded: "
            f"tcnn_model.reparameterize(model) turns the last convolutions of a CNN into GPSA layers, and probes= "
            f"measures other layers"
        )
    _check_asked_for([name for name, _ in found], asked, unsupported)
    seen_images = max((one.images for one in collector.sums.values() if one.probe.maps is not None), default=None)
    numbers = sampling.images
    if groups is None and numbers and seen_images is not None and seen_images <= numbers[0]:  # maps have no size yet
        raise RuntimeError(
            f"nothing to mark: of the images asked for, {list(numbers)}, none was among the {seen_images} seen"
        )


def _check_asked_for(layers: Iterable[str], asked: LayerFilter | None, unsupported: Mapping[str, str]) -> None:
    """Each name and glob has chosen something that was recorded."""
    if asked is None or callable(asked):
        return
    recorded = {name for layer in layers for name in (layer, layer.split("#")[0])}
    for pattern in (asked,) if isinstance(asked, str) else asked:
        if not matching(recorded, pattern):
            inside = {n: r for n, r in unsupported.items() if n == pattern or n.startswith(f"{pattern}.")}
            why = f": {inside}" if inside else ": no attention was seen there"
            raise RuntimeError(f"layers asked for {pattern!r}, of which nothing was recorded{why}")


def _some(names: list[str]) -> list[str]:
    return names[:3] + ["..."] * (len(names) > 3)
