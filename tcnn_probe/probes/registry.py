"""The probes by their names, and which of them :func:`tcnn_probe.record` uses if nobody says."""

import difflib
from collections.abc import Iterable

from tcnn_probe.probes.attention_heads import CONVIT, GPSA, SOFTMAX
from tcnn_probe.probes.class_attention import ATTENTION_BY_CLASS, CLASS_ATTENTION, DISTILLATION_ATTENTION
from tcnn_probe.probes.cross_patch import CROSS_PATCH
from tcnn_probe.probes.gradient import GRADIENT
from tcnn_probe.probes.layer_features import FEATURES
from tcnn_probe.probes.layer_scale import LAYER_SCALE
from tcnn_probe.probes.mean_attention import MEAN_ATTENTION
from tcnn_probe.probes.probe import Probe
from tcnn_probe.schema import Variable

__all__ = ["DEFAULT", "PROBES", "find_probes", "register"]

_HEADS = (GPSA, CONVIT, SOFTMAX, CLASS_ATTENTION, DISTILLATION_ATTENTION, ATTENTION_BY_CLASS)
DEFAULT: tuple[str, ...] = tuple(probe.kind for probe in _HEADS)
PROBES: dict[str, Probe] = {
    probe.kind: probe for probe in (*_HEADS, MEAN_ATTENTION, FEATURES, LAYER_SCALE, CROSS_PATCH, GRADIENT)
}


def register(probe: Probe) -> Probe:
    """Make a probe known by its kind, so that ``record(model, probes=[..., kind])`` finds it.

    Args:
        probe: a new one, of a kind of its own.

    Returns:
        the probe.

    Raises:
        ValueError: another probe has this kind.
    """
    if PROBES.get(probe.kind, probe) is not probe:
        raise ValueError(f"there is a probe of the kind {probe.kind!r} already: give yours another name")
    PROBES[probe.kind] = probe
    return probe


def find_probes(wanted: Iterable[str | Probe] | str | Probe | None) -> list[Probe]:
    """Probes by kind, or as they are; None for the default ones.

    Raises:
        ValueError: an unknown kind, or two probes of one kind.
        TypeError: something else than a name or a probe.
    """
    if wanted is None:
        wanted = DEFAULT
    elif isinstance(wanted, (str, Probe)):
        wanted = [wanted]
    probes: list[Probe] = []
    for one in wanted:
        if isinstance(one, str) and one not in PROBES:
            close = difflib.get_close_matches(one, PROBES, n=1) or list(PROBES)
            raise ValueError(f"no probe {one!r}; did you mean {' or '.join(map(repr, close))}?")
        if not isinstance(one, (str, Probe)):
            raise TypeError(f"expected a tcnn_probe.Probe or the name of one, got {one!r}")
        probe = PROBES[one] if isinstance(one, str) else one
        if probe not in probes:
            probes.append(probe)
    kinds = [probe.kind for probe in probes]
    if twice := {kind for kind in kinds if kinds.count(kind) > 1}:
        raise ValueError(f"two probes of one kind: {', '.join(sorted(twice))}")
    seen: dict[tuple[str, str], Variable] = {}
    for probe in probes:
        for name, about in probe.variables.items():
            if seen.setdefault((probe.place, name), about).dims != about.dims:
                raise ValueError(
                    f"two probes have {name!r} in one group, along other dimensions: give one another group"
                )
    return probes
