"""The contract between the recorder and what it can measure."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.schema import COORDINATES, COUNTS, Variable

__all__ = ["ForwardCall", "NotMeasuredError", "Probe"]


_NAME = re.compile(r"\w[\w-]*")


class NotMeasuredError(Exception):
    """A probe cannot measure a module that one would expect it to be for; the message says why."""


@dataclass(frozen=True)
class ForwardCall:
    """One call of a module in a forward.

    Args:
        module, name: which.
        inputs: what it was called with, by position and then by keyword.
        output: what it returned.
        parts: the last call in it of each submodule named in :attr:`Probe.parts`, if it ran. Its tensors are the
            model's own, as they are when the module returns: what works in place on them has changed them.
        limit: how many of its images, the first ones, count for sums over images; None for all.
    """

    module: Any
    name: str
    inputs: Sequence[Any]
    output: Any
    parts: Mapping[str, "ForwardCall"] = field(default_factory=dict)
    limit: int | None = None


@dataclass(frozen=True)
class Probe:
    """Measurements of one kind of layer. Give any of the functions; each says what it hooks.

    Measurements of a forward have one value (or array of values) for each image; the recorder keeps their mean over
    images. Functions run without gradients and must not change the layer. ``{variable: tensor}`` may leave a variable
    out, which is then NaN for that layer. In place of a tensor there may be a
    ``tcnn_probe.attention.patterns.Pattern`` of the first :attr:`ForwardCall.limit` images: the variable is then
    the content information of each head, of all images of the epoch.

    Args:
        kind: short name, kept in the dataset's layer table.
        variables: name -> :class:`Variable`, whose ``dims`` are "layer" and then those of the tensors.
        module_type: Modules that it is for: a class, several, or a predicate on a module; for ``attention`` as well.
        group: where its variables go: "" is the root, with the numbers of attention heads; None a group of its own,
            named after the kind.
        facts: module -> what else the layer table says of it, in plain JSON; known before any forward.
        state: module -> ``{variable: (*dims)}``, read off the parameters when an epoch is marked.
        measure: :class:`ForwardCall` -> ``{variable: (B, *dims)}``, after each forward of the layer, under the autocast
            that the layer ran in.
        attention: :class:`Attention` -> ``{variable: (B, *dims)}``, for each softmax attention in the model, in
            whatever module it is.
        maps: the same call, and which of its images were chosen -> {variable: (images, [windows,] heads, height,
            width)}; the variables have the dims ("layer", "image", ["window",] "head", "y", "x"). Beside these maps
            there may be numbers of each head, without "y" and "x".
        gradients: module -> {variable: pairs of a parameter and a function of its gradient, to ``(*dims)``}; the
            recorded value is the square root of the mean, over backward passes, of the sum of these. May raise
            :class:`NotMeasuredError` with the reason why the module is left out.
        rebuild: :class:`ForwardCall` -> the output, of the first image, rebuilt from what is measured; compared once
            with the true one. None if they cannot be compared, as under dropout.
        parts: names of submodules whose inputs or outputs ``measure`` needs.
        coords: labels along dimensions of its own, such as {"branch": ["attention", "mlp"]}; those of the first so
            many that the layers have.
        images: numbers of the images of which it keeps maps, in a group with its numbers; None: those that
            ``record(images=)`` names, in the groups of all maps.
        layers: names of all modules -> those that it is for, if ``module_type`` alone does not say.

    Raises:
        ValueError, TypeError: what could not be recorded, or not be told apart from what else is.
    """

    kind: str
    variables: Mapping[str, Variable]
    module_type: type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None = None
    group: str | None = None
    facts: Callable[[Any], Mapping[str, Any]] | None = None
    state: Callable[[Any], Mapping[str, Tensor]] | None = None
    measure: Callable[[ForwardCall], Mapping[str, Tensor | Pattern]] | None = None
    attention: Callable[[Attention], Mapping[str, Tensor | Pattern]] | None = None
    maps: Callable[[Any, Sequence[int]], Mapping[str, Tensor]] | None = None
    gradients: Callable[[Any], Mapping[str, Iterable[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]]] | None = None
    rebuild: Callable[[ForwardCall], Tensor | None] | None = None
    parts: Sequence[str] = ()
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    images: tuple[int, ...] | None = None
    layers: Callable[[Iterable[str]], Collection[str]] | None = None

    def __post_init__(self) -> None:
        """Refuse what would fail, or be lost, when the first epoch is marked."""
        which = f"the probe {self.kind!r}"
        if not any((self.state, self.measure, self.attention, self.gradients)):
            raise ValueError(f"{which} measures nothing: give it state, measure, attention or gradients")
        if not (self.module_type is None or isinstance(self.module_type, tuple) or callable(self.module_type)):
            raise TypeError(
                f"expected {which} to have a class or a predicate for module_type, got {self.module_type!r}"
            )
        if self.place.split("/")[0] in ("heads", "maps"):
            raise ValueError(f"{which} would be recorded under {self.place!r}, as others are: give it another name")
        dims = (dim for about in self.variables.values() if isinstance(about.dims, tuple) for dim in about.dims)
        for name in (self.kind, *self.place.split("/"), *self.variables, *dims):
            if name != self.group and not _NAME.fullmatch(name):
                raise ValueError(f"expected names of letters, digits, '_' and '-' in {which}, got {name!r}")
        for name, about in self.variables.items():
            if name in COORDINATES or name in COUNTS:
                raise ValueError(f"{name!r} of {which} is recorded for every layer: give the variable another name")
            if not isinstance(about.dims, tuple) or about.dims[:1] != ("layer",):
                raise ValueError(
                    f"expected {name!r} of {which} to have the dimensions ('layer', ...), got {about.dims!r}"
                )

    @property
    def place(self) -> str:
        """Path of its group."""
        return self.kind if self.group is None else self.group

    @property
    def runs(self) -> bool:
        """Whether it measures forwards."""
        return self.measure is not None or self.attention is not None

    @cached_property
    def of_images(self) -> frozenset[str]:
        """Names of its maps."""
        return frozenset(name for name, about in self.variables.items() if "image" in about.dims)

    @cached_property
    def of_classes(self) -> frozenset[str]:
        """Names of those of its maps of which some classes are kept."""
        return frozenset(name for name in self.of_images if "class" in self.variables[name].dims)

    def applies_to(self, module: nn.Module) -> bool:
        """Whether it is for this module."""
        if self.module_type is None:
            return False
        if isinstance(self.module_type, (type, tuple)):
            return isinstance(module, self.module_type)
        return self.module_type(module)
