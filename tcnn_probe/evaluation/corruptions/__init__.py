"""The fifteen corruptions of ImageNet-C, on arrays;
:func:`tcnn_probe.evaluation.corrupt` takes other images, too.
"""
