"""``record(model)``: attach to the layers, accumulate over forwards, close epochs, detach."""

import operator
import os
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, SupportsFloat, SupportsIndex

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_model.selection import LayerFilter, select_layers
from tcnn_probe.probes import PROBES, Probe
from tcnn_probe.provenance import provenance
from tcnn_probe.schema import COORDINATES, VARIABLES
from tcnn_probe.store import EpochStore

__all__ = ["Recorder", "record"]


def record(
    model: nn.Module, store: str | os.PathLike[str] | None = None, *, layers: LayerFilter | None = None
) -> "Recorder":
    """Record what the gated positional self-attention heads of a model do, epoch by epoch.

    ::

        with tcnn_probe.record(model, "run.zarr") as recorder:
            for epoch in range(epochs):
                train(model)
                accuracy = validate(model)
                recorder.mark(epoch=epoch, top1=accuracy)
        recorder.dataset.gate.sel(layer="layer4.1.conv2").plot.line(x="epoch")

    Forwards in eval mode (``model.training`` is False) are measured as they happen, and only sums over images are
    kept. Training forwards pass untouched. Everything attached is removed at the end of the ``with``, also through an
    exception, or by :meth:`Recorder.remove`.

    Args:
        model: any module with :class:`tcnn_model.GPSA` layers or timm's ConViT layers.
        store: directory for the zarr store, in which every marked epoch is safe once ``mark`` has returned; one that
            holds a recording of the same layers is continued. None keeps the recording in memory.
        layers: names, globs or a predicate ``(name, module) -> bool``; None for all that can be recorded.

    Raises:
        ValueError: no layer that can be recorded, or none that ``layers`` names; a store that holds something else.
        TypeError: ``model`` is no module, or is compiled: its hooks would be ignored.
    """
    return Recorder(model, store, layers=layers)


class Recorder:
    """See :func:`record`, which makes one."""

    def __init__(
        self,
        model: nn.Module,
        store: str | os.PathLike[str] | None = None,
        *,
        layers: LayerFilter | None = None,
    ) -> None:
        _check_model(model)
        found = _recordable(model, layers)
        _check_uncompiled(model, [module for module, _ in found.values()])
        self._model = model
        self._tallies = {name: _Tally(module, probe) for name, (module, probe) in found.items()}
        self._training_forwards = 0
        table = {name: {"kind": tally.probe.kind, "heads": tally.heads} for name, tally in self._tallies.items()}
        self._store = EpochStore(store, table, list(VARIABLES), provenance(model))
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        try:
            for tally in self._tallies.values():
                self._handles.append(tally.module.register_forward_hook(self._observer(tally), with_kwargs=True))
        except BaseException:
            self.remove()
            raise

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers recorded, in the model's order."""
        return tuple(self._tallies)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epochs marked so far, those of a continued store included."""
        return self._store.epochs

    @property
    def dataset(self) -> xr.Dataset:
        """The marked epochs: dims (epoch, layer, head), with units and descriptions in ``attrs``; loaded lazily."""
        return self._store.dataset()

    def mark(
        self,
        *,
        epoch: SupportsIndex,
        if_marked: Literal["error", "skip"] = "error",
        **scalars: SupportsFloat,
    ) -> None:
        """Close an epoch: store its statistics with ``scalars`` (accuracy, loss, ...), and start the next.

        Means are over all images and queries seen in eval mode since the previous mark; gate, locality strength and
        centre are read off the layers now. When this returns the epoch is in the store.

        Args:
            epoch: integer, later than every epoch marked before.
            if_marked: what to do if the store holds this epoch already, as it may after resuming: "error", or "skip"
                to drop what was seen for it.
            scalars: numbers kept as variables of the epoch. A new name is NaN for earlier epochs.

        Raises:
            ValueError: the epoch is marked already, or earlier than the last; a scalar has a recorded variable's name.
            TypeError: the epoch is no integer, or a scalar no number.
            RuntimeError: a layer saw no eval-mode forward since the previous mark, or the recorder was removed.
        """
        if not self._handles:
            raise RuntimeError("the recorder was removed: mark() works inside the with block only")
        if if_marked not in ("error", "skip"):
            raise ValueError(f"expected if_marked='error' or 'skip', got {if_marked!r}")
        number = _as_epoch(epoch)
        numbers = _as_numbers(scalars)
        if number in self.epochs and if_marked == "skip":
            self._reset()
            return
        if number in self.epochs:
            raise ValueError(f"epoch {number} is already marked")
        if self.epochs and number < self.epochs[-1]:
            raise ValueError(f"expected an epoch later than the last one marked, {self.epochs[-1]}, got {number}")
        if idle := [name for name, tally in self._tallies.items() if tally.images == 0]:
            raise RuntimeError(
                f"nothing to mark: no image in eval mode reached {idle[:3] + ['...'] * (len(idle) > 3)} since the "
                f"previous mark ({self._training_forwards} layer calls in training mode); run the validation, "
                f"with model.eval(), before mark()"
            )
        values = self._summary()
        self._store.append(number, values, numbers)
        self._reset()
        self._warn_nonfinite(values)

    def remove(self) -> None:
        """Detach from the model. What was marked stays available; may be called more than once."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def _observer(self, tally: "_Tally") -> Callable[..., None]:
        def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            if module is not tally.module:  # a copy made while recording, such as a moving average of the weights
                return
            if self._model.training:
                self._training_forwards += 1
            else:
                tally.add(args[0] if args else next(iter(kwargs.values())))

        return observe

    def _summary(self) -> dict[str, np.ndarray]:
        shape = (len(self._tallies), max(tally.heads for tally in self._tallies.values()))
        summary = {name: np.full(shape[: len(about.dims) - 1], np.nan) for name, about in VARIABLES.items()}
        for row, tally in enumerate(self._tallies.values()):
            for name, value in tally.summary().items():
                if summary[name].ndim == 1:
                    summary[name][row] = value
                else:
                    summary[name][row, : tally.heads] = value
        return summary

    def _warn_nonfinite(self, values: dict[str, np.ndarray]) -> None:
        bad = {}
        for row, (name, tally) in enumerate(self._tallies.items()):
            recorded = [v[row, : tally.heads] if v.ndim == 2 else v[row] for v in values.values()]
            if not all(np.isfinite(v).all() for v in recorded):
                bad[name] = int(values["nonfinite_images"][row])
        if bad:
            warnings.warn(
                f"NaN or infinite values were recorded for these layers; the number of images that reached them with "
                f"NaN or infinities (0: they arose in the layer, from its parameters or by overflow): {bad}",
                RuntimeWarning,
                stacklevel=3,
            )

    def _reset(self) -> None:
        self._training_forwards = 0
        for tally in self._tallies.values():
            tally.reset()


