"""Transformed CNNs: convolutions reparameterized as gated positional self-attention, and their fine-tuning."""

from tcnn_model.conversion.convolve import convolve
from tcnn_model.conversion.reparameterize import reparameterize, unstride
from tcnn_model.gpsa.attention import GatedAttention
from tcnn_model.gpsa.convit import Acceleration, accelerate
from tcnn_model.gpsa.functional import gpsa
from tcnn_model.gpsa.layer import GPSA, gpsa_layers
from tcnn_model.gpsa.positional import Axis, gaussian_position
from tcnn_model.gpsa.statistics import AttentionStatistics
from tcnn_model.models import patchconvnet as _patchconvnet  # noqa: F401 (registers patchconvnet_* with timm)
from tcnn_model.models import t_resnet as _t_resnet  # noqa: F401 (registers t_resnet* with timm)
from tcnn_model.pooling.add import add_attention_pool, specialize
from tcnn_model.pooling.attention_pool import AttentionPool2d
from tcnn_model.training.evaluation import EpochResult
from tcnn_model.training.finetune import finetune
from tcnn_model.training.optimization import parameter_groups

__all__ = [
    "GPSA",
    "Acceleration",
    "AttentionPool2d",
    "AttentionStatistics",
    "Axis",
    "EpochResult",
    "GatedAttention",
    "accelerate",
    "add_attention_pool",
    "convolve",
    "finetune",
    "gaussian_position",
    "gpsa",
    "gpsa_layers",
    "parameter_groups",
    "reparameterize",
    "specialize",
    "unstride",
]
