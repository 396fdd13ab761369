"""The collector, which calls the probes in the forwards of a model and adds up their measurements."""

import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.stream import AttentionListener, AttentionStream
from tcnn_probe.hooks.forwards import ModuleCall
from tcnn_probe.hooks.modes import hidden_depth, named_in_errors
from tcnn_probe.models import layer_names, unwrap
from tcnn_probe.probes import ForwardCall, NotMeasuredError, Probe
from tcnn_probe.recording.accumulator import Accumulator
from tcnn_probe.recording.forwards import ForwardCounter
from tcnn_probe.recording.image_sums import ImageSums, Key
from tcnn_probe.recording.measured import (
    MAPS_BY_CLASS,
    Measured,
    check_measured,
    select_classes,
)
from tcnn_probe.recording.options import Sampling
from tcnn_probe.recording.sums import EpochSums

__all__ = ["Collector", "RankSums"]

UNKNOWN_CELLS = "no grid is known that divides the model's input into squares"
UNREACHED = "no image reached it before the mark of"


@dataclass(frozen=True)
class RankSums:
    """Measurements of one process since the previous mark.

    Args:
        sums: Sums by layer and kind of probe.
        missed_attention: Whether attention should be measured, but no forward with attention to measure has begun.
    """

    sums: Mapping[Key, EpochSums]
    missed_attention: bool


