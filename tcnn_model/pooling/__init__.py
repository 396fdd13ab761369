"""Attention in place of a convnet's average pooling."""
