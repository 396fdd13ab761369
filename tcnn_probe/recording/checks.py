"""Checks of an epoch, and of the recording that is there, before a mark is stored."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tcnn_model.conversion.selection import LayerFilter, matching
from tcnn_probe.probes import DEFAULT, Probe
from tcnn_probe.recording.epoch import MAPS_OF_CLASSES, EpochReport, LayerReport
from tcnn_probe.recording.sums import MIXED_SIZES
from tcnn_probe.schema import Group, difference
from tcnn_probe.storage import EpochStore, StoreError

__all__ = [
    "OtherLayersError",
    "check_epoch",
    "check_order",
    "check_probes",
    "check_resumed",
    "check_same_recording",
    "warn_of_changed_images",
    "warn_of_idle_probes",
    "warn_of_mixed_sizes",
]

Groups = Mapping[str, Group]


class OtherLayersError(StoreError):
    """The store holds a recording of layers that the model does not have."""


def check_probes(report: EpochReport, *, chose_layers: bool) -> None:
    """Raise an error if it is known before a forward that probes have no layer, or if no probe has the wanted maps."""
    probes, sampling, classes = report.probes, report.sampling, report.sampling.classes
    kinds = [probe.kind for probe in probes]
    if sampling.images and not any(
        probe.maps and probe.images is None for probe in probes
    ):
        raise ValueError(f"images= keeps maps, and none of the probes {kinds} has any")
    if classes.indices:
        if not (report.class_counts and any(probe.class_variables for probe in probes)):
            raise ValueError(
                f"classes={classes.plain} chooses maps, and no layer or probe has one for each class"
            )
        if not sampling.images:
            raise ValueError(
                f"classes={classes.plain} chooses maps, and there are none without images="
            )
        for pool, count in report.class_counts.items():
            classes.check(pool, count)
    # Probes of attention are not checked, as attention is found only in the first forward.
    if probes and not report.layers and not any(probe.attention for probe in probes):
        scope = " among those asked for" if chose_layers else ""
        reasons = f": {report.missing}" if report.missing else ""
        raise ValueError(
            f"{report.model_class} has no layer{scope} for the probes {kinds}{reasons}"
        )


def check_same_recording(
    store: EpochStore, provenance: Mapping[str, str], report: EpochReport
) -> None:
    """Raise an error if the store is known, before a forward, to be of another model, layers, images or classes."""
    groups, attrs, sampling = store.groups, store.attrs, report.sampling
    if groups is None or attrs is None:
        return
    for name, word in (
        ("model_class", "class"),
        ("model_architecture", "architecture"),
    ):
        stored, current = attrs.get(name), provenance.get(name)
        if current is not None and stored is not None and stored != current:
            raise StoreError(
                f"the store is a recording of another model (of {word} {stored!r}, not {current!r})"
            )
    images = json.loads(attrs["images"])
    if images != list(sampling.images):
        raise StoreError(
            f"the store keeps maps of the images {images}, and images= asks for {list(sampling.images)}"
        )
    # A recording that has only scalars may get layers, for example when a CNN has become a T-CNN.
    if not store.has_layers:
        return
    for path, group in groups.items():
        if not path.startswith(MAPS_OF_CLASSES):
            continue
        for layer, table in group.layers.items():
            if table["classes"] != sampling.classes.plain:
                raise StoreError(
                    f"the store has maps of {layer!r} with classes={table['classes']}, got "
                    f"classes={sampling.classes.plain}"
                )
    for group in groups.values():
        for layer in group.layers:
            # "name#1" is the second attention in a call of the module "name".
            if layer.split("#")[0] not in report.order:
                reason = f"{layer!r} there, absent in this model"
                raise OtherLayersError(
                    f"the store is a recording of other layers ({reason})"
                )
    for entry in report.layers:
        _check_same_layer(entry, groups)


def _check_same_layer(entry: LayerReport, groups: Groups) -> None:
    probe, layer = entry.probe, entry.name
    group = groups.get(probe.place, Group({}, {}))
    images = group.coords.get("image")
    if (
        probe.images is not None
        and images is not None
        and list(images) != list(probe.images)
    ):
        raise StoreError(
            f"the store has {probe.kind} of {len(images)} images other than those asked for"
        )
    current = {"kind": probe.kind, **entry.facts}
    stored: Any = "absent"
    if layer in group.layers:
        # Only facts that are known before a forward are compared; the stored table has more.
        stored = {fact: group.layers[layer].get(fact) for fact in current}
    if stored != current:
        reason = f"{layer!r}: {stored} there, {current} here"
        raise OtherLayersError(f"the store is a recording of other layers ({reason})")


def check_resumed(stored: Groups, current: Groups, probes: Iterable[Probe]) -> None:
    """Raise an error if the store has other numbers of a layer, or those of a probe that does not measure now.

    Layers that have not run yet may be absent, other layers may join, and maps may have another size. Variables that
    the recording began without, in an earlier version, are left out of it.
    """
    numbers = {path: group for path, group in stored.items() if not group.maps}
    kinds = {probe.kind for probe in probes}
    for group in numbers.values():
        for layer, table in group.layers.items():
            if table["kind"] not in kinds:
                raise _other_recording(
                    f"{table['kind']} of {layer!r} there, absent here"
                )
    known = {layer for group in numbers.values() for layer in group.layers}
    for path, group in current.items():
        before = numbers.get(path, Group({}, {}))
        order = [layer for layer in {**before.layers, **group.layers} if layer in known]
        # Sizes of maps follow from sizes of images, which may differ from run to run.
        if group.maps or not group.layers.keys() & known:
            continue
        pair = []
        for side in (before, group):
            layers = {
                layer: side.layers[layer]
                for layer in order
                if layer in group.layers and layer in side.layers
            }
            part = replace(side, layers=layers)
            same_layers = before.layers.keys() == group.layers.keys()
            # Sizes are those of the largest layer, and variables those of any, which may be absent.
            if same_layers:
                named = before.variables.keys() & side.variables.keys()
                dims = {dim for name in named for dim in side.variables[name].dims}
            else:
                named, dims = before.variables.keys() & group.variables.keys(), set()
            part = replace(
                part,
                variables={name: side.variables[name] for name in named},
                sizes={dim: side.sizes[dim] for dim in dims & side.sizes.keys()},
                coords={dim: side.coords[dim] for dim in dims & side.coords.keys()},
            )
            pair.append({path: part})
        if (reason := difference(*pair)) is not None:
            raise _other_recording(reason)


def _other_recording(reason: str) -> StoreError:
    return StoreError(
        f"the store is a recording of something else ({reason}): choose another path"
    )


def check_order(along: str, number: int | float, marks: Sequence[int | float]) -> None:
    """Raise an error if an epoch is marked already, or comes before the last mark."""
    # This is checked first, because it is the usual mistake of a resumed run and needs other advice.
    if number in marks:
        raise ValueError(
            f"{along} {number} is already marked: record(..., mode='w') replaces the recording that is there; to "
            f"continue it, leave out what is in recorder.epochs, or mark(..., if_marked='skip')"
        )
    if marks and number < marks[-1]:
        raise ValueError(
            f"expected {along} to be later than the last one marked, {marks[-1]}, got {number}"
        )


def check_epoch(
    report: EpochReport, layer_filter: LayerFilter | None, groups: Groups | None
) -> None:
    """Raise an error that gives a reason and advice if an epoch lacks something.

    Args:
        report: Report of the epoch.
        layer_filter: Layers that the user has chosen; None for all.
        groups: Groups of the recording; None before its first mark.

    Raises:
        RuntimeError: Something was not measured.
    """
    # A recording without probes has only scalars.
    if not report.probes:
        return
    _check_forwards(report, groups)
    if not report.layers:
        _raise_no_attention(report, layer_filter)
    _check_layer_filter(
        [entry.name for entry in report.layers], layer_filter, report.unsupported
    )
    counts = [entry.images for entry in report.layers if entry.probe.maps is not None]
    images = report.sampling.images
    # The first mark creates the groups of maps, so it needs a map to know their size.
    if groups is None and images and counts and max(counts) <= images[0]:
        raise RuntimeError(
            f"nothing to mark: of the images asked for, {list(images)}, none was among the {max(counts)} seen"
        )


def _check_forwards(report: EpochReport, groups: Groups | None) -> None:
    """Raise an error if no forward, or no backward pass, reached the layers to measure."""
    mode, training = (
        report.sampling.mode,
        f"{report.training_forwards} forwards in training mode",
    )
    advice = "run some before mark()"
    if mode == "eval mode":
        advice = "run the validation, with model.eval(), before mark()"
    advice += (
        "; if you evaluate a copy of the model, such as a moving average, record that copy"
        + _describe_parts(report)
    )
    layers = report.layers
    running = [entry for entry in layers if entry.probe.runs]
    if groups is not None:
        # Layers that the recording began without are not written, so they may be idle.
        recorded = {layer for group in groups.values() for layer in group.layers}
        running = [entry for entry in running if entry.name in recorded] or running
    # A model may skip some layers, as in LayerDrop.
    if running and not any(entry.sums.images for entry in running):
        names = _shorten(dict.fromkeys(entry.name for entry in running))
        raise RuntimeError(
            f"nothing to mark: no image in {mode} reached {names} since the previous mark ({training}); {advice}"
        )
    # If all probes measure only gradients, there are neither images nor a state, so backward passes are checked.
    if layers and not any(
        entry.probe.runs or entry.probe.state or entry.sums.squares for entry in layers
    ):
        raise RuntimeError(
            f"nothing to mark: no gradient reached {_shorten([entry.name for entry in layers])} since the previous "
            f"mark; run some backward passes before mark(), and see that the parameters are not frozen"
        )
    if report.missed_attention:
        alternative = ", or leave the probes of attention out" if layers else ""
        raise RuntimeError(
            f"nothing to mark: attention is to be measured, and no forward in {mode} began since the previous mark "
            f"({training}); {advice}{alternative}"
        )


def _describe_parts(report: EpochReport) -> str:
    """Return the parts that were called, and those that cannot be followed."""
    text = ""
    if report.called_parts:
        text += f"; parts of the model were called: {_shorten(report.called_parts)}"
    if report.compiled_parts:
        text += (
            f"; the parts {_shorten(report.compiled_parts)} are compiled, and are seen only in calls of the model: "
            f"compile them as model.part = torch.compile(model.part)"
        )
    return text


def _raise_no_attention(report: EpochReport, layer_filter: LayerFilter | None) -> None:
    unsupported = (
        f"; layers that look like attention: {report.unsupported}"
        if report.unsupported
        else ""
    )
    if report.missing:
        unsupported += f"; attention that the probes do not measure: {report.missing}"
    unsupported += _describe_parts(report)
    if layer_filter is not None:
        layers = report.attention_like
        advice = f": such layers of this model are {_shorten(layers)}" if layers else ""
        raise RuntimeError(
            f"nothing to mark: no attention was seen in the layers asked for, {layer_filter!r}{unsupported}{advice}"
        )
    raise RuntimeError(
        f"nothing to mark: no attention was seen in {report.model_class} (with {report.training_forwards} forwards in "
        f"training mode, which are not measured){unsupported}. If it did see images in {report.sampling.mode}, it has "
        f"no layer that can be recorded: tcnn_model.reparameterize(model) turns the last convolutions of a CNN into "
        f"GPSA layers, and probes= measures other layers"
    )


def _check_layer_filter(
    layers: Iterable[str],
    layer_filter: LayerFilter | None,
    unsupported: Mapping[str, str],
) -> None:
    """Raise an error if a name or glob matches no recorded layer."""
    if layer_filter is None or callable(layer_filter):
        return
    # "name#1" is the second attention in a call of the module that the user names.
    recorded = {name for layer in layers for name in (layer, layer.split("#")[0])}
    for pattern in (layer_filter,) if isinstance(layer_filter, str) else layer_filter:
        if matching(recorded, pattern):
            continue
        inside = [
            layer
            for layer in unsupported
            if layer == pattern or layer.startswith(f"{pattern}.")
        ]
        reasons = {layer: unsupported[layer] for layer in inside}
        why = f": {reasons}" if reasons else ": no attention was seen there"
        raise RuntimeError(
            f"nothing was recorded of the layers asked for, {pattern!r}{why}"
        )


def warn_of_idle_probes(kinds: Collection[str], report: EpochReport) -> list[str]:
    """Return warnings of probes that the user has named and that have no layer, or no parameters to read.

    If one of the default probes has a layer, no warning is given for the other default probes.
    """
    kinds_with_layers = {entry.probe.kind for entry in report.layers}
    # The default probes include GPSA and softmax, and few models have both.
    idle = [
        kind
        for kind in kinds
        if kind not in kinds_with_layers
        and not (kind in DEFAULT and kinds_with_layers & {*DEFAULT})
    ]
    warned = [f"no layer was found for the probes {idle}"] if idle else []
    for probe in report.probes:
        entries = [entry for entry in report.layers if entry.probe.kind == probe.kind]
        measured = {name for entry in entries for name in entry.sums.sums}
        unread = sorted(probe.variables.keys() - probe.image_variables - measured)
        # A probe that has read some of its variables fits the model.
        has_state = any(entry.sums.state for entry in entries)
        if probe.kind in kinds and probe.state and entries and unread and not has_state:
            warned.append(
                f"{report.model_class} has no {unread} for the probe {probe.kind!r} to read"
            )
    return warned


def warn_of_mixed_sizes(report: EpochReport) -> list[str]:
    """Return a warning if layers that saw images of several sizes have no content information, else an empty list."""
    layers = list(
        dict.fromkeys(
            entry.name
            for entry in report.layers
            if None in entry.sums.patterns.values()
        )
    )
    return (
        [
            f"no content_information of {layers[:3]} (of {len(layers)} layers): {MIXED_SIZES}"
        ]
        if layers
        else []
    )


def warn_of_changed_images(
    hashes: Mapping[str, str], stored: Mapping[str, str]
) -> list[str]:
    """Return a warning if images differ from those whose hashes were stored, else an empty list."""
    numbers = [
        int(number)
        for number, image_hash in hashes.items()
        if stored.get(number, image_hash) != image_hash
    ]
    if not numbers:
        return []
    shown = numbers if len(numbers) < 5 else [*numbers[:3], "..."]
    return [
        f"the images {shown} of this epoch are not those of the epochs before, so their maps cannot be compared: "
        f"give a validation loader with shuffle=False and without random augmentation"
    ]


def _shorten(names: Iterable[str]) -> list[str]:
    names = list(names)
    return names if len(names) < 4 else [*names[:3], "..."]
