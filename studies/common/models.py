"""Small models for the digits of the studies."""

import timm
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

import tcnn_model  # noqa: F401 (registers PatchConvNet with timm)

__all__ = ["small_patchconvnet", "small_resnet"]


def small_resnet() -> nn.Module:
    """A ResNet for 64 x 64 scenes: 0.1 M parameters, four 3 x 3 convolutions in its last stage."""
    model = ResNet(
        BasicBlock, (1, 1, 1, 2), channels=(8, 16, 32, 32), in_chans=1, num_classes=10, stem_type="deep", stem_width=4
    )
    model.maxpool = nn.Identity()  # the last stage, un-strided, then works on 8 x 8 pixels
    return model


def small_patchconvnet() -> nn.Module:
    """A PatchConvNet for 64 x 64 scenes: width 32, four blocks, 16 x 16 patches of 4 x 4 pixels."""
    shape = {"embed_dim": 32, "depth": 4, "num_classes": 10, "in_chans": 1}
    model = timm.create_model("patchconvnet_s60", **shape, init_values=1.0, norm_layer="batchnorm2d")
    for convolution in (model.stem[0], model.stem[2]):
        convolution.stride = 1, 1
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()  # the published initial values, of width 384 and more, are too small for 32
    return model
