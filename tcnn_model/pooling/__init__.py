"""Attention-based aggregation: learned pooling in place of a convnet's average pooling."""
