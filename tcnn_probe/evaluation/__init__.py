"""The evaluation of classifiers: corruptions,
attacks and other test sets, agreement and cost.

None of these functions needs attention. Names are imported when they are first used, so that
results can be read and plotted without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
