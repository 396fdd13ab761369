"""What one probe has found of one layer since the last mark: sums on the layer's device."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.hooks.edits import edited
from tcnn_probe.probes.probe import Probe

__all__ = ["Found", "Tally", "checked", "named"]


@dataclass
class Found:
    """What is known when an epoch is marked: plain arrays, which ranks can send each other.

    Args:
        images: that the layer saw.
        nonfinite: of these, how many gave a NaN or an infinity.
        sums: over images, of each variable.
        counts: how many images gave each variable.
        squares: summed over backward passes, of each variable.
        passes: how many of these each variable had.
        state: what the layer's parameters are.
    """

    images: int = 0
    nonfinite: int = 0
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    squares: dict[str, np.ndarray] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def together(cls, several: Iterable["Found"]) -> "Found":
        """Of several ranks."""
        total = cls()
        for one in several:
            total.images += one.images
            total.nonfinite += one.nonfinite
            total.state = total.state or one.state
            # Of passes too: hooks see a rank's own gradients, before they are averaged.
            for what in ("sums", "counts", "squares", "passes"):
                mine, other = getattr(total, what), getattr(one, what)
                for name, value in other.items():
                    mine[name] = mine[name] + value if name in mine else value
        return total

    def means(self) -> dict[str, np.ndarray]:
        """Mean of each variable over the images that gave it, and root mean square over backward passes."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        return means | {name: np.sqrt(total / (self.passes[name] or np.nan)) for name, total in self.squares.items()}


