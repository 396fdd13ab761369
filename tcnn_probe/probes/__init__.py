"""What can be recorded of which kind of layer: one file a kind, each ending in a :class:`Probe`."""

from tcnn_probe.probes.convit import CONVIT
from tcnn_probe.probes.gpsa import GPSA
from tcnn_probe.probes.probe import Probe

__all__ = ["PROBES", "Probe"]

PROBES: tuple[Probe, ...] = (GPSA, CONVIT)
