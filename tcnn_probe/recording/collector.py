"""The collector, which calls the probes in the forwards of a model."""

import threading
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from tcnn_model.precision import without_autocast
from tcnn_probe.architectures.lookup import looks_like_attention
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_editor import run_with_gates
from tcnn_probe.attention.layout import GivenTokens, Layout
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.stream import AttentionStream
from tcnn_probe.hooks.forwards import ModuleCall
from tcnn_probe.hooks.modes import hidden_depth, named_in_errors
from tcnn_probe.models import layer_names, module_name, unwrap
from tcnn_probe.probes import ForwardCall, NotMeasuredError, Probe
from tcnn_probe.recording.forwards import ForwardCounter
from tcnn_probe.recording.measured import (
    ForwardValues,
    Key,
    check_measured,
)
from tcnn_probe.recording.measured_layer import MeasuredLayer
from tcnn_probe.recording.options import Sampling
from tcnn_probe.recording.sums import EpochSums, RunningSums

__all__ = ["Collector"]

T = TypeVar("T")

# Size up to which attentions wait for others in a forward: 256 MiB, and as much again where their
# heads are side by side.
_WAITING = 1 << 28
UNREACHED = "no image reached it before the mark of"


class Collector(AttentionListener):
    """Listener that collects measurements of a model between two marks.

    Attributes:
        names: Names of the modules.
        chosen: Names of the layers to measure; None for all.
        sums: Sums since the previous mark.
        earlier: Sums since the previous mark of a process that was killed.
        advice: Arguments that the user can give for layers without a known grid, by layer.
        lock: Lock that is held while a forward is added; hold it from :meth:`read_sums` to
            :meth:`reset`.

    The arguments are those of :class:`~tcnn_probe.recording.recorder.Recorder`, parsed.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        layers: Collection[str] | None,
        sampling: Sampling,
        tokens: GivenTokens,
    ) -> None:
        self.chosen = layers
        self.probes = probes
        self.sampling = sampling
        self.attention_probes = [probe for probe in probes if probe.attention is not None]
        self._is_detailed = any(probe.detailed for probe in self.attention_probes)
        self._model, self.names = model, layer_names(model)
        self.model_class = type(unwrap(model)).__name__
        self._positions = {name: place for place, name in enumerate(self.names.values())}
        self._layers: dict[Key, MeasuredLayer] = {}
        self.earlier: list[Mapping[Key, EpochSums]] = []
        self.sums = RunningSums()
        self._missing: dict[str, dict[str, str]] = {}
        self.advice: dict[str, str] = {}
        # Code that is hidden from this recorder runs at a greater depth, and its gradients are
        # ignored.
        self._depth = hidden_depth()
        self.forwards = ForwardCounter(
            model,
            self.names,
            sampling,
            {*sampling.images}.union(*map(sampling.images_of, probes)),
        )
        self.lock = threading.RLock()
        self._measuring: dict[nn.Module, list[MeasuredLayer]] = {}
        self._parts: dict[nn.Module, dict[str, nn.Module]] = {}
        self._attach_probes()
        self._watched_parts = {part for parts in self._parts.values() for part in parts.values()}
        self._clear()
        self.stream = AttentionStream(
            model,
            self,
            layers=layers if self.attention_probes else (),
            watched=self._measuring.keys() | self._watched_parts,
            tokens=tokens,
        )

    @property
    def layers(self) -> dict[Key, MeasuredLayer]:
        """Measured layers, by name and kind of probe, in the model's order;
        those with attention are known after their first forward.
        """
        # Layers that waited are measured after others, and some first run in a later forward.
        return {key: self._layers[key] for key in sorted(self._layers, key=self._position)}

    @property
    def missing(self) -> dict[str, dict[str, str]]:
        """Reasons why layers are recorded without a variable: {variable: {layer: reason}}."""
        # Sorted, because layers note them in the order of measuring; this is also a copy, as a
        # forward in another thread may add reasons meanwhile.
        # Whether a softmax is attention is known only after its grid was looked for.
        ignored = self.stream.unsupported.keys() - {layer for layer, _ in [*self._layers]}
        missing = {}
        for variable, reasons in sorted(self._missing.items()):
            kept = {layer: reason for layer, reason in reasons.items() if layer not in ignored}
            if kept:
                missing[variable] = self.in_order(kept)
        return missing

    def in_order(self, by_layer: Mapping[str, T]) -> dict[str, T]:
        """Return a table of layers in the model's order."""
        return dict(sorted(by_layer.items(), key=self._position))

    def _position(self, entry: tuple[str, Any]) -> tuple[int, str]:
        name = entry[0]
        # A layer of the recording that this model lacks comes last.
        return self._positions.get(module_name(name), len(self._positions)), name

    @property
    def unmarked_images(self) -> int:
        """Number of images that were measured since the previous mark."""
        # Layers see different numbers of images if the model skips layers for some images.
        return max(map(self.sums.images, [*self._layers]), default=0)

    def remove(self) -> None:
        """Detach from the model. This may be called more than once."""
        self.stream.close()
        for layer in self._all():
            layer.remove()

    def reset(self) -> None:
        """Start the next epoch. A forward that is still running belongs to no epoch."""
        self.earlier = []
        self.forwards.reset()
        self.sums.reset()
        for layer in self._all():
            layer.reset()

    def read_sums(self) -> dict[Key, EpochSums]:
        """Read the sums of this process. If parameters are sharded over ranks,
        all ranks must call this together.
        """
        sums = self.sums.read()
        # All ranks use the same order, because reading the parameters of a sharded layer waits for
        # the other ranks.
        for key in sorted(self._layers):
            layer_sums = sums.setdefault(key, EpochSums())
            layer_sums.squares = self._layers[key].read_squares()
            layer_sums.state = self._layers[key].read_state()
        return sums

    def add_up(self, parts: Sequence[Mapping[Key, EpochSums]]) -> dict[Key, EpochSums]:
        """Return the sums of all layers of all ranks, and note what these lack."""
        for part in parts:
            for key in part:
                self.expect(*key)
        sums = {}
        for key, layer in self.layers.items():
            total = EpochSums.together(part[key] for part in parts if key in part)
            for name, reason in total.reasons(layer.probe.variables).items():
                self.note_missing(layer.name, [name], reason)
            sums[key] = total
        return sums

    # The following methods implement tcnn_probe.attention.listener.AttentionListener.

    def begins(self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool) -> bool:
        """Return whether to measure a call. Calls of one forward are measured together."""
        # A forward that goes on after a mark counts as a new one.
        continues = continues and self.forwards.belongs_to_epoch
        if not continues:
            for layer in self._all():
                layer.follow_gradients()
            measuring = self._measuring.keys() | self.stream.attending
            self.forwards.begin_forward(can_measure=self._can_measure(), measuring=measuring)
        is_measured = self.forwards.calls(entry, inputs, continues=continues)
        if is_measured:
            self._clear()
        return is_measured

    def attends(self, attention: Attention) -> None:
        """Measure an attention, or keep it to be measured with others."""
        if self._is_detailed:
            # All probes get a detailed attention, so that they share one pass over the logits.
            attention = replace(attention, detailed=True)
        size = sum(x.nbytes for x in self._waiting.values())
        # The calls of a layer in a forward are measured in their order.
        if attention.name in self._waiting or size > _WAITING:
            self._measure_waiting()
        # A forward may go on with images of another size.
        self._values.note_cells(attention, self.stream.image_size)
        if isinstance(attention, SoftmaxAttention) and self._may_wait(attention):
            self._waiting[attention.name] = attention.kept()
        else:
            self._measure(attention, [attention])

    def _may_wait(self, attention: SoftmaxAttention) -> bool:
        probes = self._probes_of(attention.module)
        is_joint = attention.is_small and attention.joint_form is not None
        return is_joint and bool(probes) and all(probe.waits for probe in probes)

    def _measure_waiting(self) -> None:
        """Measure the attentions that wait, those of one form as the heads of one layer."""
        waiting = dict(self._waiting)
        self._waiting.clear()
        together: dict[Hashable, list[SoftmaxAttention]] = {}
        for name, attention in waiting.items():
            probes = self._probes_of(attention.module)
            rooms = tuple((probe.kind, self._values.room(name, probe)) for probe in probes)
            together.setdefault((attention.joint_form, rooms), []).append(attention)
        for attentions in together.values():
            names = ", ".join(attention.name for attention in attentions)
            with named_in_errors(names), without_autocast(attentions[0].source):
                self._measure(SoftmaxAttention.joined(attentions), attentions)

    def _probes_of(self, module: nn.Module) -> list[Probe]:
        return [
            probe
            for probe in self.attention_probes
            if probe.module_type is None or probe.applies_to(module)
        ]

    def _measure(self, attention: Attention, layers: Sequence[Attention]) -> None:
        """Measure an attention whose heads are those of one or more layers."""
        for probe in self._probes_of(attention.module):
            assert probe.attention is not None
            room = self._values.room(attention.name, probe)
            try:
                measured = probe.attention(_limited(attention, room))
            except NotMeasuredError as reason:
                for layer in layers:
                    self.note_missing(layer.name, probe.variables, str(reason))
                continue
            measured = check_measured(probe, measured, by_image=True)
            end = 0
            for layer in layers:
                heads = slice(end, end := end + layer.heads)
                own = measured if len(layers) == 1 else _of_heads(probe, measured, heads)
                self._values.keep(probe, own, _limited(layer, room))
        for layer in layers:
            self._note_tokens(layer.name, layer.layout)

    def _note_tokens(self, layer: str, layout: Layout) -> None:
        if layout.advice:
            self.advice[layer] = layout.advice
        if layout.reason:
            lacking = {"attention_distance", "uniform_distance"}
            known = [name for probe in self.attention_probes for name in probe.variables]
            self.note_missing(layer, lacking.intersection(known), layout.reason)

    def returned(self, call: ModuleCall, output: Any) -> None:
        """Measure a module that has run, or keep its call if probes of its parent need it."""
        module, inputs = call
        if module in self._watched_parts:
            name = self.names[module]
            self._calls[module] = ForwardCall(module, name, inputs, output)
        submodules = self._parts.get(module, {})
        parts = {
            name: self._calls[part] for name, part in submodules.items() if part in self._calls
        }
        verification = self.stream.verification
        for layer in self._measuring.get(module, ()):
            name, probe = layer.name, layer.probe
            assert probe.measure is not None
            with named_in_errors(name):
                room = self._values.room(name, probe)
                seen = ForwardCall(module, name, inputs, output, parts, room, verification)
                # The probe sees the parameters that the forward used, including the edits of
                # ablations.
                measured = run_with_gates(module, partial(probe.measure, seen))
                self._values.keep(probe, check_measured(probe, measured, by_image=True), seen)
        # Calls of the parts are dropped: their tensors may be large, and the next call of the
        # module has new ones.
        for part in submodules.values():
            self._calls.pop(part, None)

    def ends(self, layers: Collection[str], output: Any) -> None:
        """Add the measurements of the forward, unless the epoch was marked meanwhile."""
        try:
            self._measure_waiting()
            measured = self._values.ended(layers, output)
        finally:
            self._clear()
        with self.lock:
            if not self.forwards.belongs_to_epoch:
                return
            self.forwards.end_call()
            for values in measured:
                self._layer(values.layer, values.module, values.probe)
            self.sums.add(measured)

    def fails(self) -> None:
        """Discard the measurements of the forward."""
        self._clear()

    def _attach_probes(self) -> None:
        names = self.names.values()
        chosen = {probe.kind: probe.choose_layers(names) for probe in self.probes}
        for module, name in self.names.items():
            if self.chosen is not None and name not in self.chosen:
                continue
            has_heads = False
            for probe in self.probes:
                if name not in chosen[probe.kind] or not probe.applies_to(module):
                    continue
                # Of several probes that measure a layer's heads only the first is attached, as
                # heads would count twice.
                measures_heads = probe.place == "" and probe.runs
                if measures_heads and has_heads:
                    continue
                has_heads |= measures_heads
                try:
                    layer = self._layer(name, module, probe)
                except NotMeasuredError as reason:
                    self.note_missing(name, probe.variables, str(reason))
                    continue
                if probe.measure is not None:
                    self._measuring.setdefault(module, []).append(layer)
                    self._parts.setdefault(module, {}).update(probe.parts(module))

    def _layer(self, name: str, module: nn.Module, probe: Probe) -> MeasuredLayer:
        key = name, probe.kind
        if key not in self._layers:
            self._layers[key] = MeasuredLayer(name, module, probe, self._ignores_gradients)
        return self._layers[key]

    def expect(self, layer: str, kind: str) -> None:
        """Add a layer that only another rank or an earlier process has measured."""
        if (layer, kind) not in self._layers:
            probe = next(probe for probe in self.attention_probes if probe.kind == kind)
            modules = {name: module for module, name in self.names.items()}
            self._layer(layer, modules[module_name(layer)], probe)

    @property
    def replaced(self) -> list[str]:
        """Names of modules that the model no longer has, because others took their places."""
        modules = {*self._model.modules()}
        return [name for module, name in self.names.items() if module not in modules]

    @property
    def added(self) -> list[str]:
        """Names of attention layers that the model got after record() was called."""
        return [
            name
            for module, name in layer_names(self._model).items()
            if module not in self.names and looks_like_attention(module)
        ]

    def _all(self) -> list[MeasuredLayer]:
        # This is a copy, as a forward in another thread may add layers during an iteration.
        return list(self._layers.values())

    def note_missing(self, layer: str, variables: Iterable[str], reason: str) -> None:
        """Note why a layer is recorded without variables."""
        for variable in variables:
            self._missing.setdefault(variable, {})[layer] = reason

    def note_absence(self, layer: str, variables: Iterable[str], mark: str) -> None:
        """Note that no image had reached a layer at a mark, unless there is another reason."""
        is_replaced = module_name(layer) in self.replaced
        advice = "; another module took its place: call record() again" if is_replaced else ""
        for variable in variables:
            reasons = self._missing.setdefault(variable, {})
            if reasons.get(layer, UNREACHED).startswith(UNREACHED):
                reasons[layer] = f"{UNREACHED} {mark}{advice}"

    def _ignores_gradients(self) -> bool:
        return self.forwards.pauses > 0 or hidden_depth() > self._depth

    def _clear(self) -> None:
        self._waiting: dict[str, SoftmaxAttention] = {}  # by layer
        self._calls: dict[nn.Module, ForwardCall] = {}
        self._values = ForwardValues(
            self.forwards, self.sampling, self.sums.images, self.note_missing
        )

    def _can_measure(self) -> bool:
        """Return whether a probe measures forwards, and a layer has not seen enough images."""
        limit = self.sampling.max_images
        # Layers may see different numbers of images.
        counts = [
            self.sums.images(key) for key, layer in [*self._layers.items()] if layer.probe.runs
        ]
        if limit is None or not counts:
            return bool(self.attention_probes or counts)
        return min(counts) < limit


def _limited(attention: Attention, limit: int | None) -> Attention:
    """Return an attention with a limit of images, which shares what was computed of it."""
    return attention if limit is None else replace(attention, limit=limit)


def _of_heads(
    probe: Probe, measured: Mapping[str, Tensor | Pattern], heads: slice
) -> dict[str, Tensor | Pattern]:
    """Return the measurements of some heads; those that do not depend on heads are kept."""
    own: dict[str, Tensor | Pattern] = {}
    for name, value in measured.items():
        dims = probe.variables[name].dims
        if isinstance(value, Pattern):
            own[name] = value.of_heads(heads)
        elif "head" in dims:
            own[name] = value.narrow(dims.index("head"), heads.start, heads.stop - heads.start)
        else:
            own[name] = value
    return own
