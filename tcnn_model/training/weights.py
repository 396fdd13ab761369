"""Models of timm with weights from a file,
also of T-CNNs and Grafit networks, other image sizes or other classes.
"""

import os
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models import get_pretrained_cfg, load_state_dict
from timm.models.cait import Cait
from torch import Tensor, nn

from tcnn_model.class_folders import shortened
from tcnn_model.conversion.reparameterize import reparameterize
from tcnn_model.gpsa.layer import gpsa_layers
from tcnn_model.models.patchconvnet import PatchConvNet
from tcnn_model.pooling.add import add_attention_pool
from tcnn_model.training.checkpoint import check_sums

__all__ = ["create_from_weights", "create_of_size"]

State = dict[str, Tensor]

# What torch.compile, FSDP and activation checkpointing put into the names of the modules that they
# wrap.
_WRAPPERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)


def create_of_size(name: str, img_size: int | None, **options: Any) -> Any:
    """Create a model of timm for an image size,
    which transformers have as an option; convnets take any size.
    """
    if img_size is not None:
        try:
            return timm.create_model(name, img_size=img_size, **options)
        # timm passes img_size on to the model, and the constructor of a convnet does not know it.
        except TypeError:
            pass
    return timm.create_model(name, **options)


def create_from_weights(
    name: str,
    path: str,
    num_classes: int | None,
    *,
    img_size: int | None = None,
    report: Callable[[str], None] = lambda text: None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Create a model of timm with all weights of a file.

    The model is first created with as many classes as the file has, so that no weight is left out
    silently; if ``num_classes`` differs, its classifier is replaced afterwards. It becomes a T-CNN
    or gets attention pooling if the weights belong to such a model. Position embeddings are
    resized. Only the trunk of a Grafit network is used.

    Args:
        name: timm's name of the model.
        path: Checkpoint file of torch or safetensors; a moving average of the weights in it is
            preferred.
        num_classes: Number of outputs of the model; None for that of the file.
        img_size: Height and width of the images.
        report: Function that is called with a line of text for weights that are new, resized or
            left out.
        names: Names of the classes in the order of labels; None if they are unknown.
        options: Further options of ``timm.create_model``.

    Raises:
        ValueError: The file does not exist, holds more than weights, or its weights do not all fit
            this model.
    """
    state = _read_weights(path, name, report)
    classes = _count_classes(name, state)
    try:
        model = create_of_size(name, img_size, num_classes=classes, **options)
        size = (3, img_size, img_size) if img_size else None
        tokens = next(
            (value for key, value in state.items() if key.endswith("attention.cls_token")),
            None,
        )
        if tokens is not None:
            model = add_attention_pool(
                model, per_class=tokens.shape[1] > 1, input_size=size, inplace=True
            )
        gated = any(key.endswith(".raw_locality") for key in state)
        # A model such as t_resnetrs50 has GPSA layers from the start.
        if gated and not gpsa_layers(model):
            model = reparameterize(model, input_size=size, inplace=True)
        # timm resizes the position embeddings of all its transformers but CaiT.
        fitted = dict(state)
        if isinstance(model, Cait):
            fitted["pos_embed"] = _resized(state["pos_embed"], model)
        fits = _shapes(fitted) == _shapes(model.state_dict())
        if gated or tokens is not None or fits:
            model.load_state_dict(fitted)
        else:
            # label_offset is 0 because the model has as many classes as the file: timm need not
            # remove the background class that some published classifiers have.
            overlay = {"state_dict": state, "num_classes": classes, "label_offset": 0}
            model = create_of_size(
                name,
                img_size,
                pretrained=True,
                pretrained_cfg_overlay=overlay,
                num_classes=classes,
                **options,
            )
            # Otherwise pretrained_cfg would keep all weights of the file, and copies of the model
            # would copy them.
            model.pretrained_cfg = model.default_cfg = {
                **model.pretrained_cfg,
                "state_dict": None,
            }
    except (RuntimeError, TypeError, KeyError) as error:
        raise ValueError(f"weights: those in {path} do not fit {name}: {error}") from error
    new = [] if num_classes in (None, classes) else _reset_classes(model, num_classes)
    if new:
        report(
            f"weights: {', '.join(new)} are new: {path} has {classes} classes, not {num_classes}"
        )
    if names is not None and len(names) == classes and not new:
        _report_other_classes(path, names, report)
    for key, shape in _shapes(model.state_dict()).items():
        loaded = state.get(key)
        if loaded is not None and loaded.shape != shape and key not in new:
            report(f"weights: {key} is made {shape}, from {tuple(loaded.shape)}")
    return model


def _reset_classes(model: Any, num_classes: int) -> list[str]:
    """Replace the classifier, and return the names of the parameters that are new."""
    loaded = dict(model.named_parameters())
    model.reset_classifier(num_classes)
    if isinstance(model, PatchConvNet) and model.per_class:
        tokens = loaded["pool.cls_token"]
        # Equal tokens are copies of a single token and belong to no class, so the new classes get
        # copies, too.
        if len(tokens[0].unique(dim=0)) == 1:
            copies = tokens.detach()[:, :1].repeat(1, num_classes, 1)
            loaded["pool.cls_token"] = model.pool.cls_token = nn.Parameter(copies)
    return [
        name for name, parameter in model.named_parameters() if loaded.get(name) is not parameter
    ]


def _report_other_classes(path: str, names: Sequence[str], report: Callable[[str], None]) -> None:
    """Report that the classifier of a file is kept but is of other classes,
    or of the same in another order.
    """
    if zipfile.is_zipfile(path):  # others, such as safetensors, hold weights only
        before = torch.load(path, weights_only=True, mmap=True)
        before = before.get("classes") if isinstance(before, dict) else None
        if before and [*before] != [*names]:
            report(
                f"weights: the classifier in {path} is kept, though its classes are "
                f"{shortened(before)}, and those of the data {shortened(names)}"
            )


def _read_weights(path: str, name: str, report: Callable[[str], None]) -> State:
    if not Path(path).is_file():
        raise ValueError(f"weights: there is no file {path}")
    try:
        check_sums(path)
        # By default timm 1.0.20, the oldest one supported, runs code that a file holds.
        state: State = load_state_dict(path, weights_only=True)
    except Exception as error:  # torch and safetensors raise many types for damaged files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"weights: {path} is damaged, or holds more than weights: {reason}"
        ) from error
    inner = [str(key) for key, value in state.items() if isinstance(value, Mapping)]
    if inner:
        raise _several_models(path, inner)
    if {"memory", "predictor.0.weight"} <= state.keys():
        parts = {name.partition(".")[0] for name in state} - {"trunk"}
        report(f"weights: of the Grafit network in {path} {', '.join(sorted(parts))} are left out")
        return {
            name.removeprefix("trunk."): value
            for name, value in state.items()
            if name.startswith("trunk.")
        }
    return _unwrapped(state, name, path, report)


def _unwrapped(state: State, name: str, path: str, report: Callable[[str], None]) -> State:
    """Return the weights under the names that they have in the model itself,
    and report what is taken off the names.

    torch.compile, FSDP and checkpointing put a word into names; AveragedModel and modules of
    Lightning a prefix before them, and further entries beside them.
    """
    plain = {_WRAPPERS.sub("", key): value for key, value in state.items()}
    if plain.keys() != state.keys():
        report(f"weights: names of wrappers, as of torch.compile, are taken off those in {path}")
    # The prefix is that of the classifier or, without one, what all names share.
    layer = re.escape(_classifier(name))
    matches = [re.fullmatch(rf"(.+\.)?{layer}(\.\d+)?\.weight", key) for key in plain]
    prefixes = {match[1] or "" for match in matches if match}
    if not prefixes:
        common = os.path.commonprefix([*plain])  # noqa: RUF071 (cut at a dot)
        prefixes = {common[: common.rfind(".") + 1]}
    # Two classifiers are those of two models, of which one may have the names of the model itself.
    if len(prefixes) > 1 and "" not in prefixes:
        raise _several_models(path, sorted(prefix[:-1] for prefix in prefixes))
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    left_out = [key for key in plain if not key.startswith(prefix) or key == "n_averaged"]
    if prefix:
        report(f"weights: {prefix!r} is taken off the names in {path}")
    if left_out:
        report(f"weights: {shortened(left_out)} of {path} left out")
    return {key.removeprefix(prefix): value for key, value in plain.items() if key not in left_out}


def _several_models(path: str, names: Sequence[str]) -> ValueError:
    return ValueError(
        f"weights: {path} holds several models, {', '.join(names)}: save the weights of one of them"
    )


def _classifier(name: str) -> str:
    """Return the name of the classifier's layer."""
    layer = getattr(get_pretrained_cfg(name), "classifier", None) or "head"
    return layer if isinstance(layer, str) else str(layer[0])


def _count_classes(name: str, state: Mapping[str, Tensor]) -> int:
    """Return the number of outputs of the classifier in the weights,
    0 if there is no classifier.
    """
    layer = _classifier(name)
    if f"{layer}.weight" in state:
        return len(state[f"{layer}.weight"])
    # The published PatchConvNets with a token per class also have a classifier per class.
    return sum(re.fullmatch(rf"{re.escape(layer)}\.\d+\.weight", key) is not None for key in state)


def _resized(positions: Tensor, model: Cait) -> Tensor:
    return resample_abs_pos_embed(positions, list(model.patch_embed.grid_size), num_prefix_tokens=0)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
