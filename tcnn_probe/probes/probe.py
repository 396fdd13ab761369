"""The interface between the recorder and its measurements, and the registry of probes by name."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.attention.reconstruction import (
    Verification,
    relative_difference,
    tolerance,
)
from tcnn_probe.schema import COORDINATES, COUNTS, Variable

__all__ = [
    "PROBES",
    "ForwardCall",
    "NotMeasuredError",
    "Probe",
    "find_probes",
    "register",
]

PROBES: dict[str, "Probe"] = {}
"""The probes that :func:`tcnn_probe.record` finds by their names."""

# Names become folders in a store, so they must not contain a slash or begin with a dot.
_NAME = re.compile(r"\w[\w-]*")

GradientNorms = Mapping[str, Iterable[tuple[nn.Parameter, Callable[[Tensor], Tensor]]]]


class NotMeasuredError(Exception):
    """A probe cannot measure a module that it should be able to measure; the message says why."""


@dataclass(frozen=True)
class ForwardCall:
    """A call of a module in a forward pass.

    Args:
        module: Module that was called.
        name: Name of its layer.
        inputs: Its inputs, by position and then by keyword.
        output: Its output.
        parts: Last calls, inside this call, of the submodules that :meth:`Probe.parts` names. Their
            tensors are those of the model at the end of this call, including changes in place.
        limit: Number of leading images that are included in sums over images; None for all.
        verification: Comparisons of the layers so far, see :meth:`verify`.
    """

    module: Any
    name: str
    inputs: Sequence[Any]
    output: Any
    parts: Mapping[str, "ForwardCall"] = field(default_factory=dict)
    limit: int | None = None
    verification: Verification | None = None

    def verify(self, rebuild: Callable[[], Tensor | None]) -> None:
        """Compare an output that is rebuilt from the measured quantities
        with the true output, once for each layer.

        The forward raises :class:`tcnn_probe.ReconstructionError` if they differ by more than
        rounding.

        Args:
            rebuild: Function that rebuilds the output of the first image, or returns None if the
                output cannot be compared, for example because of dropout.
        """
        if self.verification is None or not self.verification.needed(self.name):
            return
        rebuilt = rebuild()
        if rebuilt is not None:
            difference = relative_difference(rebuilt, self.output[:1])
            self.verification.add(self.name, (difference, tolerance(self.output.dtype)))


@dataclass(frozen=True)
class Probe:
    """Measurements of one kind of layer, by one or more of the functions below.

    Measurements of a forward have one value (or array of values) for each image; the recorder keeps
    their mean over images. Functions run without gradients and must not change the layer. They may
    omit a variable from ``{variable: tensor}``, which is then NaN for that layer. A tensor may be
    replaced by a ``tcnn_probe.attention.patterns.Pattern`` of the first :attr:`ForwardCall.limit`
    images: the variable is then the content information of each head over all images of the epoch.

    A probe that needs more is a subclass that overrides :meth:`choose_layers`, :attr:`images`,
    :meth:`parts` or :meth:`gradients`.

    Args:
        kind: Short name, which is kept in the dataset's layer table.
        variables: Descriptions by name, whose ``dims`` are "layer" and then those of the tensors.
        module_type: Modules to measure: a class, a tuple of classes, or a predicate on a module. If
            it is given, it selects the modules of ``attention``, too.
        group: Path of the group that holds the variables: "" for the root, with the numbers of
            attention heads; None for a group named after the kind.
        facts: Function of a module that returns further entries of the layer table, in plain JSON;
            it is called before any forward.
        state: Function of a module that returns ``{variable: (*dims)}``, read off the parameters at
            each mark.
        measure: Function of a :class:`ForwardCall` that returns ``{variable: (B, *dims)}``; it is
            called after each forward of the layer, under the autocast that the layer ran in.
        attention: Function of an :class:`Attention` that returns ``{variable: (B, *dims)}``; it is
            called for each attention in the model, in any module. It may raise
            :class:`NotMeasuredError`, whose message is then the reason in ``Recorder.missing``.
        maps: Function of the same call and of indices of images; it returns ``{variable: (images,
            [windows,] heads, height, width)}``, for variables with the dims ("layer", "image",
            ["window",] "head", "y", "x"). In addition to these maps there may be numbers of each
            head, without "y" and "x".
        detailed: Whether ``attention`` needs :meth:`Attention.content_rows`.
        waits: Whether ``attention`` and ``maps`` need no more of an attention than its logits and
            layout, and treat heads alike. They may then be called when the layer has run, and
            ``attention`` with the heads of several layers of one shape as those of one.
        coords: Labels along the probe's own dimensions, such as {"branch": ["attention", "mlp"]}; a
            layer with fewer values has the first labels.

    Raises:
        ValueError, TypeError: The probe cannot be recorded, or conflicts with other records.
    """

    kind: str
    variables: Mapping[str, Variable]
    module_type: (
        type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool] | None
    ) = None
    group: str | None = None
    facts: Callable[[Any], Mapping[str, Any]] | None = None
    state: Callable[[Any], Mapping[str, Tensor]] | None = None
    measure: Callable[[ForwardCall], Mapping[str, Tensor | Pattern]] | None = None
    attention: Callable[[Attention], Mapping[str, Tensor | Pattern]] | None = None
    maps: Callable[[Any, Sequence[int]], Mapping[str, Tensor]] | None = None
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    detailed: bool = False
    waits: bool = False

    def __post_init__(self) -> None:
        """Raise for a probe that would fail, or whose data would be lost,
        when the first epoch is marked.
        """
        probe = f"the probe {self.kind!r}"
        # A subclass measures gradients if it overrides the method, which cannot be called without a
        # module.
        measures_gradients = type(self).gradients is not Probe.gradients
        if not any((self.state, self.measure, self.attention, measures_gradients)):
            raise ValueError(f"{probe} measures nothing: give it state, measure or attention")
        if not (
            self.module_type is None
            or isinstance(self.module_type, tuple)
            or callable(self.module_type)
        ):
            raise TypeError(
                f"expected {probe} to have a class or a predicate for module_type, got "
                f"{self.module_type!r}"
            )
        # These are the paths of attention heads in a tree, and of maps in a store.
        if self.place.split("/")[0] in ("heads", "maps"):
            raise ValueError(
                f"{probe} would be recorded under {self.place!r}, like another probe: give it "
                "another name"
            )
        names = [self.kind, *self.place.split("/"), *self.variables]
        for variable in self.variables.values():
            if isinstance(variable.dims, tuple):
                names += variable.dims
        for name in names:
            # A group may be a path, whose parts are checked separately.
            if name != self.group and not _NAME.fullmatch(name):
                raise ValueError(
                    f"expected names of letters, digits, '_' and '-' in {probe}, got {name!r}"
                )
        for name, variable in self.variables.items():
            if name in COORDINATES or name in COUNTS:
                raise ValueError(
                    f"{name!r} of {probe} is recorded for every layer: give the variable another "
                    "name"
                )
            if not isinstance(variable.dims, tuple) or variable.dims[:1] != ("layer",):
                raise ValueError(
                    f"expected {name!r} of {probe} to have the dimensions ('layer', ...), got "
                    f"{variable.dims!r}"
                )

    @property
    def images(self) -> tuple[int, ...] | None:
        """Images whose maps are kept, in a group with the probe's numbers;
        None for those of ``record(images=)``.
        """
        return None

    def choose_layers(self, names: Iterable[str]) -> Collection[str]:
        """Choose layers by name, among the names of all modules;
        ``module_type`` must match, too.
        """
        return frozenset(names)

    def parts(self, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the submodules, by name, whose calls ``measure`` needs
        in :attr:`ForwardCall.parts`.
        """
        return {}

    def gradients(self, module: nn.Module) -> GradientNorms:
        """Return the parameters whose gradients are measured,
        by variable, each with a function of its gradient.

        The functions return tensors of shape ``(*dims)``. The recorded value is the square root of
        the mean, over backward passes, of their sum.

        Raises:
            NotMeasuredError: The module is left out, for the reason in the message.
        """
        return {}

    @cached_property
    def place(self) -> str:
        """Path of the probe's group."""
        return self.kind if self.group is None else self.group

    @cached_property
    def runs(self) -> bool:
        """True if the probe measures forward passes."""
        return self.measure is not None or self.attention is not None

    @cached_property
    def image_variables(self) -> frozenset[str]:
        """Names of the variables that are kept for single images."""
        return frozenset(
            name for name, variable in self.variables.items() if "image" in variable.dims
        )

    @cached_property
    def class_variables(self) -> frozenset[str]:
        """Names of the variables that are kept for single images and a few classes."""
        return frozenset(
            name for name in self.image_variables if "class" in self.variables[name].dims
        )

    def applies_to(self, module: nn.Module) -> bool:
        """Return whether ``module_type`` selects the module."""
        if self.module_type is None:
            return False
        # Classes are checked before predicates, because a class is callable, too.
        if isinstance(self.module_type, (type, tuple)):
            return isinstance(module, self.module_type)
        return self.module_type(module)