class _Tally:
    """Sums over images of one layer's statistics, on the layer's device, in float64."""

    def __init__(self, module: nn.Module, probe: Probe) -> None:
        self.module, self.probe = module, probe
        self.heads = probe.heads(module)
        self.reset()

    def reset(self) -> None:
        self.images = 0
        self._sums: dict[str, Tensor] = {}

    def add(self, x: Tensor) -> None:
        # Not inference tensors, which could not be added to outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            measured = dict(self.probe.measure(self.module, x))
            broken = ~x.isfinite().flatten(1).all(1)
            for name, values in measured.items():
                self._accumulate(name, values.masked_fill(broken[:, None], torch.nan).sum(0, dtype=_sum_dtype(values)))
            self._accumulate("nonfinite_images", broken.sum())
            self.images += len(x)

    def _accumulate(self, name: str, value: Tensor) -> None:
        if name in self._sums:
            self._sums[name] += value.to(self._sums[name])
        else:
            self._sums[name] = value

    @torch.no_grad()
    def summary(self) -> dict[str, np.ndarray]:
        state = {name: value.double().cpu().numpy() for name, value in self.probe.state(self.module).items()}
        sums = {name: value.double().cpu().numpy() for name, value in self._sums.items()}
        nonfinite = sums.pop("nonfinite_images")
        means = {name: value / self.images for name, value in sums.items()}
        return state | means | {"images": np.array(self.images), "nonfinite_images": nonfinite}


def _recordable(model: nn.Module, layers: LayerFilter | None) -> dict[str, tuple[nn.Module, Probe]]:
    found = {name: (module, probe) for name, module in model.named_modules() if (probe := _probe_for(module))}
    if not found:
        kinds = ", ".join(f"{p.module_type.__module__}.{p.module_type.__name__}" for p in PROBES)
        raise ValueError(
            f"{type(model).__name__} has no layer that can be recorded (known: {kinds}); "
            f"tcnn_model.reparameterize(model) turns the last convolutions of a CNN into GPSA layers"
        )
    if layers is None:
        return found
    wanted = select_layers({name: module for name, (module, _) in found.items()}, layers, what="attention layers")
    return {name: found[name] for name in wanted}


def _probe_for(module: nn.Module) -> Probe | None:
    return next((probe for probe in PROBES if isinstance(module, probe.module_type)), None)


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def _check_uncompiled(model: nn.Module, layers: list[nn.Module]) -> None:
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        if compiled and not set(layers).isdisjoint(module.modules()):
            raise TypeError(
                f"{f'the part {name!r} of the model' if name else 'the model'} is compiled, and hooks attached after "
                f"compilation are ignored: record the original model, or attach before torch.compile"
            )


def _as_epoch(epoch: SupportsIndex) -> int:
    try:
        number = operator.index(epoch)
    except TypeError as error:
        raise TypeError(f"expected an integer for epoch, got {epoch!r}") from error
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"expected an epoch that fits in 64 bits, got {number}")
    return number


def _as_numbers(scalars: dict[str, SupportsFloat]) -> dict[str, float]:
    numbers = {}
    for name, value in scalars.items():
        if not name.isidentifier():
            raise ValueError(f"expected letters, digits and underscores in a scalar's name, got {name!r}")
        if name in VARIABLES or name in COORDINATES:
            raise ValueError(f"{name!r} is the name of a recorded variable: give the scalar another one")
        try:
            if isinstance(value, str):
                raise TypeError("a string")
            numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"expected a number for {name!r}, got {value!r}") from error
    return numbers


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
