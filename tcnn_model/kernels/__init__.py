"""Gated attention and statistics of softmax attention on the GPU (Triton),
in linear memory (README.md).
"""

from tcnn_model.kernels.ops import available, gated_attention, is_modern_gpu
from tcnn_model.kernels.softmax import (
    RowStatistics,
    TokenGrid,
    attention_statistics,
    can_measure,
)

__all__ = [
    "RowStatistics",
    "TokenGrid",
    "attention_statistics",
    "available",
    "can_measure",
    "gated_attention",
    "is_modern_gpu",
]