def register(probe: Probe) -> Probe:
    """Register a probe by its kind, so that ``record(model, probes=[..., kind])`` finds it.

    A probe whose functions have the same names and modules replaces the earlier one, as when a cell
    of a notebook runs again.

    Args:
        probe: New probe, whose kind no other probe has.

    Returns:
        The probe.

    Raises:
        ValueError: Another probe has this kind.
    """
    earlier = PROBES.get(probe.kind, probe)
    if _definitions(earlier) != _definitions(probe):
        raise ValueError(
            f"there is a probe of the kind {probe.kind!r} already: give yours another name"
        )
    PROBES[probe.kind] = probe
    return probe


def _definitions(probe: Probe) -> list[tuple[str, str]]:
    """Return the modules and names of a probe's class and functions,
    which stay the same if its code runs again.
    """
    functions = (probe.facts, probe.state, probe.measure, probe.attention, probe.maps)
    return [
        (getattr(x, "__module__", ""), getattr(x, "__qualname__", repr(x)))
        for x in (type(probe), *functions)
    ]


def find_probes(names_or_probes: Iterable[str | Probe] | str | Probe) -> list[Probe]:
    """Return probes that are given by kind or as objects.

    Raises:
        ValueError: A kind is unknown, or two probes cannot be recorded together.
        TypeError: An argument is neither a name nor a probe.
    """
    if isinstance(names_or_probes, (str, Probe)):
        names_or_probes = [names_or_probes]
    probes: list[Probe] = []
    for name_or_probe in names_or_probes:
        probe = _find_probe(name_or_probe)
        if probe not in probes:
            probes.append(probe)
    kinds = [probe.kind for probe in probes]
    if duplicates := {kind for kind in kinds if kinds.count(kind) > 1}:
        raise ValueError(f"two probes of one kind: {', '.join(sorted(duplicates))}")
    dims: dict[tuple[str, str], tuple[str, ...]] = {}
    for probe in probes:
        for name, variable in probe.variables.items():
            # Probes may share a variable, as those of gated and of softmax attention do, but an
            # array has one set of dimensions.
            if dims.setdefault((probe.place, name), variable.dims) != variable.dims:
                raise ValueError(
                    f"two probes have {name!r} in one group, along other dimensions: give one "
                    "another group"
                )
    return probes


def _find_probe(name_or_probe: str | Probe) -> Probe:
    if isinstance(name_or_probe, Probe):
        return name_or_probe
    if not isinstance(name_or_probe, str):
        raise TypeError(f"expected a tcnn_probe.Probe or the name of one, got {name_or_probe!r}")
    if name_or_probe not in PROBES:
        close = difflib.get_close_matches(name_or_probe, PROBES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {list(PROBES)}"
        raise ValueError(f"no probe {name_or_probe!r}; {hint}")
    return PROBES[name_or_probe]
