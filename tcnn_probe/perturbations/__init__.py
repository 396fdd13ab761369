"""Perturbed images, to see what a model withstands: corruptions, adversarial perturbations, other test sets.

Names are imported when they are first used: results are read and drawn without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
