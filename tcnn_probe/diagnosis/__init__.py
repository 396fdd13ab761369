"""Signs of illness in the recording of a training:
:func:`tcnn_probe.health` and its parts, without torch.
"""

from tcnn_probe.diagnosis.findings import Finding, Findings, health
from tcnn_probe.diagnosis.signs import HealthLimits, entropy_quantile

__all__ = ["Finding", "Findings", "HealthLimits", "entropy_quantile", "health"]