class Tally:
    """Sums over images, in float64 (float32 where the device has no float64), and maps of chosen images."""

    def __init__(self, name: str, module: nn.Module, probe: Probe) -> None:
        self.name, self.module, self.probe = name, module, probe
        self._sums: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._hooked: list[tuple[nn.Parameter, torch.utils.hooks.RemovableHandle]] = []
        self._unhooked = (
            []
            if probe.gradients is None
            else [
                (parameter, _GradientHook(self, variable, squares, id(parameter)))
                for variable, pairs in probe.gradients(module).items()
                for parameter, squares in pairs
            ]
        )
        self._counts: Counter[str] = Counter()
        self._passes: dict[tuple[str, int], Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self.images = 0
        self.maps: dict[int, Mapping[str, Tensor]] = {}
        self._nonfinite: Tensor | None = None
        self._counts.clear()
        self._passes.clear()
        for total in (*self._sums.values(), *self._squares.values()):
            total.zero_()

    def add(self, measured: Mapping[str, Tensor], limit: int | None) -> None:
        """Images of a forward: for each variable (B, *dims); the first ``limit`` of them if it is given."""
        count = len(next(iter(measured.values()), ()))
        count = count if limit is None else min(count, limit)
        if not count:
            return
        broken = None
        for name, values in measured.items():
            if len(values) < count:
                raise ValueError(
                    f"expected {count} images in {name!r} of {self.name!r}, got shape {tuple(values.shape)}"
                )
            values = values[:count]
            _add(self._sums, name, values.sum(0, dtype=_sum_dtype(values)))
            self._counts[name] += count
            not_finite = ~values.isfinite().reshape(count, -1).all(1)
            broken = not_finite if broken is None else broken | not_finite
        assert broken is not None
        self._nonfinite = broken.sum() if self._nonfinite is None else self._nonfinite + broken.sum()
        self.images += count

    def add_maps(self, which: Sequence[int], maps: Mapping[str, Tensor]) -> None:
        """Of images, by their number in the epoch."""
        for place, image in enumerate(which):
            self.maps[image] = {name: self._narrow(name, values[place]) for name, values in maps.items()}

    def _narrow(self, variable: str, value: Tensor) -> Tensor:
        """A copy, as narrow as it is stored."""
        dtype = getattr(torch, self.probe.variables[variable].dtype)
        return value.to(_sum_dtype(value) if dtype == torch.float64 else dtype, copy=True)

    def follow_gradients(self) -> None:
        """Hook the parameters whose gradients the probe wants; those that are frozen once they no longer are."""
        waiting = []
        for parameter, hook in self._unhooked:
            if parameter.requires_grad:
                self._hooked.append((parameter, parameter.register_hook(hook)))
            else:
                waiting.append((parameter, hook))
        self._unhooked = waiting

    def add_gradient(self, variable: str, squares: Tensor, source: int) -> None:
        """Of one parameter, in one backward pass; one that overflowed, as under a gradient scaler, does not count."""
        finite = squares.isfinite().all()
        _add(self._squares, variable, torch.where(finite, squares, 0).to(_sum_dtype(squares)))
        self._passes[variable, source] = self._passes.get((variable, source), 0) + finite.long()

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for parameter, handle in self._hooked:
            handle.remove()
            if not parameter._backward_hooks:
                parameter._backward_hooks = None  # as it was before anybody's hook
        self._hooked, self._unhooked = [], []

    def found(self) -> Found:
        """All of it but the maps. Where parameters are spread over ranks, all ranks call this together."""
        passes: dict[str, int] = {}
        for (variable, _), number in self._passes.items():
            passes[variable] = max(int(number), passes.get(variable, 0))
        return Found(
            images=self.images,
            nonfinite=0 if self._nonfinite is None else int(self._nonfinite),
            sums={name: _array(self._sums[name]) for name in self._counts},
            counts=dict(self._counts),
            squares={name: _array(self._squares[name]) for name in passes},
            passes=passes,
            state=self.state(),
        )

    @torch.no_grad()
    def state(self) -> dict[str, np.ndarray]:
        """What the layer's parameters are now."""
        if self.probe.state is None:
            return {}
        with named(self.name), edited(self.module):
            state = checked(self.probe, self.probe.state(self.module), images=False)
            return {name: _array(_whole(value)) for name, value in state.items()}


class _GradientHook:
    """Registered on a parameter; a pickle of the model holds one that does nothing."""

    def __init__(self, tally: Tally | None, variable: str, squares: Any, source: int) -> None:
        self._tally, self._variable, self._squares, self._source = tally, variable, squares, source

    @torch.compiler.disable
    def __call__(self, gradient: Tensor) -> None:
        if self._tally is not None:
            with named(self._tally.name), torch.no_grad():
                self._tally.add_gradient(self._variable, self._squares(gradient), self._source)

    def __reduce__(self) -> tuple[Any, ...]:
        return _GradientHook, (None, "", None, 0)


def checked(probe: Probe, measured: Mapping[str, Tensor], *, images: bool) -> Mapping[str, Tensor]:
    """What a probe has measured, if it is what its variables say.

    Args:
        probe: which.
        measured: its answer.
        images: whether there should be a row for each image.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(measured, Mapping):
        raise TypeError(f"expected the probe {probe.kind!r} to give {{variable: tensor}}, got {measured!r}")
    rows = -1
    for name, value in measured.items():
        if name not in probe.variables:
            raise ValueError(f"the probe {probe.kind!r} measures {name!r}, which its variables do not describe")
        if not isinstance(value, Tensor):
            raise TypeError(f"expected the probe {probe.kind!r} to give a tensor for {name!r}, got {value!r}")
        dims = (*["image"] * images, *probe.variables[name].dims[1:])
        if value.ndim != len(dims):
            raise ValueError(
                f"expected the probe {probe.kind!r} to give {name!r} with the dimensions {dims}, got the shape "
                f"{tuple(value.shape)}"
            )
        if images and rows not in (-1, len(value)):
            raise ValueError(f"the probe {probe.kind!r} measures {rows} images, and {len(value)} for {name!r}")
        rows = len(value) if images else rows
    return measured


class named:  # noqa: N801
    """Errors inside say which layer they are of."""

    def __init__(self, layer: str) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(f"while tcnn_probe measured the layer {self._layer!r}")


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    if name not in totals:
        totals[name] = value.clone()
    elif totals[name].shape != value.shape:
        raise ValueError(f"{name!r} had shape {tuple(totals[name].shape)} before, and now has {tuple(value.shape)}")
    else:
        totals[name] += value.to(totals[name])


def _array(value: Tensor) -> np.ndarray:
    return value.detach().double().cpu().numpy()


def _whole(value: Tensor) -> Tensor:
    """All of a tensor that may be spread over ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _sum_dtype(values: Tensor) -> torch.dtype:
    return torch.float32 if values.device.type == "mps" else torch.float64  # MPS has no float64
