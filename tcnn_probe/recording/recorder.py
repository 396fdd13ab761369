"""``record(model)``: attach to a model, mark and store epochs, and detach."""

import json
import logging
import os
import warnings
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, SupportsFloat, get_args

import xarray as xr
from torch import nn

from tcnn_model.conversion.selection import LayerFilter
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.diagnosis import health as find_illness
from tcnn_probe.models import check_model, plain_filter, wanted_layers
from tcnn_probe.probes import DEFAULT, PROBES, Probe, find_probes
from tcnn_probe.provenance import provenance
from tcnn_probe.recording import checks
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.fingerprints import WEIGHTS, ResumedWeights, image_hash
from tcnn_probe.recording.groups import Groups, LayerValues, assemble, groups_of, layer_values
from tcnn_probe.recording.measured import Key
from tcnn_probe.recording.options import (
    IfMarked,
    Sampling,
    When,
    check_along,
    check_choice,
    parse_attributes,
    parse_mark,
)
from tcnn_probe.recording.ranks import Ranks, repeats_images, whole_parameters
from tcnn_probe.recording.sums import EpochSums
from tcnn_probe.storage import EpochStore, Mode

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["Recorder", "record"]

_LOG = logging.getLogger(__name__)


class Recorder:
    """Record what the attention heads of a model do,
    epoch by epoch; ``tcnn_probe.record`` is its usual name.

    ::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for epoch in range(epochs):
                train(model)
                accuracy = validate(model)
                recorder.mark(epoch=epoch, top1=accuracy)
        recorder.dataset.entropy.sel(layer="blocks.3.attn").plot.line(x="epoch")

    Every softmax attention is measured during the forward, with torch's fused attention left on,
    and only sums over images are kept, so that memory does not grow with the number of images. The
    model's outputs do not change. All hooks are removed at the end of the ``with``, also after an
    exception, or by :meth:`remove`.

    Args:
        model: Any module, with or without a wrapper such as DistributedDataParallel, compiled or
            not (recorded forwards run uncompiled).
        store: Place of the recording: a path, a URL or a zarr store object; every marked epoch is
            stored when ``mark`` returns. None keeps the recording in memory.
        mode: Treatment of an existing recording: "a" continues a recording of the same layers; "w"
            replaces any recording when the first epoch is marked; "x" raises an error.
        layers: Names, globs or a predicate ``(name, module) -> bool``; None for all layers that can
            be recorded.
        probes: Measurements: names of ``tcnn_probe.PROBES`` or your own probes; None for attention
            heads (``tcnn_probe.DEFAULT``). With ``[]`` only scalars are kept, for a CNN that gets
            its heads later. A recorder that continues the recording adds these heads, with NaN for
            earlier marks.
        when: Forwards to measure, by ``model.training``: "eval", "train" or "always".
        every: Measure every n-th forward.
        images: Images whose maps are kept: the first n of each epoch, or a list of indices in the
            order in which the images are measured. None for no maps.
        classes: Classes whose maps are kept, for pools with a token for each class
            (:class:`tcnn_model.AttentionPool2d`): for each image the n classes with the highest
            scores, or a list of indices. None for no maps of classes.
        max_images: Largest number of images to measure in each epoch.
        along: Name of the coordinate of marks: "epoch", "step", or any increasing coordinate.
        prefix_tokens: Number of class and register tokens before the patches, for a model that does
            not show it.
        class_token: Position of the class token in such a model: the "first" or the "last" token,
            or "none".
        grid: Rows and columns of the patches in such a model, if each token attends to all tokens.
        attrs: Further attributes of a new recording, such as the seed, in plain JSON. Names of the
            recording's own attributes, such as "layers", are not allowed. If several recordings are
            opened together, attributes that differ become coordinates.
        health: Whether to measure the probe "health", too, and to warn at a mark of new alarms of
            :func:`tcnn_probe.health`.
        distributed: Whether all ranks call ``mark`` together, which combines their measurements;
            rank 0 writes. None to do so if torch.distributed is initialised; False if a single rank
            records alone.

    Raises:
        ValueError: A layer, a probe or an option is unknown; the store holds something else
            (StoreError).
        TypeError: ``model`` is not a module, or is TorchScript; or an argument that should be a
            number is not one.
    """

    def __init__(
        self,
        model: nn.Module,
        store: "str | os.PathLike[str] | Store | None" = None,
        *,
        mode: Mode = "a",
        layers: LayerFilter | None = None,
        probes: Iterable[str | Probe] | str | Probe | None = None,
        when: When = "eval",
        every: int = 1,
        images: int | Collection[int] | None = None,
        classes: int | Collection[int] | None = 3,
        max_images: int | None = None,
        along: str = "epoch",
        prefix_tokens: int | None = None,
        class_token: Literal["first", "last", "none"] | None = None,
        grid: tuple[int, int] | None = None,
        attrs: Mapping[str, Any] | None = None,
        health: bool = False,
        distributed: bool | None = None,
    ) -> None:
        check_model(model)
        check_along(along)
        check_choice("mode", mode, get_args(Mode))
        tokens = GivenTokens(prefix_tokens, class_token, grid)
        sampling = Sampling.parse(when, every, max_images, images, classes)
        layer_names = wanted_layers(model, layers)
        found_probes = find_probes(DEFAULT if probes is None else probes)
        if health and PROBES["health"] not in found_probes:
            found_probes.append(PROBES["health"])
        self._watches_health = health
        self._model = model
        self._along = along
        self._layer_filter = None if layers is None else plain_filter(model, layers)
        self._attrs = parse_attributes(attrs)
        self._named_kinds = [] if probes is None else [probe.kind for probe in found_probes]
        self._has_marked = False
        self._is_removed = False
        self._groups: Groups | None = None
        self._warned: set[Hashable] = set()
        self._ranks = Ranks(distributed)
        with self._ranks.agreed():
            self._store = EpochStore(store if self._ranks.writes else None, along=along, mode=mode)
        self._marks = self._ranks.gather(self._store.marks)[0]
        self._collector = Collector(model, found_probes, layer_names, sampling, tokens)
        # This also removes the hooks of a recorder that is dropped without remove(), as when a
        # notebook cell runs twice.
        release = weakref.finalize(self, _release, self._collector, self._store)
        release.atexit = False
        try:
            self._collector.stream.attach()
            checks.check_probes(self._collector)
            with self._ranks.agreed():
                # This is checked before anything is locked or written, so that an error leaves the
                # store unchanged.
                checks.check_same_recording(self._store, provenance(model), self._collector)
                self._store.hold()
            self._weights = ResumedWeights(model, self._store.attrs)
            self._collector.forwards.on_training = self._weights.check
        except BaseException:
            release()
            raise
        if self._marks:
            count = _count(len(self._marks), along)
            _LOG.info("%s holds %s: continuing", self._store.name, count)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the recorded layers, in the model's order;
        attention layers are known after the first forward.
        """
        return tuple(dict.fromkeys(name for name, _ in self._collector.layers))

    @property
    def unsupported(self) -> dict[str, str]:
        """Reasons why layers that look like attention cannot be recorded,
        by layer; known after the first forward.
        """
        return self._collector.in_order(self._collector.stream.unsupported)

    @property
    def missing(self) -> dict[str, dict[str, str]]:
        """Reasons why layers are recorded without a variable: {variable: {layer: reason}}."""
        return self._collector.missing

    @property
    def epochs(self) -> tuple[int | float, ...]:
        """Marks so far, including those of a continued store:
        epochs, steps or values of the ``along`` coordinate.
        """
        return self._store.marks if self._ranks.writes else self._marks

    @property
    def dataset(self) -> xr.Dataset:
        """The marked epochs: variables of attention heads over (epoch, layer, head), and scalars.

        Values are loaded lazily from the store; the ``attrs`` of each variable describe it.

        Raises:
            RuntimeError: Nothing is marked yet.
        """
        self._check_marked()
        return self._store.dataset()

    @property
    def tree(self) -> xr.DataTree:
        """The whole recording: scalars at the root,
        ``tree["heads"]``, ``tree["maps"]``, and other probes by kind.
        """
        self._check_marked()
        return self._store.tree()

    def mark(self, *unnamed: Never, if_marked: IfMarked = "error", **values: SupportsFloat) -> None:
        """Close an epoch: ``mark(epoch=3, top1=0.8)`` stores its statistics and ``top1``,
        and starts the next one.

        Means are over all images and queries seen since the previous mark; gate, locality strength
        and centre are read from the layers at this moment. When this returns, the epoch is stored.
        A forward that still runs in another thread belongs to no epoch.

        Args:
            unnamed: Not allowed: all numbers are given by name.
            if_marked: Treatment of an epoch that the store already holds, for example after
                resuming: "error", or "skip" to discard its new measurements. ``epoch in
                recorder.epochs`` tells in advance.
            **values: The epoch (or the coordinate that ``along`` names), a number greater than all
                previous marks, and further numbers to store with it. A new name gets NaN for
                earlier epochs.

        Raises:
            ValueError: The epoch is marked already, or earlier than the last mark; or a scalar has
                the name of a recorded variable.
            TypeError: The epoch is missing, or a value is not a number.
            RuntimeError: Nothing was measured since the previous mark, or not the layers or images
                that were chosen; or the recorder was removed.
        """
        if unnamed:
            name = self._along
            raise TypeError(f"mark() takes the {name} by name: mark({name}={unnamed[0]!r})")
        collector, ranks = self._collector, self._ranks
        # An error on one rank is raised on all ranks, as the others would wait for this rank in the
        # next exchange.
        with ranks.agreed():
            if self._is_removed:
                raise RuntimeError(
                    "the recorder was removed: mark() works only inside the with block"
                )
            number, scalars = parse_mark(values, self._along, if_marked)
        numbers = ranks.gather(number)
        if len({*numbers}) > 1:
            raise ValueError(f"expected the same {self._along} on all ranks, got {numbers}")
        warned: list[str] = []
        # With the lock, a forward in another thread ends before the sums are read, and belongs to
        # this epoch, or after they are reset, and belongs to none.
        with collector.lock:
            with whole_parameters(self._model), ranks.agreed():
                parts = [*collector.earlier, collector.read_sums()]
                if not ranks.writes:  # maps are those of the first rank
                    for total in parts[-1].values():
                        total.maps.clear()
                # Ranks that share a model's heads see the same images, which count once.
                repeats = ranks.together and repeats_images(self._model)
            gathered = ranks.gather([] if repeats else parts)
            with ranks.agreed():
                sums = collector.add_up([part for parts in gathered for part in parts])
                if ranks.writes and if_marked == "skip" and number in self.epochs:
                    _LOG.info("%s %s is marked already: skipped", self._along, number)
                elif ranks.writes:
                    warned = self._write(number, scalars, sums)
            # The store is open on the first rank only.
            self._marks = ranks.gather(self.epochs)[0]
            collector.reset()
        # Warnings of idle probes are given once.
        if not self._has_marked:
            warned += checks.idle_probes(self._named_kinds, collector, sums)
            _LOG.info("recording %s layers: %s", len(self.layers), _shorten(self.layers))
            for layer, reason in self.unsupported.items():
                _LOG.info("not recorded: %s (%s)", layer, reason)
        self._has_marked = True
        for text in self._warn_of_missing_grids() + warned:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def trust_weights(self) -> None:
        """Accept, without a warning, that a training continues
        from weights other than those of the last mark.

        An example are the weights of a checkpoint within an epoch.
        """
        self._weights.trust()

    def discard(self) -> None:
        """Forget what was measured since the previous mark,
        for example in a validation that failed.
        """
        with self._collector.lock:
            self._collector.reset()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure nothing inside the ``with``, in any thread,
        for example during a second evaluation in an epoch.
        """
        self._collector.forwards.pauses += 1
        try:
            yield
        finally:
            self._collector.forwards.pauses -= 1

    def remove(self) -> None:
        """Detach from the model, and finish writing. Marked epochs stay available. This may be
        called repeatedly.
        """
        self._is_removed = True
        # Hooks are removed first, so that the model is clean even if the store cannot be closed.
        _release(self._collector, self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()
        text = self._warn_of_unmarked()
        if text and error is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __reduce__(self) -> Never:
        """Refuse copies: those of a model that has its recorder as an attribute."""
        raise TypeError(
            "a recorder cannot be copied or pickled: do not make it an attribute of what is copied"
        )

    def __repr__(self) -> str:
        layers, marks, along = self.layers, self.epochs, self._along
        missing = [
            f"{variable} of {_count(len(reasons), 'layer')}: {next(iter(reasons.values()))}"
            for variable, reasons in self.missing.items()
        ]
        unsupported = [f"{name}: {reason}" for name, reason in self.unsupported.items()]
        none_yet = "none yet: attention is found in the first forward"
        lines = {
            "layers": f"{len(layers)} ({_shorten(layers)})" if layers else none_yet,
            f"{along}s": f"{len(marks)} ({_shorten(marks)})" if marks else "none yet",
            f"since the last {along}": _count(self._collector.unmarked_images, "image"),
            "missing": "; ".join(missing) or "nothing",
            "unsupported": "; ".join(unsupported) or "nothing",
            "kept in": self._store.name,
        }
        removed = ", removed" if self._is_removed else ""
        title = f"Recorder of {self._collector.model_class}{removed}"
        return "\n".join([title, *(f"  {name}: {text}" for name, text in lines.items())])

    def _write(
        self, number: int | float, scalars: Mapping[str, float], sums: Mapping[Key, EpochSums]
    ) -> list[str]:
        """Store an epoch, and return warnings; an error leaves the store unchanged."""
        collector, store = self._collector, self._store
        # All checks of the epoch come before the first write. This one is the usual mistake of a
        # resumed run.
        store.check_order(number)
        checks.check_epoch(collector, sums, self._layer_filter, self._groups)
        entries = layer_values(collector, sums)
        # The first mark creates the groups; later marks fill them, even if a layer did not run, and
        # may extend them.
        stored = store.groups if store.has_layers else None
        groups = groups_of(entries, stored)
        warned: list[str] = []
        if self._groups is None and stored is not None:
            checks.check_resumed(stored, groups_of(entries))
            warned += checks.joined_layers(stored, groups)
            for layer, names in checks.abandoned_variables(stored, collector.probes).items():
                collector.note_missing(layer, names, "its probe no longer measures it")
        values, dropped = assemble(entries, groups)
        for layer, names in dropped.items():
            collector.note_missing(layer, names, "the recording began without it")
        samples = collector.forwards.samples.items()
        hashes = {str(number): image_hash(sample) for number, sample in samples}
        # Each image has the hash of the first epoch that had it, perhaps in an earlier run.
        stored_hashes = json.loads(store.attrs.get("image_hashes", "{}"))
        warned += self._once("images", checks.changed_images(hashes, stored_hashes))
        warned += self._once(str(dropped), checks.dropped_values(dropped))
        warned += checks.doubtful_values(entries, groups, sums)
        for text in checks.changed_modules(collector, sums):
            warned += self._once(text, [text])
        self._note_absent_layers(number, entries, groups)
        attrs = self._attributes(hashes)
        if stored is None:
            images = {"images": json.dumps(collector.sampling.images)}
            attrs = self._attrs | provenance(self._model) | images | attrs
        store.append(number, groups, values, scalars, attrs=attrs)
        # This is set after the write, so that a mark that failed does not fix the groups.
        self._groups = groups
        return warned + (self._warn_of_alarms() if self._watches_health else [])

    def _once(self, topic: Hashable, texts: Iterable[str]) -> list[str]:
        """Return warnings of a topic, the first time that there are any."""
        new = [] if topic in self._warned else [*texts]
        self._warned.update([topic] if new else [])
        return new

    def _note_absent_layers(
        self, number: int | float, entries: Iterable[LayerValues], groups: Groups
    ) -> None:
        """Note why layers have no values at this mark, or at the marks before they joined."""
        collector, stored = self._collector, self._store.groups or {}
        variables = {probe.kind: {*probe.variables} for probe in collector.probes}
        by_layer = {(entry.place, entry.layer): entry for entry in entries}
        recorded = {layer for group in stored.values() for layer in group.layers}
        for place, group in groups.items():
            for layer, table in group.layers.items() if not group.maps else ():
                entry = by_layer.get((place, layer))
                if entry is None or not entry.has_run:
                    # What is read from parameters needs no image.
                    values = {} if entry is None else entry.values
                    lacking = variables.get(table["kind"], set()).difference(values)
                    mark = f"{self._along} {number}"
                    collector.note_absence(layer, lacking, mark)
        for entry in entries if self._store.has_layers else ():
            if entry.layer not in recorded and entry.has_run:
                mark = f"{self._along} {self.epochs[-1]}"
                collector.note_absence(entry.layer, entry.values, mark)

    def _attributes(self, hashes: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons for what is missing, and the hashes of images, of all runs so far."""
        attrs = self._store.attrs
        unsupported, missing, stored_hashes = (
            json.loads(attrs.get(name, "{}")) for name in ("unsupported", "missing", "image_hashes")
        )
        # A layer that an earlier run could not record may be recorded now.
        for layer in self.layers:
            unsupported.pop(layer, None)
        for variable, layers in self.missing.items():
            missing[variable] = self._collector.in_order(missing.get(variable, {}) | layers)
        return {
            "unsupported": json.dumps(self._collector.in_order(unsupported | self.unsupported)),
            "missing": json.dumps(missing),
            # The first hash of an image is kept, so that all later epochs are compared with the
            # same image.
            "image_hashes": json.dumps({**hashes, **stored_hashes}),
            WEIGHTS: self._weights.mark(),
        }

    def _check_marked(self) -> None:
        if not self._ranks.writes:
            raise RuntimeError("rank 0 has the recording; open its store to read it elsewhere")
        if self._store.groups is None:
            raise RuntimeError(
                f"nothing is recorded yet: run a forward, then mark({self._along}=...)"
            )

    def _warn_of_missing_grids(self) -> list[str]:
        """Return warnings of layers that lack distances and maps, once for each, with advice."""
        layers: dict[str, list[str]] = {}
        for layer, advice in self._collector.in_order(self._collector.advice).items():
            if layer in self.layers:
                layers.setdefault(advice, []).extend(self._once(layer, [layer]))
        return [
            f"no attention_distance and no maps of {', '.join(names)}: {advice}"
            for advice, names in layers.items()
            if names
        ]

    def _warn_of_alarms(self) -> list[str]:
        """Return the alarms at the last mark, each one once."""
        dataset = self._store.dataset()
        if "layer" not in dataset.dims:
            return []
        texts = []
        for alarm in find_illness(dataset).alarms:
            # Alarms that have ended are left out. An alarm that comes again has another `since`,
            # and is reported again.
            if alarm.until is None:
                texts += self._once((alarm.sign, alarm.layer, alarm.since), [str(alarm)])
        return texts

    def _warn_of_unmarked(self) -> str:
        """Return a warning if measurements are lost because they were not marked, else ""."""
        images = self._collector.unmarked_images
        advice = f"call mark({self._along}=...) after each validation"
        if images:
            since = "since the last mark" if self._has_marked else "and nothing was marked"
            return (
                f"{_count(images, 'image')} measured {since}: they are not in the recording. To "
                f"keep them, {advice}; for forwards that do not belong to it there is "
                "recorder.pause()"
            )
        if self._collector.forwards.training_forwards and not self._has_marked:
            return f"nothing was recorded, as nothing was marked: {advice}"
        return ""


def _release(collector: Collector, store: EpochStore) -> None:
    """Detach from the model, and close the store."""
    collector.remove()
    store.close()


record = Recorder


def _shorten(items: Sequence[object]) -> str:
    shown = items if len(items) < 4 else (items[0], items[1], "...", items[-1])
    return ", ".join(map(str, shown))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
