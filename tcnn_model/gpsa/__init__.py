"""Gated positional self-attention (GPSA): the layer, its attention, and the ways to compute it."""
