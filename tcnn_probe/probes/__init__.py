"""What can be recorded: one file a kind, each ending in a :class:`Probe`."""

from tcnn_probe.probes.layer_features import features
from tcnn_probe.probes.mean_attention import mean_attention
from tcnn_probe.probes.probe import ForwardCall, NotMeasuredError, Probe
from tcnn_probe.probes.registry import DEFAULT, PROBES, find_probes, register

__all__ = [
    "DEFAULT",
    "PROBES",
    "ForwardCall",
    "NotMeasuredError",
    "Probe",
    "features",
    "find_probes",
    "mean_attention",
    "register",
]
