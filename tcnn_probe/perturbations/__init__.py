"""Perturbed images, to see what a model withstands: corruptions, adversarial perturbations, other test sets.

Imports nothing before it is used: results are read and drawn without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adversarial": ["fgsm", "pgd"],
        "corrupt_images": ["corrupt"],
        "corruptions": ["CORRUPTIONS", "GROUPS", "Corruption"],
        "evaluate": ["robustness"],
        "imagenet_variants": ["Variant", "imagenet_variant"],
        "summary": ["improvement", "mean_corruption_error"],
    },
)
