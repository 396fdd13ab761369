"""The evaluation of classifiers: corruptions, attacks and other test sets, agreement, calibration and cost.

Nothing here looks at attention. Names are imported when they are first used: results are read and drawn without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
