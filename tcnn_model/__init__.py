"""Transformed CNNs: convolutions reparameterized as gated positional self-attention, and their fine-tuning."""

from tcnn_model import models as _models  # noqa: F401 (registers t_resnet* with timm)
from tcnn_model import patchconvnet as _patchconvnet  # noqa: F401 (registers patchconvnet_* with timm)
from tcnn_model.aggregation import AttentionPool2d
from tcnn_model.attention import GatedAttention
from tcnn_model.attention_pool import add_attention_pool, specialize
from tcnn_model.convit import Acceleration, accelerate
from tcnn_model.finetune import EpochResult, finetune
from tcnn_model.functional import gpsa
from tcnn_model.gpsa import GPSA, gpsa_layers
from tcnn_model.optimization import parameter_groups
from tcnn_model.positional import Axis, gaussian_position
from tcnn_model.reparameterize import reparameterize
from tcnn_model.statistics import AttentionStatistics

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
    "finetune",
    "gaussian_position",
    "gpsa",
    "gpsa_layers",
    "parameter_groups",
    "reparameterize",
    "specialize",
]
