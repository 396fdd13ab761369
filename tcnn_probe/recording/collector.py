"""Shows the probes what happens in the forwards of a model, and adds up what they measure."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from tcnn_model import AttentionPool2d
from tcnn_probe.architectures.lookup import looks_like_attention
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.stream import AttentionListener, AttentionStream
from tcnn_probe.hooks.modes import edited, hidden_depth, named_in_errors
from tcnn_probe.models import layer_names, unwrap
from tcnn_probe.probes import ForwardCall, NotMeasuredError, Probe
from tcnn_probe.recording.accumulator import (
    MAPS_BY_CLASS,
    Accumulator,
    EpochSums,
    check_measured,
    select_classes,
)
from tcnn_probe.recording.epoch import MIXED_SIZES, EpochReport, LayerReport
from tcnn_probe.recording.fingerprints import ImageHashes
from tcnn_probe.recording.options import Sampling

__all__ = ["Collector", "RankSums"]

Key = tuple[str, str]  # layer and kind of probe


@dataclass(frozen=True)
class RankSums:
    """Measurements of one process since the previous mark.

    Args:
        sums: Sums by layer and kind of probe.
        missed_attention: Whether attention is to be measured and no forward that could show any has begun.
    """

    sums: Mapping[Key, EpochSums]
    missed_attention: bool


@dataclass(frozen=True)
class _Measured:
    """Measurements of a layer by a probe in a forward that has not ended yet.

    Args:
        layer: Name of the layer.
        module: Module that was measured.
        probe: Probe that measured it.
        values: Values by variable, of the images that count.
        patterns: Sums over these images.
        images: Number of images in the forward.
        before: Number of images of the layer that came earlier in the epoch.
        rows: Indices of the images of this forward that maps are kept of.
        maps: Maps of these.
    """

    layer: str
    module: nn.Module
    probe: Probe
    values: Mapping[str, Tensor]
    patterns: Mapping[str, Pattern]
    images: int
    before: int
    rows: Sequence[int]
    maps: Mapping[str, Tensor]


class Collector(AttentionListener):
    """Measurements of a model between two marks.

    Attributes:
        accumulators: Sums by layer and kind of probe.
        missing: Layers that are recorded without a variable, and why: {variable: {layer: reason}}.
        advice: What the user can say where no grid was found, by layer.
        order: Places of the layers in the model, by name.
        model_class: Name of the model's class.
        training_forwards: Number of forwards that began in training mode since the previous mark.
        on_training: Called before the first of them.
        pauses: Number of pauses that are under way; nothing is measured in them.
        lock: Held while a forward is added up; to be held from :meth:`read_sums` to :meth:`reset`.

    Args:
        model: Any module, not compiled.
        probes: Probes that measure it.
        layers: Names of the layers to measure; None for all.
        sampling: Forwards, images and classes to measure.
        tokens: Tokens of the model, as far as the user describes them.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        layers: Collection[str] | None,
        sampling: Sampling,
        tokens: GivenTokens,
    ) -> None:
        self._model = model
        self._layers = layers
        self._probes = probes
        self._sampling = sampling
        self._attention_probes = [
            probe for probe in probes if probe.attention is not None
        ]
        self._names = layer_names(model)
        self.model_class = type(unwrap(model)).__name__
        self.order = {name: place for place, name in enumerate(self._names.values())}
        self.accumulators: dict[Key, Accumulator] = {}
        self.missing: dict[str, dict[str, str]] = {}
        self.advice: dict[str, str] = {}
        self.training_forwards = 0
        self.pauses = 0
        self.on_training: Callable[[], None] = lambda: None
        # Gradients of code that is hidden from this recorder come from deeper inside.
        self._depth = hidden_depth()
        self._map_images: dict[str, frozenset[int]] = {}
        for probe in probes:
            self._map_images[probe.kind] = frozenset(
                sampling.images if probe.images is None else probe.images
            )
        self._image_hashes = ImageHashes(
            frozenset(sampling.images).union(*self._map_images.values())
        )
        self.lock = threading.RLock()
        self._entered: Counter[nn.Module] = Counter()
        self._measuring: dict[nn.Module, list[Accumulator]] = {}
        self._parts: dict[nn.Module, Mapping[str, nn.Module]] = {}
        self._attach_probes()
        self._watched_parts = {
            part for parts in self._parts.values() for part in parts.values()
        }
        self._epoch = self._begun_in = 0
        self._image_size: object = None
        self._whole_model = False
        self._clear()
        self.stream = AttentionStream(
            model,
            self,
            layers=layers if self._attention_probes else (),
            watched=self._measuring.keys() | self._watched_parts,
            tokens=tokens,
        )
        try:
            self._follow_gradients()
        except BaseException:
            self.remove()
            raise

    @property
    def unmarked_images(self) -> int:
        """Number of images that were measured since the previous mark."""
        # Layers may see different numbers of images, as in a model that skips some.
        return max((accumulator.images for accumulator in self._all()), default=0)

    def remove(self) -> None:
        """Detach; may be called more than once."""
        self.stream.close()
        for accumulator in self._all():
            accumulator.gradients.remove()

    def reset(self) -> None:
        """Start the next epoch. A forward that is running now belongs to no epoch."""
        self._epoch += 1
        self.training_forwards = 0
        self._entered.clear()
        self._image_hashes.reset()
        for accumulator in self._all():
            accumulator.reset()

    def read_sums(self) -> RankSums:
        """Read the sums of this process. Where parameters are spread over ranks, all ranks call this together."""
        # In one order on all ranks, as reading the parameters of a sharded layer waits for the others.
        sums = {key: self.accumulators[key].read() for key in sorted(self.accumulators)}
        return RankSums(sums, bool(self._attention_probes) and not self._entered)

    def close_epoch(self, ranks: Sequence[RankSums] = ()) -> EpochReport:
        """Return the report of the epoch.

        Args:
            ranks: Sums of all ranks; none for what is known before the first forward.
        """
        # All ranks report the same layers, also a rank that has seen no image.
        for rank in ranks:
            for layer, kind in rank.sums:
                self._expect(layer, kind)
        layers = []
        for key, accumulator in self.accumulators.items():
            sums = EpochSums.together(
                rank.sums[key] for rank in ranks if key in rank.sums
            )
            mixed = [
                variable
                for variable, pattern in sums.patterns.items()
                if pattern is None
            ]
            if mixed:
                self._note_missing(
                    accumulator.name, {*mixed, "translation_equivariance"}, MIXED_SIZES
                )
            probe = accumulator.probe
            facts = dict(probe.facts(accumulator.module)) if probe.facts else {}
            images, maps = accumulator.images, accumulator.maps
            layers.append(
                LayerReport(accumulator.name, probe, facts, sums, images, maps)
            )
        return EpochReport(
            layers=layers,
            probes=self._probes,
            sampling=self._sampling,
            model_class=self.model_class,
            order=self.order,
            missing={
                variable: dict(layers) for variable, layers in self.missing.items()
            },
            unsupported=dict(self.stream.unsupported),
            class_counts=self._class_counts(),
            image_hashes=self._image_hashes.read(),
            training_forwards=self.training_forwards,
            missed_attention=all(rank.missed_attention for rank in ranks),
            attention_like=[] if layers or not ranks else self._attention_like(),
        )

    # The listener of AttentionStream: see tcnn_probe.attention.stream.AttentionListener.

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """Return whether this forward is to be measured, and prepare for it."""
        if self.pauses:
            return False
        training = self._model.training
        if training and not self.training_forwards:
            self.on_training()
        self.training_forwards += training
        self._follow_gradients()
        if not self._measures_forwards() or training not in self._sampling.training:
            return False
        # A model whose parts are called one by one has a count for each part.
        number = self._entered[entry]
        self._entered[entry] += 1
        if number % self._sampling.every or self._is_full():
            return False
        self._clear()
        self._image_hashes.begins(inputs)
        self._image_size = tuple(x.shape[1:] for x in inputs if isinstance(x, Tensor))
        # Another thread may mark this epoch before the forward ends.
        self._begun_in = self._epoch
        # True for the model, and for a wrapper around all of it.
        self._whole_model = self._names[entry] == ""
        return True

    def attends(self, attention: Attention) -> None:
        """Measure an attention."""
        if any(probe.detailed for probe in self._attention_probes):
            # Once for all probes, which share one pass over the logits.
            attention = replace(attention, detailed=True)
        for probe in self._attention_probes:
            if probe.module_type is not None and not probe.applies_to(attention.module):
                continue
            assert probe.attention is not None
            room = self._room(attention.name, probe)
            limited = attention if room is None else replace(attention, limit=room)
            try:
                measured = probe.attention(limited)
            except NotMeasuredError as reason:
                self._note_missing(attention.name, probe.variables, str(reason))
                continue
            values = check_measured(probe, measured, by_image=True)
            if values:
                self._pending.append(self._measured(probe, values, limited))
        layout = attention.layout
        if layout.advice:
            self.advice[attention.name] = layout.advice
        if layout.reason:
            known = {
                name for probe in self._attention_probes for name in probe.variables
            }
            self._note_missing(
                attention.name,
                known & {"attention_distance", "uniform_distance"},
                layout.reason,
            )

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """Measure a module that has run, or keep a part's call for the probes that need it."""
        if module in self._watched_parts:
            self._calls[module] = ForwardCall(
                module, self._names[module], inputs, output
            )
        accumulators = self._measuring.get(module, ())
        if not accumulators:
            return
        submodules = self._parts.get(module, {})
        parts = {
            name: self._calls[part]
            for name, part in submodules.items()
            if part in self._calls
        }
        for accumulator in accumulators:
            probe, layer = accumulator.probe, accumulator.name
            # Parameters count as the forward had them, ablations included.
            with named_in_errors(layer), edited(module):
                limit = self._room(layer, probe)
                call = ForwardCall(
                    module,
                    layer,
                    inputs,
                    output,
                    parts,
                    limit,
                    self.stream.verification,
                )
                assert probe.measure is not None
                values = check_measured(probe, probe.measure(call), by_image=True)
                if values:
                    self._pending.append(self._measured(probe, values, call))
        # Their tensors may be large, and another call of the module has calls of its own.
        for part in submodules.values():
            self._calls.pop(part, None)

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Add up what was measured, unless the epoch was marked meanwhile."""
        pending = self._pending
        self._clear()
        with self.lock:
            if self._begun_in != self._epoch:
                return
            self._image_hashes.ends()
            for measured in pending:
                # A softmax that weighed no values was no attention; the stream knows at the end.
                if measured.probe.attention is None or measured.layer in layers:
                    self._add(measured, output if self._whole_model else None)

    def fails(self) -> None:
        """Forget what was measured."""
        self._clear()

    def _attach_probes(self) -> None:
        names = {
            probe.kind: probe.choose_layers(self._names.values())
            for probe in self._probes
        }
        for module, name in self._names.items():
            if self._layers is not None and name not in self._layers:
                continue
            has_heads = False
            for probe in self._probes:
                if name not in names[probe.kind] or not probe.applies_to(module):
                    continue
                # Two probes of the heads of a kind of layer would count its heads twice: the first one measures.
                measures_heads = probe.place == "" and probe.runs
                if measures_heads and has_heads:
                    continue
                has_heads |= measures_heads
                self._attach(name, module, probe)

    def _attach(self, name: str, module: nn.Module, probe: Probe) -> None:
        try:
            accumulator = self._accumulator(name, module, probe)
        except NotMeasuredError as reason:
            self._note_missing(name, probe.variables, str(reason))
            return
        if probe.measure is not None:
            self._measuring.setdefault(module, []).append(accumulator)
            self._parts[module] = {**self._parts.get(module, {}), **probe.parts(module)}

    def _accumulator(self, layer: str, module: nn.Module, probe: Probe) -> Accumulator:
        key = layer, probe.kind
        if key not in self.accumulators:
            self.accumulators[key] = Accumulator(
                layer, module, probe, self._ignores_gradients
            )
            # "name#1" has the place of its module.
            self.order.setdefault(layer, self.order[self._names[module]])
        return self.accumulators[key]

    def _expect(self, layer: str, kind: str) -> None:
        """Make an accumulator for a layer that only another rank has measured."""
        if (layer, kind) not in self.accumulators:
            probe = next(
                probe for probe in self._attention_probes if probe.kind == kind
            )
            module = next(
                module
                for module, name in self._names.items()
                # "name#1" is the second attention in a call of the module "name".
                if name == layer.split("#")[0]
            )
            self._accumulator(layer, module, probe)

    def _all(self) -> list[Accumulator]:
        # A copy, as a forward in another thread may add accumulators meanwhile.
        return list(self.accumulators.values())

    def _note_missing(
        self, layer: str, variables: Collection[str], reason: str
    ) -> None:
        for variable in variables:
            self.missing.setdefault(variable, {})[layer] = reason

    def _ignores_gradients(self) -> bool:
        return self.pauses > 0 or hidden_depth() > self._depth

    def _follow_gradients(self) -> None:
        for accumulator in self._all():
            accumulator.gradients.follow()

    def _measures_forwards(self) -> bool:
        return bool(self._attention_probes) or any(
            accumulator.probe.runs for accumulator in self._all()
        )

    def _clear(self) -> None:
        self._pending: list[_Measured] = []
        self._calls: dict[nn.Module, ForwardCall] = {}
        self._pending_images: Counter[Key] = Counter()

    def _is_full(self) -> bool:
        # Layers may see different numbers of images; a forward is skipped once all have enough.
        counts = [
            accumulator.images for accumulator in self._all() if accumulator.probe.runs
        ]
        limit = self._sampling.max_images
        return limit is not None and bool(counts) and min(counts) >= limit

    def _images_before(self, layer: str, probe: Probe) -> int:
        """Return the number of images that came earlier in the epoch."""
        key = layer, probe.kind
        accumulator = self.accumulators.get(key)
        return self._pending_images[key] + (accumulator.images if accumulator else 0)

    def _room(self, layer: str, probe: Probe) -> int | None:
        """Return the number of further images that count; None for all."""
        limit = self._sampling.max_images
        return (
            None if limit is None else max(0, limit - self._images_before(layer, probe))
        )

    def _measured(
        self,
        probe: Probe,
        measured: Mapping[str, Tensor | Pattern],
        call: Attention | ForwardCall,
    ) -> _Measured:
        """Complete the measurements of a call with maps of the images that are chosen."""
        layer, patterns, values, images = call.name, {}, {}, 0
        for name, value in measured.items():
            if isinstance(value, Pattern):
                patterns[name] = replace(value, size=self._image_size)
            else:
                # Images beyond max_images count in the numbering of images, not in the sums.
                values[name], images = value[: call.limit], len(value)
        before = self._images_before(layer, probe)
        self._pending_images[layer, probe.kind] += images
        rows: list[int] = []
        maps: Mapping[str, Tensor] = {}
        if probe.maps is not None:
            map_images = self._map_images[probe.kind]
            rows = [
                row for row in range(images)[: call.limit] if before + row in map_images
            ]
            if rows:
                maps = probe.maps(call, rows)
        if MAPS_BY_CLASS in maps:
            # The model may have another classifier than when it was checked.
            self._sampling.classes.check(layer, maps[MAPS_BY_CLASS].shape[1])
        # Without a grid there are no maps. Maps of classes are lacking for reasons of their own.
        if rows and isinstance(call, Attention) and call.layout.reason:
            lacking = probe.image_variables - maps.keys()
            self._note_missing(
                layer,
                lacking - probe.class_variables if maps else lacking,
                call.layout.reason,
            )
        return _Measured(
            layer, call.module, probe, values, patterns, images, before, rows, maps
        )

    def _add(self, measured: _Measured, output: Any) -> None:
        probe, maps = measured.probe, measured.maps
        accumulator = self._accumulator(measured.layer, measured.module, probe)
        accumulator.add(measured.values)
        accumulator.add_patterns(measured.patterns)
        if MAPS_BY_CLASS in maps:
            maps, reason = select_classes(
                maps, self._sampling.classes, output, measured.rows, measured.images
            )
            if reason:
                self._note_missing(measured.layer, probe.class_variables, reason)
        accumulator.add_maps([measured.before + row for row in measured.rows], maps)

    def _class_counts(self) -> dict[str, int]:
        """Return the number of classes of each pool with a token for each class, if it or a part of it is measured."""
        layers = self.order if self._layers is None else self._layers
        counts = {}
        for module, name in self._names.items():
            if not isinstance(module, AttentionPool2d) or module.num_classes is None:
                continue
            # With the dot, so that "pool" is not taken for a part of "pool2", nor the other way round.
            if any(f"{layer}.".startswith(f"{name}.") for layer in layers):
                counts[name] = module.num_classes
        return counts

    def _attention_like(self) -> list[str]:
        return [
            name
            for module, name in self._names.items()
            if name and looks_like_attention(module)
        ]
