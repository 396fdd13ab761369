"""Shows the probes what happens in the forwards of a model, and adds up what they find."""

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_editor import edited
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.reconstruction import relative_difference, tolerance
from tcnn_probe.attention.stream import AttentionListener, AttentionStream
from tcnn_probe.hooks.modes import hidden_depth, named_in_errors
from tcnn_probe.models import layer_names, unwrap
from tcnn_probe.probes import ForwardCall, NotMeasuredError, Probe
from tcnn_probe.recording.accumulator import Accumulator, EpochSums, checked
from tcnn_probe.recording.image_identity import ImageIdentity
from tcnn_probe.recording.options import Sampling

__all__ = ["Collector"]


@dataclass(frozen=True)
class _Measured:
    """What one probe found in a forward that has not ended yet."""

    layer: str
    module: nn.Module
    probe: Probe
    values: Mapping[str, Tensor]
    images: int
    before: int  # images of the layer that came earlier in the epoch
    rows: Sequence[int]  # images of this forward of which there are maps
    maps: Mapping[str, Tensor]
    patterns: Mapping[str, Pattern]


class Collector(AttentionListener):
    """What is found between two marks.

    Attributes:
        probes, sampling: as given.
        sums: by layer and kind of probe.
        missing: {variable: {layer: why}} of layers that are recorded without it.
        advice: {layer: what the user can say} where no grid was found.
        names: of all modules.
        order: place of each module in the model, by name; of further attentions of one as well.
        model_class: name of the model's class.
        training_forwards: how many began in training mode.
        paused: how many pauses this is in: then nothing is measured.
        images: which images came.
        lock: held while a forward is added up; to be held from reading the sums to :meth:`reset`.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        wanted: Collection[str] | None,
        sampling: Sampling,
        tokens: GivenTokens,
    ) -> None:
        self._model, self._wanted, self.probes, self.sampling = model, wanted, probes, sampling
        self._attention_probes = [probe for probe in probes if probe.attention is not None]
        self.names = layer_names(model)
        self.model_class = type(unwrap(model)).__name__
        self.order = {name: place for place, name in enumerate(self.names.values())}
        self.sums: dict[tuple[str, str], Accumulator] = {}
        self.missing: dict[str, dict[str, str]] = {}
        self.advice: dict[str, str] = {}
        self.training_forwards = self.paused = 0
        self._aside = hidden_depth()
        self._chosen = {one.kind: frozenset(sampling.images if one.images is None else one.images) for one in probes}
        self.images = ImageIdentity(sorted({*sampling.images}.union(*(one.images or () for one in probes))))
        self.lock = threading.RLock()
        self._entered: Counter[nn.Module] = Counter()
        self._of_module: dict[nn.Module, list[Accumulator]] = {}
        named = [(one, one.layers(self.names.values()) if one.layers else self.order) for one in probes]
        for module, name in self.names.items():
            if wanted is None or name in wanted:
                self._attach(name, module, [one for one, names in named if name in names])
        self._parts = {part for many in self._of_module.values() for one in many for _, part in _parts_of(one)}
        self._epoch = self._begun_in = 0
        self._size: object = None  # of the images of this forward
        self._clear()
        self.stream = AttentionStream(
            model,
            self,
            layers=wanted if self._attention_probes else (),
            watched=self._of_module.keys() | self._parts,
            tokens=tokens,
        )
        try:
            self._follow_gradients()
        except BaseException:
            self.remove()
            raise

    @property
    def sees_forwards(self) -> bool:
        """Whether any probe measures them."""
        return bool(self._attention_probes) or any(one.probe.runs for one in self._all())

    @property
    def missed_attention(self) -> bool:
        """Whether attention is to be measured, and no forward that could show any has begun since the last mark."""
        return bool(self._attention_probes) and not self._entered

    @property
    def unmarked(self) -> int:
        """How many images were measured since the last mark."""
        return max((one.images for one in self._all()), default=0)

    @property
    def class_counts(self) -> dict[str, int]:
        """Number of classes of each pool with a token for each, if it or what is in it is wanted."""
        wanted = self.names.values() if self._wanted is None else self._wanted
        return {
            name: pool.num_classes
            for pool, name in self.names.items()
            if isinstance(pool, AttentionPool2d) and pool.num_classes is not None
            if any(f"{each}.".startswith(f"{name}.") for each in wanted)
        }

    def remove(self) -> None:
        """Detach; may be called more than once."""
        self.stream.close()
        for one in self._all():
            one.remove()

    def reset(self) -> None:
        """Start the next epoch. A forward that is running now belongs to none."""
        self._epoch += 1
        self.training_forwards = 0
        self._entered.clear()
        self.images.reset()
        for one in self._all():
            one.reset()

    def expect(self, layer: str, kind: str) -> None:
        """Have room for what another rank has found."""
        if (layer, kind) not in self.sums:
            probe = next(probe for probe in self._attention_probes if probe.kind == kind)
            module = next(module for module, name in self.names.items() if name == layer.split("#")[0])
            self._sums_of(layer, module, probe)

    def mixes_sizes(self, found: Mapping[tuple[str, str], EpochSums]) -> list[str]:
        """Note the layers without content information, as they saw images of several sizes; and say so, in words."""
        mixed = {layer: [v for v, p in one.patterns.items() if p is None] for (layer, _), one in found.items()}
        mixed = {layer: variables for layer, variables in mixed.items() if variables}
        why = "images of several sizes came between two marks: mark() after those of each size"
        for layer, variables in mixed.items():
            self._lacks(layer, {*variables, "translation_equivariance"}, why)
        return [f"no content_information of {list(mixed)[:3]} (of {len(mixed)} layers): {why}"] if mixed else []

    # What the stream tells: see AttentionListener.

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Return whether this forward is to be measured, and prepare for it."""
        if self.paused:
            return False
        training = self._model.training
        self.training_forwards += training
        self._follow_gradients()
        if not self.sees_forwards or not self.sampling.takes(training=training):
            return False
        number = self._entered[entry]
        self._entered[entry] += 1
        if number % self.sampling.every or self._is_full():
            return False
        self._clear()
        self.images.begins(inputs)
        self._size = tuple(x.shape[1:] for x in inputs if isinstance(x, Tensor))
        self._begun_in = self._epoch
        self._whole = unwrap(entry) is unwrap(self._model)
        return True

    def attends(self, attention: Attention) -> None:
        """Measure an attention."""
        for probe in self._attention_probes:
            if probe.module_type is not None and not probe.applies_to(attention.module):
                continue
            assert probe.attention is not None
            limited = replace(attention, limit=self._room(attention.name, probe))
            values = checked(probe, probe.attention(limited), images=True)
            if values:
                self._pending.append(self._measured(probe, values, limited))
        layout = attention.layout
        if layout.advice:
            self.advice[attention.name] = layout.advice
        if layout.reason:
            known = {name for probe in self._attention_probes for name in probe.variables}
            self._lacks(attention.name, known & {"attention_distance", "uniform_distance"}, layout.reason)

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """Measure a module that has run, or note a part of it that a probe needs."""
        if module in self._parts:
            self._calls[module] = ForwardCall(module, self.names[module], inputs, output)
        measuring = [one for one in self._of_module.get(module, ()) if one.probe.measure is not None]
        for one in measuring:
            parts = {name: self._calls[part] for name, part in _parts_of(one) if part in self._calls}
            with named_in_errors(one.name), edited(module):
                limit = self._room(one.name, one.probe)
                self._measure(one, ForwardCall(module, one.name, inputs, output, parts, limit))
        for one in measuring:
            for _, part in _parts_of(one):
                self._calls.pop(part, None)

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Add up what was measured, unless the epoch was marked meanwhile."""
        measured = [one for one in self._pending if one.probe.attention is None or one.layer in layers]
        self._clear()
        with self.lock:
            if self._begun_in == self._epoch:
                self.images.ends()
                for one in measured:
                    self._add(one, output if self._whole else None)

    def fails(self) -> None:
        """Forget what was measured."""
        self._clear()

    def _attach(self, name: str, module: nn.Module, probes: Sequence[Probe]) -> None:
        mine = [probe for probe in probes if probe.applies_to(module)]
        rivals = [probe for probe in mine if _has_heads(probe)][1:]
        for probe in mine:
            if probe not in rivals:
                try:
                    one = self._sums_of(name, module, probe)
                    if probe.measure is not None:
                        self._of_module.setdefault(module, []).append(one)
                except NotMeasuredError as reason:
                    self._lacks(name, probe.variables, str(reason))

    def _sums_of(self, layer: str, module: nn.Module, probe: Probe) -> Accumulator:
        key = layer, probe.kind
        if key not in self.sums:
            self.sums[key] = Accumulator(layer, module, probe, lambda: self.paused > 0 or hidden_depth() > self._aside)
            self.order.setdefault(layer, self.order[self.names[module]])
        return self.sums[key]

    def _all(self) -> list[Accumulator]:
        return list(self.sums.values())  # as they are now, though another thread may add one

    def _lacks(self, layer: str, variables: Collection[str], why: str) -> None:
        for variable in variables:
            self.missing.setdefault(variable, {})[layer] = why

    def _follow_gradients(self) -> None:
        for one in self._all():
            one.follow_gradients()

    def _clear(self) -> None:
        self._pending: list[_Measured] = []
        self._calls: dict[nn.Module, ForwardCall] = {}
        self._images: Counter[tuple[str, str]] = Counter()  # of this forward

    def _is_full(self) -> bool:
        most = self.sampling.max_images
        counts = [one.images for one in self._all() if one.probe.runs]
        return most is not None and bool(counts) and min(counts) >= most

    def _measure(self, one: Accumulator, call: ForwardCall) -> None:
        probe, verification = one.probe, self.stream.verification
        if probe.rebuild is not None and verification.needed(one.name) and (rebuilt := probe.rebuild(call)) is not None:
            off = relative_difference(rebuilt, call.output[:1])
            verification.add(one.name, (off, tolerance(call.output.dtype)))
        assert probe.measure is not None
        if values := checked(probe, probe.measure(call), images=True):
            self._pending.append(self._measured(probe, values, call))

    def _before(self, layer: str, probe: Probe) -> int:
        """Images that came earlier in the epoch."""
        key = layer, probe.kind
        return self._images[key] + (self.sums[key].images if key in self.sums else 0)

    def _room(self, layer: str, probe: Probe) -> int | None:
        """How many more images count; None for all."""
        most = self.sampling.max_images
        return None if most is None else max(0, most - self._before(layer, probe))

    def _measured(self, probe: Probe, found: Mapping[str, Tensor | Pattern], call: Any) -> _Measured:
        """With the maps of those images that are chosen."""
        layer = call.name
        patterns = {name: replace(one, size=self._size) for name, one in found.items() if isinstance(one, Pattern)}
        each = {name: one for name, one in found.items() if isinstance(one, Tensor)}
        values = {name: one[: call.limit] for name, one in each.items()}
        images, before = len(next(iter(each.values()))), self._before(layer, probe)
        self._images[layer, probe.kind] += images
        counted = range(images)[: call.limit]
        chosen = self._chosen[probe.kind] if probe.maps else ()
        rows = [row for row in counted if before + row in chosen]
        maps = probe.maps(call, rows) if rows and probe.maps else {}
        for name in probe.of_classes & maps.keys():
            self.sampling.classes.check(layer, maps[name].shape[1])
        if rows and isinstance(call, Attention) and call.layout.reason:
            lacking = probe.of_images - maps.keys()
            self._lacks(layer, lacking - probe.of_classes if maps else lacking, call.layout.reason)
        return _Measured(layer, call.module, probe, values, images, before, rows, maps, patterns)

    def _add(self, one: _Measured, output: Any) -> None:
        sums = self._sums_of(one.layer, one.module, one.probe)
        sums.add(one.values)
        sums.add_patterns(one.patterns)
        maps, why = self.sampling.classes.of(one.maps, output, one.rows, one.images)
        sums.add_maps([one.before + row for row in one.rows], maps)
        if why:
            self._lacks(one.layer, one.probe.of_classes, why)


def _has_heads(probe: Probe) -> bool:
    """Return whether the probe measures the heads of a kind of layer."""
    return probe.place == "" and probe.module_type is not None and probe.runs


def _parts_of(one: Accumulator) -> Iterator[tuple[str, nn.Module]]:
    for name in one.probe.parts:
        if isinstance(part := getattr(one.module, name, None), nn.Module):
            yield name, part
