"""Choosing heads: by layer and index, by glob, or by a boolean DataArray."""

import operator
import re
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from timm.models import convit
from torch import nn

from tcnn_model import GPSA
from tcnn_model.conversion.selection import select_layers
from tcnn_probe.attention import known_layers as known
from tcnn_probe.attention.rebuild import head_count
from tcnn_probe.interventions.edits import Heads
from tcnn_probe.interventions.gates import why_not
from tcnn_probe.models import layer_names

__all__ = ["Chosen", "HeadSelection", "choose"]

HeadSelection = str | xr.DataArray | Mapping[str, Any] | Iterable[str | tuple[str, Any]] | None

_CALLED = re.compile("Attn|Attention")


@dataclass(frozen=True)
class Chosen:
    """Heads of a layer that something in ``heads=`` stands for; fields as of :class:`Edit`."""

    asked: str
    layer: str
    module: nn.Module
    call: int | None
    heads: Heads
    strict: bool

    @property
    def count(self) -> int | None:
        """How many heads the layer has, if that is known before it runs."""
        return _known_count(self.module, self.call)


def choose(model: nn.Module, heads: HeadSelection, mode: str) -> list[Chosen]:
    """The heads of a model that ``heads`` stands for, see :func:`tcnn_probe.ablate`.

    Raises:
        ValueError: a layer or head that the model lacks, a layer that cannot do this, a DataArray of other dimensions.
        TypeError: ``heads`` is none of what it may be.

    Warns:
        UserWarning: a DataArray that is nowhere True and has none of the model's layers.
    """
    layers = _Layers(model, mode)
    found = [one for wanted, spec in _items(heads) for one in layers.choose(wanted, _as_heads(spec, wanted))]
    if not found and isinstance(heads, xr.DataArray):
        theirs = [str(name) for name in np.atleast_1d(heads["layer"].values)]
        if theirs and not any(layers.has(name) for name in theirs):
            warnings.warn(
                f"nothing is ablated: heads is nowhere True, and {type(model).__name__} has none of its layers "
                f"({reprlib.repr(theirs)[1:-1]}); is it of another model?",
                stacklevel=3,
            )
    return [one for one in found if one.heads.chosen != ()]


