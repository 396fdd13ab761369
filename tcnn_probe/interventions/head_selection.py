"""Parsing of ``heads=`` of :func:`tcnn_probe.ablate`:
names or globs, a mapping, or a boolean DataArray.
"""

import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from tcnn_model import GPSA
from tcnn_model.conversion.selection import select_layers
from tcnn_probe.architectures.lookup import head_count, known, looks_like_attention
from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.interventions.ablation_kinds import Ablated, Heads, Mode, kind_of
from tcnn_probe.models import layer_names, plain_name, whole_number

__all__ = ["HeadSelection", "select_heads"]

HeadSelection = str | Iterable[str] | Mapping[str, Any] | xr.DataArray | None


def select_heads(
    model: nn.Module, heads: HeadSelection, mode: Mode, *, with_images: bool = False
) -> list[Ablated]:
    """Return the ablated heads of each layer that ``heads`` selects, see :func:`tcnn_probe.ablate`.

    Args:
        model: Model with attention.
        heads: Selection of heads.
        mode: Mode of the ablation.
        with_images: Whether there are given images.

    Raises:
        ValueError: The model lacks a layer or head, a layer does not support the mode, or a
            DataArray has other dimensions.
        TypeError: ``heads`` has another type.
    """
    modules = {name: module for module, name in layer_names(model).items()}
    kind = kind_of(mode, with_images=with_images)
    selected = []
    for pattern, indices in _by_layer(heads):
        if pattern is not None:
            pattern = plain_name(model, pattern)
        for entry in _ablated_layers(modules, pattern, _as_heads(indices, pattern), mode, kind):
            if entry.count is not None:
                entry.among(entry.count)  # refuses heads that the layer lacks
            selected.append(entry)
    selected = [entry for entry in selected if entry.heads != ()]
    if not selected:
        warnings.warn("no head is selected: nothing is ablated", RuntimeWarning, stacklevel=3)
    return selected


def _by_layer(heads: HeadSelection) -> Iterable[tuple[str | None, Any]]:
    """Return names or globs (None for all layers), each with its heads."""
    if heads is None or isinstance(heads, str):
        return [(heads, None)]
    if isinstance(heads, xr.DataArray):
        return _of_array(heads)
    # A Dataset iterates over names of variables, which would be taken for layers.
    if isinstance(heads, Iterable) and not isinstance(heads, xr.Dataset):
        if isinstance(heads, Mapping):
            return list(heads.items())
        names = list(heads)
        if all(isinstance(name, str) for name in names):
            return [(name, None) for name in names]
    raise TypeError(
        "expected a name or glob of layers, several, a mapping from these to heads, or a boolean "
        "DataArray for heads; got "
        f"{reprlib.repr(heads) if isinstance(heads, (list, tuple)) else type(heads).__name__}: a "
        "mask is an xarray.DataArray with the coordinates layer and head, such as ds.gate < 0.5 of "
        "a recording"
    )


def _of_array(array: xr.DataArray) -> Iterator[tuple[str, Any]]:
    """Yield layers, and the heads at which a boolean array over (layer, head) is True,
    at the last of several marks.
    """
    if array.dtype != bool:
        raise TypeError(
            "expected a boolean DataArray, such as head_types(ds) == 'content'; got dtype "
            f"{array.dtype}"
        )
    marks = [dim for dim in array.dims if dim not in ("layer", "head")]
    if len(marks) > 1 or "layer" not in array.coords or (marks and not array.sizes[marks[0]]):
        raise ValueError(
            "expected a DataArray over layer and head, with their names along layer, and over one "
            f"more dimension at most, whose last mark counts; got dims {array.dims} with "
            f"coordinates {tuple(array.coords)}"
        )
    array = array.isel(dict.fromkeys(marks, -1))
    # A mask over layers only selects all of their heads.
    is_by_layer = "head" not in array.dims and "head" not in array.coords
    array = array.expand_dims([dim for dim in ("layer", "head") if dim not in array.dims])
    numbers = array["head"].values  # positions if there is no coordinate
    for layer, row in zip(
        array["layer"].values, array.transpose("layer", "head").values, strict=True
    ):
        if np.any(row):
            yield str(layer), None if is_by_layer else numbers[row].astype(int)


