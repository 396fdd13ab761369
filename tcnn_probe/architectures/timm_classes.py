"""Classes of timm whose layers have measurements of their own;
without timm, no model has such layers.
"""

from torch import nn

__all__ = ["ConViTLayer", "MixerBlock", "ResBlock"]


class _Absent(nn.Module):
    """Class of no layer."""


try:
    from timm.models.convit import GPSA as ConViTLayer
    from timm.models.mlp_mixer import MixerBlock, ResBlock
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "timm":
        raise
    ConViTLayer = MixerBlock = ResBlock = _Absent
