"""Small models for the digits of the studies, and the user's model for the user's images."""

import copy
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import HybridEmbed
from timm.models import get_pretrained_cfg, load_state_dict
from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import tcnn_model  # noqa: F401 (registers PatchConvNet with timm)
from common.ending import InputError
from common.folder import imagenet_rows

__all__ = [
    "SMALL_RESNETS",
    "check_input",
    "own_model",
    "pretrained_model",
    "small_patchconvnet",
    "small_resnet",
    "small_vit",
]

SMALL_RESNETS: dict[str, dict[str, Any]] = {
    "ResNet": {},
    "ResNet-D": {"avg_down": True},
    "ResNet-RS": {"avg_down": True, "block_args": {"attn_layer": "se"}},
}
"""Architectures of the T-CNN paper (Table 5), as options of timm's ResNet."""


def small_resnet(kind: str = "ResNet") -> nn.Module:
    """A ResNet for 64 x 64 scenes: 0.1 M parameters, four 3 x 3 convolutions in its last stage."""
    shape = {
        "channels": (8, 16, 32, 32),
        "in_chans": 1,
        "num_classes": 10,
        "stem_type": "deep",
        "stem_width": 4,
    }
    model = ResNet(BasicBlock, (1, 1, 1, 2), **shape, **SMALL_RESNETS[kind])
    model.maxpool = (
        nn.Identity()
    )  # the last stage, un-strided, then works on 8 x 8 pixels
    return model


def small_patchconvnet() -> nn.Module:
    """A PatchConvNet for 64 x 64 scenes: width 32, four blocks, 16 x 16 patches of 4 x 4 pixels."""
    shape = {"embed_dim": 32, "depth": 4, "num_classes": 10, "in_chans": 1}
    model = timm.create_model(
        "patchconvnet_s60", **shape, init_values=1.0, norm_layer="batchnorm2d"
    )
    for convolution in (model.stem[0], model.stem[2]):
        convolution.stride = 1, 1
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()  # the published initial values, of width 384 and more, are too small for 32
    return model


def small_vit(cnn: nn.Module, size: int) -> nn.Module:
    """A vision transformer: four blocks of three heads, on the features before :func:`small_resnet`'s last stage."""
    stages = nn.Sequential(*list(copy.deepcopy(cnn).children())[:-3])
    shape = {
        "img_size": size,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 48,
        "depth": 4,
        "num_heads": 3,
    }
    return VisionTransformer(
        patch_size=1, embed_layer=partial(HybridEmbed, stages), **shape
    )


def own_model(args: Namespace, classes: Sequence[str], **options: Any) -> nn.Module:
    """The model of timm's that the user named, with an output for each class.

    Pretrained weights keep their classifier if it has as many classes as the images. If all classes are WordNet ids of
    ImageNet, a classifier of ImageNet keeps their rows. Else the classifier is new, which is printed.

    Args:
        args: the study's command line.
        classes: names of the images' classes.
        **options: of ``timm.create_model``.

    Raises:
        InputError: fewer ``--num-classes`` than the images have; a classifier whose rows cannot be taken.
        RuntimeError, OSError: timm has no such model, or the weights are not there or do not fit.
    """
    wanted = args.num_classes or len(classes)
    if wanted < len(classes):
        raise InputError(
            f"--num-classes: the images have {len(classes)} classes, got {wanted}"
        )
    model = pretrained_model(args, **options)
    has = model.num_classes
    rows = (
        imagenet_rows(classes, timm.data.infer_imagenet_subset(model))
        if args.pretrained
        else None
    )
    if rows is not None and wanted == len(classes):
        if rows != list(range(has)):
            _keep_rows(model, rows)
            print(
                f"the classifier keeps the rows of the {wanted} WordNet ids among its {has} classes"
            )
    elif has != wanted:
        model.reset_classifier(wanted)
        if args.pretrained:
            print(
                f"the classifier is new: the weights have {has} classes, and the images {wanted}"
            )
    return model


def pretrained_model(args: Namespace, **options: Any) -> nn.Module:
    """The model of timm's that the user named, with its own classifier; with weights if the user asked for them.

    Args:
        args: the study's command line.
        **options: of ``timm.create_model``.

    Raises:
        InputError, RuntimeError, OSError: timm has no such model, or the weights are not there or do not fit.
    """
    options["pretrained"] = bool(args.pretrained)
    if isinstance(args.pretrained, str):
        options |= _of_file(args.model, args.pretrained)
    return _of_size(args.model, args.img_size, options)


@torch.no_grad()
def check_input(model: nn.Module, image: Tensor, classes: int) -> None:
    """Refuse a model that does not take the images, shape (C, H, W), or gives no score for each class."""
    size = " x ".join(map(str, image.shape[1:]))
    try:
        scores = model.eval()(image[None])
    except Exception as error:
        raise InputError(
            f"--model, --img-size: {type(model).__name__} takes no images of {size} pixels: {error}"
        ) from error
    if scores.shape != (1, classes):
        raise InputError(
            f"--model: expected a score for each of {classes} classes, got shape {tuple(scores.shape)}"
        )


def _of_file(name: str, file: str) -> dict[str, Any]:
    """Options of timm for weights in a file, with as many classes as they have."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"--pretrained: there is no file {file!r}")
    try:
        weights = load_state_dict(file)
    except Exception as error:
        raise InputError(f"--pretrained: {file!r} holds no weights: {error}") from error
    layer = getattr(
        get_pretrained_cfg(name, allow_unregistered=True), "classifier", None
    )
    layer = layer if isinstance(layer, str | None) else layer[0]
    if layer is None:  # no model of timm's, as create_model will say
        return {}
    if not isinstance(weights, dict) or f"{layer}.weight" not in weights:
        raise InputError(
            f"--pretrained: {file!r} holds no weights of {name}: there is no {layer}.weight in it"
        )
    count = len(weights[f"{layer}.weight"])
    return {
        "num_classes": count,
        "pretrained_cfg_overlay": {"file": file, "num_classes": count},
    }


def _of_size(name: str, size: int | None, options: dict[str, Any]) -> nn.Module:
    """The model for images of a size; timm's convnets take any and have no such option."""
    if size is not None:
        try:
            model = timm.create_model(name, img_size=size, **options)
        except TypeError:
            return timm.create_model(name, **options)
        config = model.pretrained_cfg
        config["input_size"] = (
            options.get("in_chans", config["input_size"][0]),
            size,
            size,
        )  # it takes no other now
        return model
    return timm.create_model(name, **options)


def _keep_rows(model: nn.Module, rows: list[int]) -> None:
    """Leave these outputs of the classifier."""
    layers = model.get_classifier()
    for layer in layers if isinstance(layers, tuple) else (layers,):
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            raise InputError(
                f"--model: cannot take rows of the classifier, a {type(layer).__name__}"
            )
        layer.weight = nn.Parameter(layer.weight.detach()[rows])
        layer.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach()[rows])
        )
        setattr(
            layer,
            "out_features" if isinstance(layer, nn.Linear) else "out_channels",
            len(rows),
        )
    model.num_classes = len(rows)
