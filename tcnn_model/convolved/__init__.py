"""Layers in which some heads are convolutions of their values,
made by :func:`tcnn_model.convolve`.
"""
