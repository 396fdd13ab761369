"""Attention-based aggregation: learned pooling instead of a convnet's average pooling."""