def _as_heads(heads: Any, layer: str | None) -> Heads:
    """Return an index, indices, a slice or None as heads."""
    if heads is None:
        return slice(None)
    if isinstance(heads, slice):
        # The number of heads may be unknown before a forward, so heads cannot be counted from the
        # end.
        if any(part is not None and part < 0 for part in (heads.start, heads.stop, heads.step)):
            raise ValueError(f"expected heads of {layer!r} counted from 0, got {heads!r}")
        return heads
    are_several = isinstance(heads, Iterable) and not isinstance(heads, str)
    # Integers of NumPy, torch or pandas become plain integers.
    indices = np.array([*heads] if are_several else [heads]).tolist()
    noun = f"heads of {layer!r} (an index, indices or a slice)"
    return tuple(dict.fromkeys(whole_number(head, noun) for head in indices))


def _ablated_layers(
    modules: Mapping[str, nn.Module],
    pattern: str | None,
    heads: Heads,
    mode: Mode,
    kind: type[Ablated],
) -> Iterator[Ablated]:
    """Yield the ablated heads of each layer that a name or glob selects,
    or of all layers that support the mode.
    """
    attention = _attention_layers(modules)
    name, number = _split(pattern, modules)
    # The name of a block selects the attention inside it, and any other name selects the module
    # itself.
    if name in modules and (
        name in attention or not any(_within(layer, name) for layer in attention)
    ):
        layer, module = f"{name}#{number}" if number else name, modules[name]
        reason = known(module).no_attention_matrix or kind.reason_against(module, mode)
        if reason:
            raise ValueError(
                f"{layer!r} ({type(module).__name__}) cannot be ablated in this way: {reason}"
            )
        if number and isinstance(module, GATED_LAYERS):
            raise ValueError(f"the model has no attention {layer!r}: {name!r} has only one")
        # The number of heads that a module states is that of its first attention.
        count = None if number else _known_count(module)
        yield kind(layer, layer, module, number, heads, mode, strict=True, count=count)
        return
    matching = (
        attention
        if pattern is None
        else select_layers(attention, pattern or "*", noun="attention layers")
    )
    reasons = {name: kind.reason_against(module, mode) for name, module in matching.items()}
    editable = {name: module for name, module in matching.items() if reasons[name] is None}
    if not editable:
        reason = next((f": {reason}" for reason in reasons.values()), "")
        hint = ""
        if not matching:
            others = (known(module).no_attention_matrix for module in modules.values())
            why = next(filter(None, others), "no layer has a class that is named like attention")
            hint = (
                f": {why}. Other layers are selected by their own names; "
                "tcnn_model.reparameterize(cnn) gives a CNN attention"
            )
        scope = "this model" if pattern is None else repr(pattern)
        raise ValueError(f"no layer of {scope} can do mode={mode!r}{reason}{hint}")
    for name, module in editable.items():
        stands_for = "every layer" if pattern is None else pattern
        strict, count = len(editable) == 1, _known_count(module)
        yield kind(stands_for, name, module, None, heads, mode, strict=strict, count=count)


def _known_count(module: nn.Module) -> int | None:
    # If a layer loops over its heads, each attention has a single head.
    return None if known(module).heads_axis == "one" else head_count(module)


def _split(pattern: str | None, modules: Mapping[str, nn.Module]) -> tuple[str, int]:
    """Split a name from the number of the layer's attention:
    "attn#1" is the second attention of each call.
    """
    if pattern is not None and not isinstance(pattern, str):
        raise TypeError(
            f"expected the name of a layer, or a glob, in heads; got {reprlib.repr(pattern)}"
        )
    base, _, number = (pattern or "").rpartition("#")
    if pattern in modules or base not in modules or not number.isdecimal():
        return ("*" if pattern is None else pattern), 0
    return base, int(number)


def _attention_layers(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that look like attention between tokens, which only a forward can confirm.

    Either their class is named like attention, or they have heads and neither contain nor belong to
    a module that is named like attention. Of nested modules, the innermost is returned.
    """
    by_class = [
        name for name, m in modules.items() if isinstance(m, GPSA) or looks_like_attention(m)
    ]
    by_heads = [
        name for name, m in modules.items() if head_count(m) is not None and name not in by_class
    ]
    by_heads = [
        name for name in by_heads if not any(_within(a, name) or _within(name, a) for a in by_class)
    ]
    candidates = [*by_class, *by_heads]
    return {
        name: module
        for name, module in modules.items()
        if name in candidates
        and known(module).no_attention_matrix is None
        and not any(_within(candidate, name) for candidate in candidates)
    }


def _within(name: str, outer: str) -> bool:
    """Return whether a module is inside of another."""
    return name != outer and (name.startswith(f"{outer}.") or not outer)
