"""Built-in probes, which are registered by name."""

from tcnn_probe.probes.anatomy import OFFSET_KERNEL
from tcnn_probe.probes.attention_heads import (
    ATTENTION_BY_CLASS,
    CLASS_ATTENTION,
    CONVIT,
    DISTILLATION_ATTENTION,
    GPSA,
    SOFTMAX,
    VIDEO,
)
from tcnn_probe.probes.cross_patch import CROSS_PATCH
from tcnn_probe.probes.gradient import GRADIENT
from tcnn_probe.probes.layer_features import FEATURES
from tcnn_probe.probes.layer_health import HEALTH
from tcnn_probe.probes.layer_scale import LAYER_SCALE
from tcnn_probe.probes.mean_attention import MEAN_ATTENTION
from tcnn_probe.probes.probe import register
from tcnn_probe.probes.redundancy import REDUNDANCY
from tcnn_probe.probes.segment_attention import SEGMENT_ATTENTION

__all__ = ["DEFAULT"]

_HEADS = (
    GPSA,
    CONVIT,
    SOFTMAX,
    VIDEO,
    CLASS_ATTENTION,
    DISTILLATION_ATTENTION,
    ATTENTION_BY_CLASS,
)

DEFAULT: tuple[str, ...] = tuple(register(probe).kind for probe in _HEADS)
"""Names of the probes that :func:`tcnn_probe.record` uses unless told otherwise."""

for _probe in (
    HEALTH,
    SEGMENT_ATTENTION,
    MEAN_ATTENTION,
    OFFSET_KERNEL,
    FEATURES,
    LAYER_SCALE,
    CROSS_PATCH,
    GRADIENT,
    REDUNDANCY,
):
    register(_probe)
