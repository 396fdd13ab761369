"""See, while a vision model trains, which of its heads convolve and which attend to content."""

from tcnn_probe import plot
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attribution import faithfulness, saliency
from tcnn_probe.bootstrap import bootstrap_interval
from tcnn_probe.heads import head_types
from tcnn_probe.interventions.ablation import Ablation, ablate
from tcnn_probe.perturbations import (
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
from tcnn_probe.recording.collector import ReconstructionError
from tcnn_probe.recording.recorder import Recorder, record
from tcnn_probe.schema import Variable
from tcnn_probe.storage import StoreError, compact, migrate
from tcnn_probe.storage import open_recording as open  # noqa: A004

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
