"""See, while a vision model trains, which of its heads convolve and which attend to content."""

from tcnn_probe import plot
from tcnn_probe.collector import ReconstructionError
from tcnn_probe.explaining import faithfulness, saliency
from tcnn_probe.heads import head_types
from tcnn_probe.intervals import bootstrap_interval
from tcnn_probe.intervening.ablation import Ablation, ablate
from tcnn_probe.perturbing import (
    CORRUPTIONS,
    Variant,
    corrupt,
    fgsm,
    imagenet_variant,
    improvement,
    mean_corruption_error,
    pgd,
    robustness,
)
from tcnn_probe.probes import DEFAULT, PROBES, ForwardCall, Probe, register
from tcnn_probe.recorder import Recorder, record
from tcnn_probe.schema import Variable
from tcnn_probe.seeing.attention import AttentionCall
from tcnn_probe.store import StoreError, compact, migrate
from tcnn_probe.store import open_recording as open  # noqa: A004

__all__ = [
    "CORRUPTIONS",
    "DEFAULT",
    "PROBES",
    "Ablation",
    "AttentionCall",
    "ForwardCall",
    "Probe",
    "ReconstructionError",
    "Recorder",
    "StoreError",
    "Variable",
    "Variant",
    "ablate",
    "bootstrap_interval",
    "compact",
    "corrupt",
    "faithfulness",
    "fgsm",
    "head_types",
    "imagenet_variant",
    "improvement",
    "mean_corruption_error",
    "migrate",
    "open",
    "pgd",
    "plot",
    "record",
    "register",
    "robustness",
    "saliency",
]