class Collector(AttentionListener):
    """Listener that collects measurements of a model between two marks.

    Attributes:
        names: Names of the modules.
        layers: Names of the layers to measure; None for all.
        probes: Probes that measure them.
        sampling: Forwards, images and classes to measure.
        accumulators: Sums by layer and kind of probe.
        missing: Reasons why layers are recorded without a variable: {variable: {layer: reason}}.
        advice: Arguments that the user can give for layers without a known grid, by layer.
        order: Positions of the layers in the model, by name.
        model_class: Name of the model's class.
        forwards: Count of the forwards and images since the previous mark.
        lock: Lock that is held while a forward is added; hold it from :meth:`read_sums` to :meth:`reset`.

    Args:
        model: Any module.
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
        self.layers = layers
        self.probes = probes
        self.sampling = sampling
        self._attention_probes = [
            probe for probe in probes if probe.attention is not None
        ]
        self.names = layer_names(model)
        self.model_class = type(unwrap(model)).__name__
        self.order = {name: place for place, name in enumerate(self.names.values())}
        self.accumulators: dict[Key, Accumulator] = {}
        self._numbers = ImageSums()
        self.missing: dict[str, dict[str, str]] = {}
        self.advice: dict[str, str] = {}
        # Code that is hidden from this recorder runs at a greater depth, and its gradients are ignored.
        self._depth = hidden_depth()
        self._map_images: dict[str, frozenset[int]] = {}
        for probe in probes:
            self._map_images[probe.kind] = frozenset(
                sampling.images if probe.images is None else probe.images
            )
        self.forwards = ForwardCounter(
            model,
            self.names,
            sampling,
            frozenset(sampling.images).union(*self._map_images.values()),
            self._begins_forward,
            self._is_full,
        )
        self.lock = threading.RLock()
        self._measuring: dict[nn.Module, list[Accumulator]] = {}
        self._parts: dict[nn.Module, Mapping[str, nn.Module]] = {}
        self._attach_probes()
        self._watched_parts = {
            part for parts in self._parts.values() for part in parts.values()
        }
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
        # Layers see different numbers of images if the model skips layers for some images.
        return max((accumulator.images for accumulator in self._all()), default=0)

    def remove(self) -> None:
        """Detach from the model. This may be called more than once."""
        self.stream.close()
        for accumulator in self._all():
            accumulator.gradients.remove()

    def reset(self) -> None:
        """Start the next epoch. A forward that is still running belongs to no epoch."""
        self.forwards.reset()
        self._numbers.reset()
        for accumulator in self._all():
            accumulator.reset()

    def read_sums(self) -> RankSums:
        """Read the sums of this process. If parameters are sharded over ranks, all ranks must call this together."""
        numbers = self._numbers.read()
        sums = {}
        # All ranks use the same order, because reading the parameters of a sharded layer waits for the other ranks.
        for key in sorted(self.accumulators):
            sums[key] = self.accumulators[key].read(numbers.get(key, EpochSums()))
        return RankSums(
            sums, bool(self._attention_probes) and not self.forwards.measured
        )

    # The following methods implement tcnn_probe.attention.stream.AttentionListener.

    def begins(
        self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool
    ) -> bool:
        """Return whether to measure this call, and prepare for it. Calls of one forward are measured together."""
        is_measured = self.forwards.begins(
            entry,
            inputs,
            continues=continues,
            measuring=lambda: self._measuring.keys() | self.stream.attending,
        )
        if is_measured:
            self._clear()
        return is_measured

    def attends(self, attention: Attention) -> None:
        """Measure an attention."""
        if any(probe.detailed for probe in self._attention_probes):
            # All probes get a detailed attention, so that they share one pass over the logits.
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
                self.note_missing(attention.name, probe.variables, str(reason))
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
            self.note_missing(
                attention.name,
                known & {"attention_distance", "uniform_distance"},
                layout.reason,
            )

    def returned(self, call: ModuleCall, output: Any) -> None:
        """Measure a module that has run, or keep its call if it is a part that probes of its parent need."""
        module, inputs = call
        if module in self._watched_parts:
            self._calls[module] = ForwardCall(
                module, self.names[module], inputs, output
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
            # The probe sees the parameters that the forward used, including the edits of ablations.
            with named_in_errors(layer):
                limit = self._room(layer, probe)
                measured_call = ForwardCall(
                    module,
                    layer,
                    inputs,
                    output,
                    parts,
                    limit,
                    self.stream.verification,
                )
                assert probe.measure is not None
                measure = partial(probe.measure, measured_call)
                measured = run_with_gates(module, measure)
                values = check_measured(probe, measured, by_image=True)
                if values:
                    self._pending.append(self._measured(probe, values, measured_call))
        # Calls of the parts are dropped: their tensors may be large, and the next call of the module has new ones.
        for part in submodules.values():
            self._calls.pop(part, None)

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Add the measurements of the forward, unless the epoch was marked meanwhile."""
        pending = self._pending
        self._clear()
        with self.lock:
            if not self.forwards.belongs_to_epoch:
                return
            self.forwards.image_hashes.ends()
            # A softmax whose result was multiplied with no values is not attention: `layers` lacks it.
            pending = [
                measured
                for measured in pending
                if measured.probe.attention is None or measured.layer in layers
            ]
            self._numbers.add((measured.key, measured.values) for measured in pending)
            for measured in pending:
                self._add(measured, output if self.forwards.whole_model else None)

    def fails(self) -> None:
        """Discard the measurements of the forward."""
        self._clear()

    def _attach_probes(self) -> None:
        names = {
            probe.kind: probe.choose_layers(self.names.values())
            for probe in self.probes
        }
        for module, name in self.names.items():
            if self.layers is not None and name not in self.layers:
                continue
            has_heads = False
            for probe in self.probes:
                if name not in names[probe.kind] or not probe.applies_to(module):
                    continue
                # Of several probes that measure a layer's heads only the first is attached, as heads would count twice.
                measures_heads = probe.place == "" and probe.runs
                if measures_heads and has_heads:
                    continue
                has_heads |= measures_heads
                self._attach(name, module, probe)

    def _attach(self, name: str, module: nn.Module, probe: Probe) -> None:
        try:
            accumulator = self._accumulator(name, module, probe)
        except NotMeasuredError as reason:
            self.note_missing(name, probe.variables, str(reason))
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
            # "name#1" has the position of the module "name".
            self.order.setdefault(layer, self.order[self.names[module]])
        return self.accumulators[key]

    def expect(self, layer: str, kind: str) -> None:
        """Create an accumulator for a layer that only another rank or an earlier process has measured."""
        if (layer, kind) not in self.accumulators:
            probe = next(
                probe for probe in self._attention_probes if probe.kind == kind
            )
            module = next(
                module
                for module, name in self.names.items()
                # "name#1" is the second attention in a call of the module "name".
                if name == layer.split("#")[0]
            )
            self._accumulator(layer, module, probe)

    def _all(self) -> list[Accumulator]:
        # This is a copy, as a forward in another thread may add accumulators during an iteration.
        return list(self.accumulators.values())

    def note_missing(self, layer: str, variables: Collection[str], reason: str) -> None:
        """Note why a layer is recorded without variables."""
        for variable in variables:
            self.missing.setdefault(variable, {})[layer] = reason

    def note_absence(self, layer: str, variables: Collection[str], mark: str) -> None:
        """Note that no image had reached a layer at a mark, unless another reason is known for a variable."""
        for variable in variables:
            reasons = self.missing.setdefault(variable, {})
            if reasons.get(layer, UNREACHED).startswith(UNREACHED):
                reasons[layer] = f"{UNREACHED} {mark}"

    def _ignores_gradients(self) -> bool:
        return self.forwards.pauses > 0 or hidden_depth() > self._depth

    def _follow_gradients(self) -> None:
        for accumulator in self._all():
            accumulator.gradients.follow()

    def _begins_forward(self) -> bool:
        self._follow_gradients()
        return bool(self._attention_probes) or any(
            accumulator.probe.runs for accumulator in self._all()
        )

    def _clear(self) -> None:
        self._pending: list[Measured] = []
        self._calls: dict[nn.Module, ForwardCall] = {}
        self._pending_images: Counter[Key] = Counter()

    def _is_full(self) -> bool:
        # Layers may see different numbers of images; forwards are skipped once all layers have enough.
        counts = [
            accumulator.images for accumulator in self._all() if accumulator.probe.runs
        ]
        limit = self.sampling.max_images
        return limit is not None and bool(counts) and min(counts) >= limit

    def _images_before(self, layer: str, probe: Probe) -> int:
        """Return the number of images that the layer has seen earlier in the epoch."""
        key = layer, probe.kind
        accumulator = self.accumulators.get(key)
        return self._pending_images[key] + (accumulator.images if accumulator else 0)

    def _room(self, layer: str, probe: Probe) -> int | None:
        """Return how many further images ``max_images`` allows; None for any number."""
        limit = self.sampling.max_images
        return (
            None if limit is None else max(0, limit - self._images_before(layer, probe))
        )

    def _measured(
        self,
        probe: Probe,
        measured: Mapping[str, Tensor | Pattern],
        call: Attention | ForwardCall,
    ) -> Measured:
        """Return the measurements of a call with the maps of chosen images."""
        layer, patterns, values, images = call.name, {}, {}, 0
        for name, value in measured.items():
            if isinstance(value, Pattern):
                patterns[name] = replace(value, size=self.forwards.image_size)
                images = images or value.batch
            else:
                # Images beyond max_images are numbered, but not added to the sums.
                values[name], images = value[: call.limit], len(value)
        if isinstance(call, Attention) and values and "cell_pixels" in probe.variables:
            side = self._cell_pixels(call)
            if side is None:
                self.note_missing(layer, ["cell_pixels"], UNKNOWN_CELLS)
            else:
                values["cell_pixels"] = torch.full((images,), side)[: call.limit]
        before, batch = self._images_before(layer, probe), images
        self._pending_images[layer, probe.kind] += images
        rows: list[int] = []
        numbers: Sequence[int] = range(images)
        maps: Mapping[str, Tensor] = {}
        without_maps = ""
        if self.forwards.batch:
            before, batch = self.forwards.before, self.forwards.batch
            if isinstance(call, Attention):
                numbers, without_maps = call.image_numbers or (), call.without_maps
                # A layer without a grid has no maps of any image.
                if without_maps and call.layout.keys is None:
                    without_maps = call.layout.reason
            elif images != batch:
                numbers, without_maps = (), f"it has {images} rows for {batch} images"
        if probe.maps is not None:
            map_images = self._map_images[probe.kind]
            # The maps of a layer that is called twice in a forward are those of its first call.
            taken = {
                number
                for measured in self._pending
                if (measured.layer, measured.probe) == (layer, probe)
                for number in measured.numbers
            }
            rows = [
                row
                for row, number in enumerate(numbers[: call.limit])
                if before + number in map_images and number not in taken
            ]
            if rows:
                maps = probe.maps(call, rows)
            elif without_maps and map_images.intersection(
                range(before, before + batch)
            ).difference(before + number for number in taken):
                self.note_missing(layer, probe.image_variables, without_maps)
        if MAPS_BY_CLASS in maps:
            # The classifier may have been replaced since the first check.
            self.sampling.classes.check(layer, maps[MAPS_BY_CLASS].shape[1])
        # Without a grid there are no maps. If maps of classes are missing, select_classes gives the reason.
        if rows and isinstance(call, Attention) and call.layout.reason:
            lacking = probe.image_variables - maps.keys()
            self.note_missing(
                layer,
                lacking - probe.class_variables if maps else lacking,
                call.layout.reason,
            )
        return Measured(
            layer=layer,
            module=call.module,
            probe=probe,
            values=values,
            patterns=patterns,
            batch=batch,
            before=before,
            numbers=[numbers[row] for row in rows],
            maps=maps,
        )

    def _cell_pixels(self, attention: Attention) -> float | None:
        """Return the side of a cell in pixels of the input; None if it is unknown, or cells are not square."""
        # Images are (C, H, W), videos (T, C, H, W) or (C, T, H, W), here without the dimension of the batch.
        size: Sequence[int] | None = self.stream.image_size
        if size is None:
            size = next(
                (shape for shape in self.forwards.image_size if len(shape) > 2), None
            )
        # A model that crops, pads or resizes images embeds others than it gets.
        elif not any(
            size in (shape[-2:], shape[:2]) for shape in self.forwards.image_size
        ):
            return None
        if size is None or attention.cells is None:
            return None
        (height, width), (rows, columns) = size[-2:], attention.cells
        return height / rows if height * columns == width * rows else None

    def _add(self, measured: Measured, output: Any) -> None:
        probe, maps = measured.probe, measured.maps
        accumulator = self._accumulator(measured.layer, measured.module, probe)
        accumulator.add(measured.patterns, measured.images)
        if MAPS_BY_CLASS in maps:
            maps, reason = select_classes(
                maps, self.sampling.classes, output, measured.numbers, measured.batch
            )
            if reason:
                self.note_missing(measured.layer, probe.class_variables, reason)
        numbers = [measured.before + number for number in measured.numbers]
        accumulator.add_maps(numbers, maps)
