"""The types of heads: convolutional, averaging or by content.

:func:`tcnn_probe.head_types` labels a recording; the functions here are its parts, on plain arrays, and
:func:`cross_patch`, which reads layers of MLPs as heads. Names are imported when they are first used: a recording is
typed without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
