"""``record(model)``: attach to the model, close epochs, keep them, detach."""

import json
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Self, SupportsFloat

import xarray as xr
from torch import nn

from tcnn_model.conversion.selection import LayerFilter
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.diagnosis import health as find_illness
from tcnn_probe.models import check_model, wanted_layers
from tcnn_probe.probes import DEFAULT, PROBES, Probe, find_probes
from tcnn_probe.provenance import provenance
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.epoch import (
    EpochReport,
    check_epoch,
    check_order,
    check_probes,
    check_resumed,
    check_same_recording,
    check_scalars,
    warn_of_changed_images,
    warn_of_idle_probes,
    warn_of_mixed_sizes,
)
from tcnn_probe.recording.fingerprints import WEIGHTS, ResumedWeights
from tcnn_probe.recording.groups import (
    assemble,
    drop_unknown_layers,
    groups_of,
    map_values,
    number_values,
    warn_of_nonfinite,
)
from tcnn_probe.recording.options import (
    IfMarked,
    Mark,
    Sampling,
    When,
    check_along,
    check_mode,
    parse_attributes,
    parse_mark,
)
from tcnn_probe.recording.ranks import Ranks, whole_parameters
from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, Mode
from tcnn_probe.storage.place import in_zarr_thread

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["Recorder", "record"]

_LOG = logging.getLogger(__name__)


