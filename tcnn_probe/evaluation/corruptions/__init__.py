"""The fifteen corruptions of ImageNet-C, on arrays: :func:`tcnn_probe.evaluation.corrupt` is for images of any kind."""
