"""The evaluation of classifiers: corruptions,
attacks and other test sets, agreement and cost.

None of these functions needs attention. Names are imported when they are first used, so that
results can be read and plotted without torch.
"""

from tcnn_probe.extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
