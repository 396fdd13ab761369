"""``record(model)``: attach to the model, close epochs, keep them, detach."""

import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsFloat, get_args

import xarray as xr
from torch import nn

from tcnn_model.conversion.selection import LayerFilter
from tcnn_probe.attention.layout import GivenTokens
from tcnn_probe.models import check_model, wanted_layers
from tcnn_probe.probes import Probe, find_probes
from tcnn_probe.provenance import provenance
from tcnn_probe.recording.accumulator import EpochSums
from tcnn_probe.recording.checks import (
    check_epoch,
    check_order,
    check_probes,
    check_resumed,
    check_same_recording,
    check_scalars,
    idle_probes,
)
from tcnn_probe.recording.collector import Collector
from tcnn_probe.recording.dataset import assemble, groups_of, layer_values, map_values, nonfinite, without_strangers
from tcnn_probe.recording.distributed import Ranks, whole_parameters
from tcnn_probe.recording.options import Sampling, When, as_attributes, as_mark, as_scalars, check_along
from tcnn_probe.recording.summary import described, forgotten
from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, Mode

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["Recorder", "record"]


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
        model: any module, not compiled (compile it after this call if you like), in a wrapper such as
            DistributedDataParallel or not.
        store: where the recording is kept: a path, a URL or a zarr store object; every marked epoch is safe once
            ``mark`` has returned. None: in memory.
        mode: what to do with a recording that is there: "a" continues one of the same layers; "w" replaces any, when
            the first epoch is marked; "x" refuses it.
        layers: names, globs or a predicate ``(name, module) -> bool``; None for all that can be recorded.
        probes: what to measure: names of ``tcnn_probe.PROBES`` or probes of your own; None for attention heads
            (``tcnn_probe.DEFAULT``). With ``[]`` only scalars are kept, for a CNN that gets its heads later. A
            recorder that continues the recording adds these heads, with NaN for the marks before.
        when: which forwards are measured, by ``model.training``: "eval", "train" or "always".
        every: measure one forward in so many.
        images: of which images maps are kept: the first so many of each epoch, or their numbers in the order in which
            they are measured. None for no maps.
        classes: of which classes maps are kept, by pools with a token for each (:class:`tcnn_model.AttentionPool2d`):
            the first so many by the model's own output, of each image, or those whose indices you give. None for none.
        max_images: measure no more than so many images in each epoch.
        along: name of what is marked: "epoch", "step", or any coordinate that only grows.
        prefix_tokens: number of class and register tokens before the patches, for a model that does not show it.
        class_token: for such a model: whether the class token is the "first" or the "last" token, or there is "none".
        grid: for such a model, if all of its tokens see each other: rows and columns of the patches.
        attrs: further attributes of a new recording, in plain JSON, such as the seed. If several recordings are opened
            together, attributes that differ become coordinates.
        distributed: whether ``mark`` is called by all ranks together, which adds up what they measured; rank 0 writes.
            None: if torch.distributed is initialised. Give False if one rank records alone.

    Raises:
        ValueError: a layer, a probe or an option that is unknown; a store that holds something else (StoreError).
        TypeError: ``model`` is no module, or is compiled: what it does could not be seen; a number that is none.
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
        distributed: bool | None = None,
    ) -> None:
        check_model(model)
        check_along(along)
        if mode not in get_args(Mode):
            raise ValueError(
                f"expected mode='a' (continue), 'w' (replace) or 'x' (only if nothing is there), got {mode!r}"
            )
        tokens = GivenTokens(prefix_tokens, class_token, grid)
        self._model, self._along, self._asked, self._about = model, along, layers, as_attributes(attrs or {})
        sampling = Sampling.asked(when, every, max_images, images, classes)
        wanted, chosen = wanted_layers(model, layers), find_probes(probes)
        self._marked = False
        self._named = [] if probes is None else [probe.kind for probe in chosen]
        self._ranks = Ranks(distributed)
        self._groups: Mapping[str, Group] | None = None
        self._advised: set[str] = set()
        with ExitStack() as undo:
            with self._ranks.agreed():
                self._store = EpochStore(store if self._ranks.writes else None, along=along, mode=mode)
                undo.callback(self._store.close)
            self._marks = self._ranks.gather(self._store.marks)[0]
            self._collector = Collector(model, chosen, wanted, sampling, tokens)
            undo.callback(self._collector.remove)
            check_probes(self._collector, chose_layers=layers is not None)
            with self._ranks.agreed():
                check_same_recording(self._store, provenance(model), self._collector)
                self._store.hold()
            undo.pop_all()

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers recorded, in the model's order; attention is found in the first forward."""
        names = dict.fromkeys(name for name, _ in self._collector.sums)
        return tuple(sorted(names, key=lambda name: (self._collector.order[name], name)))

    @property
    def unsupported(self) -> dict[str, str]:
        """Layers that look like attention and cannot be recorded, and why; known after the first forward."""
        return dict(self._collector.stream.unsupported)

    @property
    def missing(self) -> dict[str, dict[str, str]]:
        """Layers that are recorded without some variable, and why: {variable: {layer: reason}}."""
        return {variable: dict(layers) for variable, layers in self._collector.missing.items()}

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
        """All of it: scalars at the root, ``tree["heads"]``, ``tree["maps"]``, and each other probe under its kind."""
        self._check_marked()
        return self._store.tree()

    def mark(self, *, if_marked: Literal["error", "skip"] = "error", **values: SupportsFloat) -> None:
        """Close an epoch: ``mark(epoch=3, top1=0.8)`` stores its statistics and ``top1``, and starts the next.

        Means are over all images and queries seen since the previous mark; gate, locality strength and centre are read
        off the layers now. When this returns the epoch is in the store. A forward that another thread is in the middle
        of belongs to no epoch.

        Args:
            if_marked: what to do if the store holds this epoch already, as it may after resuming: "error", or "skip"
                to drop what was seen for it. To know it before: ``if epoch in recorder.epochs``.
            **values: the epoch (or what ``along`` names), a number greater than every one marked before, and
                further numbers to be kept with it. A new name is NaN for earlier epochs.

        Raises:
            ValueError: the epoch is marked already, or earlier than the last; a scalar has a recorded variable's name.
            TypeError: the epoch is missing, or something is no number.
            RuntimeError: nothing was measured since the previous mark, or not what was asked for; or the recorder
                was removed.
        """
        with self._ranks.agreed():
            number, scalars = self._told(values, if_marked)
        numbers = self._ranks.gather(number)
        if len(set(numbers)) > 1:
            told = ", ".join(f"{each} on rank {rank}" for rank, each in enumerate(numbers))
            raise ValueError(f"expected the same {self._along} on all ranks, got {self._along} {told}")
        warned: list[str] = []
        with self._collector.lock:
            found, missed = self._gather()
            with self._ranks.agreed():
                if self._ranks.writes and not (if_marked == "skip" and number in self.epochs):
                    warned = self._write(number, scalars, found, missed=missed)
            self._marks = self._ranks.gather(self.epochs)[0]
            self._collector.reset()
        warned += idle_probes(self._named, found, self._collector)
        self._marked, self._named = True, []
        for text in self._ungridded() + warned:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Measure nothing inside of a ``with``, in any thread: for a second evaluation in the same epoch."""
        self._collector.paused += 1
        try:
            yield
        finally:
            self._collector.paused -= 1

    def remove(self) -> None:
        """Detach from the model, and finish writing. What was marked stays available; may be called more than once."""
        self._collector.remove()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.remove()
        except Exception as problem:
            if error is None:
                raise
            error.add_note(f"besides, the recording could not be finished: {problem!r}")
        one = self._collector
        text = forgotten(self._along, marked=self._marked, images=one.unmarked, training=one.training_forwards)
        if text and error is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        one, end = self._collector, "" if self._collector.stream.attached else ", removed"
        found = self.layers, self._along, self.epochs, one.unmarked, self.missing, self.unsupported
        return f"Recorder of {one.model_class}{end}\n{described(*found, self._store.name)}"

    def _told(self, values: dict[str, SupportsFloat], if_marked: str) -> tuple[int | float, dict[str, float]]:
        """The mark and the scalars, as numbers."""
        if not self._collector.stream.attached:
            raise RuntimeError("the recorder was removed: mark() works inside the with block only")
        if if_marked not in ("error", "skip"):
            raise ValueError(f"expected if_marked='error' or 'skip', got {if_marked!r}")
        if self._along not in values:
            others = [
                f"; to mark {name}s, record(model, along={name!r})" for name in ("epoch", "step") if name in values
            ]
            raise TypeError(f"mark() needs the {self._along}: mark({self._along}=..., top1=...){''.join(others)}")
        number = as_mark(self._along, values.pop(self._along))
        return number, as_scalars(values, self._along)

    def _gather(self) -> tuple[dict[tuple[str, str], EpochSums], bool]:
        """What all ranks found, and whether none has seen a forward in which attention could be."""
        collector, sums = self._collector, self._collector.sums
        with whole_parameters(self._model), self._ranks.agreed():
            mine = {key: sums[key].found() for key in sorted(sums)}
        everyone, missed = zip(*self._ranks.gather((mine, collector.missed_attention)), strict=True)
        keys = dict.fromkeys(key for one in (sums, *everyone) for key in one)
        for layer, kind in keys:
            collector.expect(layer, kind)  # on a rank that has seen no image
        found = {key: EpochSums.together(one[key] for one in everyone if key in one) for key in keys}
        return found, all(missed)

    def _write(
        self,
        number: int | float,
        scalars: Mapping[str, float],
        found: Mapping[tuple[str, str], EpochSums],
        *,
        missed: bool,
    ) -> list[str]:
        """Store an epoch; nothing is changed where it is refused. Returns what to warn of."""
        collector = self._collector
        check_order(self._along, number, self.epochs)
        check_epoch(found, collector, self._asked, self._groups, missed=missed)
        sums = [collector.sums[key] for key in found]
        entries = layer_values(sums, found) + map_values(sums, collector.sampling)
        groups, stored = self._groups or groups_of(entries, collector.order), self._store.groups
        if self._groups is None and stored is not None and self._store.has_layers:
            check_resumed(stored, groups)
            groups = stored
        check_scalars(scalars, groups)
        warned = without_strangers(entries, groups) + nonfinite(entries) + collector.mixes_sizes(found)
        warned += collector.images.changed(json.loads((self._store.attrs or {}).get("image_hashes", "{}")))
        if stored is None or not self._store.has_layers:
            images = {"images": json.dumps(collector.sampling.images)}  # of which maps are kept
            self._store.create(groups, self._about | provenance(self._model) | images | self._attributes())
        self._store.append(number, assemble(entries, groups), scalars, attrs=self._attributes())
        self._groups = groups
        return warned

    def _attributes(self) -> dict[str, str]:
        """Why layers or variables are not recorded, and which images came: also what earlier runs have found."""
        names, stored = ("unsupported", "missing", "image_hashes"), self._store.attrs or {}
        unsupported, missing, hashes = (json.loads(stored.get(name, "{}")) for name in names)
        unsupported = {layer: why for layer, why in unsupported.items() if layer not in self.layers}
        for variable, layers in self._collector.missing.items():
            missing[variable] = missing.get(variable, {}) | layers
        found = unsupported | self.unsupported, missing, self._collector.images.hashes() | hashes
        return {name: json.dumps(value) for name, value in zip(names, found, strict=True)}

    def _check_marked(self) -> None:
        if not self._ranks.writes:
            raise RuntimeError("rank 0 has the recording; open its store to read it elsewhere")
        if self._store.groups is None:
            raise RuntimeError(f"nothing is recorded yet: run a forward, then mark({self._along}=...)")

    def _ungridded(self) -> list[str]:
        """Say once of which layers distances and maps are missing, and what would help."""
        layers: dict[str, list[str]] = {}
        for layer, advice in self._collector.advice.items():
            if layer in self.layers and layer not in self._advised:
                layers.setdefault(advice, []).append(layer)
                self._advised.add(layer)
        return [f"no attention_distance and no maps of {', '.join(some)}: {why}" for why, some in layers.items()]


record = Recorder
