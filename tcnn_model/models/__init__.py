"""Model families of the papers, T-ResNet and PatchConvNet,
which importing this folder adds to timm's registry.
"""

from tcnn_model.extras import needed_for

with needed_for(__name__):
    from tcnn_model.models import patchconvnet, t_resnet

__all__ = ["patchconvnet", "t_resnet"]
