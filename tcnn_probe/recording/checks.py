"""What was asked for and is not there: errors of ``record()`` and ``mark()``, with their reasons."""

from collections.abc import Iterable, Mapping

from torch import nn

from tcnn_model.conversion.selection import select_layers
from tcnn_probe.models import layer_names, unwrap
from tcnn_probe.probes import Probe
from tcnn_probe.provenance import provenance
from tcnn_probe.recording.accumulator import Found
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.dataset import MAPS_OF_CLASSES
from tcnn_probe.recording.options import Options
from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, StoreError

__all__ = ["check_found", "check_probes", "check_same_recording"]

Everything = Mapping[tuple[str, str], Found]  # by layer and probe


def check_probes(probes: Iterable[Probe], collector: Collector, model: nn.Module, options: Options) -> None:
    """Refuse probes that no layer is for, as far as this is known before a forward, and images that none keeps."""
    probes = list(probes)
    if options.image_numbers() and not any(probe.maps for probe in probes):
        raise ValueError(f"images= keeps maps, and none of the probes {[probe.kind for probe in probes]} has any")
    _check_classes(probes, collector, options)
    if not collector.tallies and not collector.sees_forwards:
        kinds = [probe.kind for probe in probes]
        where = "" if options.layers is None else " among those asked for"
        why = f": {collector.missing}" if collector.missing else ""
        raise ValueError(f"{type(unwrap(model)).__name__} has no layer{where} for the probes {kinds}{why}")


def _check_classes(probes: Iterable[Probe], collector: Collector, options: Options) -> None:
    """Classes that were named are classes of a pool, and maps of them are kept."""
    classes, counts = options.wanted_classes(), collector.class_counts
    if not classes.chosen:
        return
    if not (counts and any(probe.of_classes for probe in probes)):
        raise ValueError(f"classes={options.classes} chooses maps, and no layer or probe has one for each class")
    if not options.image_numbers():
        raise ValueError(f"classes={options.classes} chooses maps, and there are none without images=")
    classes.check(counts)


def check_same_recording(store: EpochStore, collector: Collector, model: nn.Module, options: Options) -> None:
    """Refuse a store of another model or other layers, as far as these are known before a forward.

    Raises:
        StoreError: naming the first difference.
    """
    groups, attrs = store.groups, store.attrs
    if groups is None or attrs is None:
        return
    about = provenance(model)
    for name, what in (("model_class", "class"), ("model_architecture", "architecture")):
        then, now = attrs.get(name), about.get(name)
        if now is not None and then is not None and then != now:
            raise StoreError(f"the store is a recording of another model (of {what} {then!r}, not {now!r})")
    _check_same_classes(groups, options)
    modules = set(layer_names(model).values())
    for layer in (layer for group in groups.values() for layer in group.layers):
        if layer.split("#")[0] not in modules:
            raise StoreError(f"the store is a recording of other layers ({layer!r} there, absent in this model)")
    for tally in collector.tallies.values():
        table = groups[tally.probe.place].layers if tally.probe.place in groups else {}
        here = {"kind": tally.probe.kind} | (dict(tally.probe.facts(tally.module)) if tally.probe.facts else {})
        there = {key: table[tally.name].get(key) for key in here} if tally.name in table else "absent"
        if there != here:
            raise StoreError(f"the store is a recording of other layers ({tally.name!r}: {there} there, {here} here)")


def _check_same_classes(groups: Mapping[str, Group], options: Options) -> None:
    here = options.wanted_classes().plain
    for path, group in groups.items():
        for layer, table in group.layers.items() if path.startswith(MAPS_OF_CLASSES) else ():
            if options.image_numbers() and (there := table.get("classes")) != here:
                raise StoreError(f"the store has maps of {layer!r} with classes={there}, got classes={options.classes}")


def check_found(
    found: Everything,
    collector: Collector,
    model: nn.Module,
    options: Options,
    groups: Mapping[str, Group] | None,
    *,
    missed: bool,
) -> None:
    """Refuse to mark an epoch of which something is missing.

    Args:
        found: by all ranks.
        collector: of this one.
        model: recorded.
        options: of the recorder.
        groups: of the recording, None before its first mark.
        missed: whether attention is to be measured and no forward that could show any has begun.

    Raises:
        RuntimeError: with what is missing, why, and what to do.
    """
    training = f"{collector.training_forwards} forwards in training mode"
    advice = "run some before mark()"
    if options.when == "eval":
        advice = "run the validation, with model.eval(), before mark()"
    recorded = None if groups is None else {layer for group in groups.values() for layer in group.layers}
    idle = [name for (name, kind), one in found.items() if collector.tallies[name, kind].probe.runs and not one.images]
    if idle := [name for name in dict.fromkeys(idle) if recorded is None or name in recorded]:
        raise RuntimeError(
            f"nothing to mark: no image in {options.mode} reached {_some(idle)} since the previous mark ({training}); "
            f"{advice}"
        )
    _check_passes(found, collector)
    if missed:
        alternative = ", or leave the probes of attention out" if found else ""
        raise RuntimeError(
            f"nothing to mark: attention is to be measured, and no forward in {options.mode} began since the previous "
            f"mark ({training}); {advice}{alternative}"
        )
    if not found:
        seen = f"; layers that look like attention: {collector.unsupported}" if collector.unsupported else ""
        raise RuntimeError(
            f"nothing to mark: no attention was seen in {type(unwrap(model)).__name__} (with {training}, which are not "
            f"measured){seen}. If it did see images in {options.mode}, it has no layer that can be recorded: "
            f"tcnn_model.reparameterize(model) turns the last convolutions of a CNN into GPSA layers, and probes= "
            f"measures other layers"
        )
    _check_asked_for(found, collector, options)
    if groups is None:
        _check_images(collector, options)


def _check_images(collector: Collector, options: Options) -> None:
    """The first mark says how large maps are: some must have been seen by then."""
    numbers = options.image_numbers()
    seen = [tally.images for tally in collector.tallies.values() if tally.probe.maps is not None]
    if numbers and seen and max(seen) <= numbers[0]:
        raise RuntimeError(
            f"nothing to mark: of the images asked for, {list(numbers)}, none was among the {max(seen)} seen"
        )


def _check_passes(found: Everything, collector: Collector) -> None:
    probes = {key: collector.tallies[key].probe for key in found}
    if found and not any(probe.runs or probe.state or found[key].passes for key, probe in probes.items()):
        raise RuntimeError(
            f"nothing to mark: no gradient reached {_some([name for name, _ in found])} since the previous mark; run "
            f"some backward passes before mark(), and see that the parameters are not frozen"
        )


def _check_asked_for(found: Everything, collector: Collector, options: Options) -> None:
    """Each name and glob has chosen something that was recorded."""
    asked = options.layers
    if asked is None or callable(asked):
        return
    layers = {name: nn.Identity() for layer, _ in found for name in (layer, layer.split("#")[0])}
    for pattern in (asked,) if isinstance(asked, str) else asked:
        try:
            select_layers(layers, pattern, what="layers")
        except ValueError:
            inside = {n: r for n, r in collector.unsupported.items() if n == pattern or n.startswith(f"{pattern}.")}
            why = f": {inside}" if inside else ": no attention was seen there"
            raise RuntimeError(f"layers asked for {pattern!r}, of which nothing was recorded{why}") from None


def _some(names: list[str]) -> list[str]:
    return names[:3] + ["..."] * (len(names) > 3)
