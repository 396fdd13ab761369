"""The fifteen corruptions of ImageNet-C, on arrays: :func:`tcnn_probe.corrupt` is for images of any kind."""
