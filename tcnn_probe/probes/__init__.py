"""Measurements that can be recorded, one file per kind; each file ends in a :class:`Probe`."""

from tcnn_probe.probes.built_in import DEFAULT
from tcnn_probe.probes.layer_features import features
from tcnn_probe.probes.mean_attention import mean_attention
from tcnn_probe.probes.probe import (
    PROBES,
    ForwardCall,
    NotMeasuredError,
    Probe,
    find_probes,
    register,
)

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
