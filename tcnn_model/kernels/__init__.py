"""Gated positional self-attention on the GPU (Triton), in memory linear in the number of pixels (README.md)."""

from tcnn_model.kernels.ops import available, gated_attention

__all__ = ["available", "gated_attention"]