class _Layers:
    """Of a model, with respect to a mode."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self._mode = mode
        self._modules = {name: module for module, name in layer_names(model).items()}
        self._attention = _attention_layers(self._modules)
        self._able = {name: module for name, module in self._attention.items() if why_not(module, mode) is None}

    def has(self, name: str) -> bool:
        """Whether the model has such a module."""
        return _split(name, self._modules)[0] is not None

    def choose(self, wanted: str | None, heads: Heads) -> Iterator[Chosen]:
        """Layers of a name or glob, with such heads of each; of all layers, for None."""
        base, call = _split(wanted, self._modules)
        if base is not None and (base in self._attention or not self._inside(base)):
            yield self._named(base, call, heads)
            return
        if wanted is None:
            several = dict(self._able)
        else:
            several = select_layers(self._attention, wanted or "*", what="attention layers")
            several = {name: module for name, module in several.items() if name in self._able}
        if not several:
            where = "this model" if wanted is None else repr(wanted)
            others = "; a layer that is not called attention has to be named" if self._able == self._attention else ""
            raise ValueError(f"no layer of {where} can do mode={self._mode!r}{self._needs()}{others}")
        for name, module in several.items():
            asked = "every layer" if wanted is None else wanted
            yield _checked(Chosen(asked, name, module, None, heads, strict=len(several) == 1))

    def _named(self, name: str, call: int, heads: Heads) -> Chosen:
        module, layer = self._modules[name], f"{name}#{call}" if call else name
        if reason := known.lookup(known.NO_ATTENTION_MATRIX, module) or why_not(module, self._mode):
            raise ValueError(f"{layer!r} ({type(module).__name__}) cannot be ablated so: {reason}")
        if call and isinstance(module, GPSA | convit.GPSA):
            raise ValueError(f"the model has no attention {layer!r}: {name!r} has one only")
        return _checked(Chosen(layer, layer, module, call, heads, strict=True))

    def _inside(self, name: str) -> list[str]:
        return [other for other in self._attention if _within(other, name)]

    def _needs(self) -> str:
        reason = next((why for module in self._attention.values() if (why := why_not(module, self._mode))), None)
        return f": {reason}" if reason else ""


def _known_count(module: nn.Module, call: int | None = None) -> int | None:
    return None if call or known.lookup(known.HEADS, module) == "one" else head_count(module)


def _checked(chosen: Chosen) -> Chosen:
    """It, if the layer is not known to lack any of the heads."""
    if chosen.count is not None:
        chosen.heads.of(chosen.count, chosen.layer)
    return chosen


def _items(heads: HeadSelection) -> Iterator[tuple[str | None, Any]]:
    """What is wanted: names or globs, and which heads of each."""
    if heads is None or isinstance(heads, str):
        yield heads, None
    elif isinstance(heads, xr.DataArray):
        yield from _of_array(heads)
    elif isinstance(heads, xr.Dataset) or len(getattr(heads, "shape", (0,))) != 1:
        raise _no_selection(heads)
    elif isinstance(heads, Mapping):
        yield from heads.items()
    elif isinstance(heads, tuple) and len(heads) == 2 and isinstance(heads[0], str) and not isinstance(heads[1], str):
        yield heads[0], heads[1]
    elif isinstance(heads, Iterable):
        for one in heads:
            if not isinstance(one, str) and not (isinstance(one, tuple) and len(one) == 2):
                if hasattr(heads, "shape"):  # no list that is wrong somewhere, but a mask of another library's
                    raise _no_selection(heads)
                raise TypeError(f"expected names of layers, or pairs (layer, head), in heads; got {_brief(one)}")
            yield (one, None) if isinstance(one, str) else one
    else:
        raise _no_selection(heads)


def _no_selection(heads: object) -> TypeError:
    return TypeError(
        f"expected a name or glob, several, pairs (layer, head), a mapping from layers to heads, or a boolean "
        f"DataArray for heads; got {type(heads).__name__}: a mask is an xarray.DataArray with the coordinates layer "
        f"and head, such as ds.gate < 0.5 of a recording"
    )


def _brief(given: object) -> str:
    """In an error: not all of an array."""
    return f"{type(given).__name__} of shape {tuple(given.shape)}" if hasattr(given, "shape") else reprlib.repr(given)


def _of_array(array: xr.DataArray) -> Iterator[tuple[str, Any]]:
    """The layers and heads at which a boolean array over (layer, head) is True; the last of several marks."""
    if array.dtype != bool:
        raise TypeError(f"expected a boolean DataArray, such as head_types(ds) == 'content'; got dtype {array.dtype}")
    others = [dim for dim in array.dims if dim not in ("layer", "head")]
    if len(others) > 1 or "layer" not in array.coords or (others and not array.sizes[others[0]]):
        raise ValueError(
            f"expected a DataArray over layer and head, with their names along layer, and over one more dimension at "
            f"most, whose last mark counts; got dims {array.dims} with coordinates {tuple(array.coords)}"
        )
    array = array.isel({others[0]: -1}) if others else array
    of_all = "head" not in array.dims and "head" not in array.coords
    for name in ("layer", "head"):
        if name not in array.dims:
            array = array.expand_dims(name)
    numbers = array["head"].values  # positions where there is no coordinate
    for layer, row in zip(array["layer"].values, array.transpose("layer", "head").values, strict=True):
        if np.any(row):
            yield str(layer), None if of_all else [int(number) for number in numbers[row]]


def _as_heads(spec: Any, layer: str | None) -> Heads:
    """Indices, a slice or None as heads.

    Raises:
        TypeError, ValueError: no such, or negative ones.
    """
    if spec is None:
        return Heads()
    if isinstance(spec, slice):
        given = [part for part in (spec.start, spec.stop) if part is not None]
    else:
        try:
            given = [operator.index(spec)] if not isinstance(spec, Iterable) else [operator.index(one) for one in spec]
            if isinstance(spec, str) or any(_is_bool(n) for n in (spec if isinstance(spec, Iterable) else [spec])):
                raise TypeError
        except TypeError as error:
            what = f"expected heads of {layer!r} as an index, indices or a slice, got {_brief(spec)}"
            raise TypeError(what) from error
    if any(number < 0 for number in given) or (isinstance(spec, slice) and (spec.step or 1) < 0):
        raise ValueError(f"expected heads of {layer!r} counted from 0, got {spec!r}")
    return Heads(spec) if isinstance(spec, slice) else Heads(tuple(dict.fromkeys(given)))


def _is_bool(number: Any) -> bool:
    return isinstance(number, bool) or str(getattr(number, "dtype", "")) in ("bool", "torch.bool")


def _split(wanted: str | None, modules: Mapping[str, nn.Module]) -> tuple[str | None, int]:
    """A module's name and the number of its attention, ``name#1``; None if it is none's."""
    if wanted is not None and not isinstance(wanted, str):
        raise TypeError(f"expected the name of a layer, or a glob, in heads; got {_brief(wanted)}")
    if wanted is None or wanted in modules:
        return wanted, 0
    base, _, number = wanted.rpartition("#")
    return (base, int(number)) if base in modules and number.isdecimal() else (None, 0)


def _attention_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Modules that look like attention between tokens: which of them are, forwards will show.

    They are called so, or have heads and neither contain nor belong to one that is called so. Of several, one inside of
    the other, the innermost.
    """
    called = [name for name, m in modules.items() if isinstance(m, GPSA) or _CALLED.search(type(m).__name__)]
    others = [name for name, m in modules.items() if head_count(m) is not None and name not in called]
    others = [name for name in others if not any(_within(a, name) or _within(name, a) for a in called)]
    alike = {*called, *others}
    return {
        name: module
        for name, module in modules.items()
        if name in alike
        and known.lookup(known.NO_ATTENTION_MATRIX, module) is None
        and not any(_within(other, name) for other in alike)
    }


def _within(name: str, other: str) -> bool:
    """Whether the first module is inside of the second."""
    return name != other and (name.startswith(f"{other}.") or not other)