class Recorder:
    """Record what the attention heads of a model do, epoch by epoch; ``tcnn_probe.record`` is its usual name.

    ::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for epoch in range(epochs):
                train(model)
                accuracy = validate(model)
                recorder.mark(epoch=epoch, top1=accuracy)
        recorder.dataset.entropy.sel(layer="blocks.3.attn").plot.line(x="epoch")

    Every softmax attention is measured as it happens, with torch's fused attention left on, and only sums over images
    are kept: memory does not grow with the number of images. What the model computes is not changed. Everything that is
    attached is removed at the end of the ``with``, also through an exception, or by :meth:`remove`.

    Args:
        model: Any module, not compiled (compile it after this call if you like), in a wrapper such as
            DistributedDataParallel or not.
        store: Place of the recording: a path, a URL or a zarr store object; every marked epoch is safe once ``mark``
            has returned. None keeps it in memory.
        mode: Treatment of a recording that is there: "a" continues a recording of the same layers; "w" replaces any,
            when the first epoch is marked; "x" refuses it.
        layers: Names, globs or a predicate ``(name, module) -> bool``; None for all that can be recorded.
        probes: Measurements: names of ``tcnn_probe.PROBES`` or probes of your own; None for attention heads
            (``tcnn_probe.DEFAULT``). With ``[]`` only scalars are kept, for a CNN that gets its heads later. A
            recorder that continues the recording adds these heads, with NaN for the marks before.
        when: Forwards to measure, by ``model.training``: "eval", "train" or "always".
        every: Measure every n-th forward.
        images: Images to keep maps for: the first n of each epoch, or a list of indices in the order in which the
            images are measured. None for no maps.
        classes: Classes to keep maps of, for pools with a token for each class (:class:`tcnn_model.AttentionPool2d`):
            the first n by the model's own output, of each image, or a list of indices. None for no maps of classes.
        max_images: Largest number of images to measure in each epoch.
        along: Name of the coordinate of marks: "epoch", "step", or any coordinate that only grows.
        prefix_tokens: Number of class and register tokens before the patches, for a model that does not show it.
        class_token: Place of the class token in such a model: the "first" or the "last" token, or "none".
        grid: Rows and columns of the patches of such a model, if all of its tokens see each other.
        attrs: Further attributes of a new recording, in plain JSON, such as the seed. If several recordings are opened
            together, attributes that differ become coordinates. The recording keeps some itself, such as "layers".
        health: Whether to measure the probe "health" too, and to warn at a mark of new alarms of
            :func:`tcnn_probe.health`.
        distributed: Whether all ranks call ``mark`` together, which adds up what they measured; rank 0 writes. None
            if torch.distributed is initialised. Give False if a single rank records alone.

    Raises:
        ValueError: A layer, a probe or an option is unknown; a store holds something else (StoreError).
        TypeError: ``model`` is no module, or is compiled, so that hooks cannot see it; or a number is none.
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
        check_mode(mode)
        tokens = GivenTokens(prefix_tokens, class_token, grid)
        sampling = Sampling.parse(when, every, max_images, images, classes)
        layer_names = wanted_layers(model, layers)
        found_probes = find_probes(DEFAULT if probes is None else probes)
        if health and PROBES["health"] not in found_probes:
            found_probes.append(PROBES["health"])
        self._watches_health = health
        self._model = model
        self._along = along
        self._layer_filter = layers
        self._attrs = parse_attributes(attrs)
        self._named_kinds = (
            [] if probes is None else [probe.kind for probe in found_probes]
        )
        self._has_marked = False
        self._is_removed = False
        self._groups: Mapping[str, Group] | None = None
        self._warned: set[str] = set()
        self._alarms: set[tuple[str, str, int | float]] = set()
        self._ranks = Ranks(distributed)
        # Leaves no hook and no lock behind if anything in it fails.
        with ExitStack() as undo:
            with self._ranks.agreed():
                self._store = EpochStore(
                    store if self._ranks.writes else None, along=along, mode=mode
                )
                undo.callback(self._store.close)
            self._marks = self._ranks.gather(self._store.marks)[0]
            self._collector = Collector(
                model, found_probes, layer_names, sampling, tokens
            )
            undo.callback(self._collector.remove)
            report = self._collector.close_epoch()
            check_probes(report, chose_layers=layers is not None)
            with self._ranks.agreed():
                if self._store.groups is not None:
                    # Checked before anything is locked or written, so that a refusal leaves the store as it was.
                    check_same_recording(self._store, provenance(model), report)
                self._store.hold()
            self._weights = ResumedWeights(model, self._store.attrs or {})
            self._collector.on_training = self._weights.check
            undo.pop_all()
        if self._marks:
            count = _count(len(self._marks), along)
            _LOG.info("%s holds %s: continuing", self._store.name, count)
        # A recorder that is dropped without remove(), as in a notebook's cell that runs twice, leaves no hooks.
        weakref.finalize(self, _release, self._collector, self._store).atexit = False

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers recorded, in the model's order; attention is found in the first forward."""
        names = {name for name, _ in self._collector.accumulators}
        return tuple(
            sorted(names, key=lambda name: (self._collector.order[name], name))
        )

    @property
    def unsupported(self) -> dict[str, str]:
        """Layers that look like attention and cannot be recorded, and why; known after the first forward."""
        return dict(self._collector.stream.unsupported)

    @property
    def missing(self) -> dict[str, dict[str, str]]:
        """Layers that are recorded without some variable, and why: {variable: {layer: reason}}."""
        return {
            variable: dict(layers)
            for variable, layers in self._collector.missing.items()
        }

    @property
    def epochs(self) -> tuple[int | float, ...]:
        """Marks so far, with those of a continued store: epochs, steps or what ``along`` names."""
        return self._store.marks if self._ranks.writes else self._marks

    @property
    def dataset(self) -> xr.Dataset:
        """The marked epochs: attention heads over (epoch, layer, head), described in their ``attrs``, and scalars.

        Loaded lazily, from the store.

        Raises:
            RuntimeError: nothing is marked yet.
        """
        self._check_marked()
        return self._store.dataset()

    @property
    def tree(self) -> xr.DataTree:
        """The whole recording: scalars at the root, ``tree["heads"]``, ``tree["maps"]``, and probes by their kinds."""
        self._check_marked()
        return self._store.tree()

    def mark(
        self,
        *unnamed: Never,
        if_marked: IfMarked = "error",
        **values: SupportsFloat,
    ) -> None:
        """Close an epoch: ``mark(epoch=3, top1=0.8)`` stores its statistics and ``top1``, and starts the next.

        Means are over all images and queries seen since the previous mark; gate, locality strength and centre are read
        off the layers now. When this returns the epoch is in the store. A forward that another thread is in the middle
        of belongs to no epoch.

        Args:
            unnamed: Nothing: all numbers have names.
            if_marked: Treatment of an epoch that the store holds already, as it may after resuming: "error", or "skip"
                to drop what was seen for it. To know it before: ``if epoch in recorder.epochs``.
            **values: The epoch (or the coordinate that ``along`` names), a number greater than every mark before, and
                further numbers to keep with it. A new name is NaN for earlier epochs.

        Raises:
            ValueError: The epoch is marked already, or earlier than the last; a scalar has a recorded variable's name.
            TypeError: The epoch is missing, or something is no number.
            RuntimeError: Nothing was measured since the previous mark, or not what was asked for; or the recorder
                was removed.
        """
        if unnamed:
            number: object = unnamed[0]
            along = self._along
            raise TypeError(f"mark() takes the {along} by name: mark({along}={number})")
        # An error on one rank is raised on all: the others would wait for it in the next exchange.
        with self._ranks.agreed():
            if self._is_removed:
                raise RuntimeError(
                    "the recorder was removed: mark() works only inside the with block"
                )
            mark = parse_mark(values, self._along, if_marked)
        self._check_same_on_all_ranks(mark)
        warned: list[str] = []
        # A forward of another thread ends before the sums are read or after they are reset, and is in one epoch or
        # none.
        with self._collector.lock:
            with whole_parameters(self._model), self._ranks.agreed():
                sums = self._collector.read_sums()
            sums_of_ranks = self._ranks.gather(sums)
            with self._ranks.agreed():
                report = self._collector.close_epoch(sums_of_ranks)
                if self._ranks.writes and not (
                    mark.skips and mark.number in self.epochs
                ):
                    warned = self._write(mark, report)
                    if self._watches_health:
                        warned += self._warn_of_alarms()
                elif self._ranks.writes:
                    _LOG.info(
                        "%s %s is marked already: skipped", self._along, mark.number
                    )
            # The store is open on the first rank only.
            self._marks = self._ranks.gather(self.epochs)[0]
            self._collector.reset()
        warned += warn_of_idle_probes(self._named_kinds, report)
        if not self._has_marked:
            _LOG.info(
                "recording %s layers: %s", len(self.layers), _shorten(self.layers)
            )
            for layer, reason in self.unsupported.items():
                _LOG.info("not recorded: %s (%s)", layer, reason)
        self._has_marked = True
        # Idle probes are named once.
        self._named_kinds = []
        for text in self._warn_of_missing_grids() + warned:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def trust_weights(self) -> None:
        """Let a training go on from weights that are not those of the last mark, without a warning.

        Such are those of a checkpoint within an epoch.
        """
        self._weights.trust()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure nothing inside of a ``with``, in any thread: for a second evaluation in the same epoch."""
        self._collector.pauses += 1
        try:
            yield
        finally:
            self._collector.pauses -= 1

    def remove(self) -> None:
        """Detach from the model, and finish writing. What was marked stays available; may be called more than once."""
        self._is_removed = True
        # The hooks go first: the model is free of them even if the store cannot be finished.
        self._collector.remove()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.remove()
        except Exception as problem:
            if error is None:
                raise
            # The exception that ended the block is the one to be seen.
            error.add_note(f"besides, the recording could not be finished: {problem!r}")
        text = self._warn_of_unmarked()
        if text and error is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        layers, marks, along = self.layers, self.epochs, self._along
        missing = []
        for variable, reasons in self.missing.items():
            missing.append(
                f"{variable} of {_count(len(reasons), 'layer')}: {next(iter(reasons.values()))}"
            )
        unsupported = [
            f"{layer}: {reason}" for layer, reason in self.unsupported.items()
        ]
        none_yet = "none yet: attention is found in the first forward"
        lines = {
            "layers": f"{len(layers)} ({_shorten(layers)})" if layers else none_yet,
            f"{along}s": f"{len(marks)} ({_shorten(marks)})" if marks else "none yet",
            f"since the last {along}": _count(self._collector.unmarked_images, "image"),
            "missing": "; ".join(missing) or "nothing",
            "unsupported": "; ".join(unsupported) or "nothing",
            "kept in": self._store.name,
        }
        title = f"Recorder of {self._collector.model_class}{', removed' if self._is_removed else ''}"
        return "\n".join(
            [title, *(f"  {name}: {text}" for name, text in lines.items())]
        )

    def _check_same_on_all_ranks(self, mark: Mark) -> None:
        numbers = self._ranks.gather(mark.number)
        if len(set(numbers)) > 1:
            numbers_of_ranks = ", ".join(
                f"{number} on rank {rank}" for rank, number in enumerate(numbers)
            )
            raise ValueError(
                f"expected the same {self._along} on all ranks, got {self._along} {numbers_of_ranks}"
            )

    def _write(self, mark: Mark, report: EpochReport) -> list[str]:
        """Store an epoch, and return warnings; nothing is changed where it is refused."""
        # All that may refuse the epoch comes before the first write.
        check_order(self._along, mark.number, self.epochs)
        check_epoch(report, self._layer_filter, self._groups)
        entries = number_values(report.layers) + map_values(report)
        # The first mark settles the groups: later ones fill them, also where a layer did not run.
        groups = self._groups or groups_of(entries, report.order)
        stored = self._store.groups
        if self._groups is None and stored is not None and self._store.has_layers:
            check_resumed(stored, groups)
            groups = stored
        check_scalars(mark.scalars, groups)
        entries, warned = drop_unknown_layers(entries, groups)
        warned += warn_of_nonfinite(entries) + warn_of_mixed_sizes(report)
        # Hashes of the first epoch that had each image, perhaps of an earlier run.
        stored_hashes = json.loads((self._store.attrs or {}).get("image_hashes", "{}"))
        if "images" not in self._warned:
            changed = warn_of_changed_images(report.image_hashes, stored_hashes)
            self._warned |= {"images"} if changed else set()
            warned += changed
        attrs = self._attributes(report)
        # Only a forward shows how many heads, and maps of what size, there are to make room for.
        if not self._store.has_layers:
            maps_of = {"images": json.dumps(report.sampling.images)}
            self._store.create(
                groups, self._attrs | provenance(self._model) | maps_of | attrs
            )
        self._store.append(
            mark.number, assemble(entries, groups), mark.scalars, attrs=attrs
        )
        # Set only now, after the write: a mark that failed has settled nothing.
        self._groups = groups
        return warned

    def _attributes(self, report: EpochReport) -> dict[str, str]:
        """Return why layers or variables are not recorded, and which images came, in this run or in earlier ones."""
        attrs = self._store.attrs or {}
        unsupported, missing, hashes = (
            json.loads(attrs.get(name, "{}"))
            for name in ("unsupported", "missing", "image_hashes")
        )
        unsupported = {
            layer: reason
            for layer, reason in unsupported.items()
            # What could not be recorded in an earlier run may be now.
            if layer not in self.layers
        }
        for variable, layers in report.missing.items():
            missing[variable] = missing.get(variable, {}) | layers
        return {
            "unsupported": json.dumps({**unsupported, **report.unsupported}),
            "missing": json.dumps(missing),
            # The hash of the first epoch stays, so that all later ones are compared with the same image.
            "image_hashes": json.dumps({**report.image_hashes, **hashes}),
            WEIGHTS: self._weights.mark(),
        }

    def _check_marked(self) -> None:
        if not self._ranks.writes:
            raise RuntimeError(
                "rank 0 has the recording; open its store to read it elsewhere"
            )
        if self._store.groups is None:
            raise RuntimeError(
                f"nothing is recorded yet: run a forward, then mark({self._along}=...)"
            )

    def _warn_of_missing_grids(self) -> list[str]:
        """Say once which layers lack distances and maps, and what would help."""
        layers: dict[str, list[str]] = {}
        for layer, advice in self._collector.advice.items():
            if layer in self.layers and layer not in self._warned:
                layers.setdefault(advice, []).append(layer)
                self._warned.add(layer)
        return [
            f"no attention_distance and no maps of {', '.join(names)}: {advice}"
            for advice, names in layers.items()
        ]

    def _warn_of_alarms(self) -> list[str]:
        """Describe the alarms that the last mark shows, once for each spell."""
        dataset = self._store.dataset()
        if "layer" not in dataset.dims:
            return []
        texts = []
        for alarm in find_illness(dataset).alarms:
            key = alarm.sign, alarm.layer, alarm.since
            # An alarm that has ended is no news; one that comes again has another beginning.
            if alarm.until is None and key not in self._alarms:
                self._alarms.add(key)
                texts.append(str(alarm))
        return texts

    def _warn_of_unmarked(self) -> str:
        """Return what to warn of when the recording ends; "" if nothing is lost."""
        images = self._collector.unmarked_images
        advice = f"call mark({self._along}=...) after each validation"
        if images:
            since = (
                "since the last mark" if self._has_marked else "and nothing was marked"
            )
            return (
                f"{_count(images, 'image')} measured {since}: they are not in the recording. To keep them, {advice}; "
                f"for forwards that do not belong to it there is recorder.pause()"
            )
        if self._collector.training_forwards and not self._has_marked:
            return f"nothing was recorded, as nothing was marked: {advice}"
        return ""


def _release(collector: Collector, store: EpochStore) -> None:
    """Detach from the model, and let the store go."""
    collector.remove()
    if in_zarr_thread():
        # The garbage collector runs in any thread; this one cannot wait for what itself would have to do.
        threading.Thread(target=store.close).start()
    else:
        store.close()


record = Recorder


def _shorten(items: Sequence[object]) -> str:
    shown = items if len(items) < 4 else (items[0], items[1], "...", items[-1])
    return ", ".join(map(str, shown))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
