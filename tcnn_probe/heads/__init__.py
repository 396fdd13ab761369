"""The types of heads: convolutional, averaging or by content.

:func:`tcnn_probe.head_types` labels a recording. This package has its parts, which work on plain
arrays, and :func:`cross_patch`, which treats layers of MLPs as heads. Names are imported when they
are first used, so that heads of a recording can be classified without torch.
"""

from tcnn_probe.extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
