"""Errors and warnings of a mark, raised or worded before the epoch is stored."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tcnn_model import AttentionPool2d
from tcnn_model.conversion.selection import LayerFilter, matching
from tcnn_probe.architectures.lookup import looks_like_attention
from tcnn_probe.hooks.private_torch import COMPILED_CALL
from tcnn_probe.models import module_name
from tcnn_probe.probes import DEFAULT, Probe
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.groups import MAPS_OF_CLASSES, Groups, LayerValues
from tcnn_probe.recording.measured import Key
from tcnn_probe.recording.sums import MIXED_SIZES, EpochSums
from tcnn_probe.schema import COUNTS, Group
from tcnn_probe.storage import EpochStore, StoreError

__all__ = [
    "OtherLayersError",
    "abandoned_variables",
    "changed_images",
    "changed_modules",
    "check_epoch",
    "check_probes",
    "check_resumed",
    "check_same_recording",
    "doubtful_values",
    "dropped_values",
    "idle_probes",
    "joined_layers",
]


class OtherLayersError(StoreError):
    """The store holds a recording of layers that the model does not have."""


def check_probes(collector: Collector) -> None:
    """Raise an error if it is clear before a forward that probes have no layer, or no maps."""
    probes, sampling = collector.probes, collector.sampling
    kinds = [probe.kind for probe in probes]
    has_maps = any(probe.maps and probe.images is None for probe in probes)
    if sampling.images and not has_maps:
        raise ValueError(f"images= keeps maps, and none of the probes {kinds} has any")
    counts = [
        module.num_classes
        for module in collector.names
        if isinstance(module, AttentionPool2d) and module.num_classes is not None
    ]
    if sampling.class_indices and not (sampling.images and counts):
        raise ValueError(
            f"classes={sampling.classes} chooses maps: expected images=, and a layer with a "
            "token for each class"
        )
    for count in counts:
        sampling.check_classes(count)
    # Probes of attention are not checked, as attention is found only in the first forward.
    if probes and not (collector.layers or collector.attention_probes):
        scope = "" if collector.chosen is None else " among those asked for"
        reasons = f": {collector.missing}" if collector.missing else ""
        raise ValueError(
            f"{collector.model_class} has no layer{scope} for the probes {kinds}{reasons}"
        )


def check_same_recording(
    store: EpochStore, provenance: Mapping[str, str], collector: Collector
) -> None:
    """Raise an error if the store is known to be of another model, layers, images or classes."""
    groups, attrs, sampling = store.groups, store.attrs, collector.sampling
    if groups is None:
        return
    for name in ("model_class", "model_architecture"):
        stored, current = attrs.get(name), provenance.get(name)
        if None not in (stored, current) and stored != current:
            raise StoreError(
                f"the store is a recording of another model: {name} {stored!r} there, {current!r} "
                "here"
            )
    images = json.loads(attrs["images"])
    if store.has_layers and images != list(sampling.images):
        raise StoreError(
            f"the store keeps maps of the images {images}, and images= asks for "
            f"{list(sampling.images)}"
        )
    kinds = [probe.kind for probe in collector.probes]
    for path, group in groups.items():
        for layer, table in group.layers.items():
            if module_name(layer) not in collector.names.values():
                raise _other_layers(layer, "a layer", "absent in this model")
            if not group.maps and table["kind"] not in kinds:
                raise _other_layers(layer, table["kind"], "absent")
            if path.startswith(MAPS_OF_CLASSES) and table["classes"] != sampling.classes:
                raise StoreError(
                    f"the store has maps of {layer!r} with classes={table['classes']}, got "
                    f"classes={sampling.classes}"
                )
    # A recording that has only scalars may get layers, for example when a CNN has become a T-CNN.
    for (layer, kind), measured in collector.layers.items() if store.has_layers else ():
        probe, facts = measured.probe, {"kind": kind, **measured.facts()}
        group = groups.get(probe.place, Group({}, {}))
        # Only facts that are known before a forward are compared; the stored table has more.
        table = group.layers.get(layer, {})
        stored = {fact: table[fact] for fact in facts if fact in table}
        if probe.images is not None:
            facts["images"] = list(probe.images)
            stored["images"] = list(group.coords.get("image", probe.images))
        if stored != facts:
            raise _other_layers(layer, stored if table else "absent", facts)


def _other_layers(layer: str, stored: object, current: object) -> StoreError:
    return OtherLayersError(
        f"the store is a recording of other layers ({layer!r}: {stored} there, {current} here)"
    )


def check_resumed(stored: Groups, current: Groups) -> None:
    """Raise an error if the store has other numbers of a layer.

    Layers that have not run yet may be absent, other layers may join, and maps may have another
    size, as sizes of images may differ from run to run. Variables that only one of both versions of
    a probe has, that which began the recording or that which continues it, are not compared.
    """
    for path, before in stored.items():
        now = current.get(path, Group({}, {}))
        layers = [layer for layer in before.layers if layer in now.layers]
        if before.maps or not layers:
            continue
        shared = before.variables.keys() & now.variables.keys()
        names = sorted(shared)
        dims: list[str] = []
        # Sizes and labels are those of the largest layer, and variables those of any, which may be
        # absent.
        if before.layers.keys() == now.layers.keys():
            # Another version of a probe may lack some of its variables; another probe lacks all.
            if shared <= COUNTS.keys():
                names = sorted(before.variables)
            dims = sorted({dim for name in names for dim in before.variables[name].dims[1:]})
        there, here = (_facts(group, layers, dims, names) for group in (before, now))
        for fact, value in there.items():
            if value != here[fact]:
                raise StoreError(
                    f"the store is a recording of something else ({fact}: {value} there, "
                    f"{here[fact]} here): choose another path"
                )


def _facts(
    group: Group, layers: Iterable[str], dims: Iterable[str], names: Iterable[str]
) -> dict[str, Any]:
    """Return the facts of a group that must be the same when it is continued."""
    # After a round trip through JSON, as in a store, tuples are lists and keys are strings.
    facts: dict[str, Any] = {
        f"layer {layer!r}": json.loads(json.dumps(dict(group.layers[layer]))) for layer in layers
    }
    for dim in dims:
        facts[f"dimension {dim!r}"] = group.sizes.get(dim, "absent")
        facts[f"labels along {dim!r}"] = [*group.coords.get(dim, ())]
    for name in names:
        x = group.variables.get(name)
        # Units are not compared: a unit may get another name, such as "cell" for "pixel", and a
        # number gets another meaning only with another version of the schema.
        facts[f"variable {name!r}"] = "absent" if x is None else (x.dtype, x.dims)
    return facts


def abandoned_variables(stored: Groups, probes: Iterable[Probe]) -> dict[str, list[str]]:
    """Return the stored variables of each layer that its probes no longer have."""
    names: dict[str, set[str]] = {}
    for probe in probes:
        names.setdefault(probe.place, {*COUNTS}).update(probe.variables)
    return {
        layer: sorted(group.variables.keys() - names[place])
        for place, group in stored.items()
        if place in names
        for layer in group.layers
    }


def check_epoch(
    collector: Collector,
    sums: Mapping[Key, EpochSums],
    layer_filter: LayerFilter | None,
    groups: Groups | None,
) -> None:
    """Raise RuntimeError, with a reason and advice, if something was not measured on any rank.

    Args:
        layer_filter: Layers that the user has chosen; None for all.
        groups: Groups of the recording; None before its first mark.
    """
    # A recording without probes has only scalars.
    if not collector.probes:
        return
    lacking = _what_is_lacking(collector, sums, layer_filter, groups)
    if lacking:
        notes = "; ".join([f"{lacking} since the previous mark", *_notes(collector)])
        raise RuntimeError(f"nothing to mark: {notes}")
    recorded = {name for layer, _ in sums for name in (layer, module_name(layer))}
    names = [layer_filter] if isinstance(layer_filter, str) else layer_filter
    for name in () if names is None or callable(names) else names:
        if not matching(recorded, name):
            reasons = {
                layer: reason
                for layer, reason in collector.stream.unsupported.items()
                if f"{layer}.".startswith(f"{name}.")
            }
            raise RuntimeError(
                f"nothing was recorded of the layers asked for, {name!r}: "
                f"{reasons or 'no attention was seen there'}"
            )


def _what_is_lacking(
    collector: Collector,
    sums: Mapping[Key, EpochSums],
    layer_filter: LayerFilter | None,
    groups: Groups | None,
) -> str:
    mode, layers = collector.sampling.mode, collector.layers
    names = _shorten(dict.fromkeys(layer for layer, _ in layers))
    running = [key for key in sums if layers[key].probe.runs]
    if groups is not None:
        # Layers that the recording began without are not written, so they may be idle.
        recorded = {layer for group in groups.values() for layer in group.layers}
        running = [key for key in running if key[0] in recorded] or running
    has_run = any(sums[key].images for key in running)
    # A model may skip some layers, as in LayerDrop.
    if running and not has_run:
        return f"no image in {mode} reached {names}"
    # If all probes measure only gradients, there are neither images nor a state, so backward passes
    # are checked.
    if layers and not any(
        layer.probe.runs or layer.probe.state or sums[key].squares for key, layer in layers.items()
    ):
        return f"no gradient reached {names}, which are perhaps frozen,"
    if collector.attention_probes and not (collector.forwards.measured or has_run):
        what = f"attention is to be measured, and no forward in {mode} began"
        return f"{what} (or leave the probes of attention out)" if layers else what
    if not layers:
        asked_for = f"the layers asked for, {layer_filter!r},"
        return f"no attention was seen in {asked_for if layer_filter else collector.model_class}"
    images = collector.sampling.images
    counts = [collector.sums.images(key) for key in layers if layers[key].probe.maps]
    # Maps could join later, but images that the first epoch lacks come in no other.
    if groups is None and images and counts and max(counts) <= images[0]:
        return f"of the images asked for, {list(images)}, none was among the {max(counts)} seen"
    return ""


def _notes(collector: Collector) -> list[str]:
    """Return what may explain that nothing was measured, and advice."""
    forwards, names = collector.forwards, collector.names
    notes = []
    # A forward that was measured was in the right mode, and of this model.
    if not forwards.measured:
        notes.append(f"forwards in training mode: {forwards.training_forwards}")
        if collector.sampling.mode == "eval mode":
            notes.append("run the validation, with model.eval(), before mark()")
        notes.append("if you evaluate a copy, such as a moving average, record that copy")
    if forwards.called_parts:
        notes.append(f"parts of the model were called: {_shorten(forwards.called_parts)}")
    compiled = [
        name
        for module, name in names.items()
        if name and getattr(module, COMPILED_CALL, None) is not None
    ]
    if compiled:
        notes.append(
            f"the parts {_shorten(compiled)} are compiled, and are seen only in calls of the "
            "model: compile them as model.part = torch.compile(model.part)"
        )
    if replaced := collector.replaced:
        notes.append(
            f"other modules took the places of {_shorten(replaced)} since record() was called: "
            "call it again"
        )
    if collector.stream.unsupported:
        notes.append(f"layers that look like attention: {collector.stream.unsupported}")
    if collector.missing:
        notes.append(f"what the probes do not measure: {collector.missing}")
    if forwards.measured and not collector.layers:
        like = [name for module, name in names.items() if looks_like_attention(module)]
        notes.append(
            f"layers that are named like attention: {_shorten(like)}"
            if like
            else "tcnn_model.reparameterize(model) turns the last convolutions of a CNN into GPSA "
            "layers, and probes= measures other layers"
        )
    return notes


def idle_probes(
    kinds: Collection[str], collector: Collector, sums: Mapping[Key, EpochSums]
) -> Iterator[str]:
    """Yield warnings of probes that the user names and that lack a layer, or parameters to read.

    If one of the default probes has a layer, no warning is given for the other default probes.
    """
    with_layers = {kind for _, kind in sums}
    # The default probes include GPSA and softmax, and few models have both.
    expected = {*DEFAULT} if with_layers & {*DEFAULT} else set()
    if idle := [kind for kind in kinds if kind not in with_layers | expected]:
        yield f"no layer was found for the probes {idle}"
    for probe in collector.probes:
        entries = [total for (_, kind), total in sums.items() if kind == probe.kind]
        measured = {name for total in entries for name in total.sums}
        unread = sorted(probe.variables.keys() - probe.image_variables - measured)
        # A probe that has read some of its variables fits the model.
        has_state = any(total.state for total in entries)
        if probe.kind in kinds and probe.state and entries and unread and not has_state:
            yield f"{collector.model_class} has no {unread} for the probe {probe.kind!r} to read"


def joined_layers(stored: Groups, groups: Groups) -> Iterator[str]:
    """Yield a warning if a run that continues a recording brings layers that it lacks.

    They may not have run before, or be those of a deeper model, which has the same class.
    """
    before, after = (
        dict.fromkeys(name for group in side.values() for name in group.layers)
        for side in (stored, groups)
    )
    if joined := [name for name in after if name not in before]:
        yield (
            f"the recording began without these layers, which now join its {len(before)}: "
            f"{', '.join(joined)}. If this is another model, choose another path"
        )


def doubtful_values(
    entries: Iterable[LayerValues], groups: Groups, sums: Mapping[Key, EpochSums]
) -> Iterator[str]:
    """Yield warnings that name layers with NaN or infinity, or that saw images of several sizes."""
    counts: dict[str, int] = {}
    broken: list[str] = []
    for entry in entries:
        recorded = groups.get(entry.place, Group({}, {}))
        # Maps are not checked: they are NaN for images that were not seen.
        if entry.maps or entry.layer not in recorded.layers:
            continue
        images = int(entry.values.get("nonfinite_images", 0))
        if images:
            counts[entry.layer] = max(images, counts.get(entry.layer, 0))
        elif not all(
            np.isfinite(value).all() or entry.variables[name].may_be_nan
            for name, value in entry.values.items()
            if name in recorded.variables
        ):
            broken.append(entry.layer)
    if counts:
        yield (
            "images gave NaN or infinite values, which are left out of the means; their number by "
            f"layer: {counts}"
        )
    if broken:
        yield (
            "NaN or infinite values were recorded for these layers, from their parameters or "
            f"gradients: {broken}"
        )
    mixed = [layer for (layer, _), total in sums.items() if None in total.patterns.values()]
    if mixed := [*dict.fromkeys(mixed)]:
        yield f"no content_information of {mixed[:3]} (of {len(mixed)} layers): {MIXED_SIZES}"


def changed_modules(collector: Collector, sums: Mapping[Key, EpochSums]) -> Iterator[str]:
    """Yield warnings of layers without images whose modules others have replaced,
    and of attention that the model got later.
    """
    have_run = {layer for (layer, _), total in sums.items() if total.images}
    idle = dict.fromkeys(layer for layer, _ in collector.layers if layer not in have_run)
    if replaced := [layer for layer in idle if module_name(layer) in collector.replaced]:
        yield (
            f"other modules took the places of {_shorten(replaced)} since record() was called, so "
            "that these layers are NaN: call it again"
        )
    # Layers that the user did not ask for are not missed.
    if collector.chosen is not None or not collector.attention_probes:
        return
    if added := [layer for layer in collector.added if layer not in replaced]:
        yield (
            f"the model got {_shorten(added)} after record() was called, and they are not "
            "recorded: call it again"
        )


def dropped_values(dropped: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield a warning of layers, and of variables by layer, that the recording began without."""
    if dropped:
        names = sorted({name for names in dropped.values() for name in names})
        variables = f"{names} of " if names else ""
        yield (
            "not recorded, because the recording began without them: "
            f"{variables}{[*dropped][:3]} (of {len(dropped)})"
        )


def changed_images(hashes: Mapping[str, str], stored: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning if images differ from those whose hashes were stored."""
    changed = [number for number in hashes if stored.get(number, hashes[number]) != hashes[number]]
    if changed:
        yield (
            f"the images [{', '.join(_shorten(changed))}] of this epoch are not those of the "
            "epochs before, so their maps cannot be compared: give a validation loader with "
            "shuffle=False and without random augmentation"
        )


def _shorten(names: Iterable[str]) -> list[str]:
    names = list(names)
    return names if len(names) < 4 else [*names[:3], "..."]
