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

import tcnn_model.models  # noqa: F401 (registers PatchConvNet with timm)
from common.folder import imagenet_rows
from common.output import InputError
from tcnn_model.training.checkpoint import check_sums

__all__ = [
    "SMALL_RESNETS",
    "check_input",
    "own_model",
    "pretrained_model",
    "small_patchconvnet",
    "small_resnet",
    "small_vit",
    "widened",
]

SMALL_RESNETS: dict[str, dict[str, Any]] = {
    "ResNet": {},
    "ResNet-D": {"avg_down": True},
    "ResNet-RS": {"avg_down": True, "block_args": {"attn_layer": "se"}},
}
"""Architectures of the T-CNN paper (Table 5), as options of timm's ResNet."""


def small_resnet(kind: str = "ResNet") -> nn.Module:
    """Return a ResNet for 64 x 64 scenes: 0.1 M parameters,
    four 3 x 3 convolutions in its last stage.
    """
    shape = {
        "channels": (8, 16, 32, 32),
        "in_chans": 1,
        "num_classes": 10,
        "stem_type": "deep",
        "stem_width": 4,
    }
    model = ResNet(BasicBlock, (1, 1, 1, 2), **shape, **SMALL_RESNETS[kind])
    # Without max-pooling, the last stage works on 8 x 8 pixels once its stride is taken out.
    model.maxpool = nn.Identity()
    return model


def widened(model: nn.Module) -> nn.Module:
    """Reinitialise the linear layers of a model
    in place with torch's defaults, and return the model.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            # timm's initial values, for widths of 192 and more, are too small for 32 or 48.
            layer.reset_parameters()
    return model


def small_patchconvnet(num_heads: int = 1) -> nn.Module:
    """Return a PatchConvNet for 64 x 64 scenes: width 32,
    four blocks, 16 x 16 patches of 4 x 4 pixels.

    Args:
        num_heads: Number of heads of its pooling, a divisor of 32.
    """
    shape = {"embed_dim": 32, "depth": 4, "num_classes": 10, "in_chans": 1}
    model = timm.create_model(
        "patchconvnet_s60",
        **shape,
        init_values=1.0,
        norm_layer="batchnorm2d",
        num_heads=num_heads,
    )
    for convolution in (model.stem[0], model.stem[2]):
        convolution.stride = 1, 1
    return widened(model)


def small_vit(cnn: nn.Module, size: int) -> nn.Module:
    """Return a vision transformer of four blocks of three heads,
    on the features before a small ResNet's last stage.
    """
    # All but the last stage, the pooling and the classifier.
    stages = nn.Sequential(*list(copy.deepcopy(cnn).children())[:-3])
    shape = {
        "img_size": size,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 48,
        "depth": 4,
        "num_heads": 3,
    }
    return VisionTransformer(patch_size=1, embed_layer=partial(HybridEmbed, stages), **shape)


def own_model(args: Namespace, classes: Sequence[str], **options: Any) -> nn.Module:
    """Return the timm model that the user named, with an output for each class.

    Pretrained weights keep their classifier if it has as many classes as the images. If all classes
    are WordNet ids of ImageNet, a classifier of ImageNet keeps their rows. Otherwise the classifier
    is new, and a line says so.

    Args:
        args: Command line of the study.
        classes: Names of the images' classes.
        **options: Options of ``timm.create_model``.

    Raises:
        InputError: ``--num-classes`` is below the number of classes of the images, or rows of the
            classifier cannot be kept.
        RuntimeError, OSError: timm has no such model, or the weights are missing or do not fit.
    """
    class_count = args.num_classes or len(classes)
    if class_count < len(classes):
        raise InputError(
            f"--num-classes: the images have {len(classes)} classes, got {class_count}"
        )
    model = pretrained_model(args, **options)
    model_classes = model.num_classes
    rows = (
        imagenet_rows(classes, timm.data.infer_imagenet_subset(model)) if args.pretrained else None
    )
    if rows is not None and class_count == len(classes):
        # A classifier of the same classes in the same order needs no change.
        if rows != list(range(model_classes)):
            _keep_rows(model, rows)
            print(
                f"the classifier keeps the rows of the {class_count} WordNet ids among its "
                f"{model_classes} classes"
            )
    elif model_classes != class_count:
        model.reset_classifier(class_count)
        if args.pretrained:
            print(
                f"the classifier is new: the weights have {model_classes} classes, and the images "
                f"{class_count}"
            )
    return model


def pretrained_model(args: Namespace, **options: Any) -> nn.Module:
    """Return the timm model that the user named,
    with its own classifier, and with weights if asked for.

    Args:
        args: Command line of the study.
        **options: Options of ``timm.create_model``.

    Raises:
        InputError, RuntimeError, OSError: timm has no such model, or the weights are missing or do
            not fit.
    """
    # --pretrained is False, True or the name of a file.
    options["pretrained"] = bool(args.pretrained)
    if isinstance(args.pretrained, str):
        options |= _of_file(args.model, args.pretrained)
    return _of_size(args.model, args.img_size, options)


@torch.no_grad()
def check_input(model: nn.Module, image: Tensor, classes: int) -> None:
    """Refuse a model that does not take an image,
    shape (C, H, W), or does not return a score for each class.
    """
    size = " x ".join(map(str, image.shape[1:]))
    try:
        scores = model.eval()(image[None])
    except Exception as error:
        raise InputError(
            f"--model, --img-size: {type(model).__name__} takes no images of {size} pixels: {error}"
        ) from error
    if scores.shape != (1, classes):
        raise InputError(
            f"--model: expected a score for each of {classes} classes, got shape "
            f"{tuple(scores.shape)}"
        )


def _of_file(name: str, file: str) -> dict[str, Any]:
    """Return timm's options for weights in a file, with the number of classes of the weights."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"--pretrained: there is no file {file!r}")
    try:
        check_sums(file)
        # By default timm 1.0.20, the oldest supported version, runs code in the file.
        weights = load_state_dict(file, weights_only=True)
    except Exception as error:
        raise InputError(f"--pretrained: {file!r} holds no weights: {error}") from error
    layer = getattr(get_pretrained_cfg(name, allow_unregistered=True), "classifier", None)
    layer = layer if isinstance(layer, str | None) else layer[0]
    if layer is None:  # timm has no such model, as create_model will say
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
    """Return the model for images of a size;
    timm's CNNs take any size and have no option for it.
    """
    if size is not None:
        try:
            model = timm.create_model(name, img_size=size, **options)
        # timm tells in no other way that a model has no such option.
        except TypeError:
            return timm.create_model(name, **options)
        config = model.pretrained_cfg
        channels = options.get("in_chans", config["input_size"][0])
        config["input_size"] = channels, size, size  # the only size that it now takes
        return model
    return timm.create_model(name, **options)


def _keep_rows(model: nn.Module, rows: list[int]) -> None:
    """Keep these outputs of the classifier only."""
    # timm's distilled models have two classifiers.
    layers = model.get_classifier()
    for layer in layers if isinstance(layers, tuple) else (layers,):
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            raise InputError(
                f"--model: cannot take rows of the classifier, a {type(layer).__name__}"
            )
        layer.weight = nn.Parameter(layer.weight.detach()[rows])
        layer.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach()[rows])
        setattr(
            layer,
            "out_features" if isinstance(layer, nn.Linear) else "out_channels",
            len(rows),
        )
    # timm reads the number of classes from the model.
    model.num_classes = len(rows)
