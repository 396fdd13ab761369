"""``record(model)``: attach to the model, close epochs, keep them, detach."""

import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, SupportsFloat

import numpy as np
import xarray as xr
from torch import nn

from tcnn_model.conversion.selection import LayerFilter
from tcnn_probe.probes import DEFAULT, Probe, find_probes
from tcnn_probe.provenance import provenance
from tcnn_probe.recording.accumulator import Found
from tcnn_probe.recording.checks import check_found, check_probes, check_same_recording
from tcnn_probe.recording.collector import Collector, When
from tcnn_probe.recording.dataset import LayerValues, assemble, groups_of, layer_values, map_values
from tcnn_probe.recording.distributed import Ranks, whole_parameters
from tcnn_probe.recording.marks import a_or_an, as_mark, as_numbers
from tcnn_probe.recording.options import Options, check_model
from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = ["Recorder", "record"]


def record(
    model: nn.Module,
    store: "str | os.PathLike[str] | Store | None" = None,
    *,
    layers: LayerFilter | None = None,
    probes: Iterable[str | Probe] | str | Probe | None = None,
    when: When = "eval",
    every: int = 1,
    images: int | Collection[int] | None = None,
    classes: int | Collection[int] | None = 3,
    max_images: int | None = None,
    along: str = "epoch",
    prefix_tokens: int | None = None,
    distributed: bool | None = None,
) -> "Recorder":
    """Record what the attention heads of a model do, epoch by epoch.

    ::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for epoch in range(epochs):
                train(model)
                accuracy = validate(model)
                recorder.mark(epoch=epoch, top1=accuracy)
        recorder.dataset.entropy.sel(layer="blocks.3.attn").plot.line(x="epoch")

    Every softmax attention is measured as it happens, with torch's fused attention left on, and only sums over images
    are kept: memory does not grow with the number of images. What the model computes is not changed. Everything that is
    attached is removed at the end of the ``with``, also through an exception, or by :meth:`Recorder.remove`.

    Args:
        model: any module, not compiled (compile it after this call if you like), in a wrapper such as
            DistributedDataParallel or not.
        store: where the recording is kept: a path, a URL or a zarr store object; every marked epoch is safe once
            ``mark`` has returned. One that holds a recording of the same layers is continued. None: in memory.
        layers: names, globs or a predicate ``(name, module) -> bool``; None for all that can be recorded.
        probes: what to measure: names of ``tcnn_probe.PROBES`` or probes of your own; None for attention heads
            (``tcnn_probe.DEFAULT``).
        when: which forwards are measured, by ``model.training``: "eval", "train" or "always".
        every: measure one forward in so many.
        images: of which images maps are kept: the first so many of each epoch, or their numbers in the order in which
            they are measured. None for no maps.
        classes: of which classes maps are kept, by pools with a token for each (:class:`tcnn_model.AttentionPool2d`):
            the first so many by the model's own output, of each image, or those whose indices you give. None for none.
        max_images: measure no more than so many images in each epoch.
        along: name of what is marked: "epoch", "step", or any coordinate that only grows.
        prefix_tokens: class and register tokens before the patches, where the model does not say (timm's do).
        distributed: whether ``mark`` is called by all ranks together, which adds up what they measured; rank 0 writes.
            None: if torch.distributed is initialised. Give False if one rank records alone.

    Raises:
        ValueError: a layer, a probe or an option that is unknown; a store that holds something else (StoreError).
        TypeError: ``model`` is no module, or is compiled: what it does could not be seen.
    """
    options = Options(
        layers=layers,
        when=when,
        every=every,
        images=images,
        classes=classes,
        max_images=max_images,
        along=along,
        prefix_tokens=prefix_tokens,
    )
    return Recorder(model, store, probes=probes, options=options, distributed=distributed)


