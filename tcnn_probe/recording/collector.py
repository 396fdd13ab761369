"""Follows the forwards of a model and keeps what the probes find in them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import without_autocast
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import prefix_of
from tcnn_probe.attention.rebuild import NoTokenAttentionError, discrepancy, rebuild
from tcnn_probe.attention.token_grid import class_counts
from tcnn_probe.hooks.edits import edited
from tcnn_probe.hooks.forwards import Forwards
from tcnn_probe.hooks.interception import SeenAttention, SeenOperand, SeenProduct
from tcnn_probe.models import layer_names, unwrap
from tcnn_probe.probes import ForwardCall, Probe
from tcnn_probe.recording.accumulator import Tally, checked, named
from tcnn_probe.recording.classes import Classes
from tcnn_probe.recording.unsupported import Reasons

__all__ = ["Collector", "ReconstructionError", "When"]

When = Literal["eval", "train", "always"]


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


@dataclass
class _Pending:
    """Measured in a forward that has not ended yet."""

    tally: Tally
    measured: Mapping[str, Tensor]
    chosen: Sequence[int] = ()  # numbers of images, of which there are maps
    rows: Sequence[int] = ()  # and which of the forward's images these are
    maps: Mapping[str, Tensor] | None = None
    softmax: SeenOperand | None = None  # of a softmax of which it is not known yet whether it weighs values
    heads: bool = False  # whether it has an axis of heads


@dataclass
class _Check:
    layer: str
    off: Tensor
    tolerance: float


class Collector:
    """See :class:`tcnn_probe.Recorder`, which owns one.

    Args:
        model: to follow.
        probes: what to measure.
        wanted: names of the layers to record, None for all.
        when: which forwards, by ``model.training``.
        every: take one forward in so many.
        images: numbers of the images, in each epoch, of which maps are kept.
        classes: of which maps are kept, where there is a token for each.
        max_images: measure no more than so many in each epoch.
        prefix_tokens: class and register tokens before the grid, if the model does not say.
    """

    def __init__(
        self,
        model: nn.Module,
        probes: Sequence[Probe],
        wanted: Collection[str] | None,
        *,
        when: When = "eval",
        every: int = 1,
        images: Collection[int] = (),
        classes: Classes,
        max_images: int | None = None,
        prefix_tokens: int | None = None,
    ) -> None:
        self._model, self._wanted, self._when, self._every = model, wanted, when, every
        self._chosen, self._classes, self._max_images = frozenset(images), classes, max_images
        self._attention_probes = [probe for probe in probes if probe.attention is not None]
        self._names = layer_names(model)
        self.order = {name: place for place, name in enumerate(self._names.values())}
        self.tallies: dict[tuple[str, str], Tally] = {}
        self._of_module: dict[nn.Module, list[Tally]] = {}
        self._reasons = Reasons(self._names)
        self.unsupported, self.missing = self._reasons.unsupported, self._reasons.missing
        for module, name in self._names.items():
            if self.wants_layer(name):
                for probe in _without_rivals([probe for probe in probes if probe.applies_to(module)]):
                    tally = self._tally(name, module, probe)
                    self._of_module.setdefault(module, []).append(tally)
                for probe in probes:
                    for variable, reason in (probe.missing(module) if probe.missing else {}).items():
                        self._reasons.lacks(name, [variable], reason)
        self._parts = {part: parent for parent, part in self._wanted_parts()}
        self.training_forwards = 0
        self._entered: dict[nn.Module, int] = {}
        self._scene, self._whole = FeatureMaps(prefix_of(self._names, prefix_tokens)), False
        self._checked: set[str] = set()
        self._begin()
        self._forwards = Forwards(model, self)
        try:
            for tally in self.tallies.values():
                tally.follow_gradients()
        except BaseException:
            self.remove()
            raise

    @property
    def attached(self) -> bool:
        """Whether forwards are still followed."""
        return self._forwards.attached

    @property
    def sees_forwards(self) -> bool:
        """Whether any probe measures them."""
        return bool(self._attention_probes) or any(tally.probe.runs for tally in self.tallies.values())

    @property
    def missed_attention(self) -> bool:
        """Whether attention is to be measured, and no forward that could show any has begun since the last mark."""
        return bool(self._attention_probes) and not self._entered

    @property
    def class_counts(self) -> dict[str, int]:
        """How many classes each pool has that has a token for each of them, if it or what is in it is wanted."""
        wanted = [name for name in self._names.values() if self.wants_layer(name)]
        counts = class_counts(self._names)
        return {pool: n for pool, n in counts.items() if any(f"{name}.".startswith(f"{pool}.") for name in wanted)}

    def remove(self) -> None:
        """Detach."""
        self._forwards.remove()
        for tally in self.tallies.values():
            tally.remove()

    def reset(self) -> None:
        """Start the next epoch."""
        self.training_forwards = 0
        self._entered.clear()
        for tally in self.tallies.values():
            tally.reset()

    def expect(self, layer: str, kind: str) -> None:
        """Have a tally for what another rank has found."""
        if (layer, kind) not in self.tallies:
            probe = next(probe for probe in self._attention_probes if probe.kind == kind)
            module = next(module for module, name in self._names.items() if name == layer.split("#")[0])
            self._tally(layer, module, probe)

    def wants_layer(self, name: str) -> bool:
        """Whether the user asked for it."""
        return self._wanted is None or name in self._wanted

    # What a Listener is told.

    def wants(self, entry: nn.Module, inputs: Sequence[Any]) -> bool:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        if any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs):
            return False
        training = self._model.training
        self.training_forwards += training
        for tally in self.tallies.values():
            tally.follow_gradients()
        if not self.sees_forwards:
            return False
        if self._when != "always" and training != (self._when == "train"):
            return False
        count = self._entered[entry] = self._entered.get(entry, -1) + 1
        full = self._max_images is not None and any(t.probe.runs for t in self.tallies.values())
        full = full and all(t.images >= (self._max_images or 0) for t in self.tallies.values() if t.probe.runs)
        return count % self._every == 0 and not full

    def begins(self, entry: nn.Module, inputs: Sequence[Any]) -> None:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        self._begin()
        self._whole = unwrap(entry) is unwrap(self._model)
        self._scene.enter(inputs, whole_model=entry is self._model)

    def asked(self, running: Sequence[tuple[nn.Module, Sequence[Any]]], seen: SeenAttention | SeenProduct) -> None:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        if isinstance(seen, SeenProduct):
            self._confirm(seen)
            return
        module = running[-1][0]
        name = self._names[module]
        if not self._attention_probes or not self.wants_layer(name) or self._is_measured_whole(module):
            return
        number = self._asked[module] = self._asked.get(module, -1) + 1
        layer = f"{name}#{number}" if number else name
        try:
            with named(layer):
                call = rebuild(seen, layer, running, self._scene)
        except NoTokenAttentionError as reason:
            self.unsupported[layer] = str(reason)
            return
        source = seen.logits if seen.logits is not None else seen.query
        assert source is not None
        with named(layer), without_autocast(source):
            if layer not in self._checked and (off := discrepancy(seen, module)) is not None:
                self._checks.append(_Check(layer, *off))
            for probe in self._attention_probes:
                assert probe.attention is not None
                if measured := checked(probe, probe.attention(call), images=True):
                    tally = self._tally(layer, module, probe)
                    softmax = seen.output if seen.logits is not None else None
                    self._keep(tally, measured, call, None if softmax is None else SeenOperand.of(softmax))
                    self.unsupported.pop(layer, None)
        if call.layout.reason:
            known = {name for probe in self._attention_probes for name in probe.variables}
            distances = [name for name in ("attention_distance", "uniform_distance") if name in known]
            self._reasons.lacks(layer, distances, call.layout.reason)

    def returned(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> bool:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        self._asked.pop(module, None)
        self._ran.add(module)
        self._scene.passes([*inputs, output])
        return module in self._of_module or module in self._parts

    def ran(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        if module in self._parts:
            self._calls[module] = ForwardCall(module, self._names[module], inputs, output)
        tallies = [tally for tally in self._of_module.get(module, ()) if tally.probe.measure is not None]
        for tally in tallies:
            probe = tally.probe
            assert probe.measure is not None
            parts = {part: self._calls[sub] for part, sub in self._parts_of(tally) if sub in self._calls}
            call = ForwardCall(module, tally.name, inputs, output, parts)
            with named(tally.name), edited(module):
                unchecked = probe.rebuild is not None and tally.name not in self._checked
                if unchecked and probe.rebuild and (rebuilt := probe.rebuild(call)) is not None:
                    self._checks.append(_Check(tally.name, *_difference(rebuilt, output)))
                if measured := checked(probe, probe.measure(call), images=True):
                    self._keep(tally, measured, call, None)
        for tally in tallies:
            for _, sub in self._parts_of(tally):
                self._calls.pop(sub, None)

    def ends(self, *, whole: bool, output: Any = None) -> None:
        """See :class:`tcnn_probe.hooks.forwards.Listener`."""
        pending, checks, ran = self._pending, self._checks, self._ran
        self._begin()
        if not whole:
            return
        self._verify(checks)
        attended = {one.tally for one in pending if one.softmax is None}
        for one in pending:
            if one.softmax is not None:
                if one.tally.images == 0 and one.tally not in attended:
                    self.unsupported[one.tally.name] = "a softmax that weighs no values in a matrix product"
                    self._forget(one.tally)
                continue
            left = None if self._max_images is None else self._max_images - one.tally.images
            one.tally.add(one.measured, left)
            self.unsupported.pop(one.tally.name, None)  # as it was called in forwards before this one
            if one.maps is not None:
                self._keep_maps(one, output)
        if self._attention_probes:
            self._reasons.explain(ran, {layer for layer, _ in self.tallies}, self.wants_layer)

    # Helpers.

    def _begin(self) -> None:
        self._pending: list[_Pending] = []
        self._checks: list[_Check] = []
        self._asked: dict[nn.Module, int] = {}
        self._calls: dict[nn.Module, ForwardCall] = {}
        self._ran: set[nn.Module] = set()

    def _tally(self, layer: str, module: nn.Module, probe: Probe) -> Tally:
        key = layer, probe.kind
        if key not in self.tallies:
            self.tallies[key] = Tally(layer, module, probe)
            self.order.setdefault(layer, self.order[self._names[module]])
        return self.tallies[key]

    def _forget(self, tally: Tally) -> None:
        self.tallies.pop((tally.name, tally.probe.kind), None)

    def _keep(
        self,
        tally: Tally,
        measured: Mapping[str, Tensor],
        call: AttentionCall | ForwardCall,
        softmax: SeenOperand | None,
    ) -> None:
        heads = isinstance(call, AttentionCall) and (call.heads > 1 or (softmax is not None and len(softmax.shape) > 3))
        one = _Pending(tally, measured, softmax=softmax, heads=heads)
        if self._chosen and tally.probe.maps is not None:
            before = tally.images + sum(len(_any(p.measured)) for p in self._pending if p.tally is tally)
            count = len(_any(measured)) if self._max_images is None else self._max_images - before
            here = [i for i in range(min(count, len(_any(measured)))) if before + i in self._chosen]
            if here:
                one.chosen, one.rows, one.maps = [before + i for i in here], here, tally.probe.maps(call, here)
                for name in tally.probe.of_classes & one.maps.keys():
                    self._classes.check({tally.name: one.maps[name].shape[1]})
                if isinstance(call, AttentionCall) and call.layout.reason:
                    lacking = tally.probe.of_images - one.maps.keys()
                    lacking -= tally.probe.of_classes if one.maps else set()  # which are made of these
                    self._reasons.lacks(tally.name, lacking, call.layout.reason)
        self._pending.append(one)

    def _keep_maps(self, one: _Pending, output: Any) -> None:
        """Of the classes to keep, now that the model's output is known."""
        assert one.maps is not None
        output = output if self._whole else None
        maps, why = self._classes.of(one.maps, output, one.rows, len(_any(one.measured)))
        one.tally.add_maps(one.chosen, maps)
        if why:
            self._reasons.lacks(one.tally.name, one.tally.probe.of_classes, why)

    def _confirm(self, seen: SeenProduct) -> None:
        """A softmax is attention once its result, mixed among heads perhaps, multiplies values."""
        for one in self._pending:
            if one.softmax is not None and any(
                one.softmax.is_in(operand, heads=one.heads) for operand in seen.operands
            ):
                one.softmax = None

    def _verify(self, checks: list[_Check]) -> None:
        wrong = {c.layer: off for c in checks if not (off := float(c.off)) <= c.tolerance}
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._checked |= {check.layer for check in checks}

    def _is_measured_whole(self, module: nn.Module) -> bool:
        return any(t.probe.place == "" and t.probe.measure is not None for t in self._of_module.get(module, ()))

    def _wanted_parts(self) -> Iterator[tuple[nn.Module, nn.Module]]:
        for tallies in self._of_module.values():
            for tally in tallies:
                for _, part in self._parts_of(tally):
                    yield tally.module, part

    @staticmethod
    def _parts_of(tally: Tally) -> Iterator[tuple[str, nn.Module]]:
        for name in tally.probe.parts:
            if isinstance(part := getattr(tally.module, name, None), nn.Module):
                yield name, part


def _without_rivals(probes: list[Probe]) -> list[Probe]:
    """Of those that measure heads of a layer, the first."""
    heads = [probe for probe in probes if probe.place == "" and probe.measure is not None]
    return [probe for probe in probes if probe not in heads[1:]]


def _any(measured: Mapping[str, Tensor]) -> Tensor:
    return next(iter(measured.values()))


def _difference(rebuilt: Tensor, output: Tensor) -> tuple[Tensor, float]:
    expected = output[:1]
    broken = ~expected.isfinite()
    off, size = (x.masked_fill(broken, 0).abs().amax().float() for x in (rebuilt - expected, expected))
    return off / size.clamp_min(1e-30), 0.1 if output.dtype in (torch.float16, torch.bfloat16) else 5e-3
