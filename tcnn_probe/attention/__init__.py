"""Attention of any model: reconstructed from calls of torch during a forward,
arranged on its grid, and measured.
"""