class Recorder:
    """See :func:`record`, which makes one."""

    def __init__(
        self,
        model: nn.Module,
        store: "str | os.PathLike[str] | Store | None" = None,
        *,
        probes: Iterable[str | Probe] | str | Probe | None = None,
        options: Options | None = None,
        distributed: bool | None = None,
    ) -> None:
        check_model(model)
        self._options = options = options or Options()
        self._model, self._along = model, options.along
        wanted = options.layer_names(model)
        chosen_probes = find_probes(probes)
        self._named = [] if probes is None else [probe.kind for probe in chosen_probes]
        self._ranks = Ranks(distributed)
        self._groups: Mapping[str, Group] | None = None

        def open_store() -> tuple[int | float, ...]:
            self._store = EpochStore(store if self._ranks.writes else None, along=options.along)
            return self._store.marks

        self._marks = self._ranks.each(open_store)[0]
        self._collector = Collector(
            model,
            chosen_probes,
            wanted,
            when=options.when,
            every=options.every,
            images=options.image_numbers(),
            classes=options.wanted_classes(),
            max_images=options.max_images,
            prefix_tokens=options.prefix_tokens,
        )
        try:
            check_probes(chosen_probes, self._collector, model, options)
            self._ranks.writer(lambda: check_same_recording(self._store, self._collector, model, options))
        except BaseException:
            self.remove()
            raise

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers recorded, in the model's order; attention is found in the first forward."""
        names = dict.fromkeys(name for name, _ in self._collector.tallies)
        return tuple(sorted(names, key=lambda name: (self._collector.order[name], name)))

    @property
    def unsupported(self) -> dict[str, str]:
        """Layers that look like attention and cannot be recorded, and why; known after the first forward."""
        return dict(self._collector.unsupported)

    @property
    def missing(self) -> dict[str, dict[str, str]]:
        """Layers that are recorded without some variable, and why: {variable: {layer: reason}}."""
        return {variable: dict(layers) for variable, layers in self._collector.missing.items()}

    @property
    def epochs(self) -> tuple[int | float, ...]:
        """What has been marked so far, a continued store's included: epochs, steps or what ``along`` names."""
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

    def mark(
        self,
        *,
        if_marked: Literal["error", "skip"] = "error",
        **values: SupportsFloat,
    ) -> None:
        """Close an epoch: ``mark(epoch=3, top1=0.8)`` stores its statistics and ``top1``, and starts the next.

        Means are over all images and queries seen since the previous mark; gate, locality strength and centre are read
        off the layers now. When this returns the epoch is in the store.

        Args:
            if_marked: what to do if the store holds this epoch already, as it may after resuming: "error", or "skip"
                to drop what was seen for it.
            **values: the epoch (or what ``along`` names), a number greater than every one marked before, and
                further numbers to be kept with it. A new name is NaN for earlier epochs.

        Raises:
            ValueError: the epoch is marked already, or earlier than the last; a scalar has a recorded variable's name.
            TypeError: the epoch is missing, or something is no number.
            RuntimeError: nothing was measured since the previous mark, or not what was asked for; or the recorder
                was removed.
        """
        number, scalars = self._agreed(values, if_marked)
        found, missed = self._gather()
        entries: list[LayerValues] = []

        def write() -> tuple[int | float, ...]:
            if not (if_marked == "skip" and number in self.epochs):
                self._check_order(number)
                check_found(found, self._collector, self._model, self._options, self._groups, missed=missed)
                entries.extend(self._entries(found))
                self._write(number, entries, scalars)
            return self.epochs

        self._marks = self._ranks.writer(write)
        self._collector.reset()
        self._warn_idle()
        self._warn_nonfinite(entries)

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

    def _agreed(self, values: dict[str, SupportsFloat], if_marked: str) -> tuple[int | float, dict[str, float]]:
        """The mark, which is to be the same on all ranks, and the scalars."""

        def mine() -> tuple[int | float, dict[str, float]]:
            if not self._collector.attached:
                raise RuntimeError("the recorder was removed: mark() works inside the with block only")
            if if_marked not in ("error", "skip"):
                raise ValueError(f"expected if_marked='error' or 'skip', got {if_marked!r}")
            if self._along not in values:
                raise TypeError(f"mark() needs the {self._along}: mark({self._along}=..., top1=...)")
            number = as_mark(self._along, values.pop(self._along))
            return number, as_numbers(values, self._along)

        everyone = self._ranks.each(mine)
        numbers = [number for number, _ in everyone]
        if len(set(numbers)) > 1:
            told = ", ".join(f"{number} on rank {rank}" for rank, number in enumerate(numbers))
            raise ValueError(f"expected the same {self._along} on all ranks, got {self._along} {told}")
        return everyone[0]

    def _gather(self) -> tuple[dict[tuple[str, str], Found], bool]:
        """What all ranks found, by layer and probe; and whether none has seen a forward in which attention could be."""
        collector, tallies = self._collector, self._collector.tallies
        with whole_parameters(self._model):
            mine = self._ranks.each(
                lambda: ({k: tallies[k].found() for k in sorted(tallies)}, collector.missed_attention)
            )
        everyone, missed = zip(*mine, strict=True)
        keys = dict.fromkeys(key for key in (*tallies, *(key for one in everyone for key in one)))
        for layer, kind in keys:
            collector.expect(layer, kind)  # on a rank that has seen no image
        return {key: Found.together(one[key] for one in everyone if key in one) for key in keys}, all(missed)

    def _entries(self, found: Mapping[tuple[str, str], Found]) -> list[LayerValues]:
        tallies = [self._collector.tallies[key] for key in found]
        return layer_values(tallies, found) + map_values(
            tallies, self._options.image_numbers(), self._options.wanted_classes()
        )

    def _write(self, number: int | float, entries: list[LayerValues], scalars: dict[str, float]) -> None:
        if self._groups is None:
            groups = groups_of(entries, self._collector.order)
            if self._store.groups is None:
                self._store.create(groups, provenance(self._model) | self._reasons())
            else:
                self._store.check(groups)
            self._groups = groups
        known = [entry for entry in entries if entry.layer in getattr(self._groups.get(entry.place), "layers", ())]
        if strange := [f"{e.layer} in {e.place}" if e.place else e.layer for e in entries if e not in known]:
            warnings.warn(
                f"not recorded, because the recording began without them: {strange[:3]} (of {len(strange)})",
                RuntimeWarning,
                stacklevel=7,
            )
        for entry in known:
            self._drop_strange(entry)
        taken = {name for group in self._groups.values() for name in group.variables} & scalars.keys()
        if taken:
            raise ValueError(f"{sorted(taken)[0]!r} is the name of a recorded variable: give the scalar another one")
        self._store.append(number, assemble(known, self._groups), scalars, attrs=self._reasons())

    def _drop_strange(self, entry: LayerValues) -> None:
        """Variables that no layer had at the first mark, whose sizes were then not known."""
        assert self._groups is not None
        strange = entry.values.keys() - self._groups[entry.place].variables.keys()
        if strange:
            warnings.warn(
                f"not recorded, because the recording began without them: {sorted(strange)} of {entry.layer!r}",
                RuntimeWarning,
                stacklevel=8,
            )
        for name in strange:
            del entry.values[name]

    def _reasons(self) -> dict[str, str]:
        """Why layers or variables are not recorded, as attributes: also what earlier runs have found."""
        stored = self._store.attrs or {}
        unsupported, missing = (json.loads(stored.get(name, "{}")) for name in ("unsupported", "missing"))
        unsupported = {layer: why for layer, why in unsupported.items() if layer not in self.layers}
        for variable, layers in self._collector.missing.items():
            missing[variable] = missing.get(variable, {}) | layers
        return {"unsupported": json.dumps(unsupported | self._collector.unsupported), "missing": json.dumps(missing)}

    def _check_marked(self) -> None:
        if not self._ranks.writes:
            raise RuntimeError("rank 0 has the recording; open its store to read it elsewhere")
        if self._store.groups is None:
            raise RuntimeError(f"nothing is recorded yet: run a forward, then mark({self._along}=...)")

    def _check_order(self, number: int | float) -> None:
        marks = self.epochs
        if number in marks:
            raise ValueError(f"{self._along} {number} is already marked")
        if marks and number < marks[-1]:
            raise ValueError(
                f"expected {a_or_an(self._along)} later than the last one marked, {marks[-1]}, got {number}"
            )

    def _warn_idle(self) -> None:
        """Probes that were named and found no layer, once; of those that are there by default one is enough."""
        busy = {kind for _, kind in self._collector.tallies}
        idle = [kind for kind in self._named if kind not in busy and not (kind in DEFAULT and busy & {*DEFAULT})]
        self._named = []
        if idle:
            warnings.warn(f"no layer was found for the probes {idle}", RuntimeWarning, stacklevel=3)

    def _warn_nonfinite(self, entries: Iterable[LayerValues]) -> None:
        bad = {
            entry.layer: int(entry.values.get("nonfinite_images", np.array(0)))
            for entry in entries
            if not entry.maps and not all(np.isfinite(value).all() for value in entry.values.values())
        }
        if bad:
            warnings.warn(
                f"NaN or infinite values were recorded for these layers; the number of images that gave them "
                f"(0: they are in the layer's parameters or gradients): {bad}",
                RuntimeWarning,
                stacklevel=3,
            )
