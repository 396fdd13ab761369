"""Models by the names that libraries give them,
with their weights, and how each of them takes photographs.
"""

import difflib
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from tcnn_probe.images import preparation
from tcnn_probe.models import first_line, unwrap

__all__ = ["create_timm_model", "find_model", "find_preparation", "is_function", "with_weights"]

Weights = str | Path | Literal["pretrained", "random"]
"""A file, or where the weights come from."""

_IMAGENET: Mapping[str, Any] = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
}
# Prefixes under which checkpoints keep a model as a part of a larger one, or in a wrapper.
_PREFIXES = (
    "",
    "module.",
    "model.",
    "backbone.",
    "module.backbone.",
    "encoder.",
    "student.",
    "teacher.",
)
# Names in configurations of transformers for the side of images.
_SIZES = ("image_size", "img_size")


def find_model(
    name: str, weights: Weights = "pretrained", size: int | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model by its name, and how it takes photographs, as :func:`find_preparation` does.

    Args:
        name: A name of timm or torchvision; a folder or name of Hugging Face's hub, or with random
            weights a type of model of transformers, such as "dinov2"; or "module:function", which
            is imported and called.
        weights: "pretrained", "random", or a checkpoint for a model of timm or torchvision, from
            which no code runs. A function's model keeps its own.
        size: Side of the images in pixels; None for the model's own.

    Raises:
        ValueError: No library has this name; its weights cannot be had, or do not fit; or the
            function returns none.
    """
    if is_function(name):
        if weights not in ("pretrained", "random"):
            raise ValueError(
                "--weights is for models of timm and torchvision; a function returns its model "
                f"with weights: {name}"
            )
        model = _from_function(name)
        return model, find_preparation(model, size)
    import timm

    import tcnn_model.models  # noqa: F401 (which timm then has, too)

    if timm.is_model(name) or name.startswith("hf-hub:"):
        options = {} if size is None else {"img_size": size}
        if weights in ("pretrained", "random"):
            model = create_timm_model(name, pretrained=weights == "pretrained", **options)
        else:
            model = with_weights(name, str(weights), **options)
        return model, find_preparation(model, size)
    if name in _torchvision_names():
        return _from_torchvision(name, weights, size)
    return _from_transformers(name, weights, size)


def is_function(name: str) -> bool:
    """Return whether the name of a model is "module:function"."""
    return ":" in name and not Path(name).exists() and not name.startswith("hf-hub:")


def _from_function(name: str) -> nn.Module:
    """Import a module, also one of the current folder, and call its function."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"expected module:function, and {name} cannot be imported: {error}"
        ) from error
    model = function()
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected {name} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def create_timm_model(name: str, *, pretrained: bool, **options: Any) -> nn.Module:
    """Create a model of timm; the error for a misspelt name or missing weights says what to do."""
    _check_timm_name(name)
    try:
        model: nn.Module = _create(name, pretrained=pretrained, **options)
    except OSError as error:  # there is no network, or no file for this model
        raise _no_weights(name, error) from error
    return model


def _check_timm_name(name: str) -> None:
    import timm

    import tcnn_model.models  # noqa: F401 (which timm then has, too)

    if not timm.is_model(name) and not name.startswith("hf-hub:"):
        near = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"timm has no model {name}{hint}")


def _create(name: str, **options: Any) -> nn.Module:
    """Create a model of timm; those that take any size, such as CNNs, have no img_size."""
    import timm

    try:
        model: nn.Module = timm.create_model(name, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        model = timm.create_model(
            name, **{key: value for key, value in options.items() if key != "img_size"}
        )
    return model


def _no_weights(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"no weights of {name} could be downloaded: give their file (--weights FILE), or use "
        f"random ones (--random): {first_line(error)}"
    )


def with_weights(name: str, path: str, **options: Any) -> nn.Module:
    """Return a model of timm with the weights and the classes of a file,
    without running code from the file.

    The file may hold a larger model that has this one as a part, such as "backbone", and positions
    of another grid.
    """
    from timm.models import get_pretrained_cfg, load_state_dict

    _check_timm_name(name)
    with _weights_of(path):
        # By default timm 1.0.20, the oldest supported version, runs code that a file contains.
        state = load_state_dict(path, weights_only=True)
        classifier = getattr(get_pretrained_cfg(name), "classifier", None) or "head"
        # timm has one name, or several (DeiT with distillation).
        first = classifier if isinstance(classifier, str) else classifier[0]
        state = _of_part(state, _create(name, num_classes=0).state_dict())
        bias = state.get(f"{first}.bias")
        model = _create(name, num_classes=0 if bias is None else len(bias), **options)
        if any(key.endswith(".gating") for key in state.keys() - model.state_dict().keys()):
            # They do not tell the stride with which the CNN was converted.
            raise ValueError(
                f"those of a T-CNN: load them into tcnn_model.reparameterize(...) of {name}, in "
                "Python or in a module:function for look"
            )
        resize = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if resize is not None and "pos_embed" in state:
            state = resize(state, model)
        model.load_state_dict(
            {
                key: value.float() if value.is_floating_point() else value
                for key, value in state.items()
            }
        )
    return model


@contextmanager
def _weights_of(path: str | Path) -> Iterator[None]:
    """Refuse a file whose weights do not exist, cannot be read or do not fit."""
    if not Path(path).is_file():
        raise ValueError(f"--weights: there is no file {path}")
    try:
        yield
    except Exception as error:  # torch and safetensors raise many types for damaged files
        raise ValueError(
            f"{path} is damaged, or holds more than weights, or those of another model: "
            f"{first_line(error)}"
        ) from error


def _of_part(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights under the first prefix that has all expected names;
    those of a whole file as they are.
    """
    for prefix in _PREFIXES:
        if {prefix + key for key in expected} <= state.keys():
            if not prefix:
                break
            return {
                key.removeprefix(prefix): value
                for key, value in state.items()
                if key.startswith(prefix)
            }
    return dict(state)


def _torchvision_names() -> list[str]:
    """Return the names of torchvision's classifiers; none if it is not installed."""
    try:
        from torchvision import models
    except ImportError:
        return []
    names: list[str] = models.list_models(module=models)
    return names


def _from_torchvision(
    name: str, weights: Weights, size: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    from torchvision import models

    # Vision transformers take the size that they are made for.
    options = {} if size is None or not name.startswith("vit") else {"image_size": size}
    if weights == "pretrained":
        try:
            model = models.get_model(name, weights="DEFAULT", **options)
        except OSError as error:
            raise _no_weights(name, error) from error
    else:
        model = models.get_model(name, **options)
        if weights != "random":
            from timm.models import load_state_dict

            with _weights_of(weights):
                model.load_state_dict(load_state_dict(weights, weights_only=True))
    preset = models.get_model_weights(name).DEFAULT.transforms()
    side = size or preset.crop_size[0]
    return model, {
        "input_size": (3, side, side),
        "crop_pct": preset.crop_size[0] / preset.resize_size[0],
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "interpolation": preset.interpolation.value,
        "crop_mode": "center",
    }


def _from_transformers(
    name: str, weights: Weights, size: int | None
) -> tuple[nn.Module, dict[str, Any]]:
    unknown = _unknown(name)
    try:
        import transformers
    except ImportError:
        raise unknown from None
    if weights not in ("pretrained", "random"):
        raise ValueError(
            "--weights is for models of timm and torchvision; a folder of Hugging Face has its "
            f"own: {name}"
        )
    from_hub = "/" in name or Path(name).is_dir()
    if not from_hub and not (weights == "random" and name in transformers.CONFIG_MAPPING):
        raise unknown
    try:
        if weights == "pretrained":
            model = transformers.AutoModel.from_pretrained(name)
        else:
            config = transformers.AutoConfig
            config = config.from_pretrained(name) if from_hub else config.for_model(name)
            model = transformers.AutoModel.from_config(config)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no folder or name of a model of Hugging Face that can be loaded: "
            f"{first_line(error)}"
        ) from error
    model = getattr(model, "vision_model", model)  # of models of images and text, such as CLIP
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name) if from_hub else None
    except (OSError, ValueError):  # a folder of weights alone
        processor = None
    return model, find_preparation(model, size) | _of_processor(processor, size)


def _of_processor(processor: Any, size: int | None) -> dict[str, Any]:
    """Return the options of timm's transform that do what a processor of transformers does."""
    if processor is None:
        return {}
    options: dict[str, Any] = {"crop_mode": "center", "crop_pct": 1.0, "guessed": False}
    normalizes = processor.do_normalize
    options["mean"] = tuple(processor.image_mean) if normalizes else (0.0, 0.0, 0.0)
    options["std"] = tuple(processor.image_std) if normalizes else (1.0, 1.0, 1.0)
    resampling = getattr(processor.resample, "name", "")
    if resampling in ("BICUBIC", "BILINEAR"):
        options["interpolation"] = resampling.lower()
    sides, crop = (
        dict(processor.size),
        dict(getattr(processor, "crop_size", None) or {}),
    )
    if sides.get("height"):
        options |= {
            "input_size": (3, sides["height"], sides["width"]),
            "crop_mode": "squash",
        }
    elif crop.get("height") and sides.get("shortest_edge"):
        options["input_size"] = (3, crop["height"], crop["width"])
        options["crop_pct"] = crop["height"] / sides["shortest_edge"]
    elif size is None:
        # Detectors take whole photographs, of any size.
        options["guessed"] = True
    if size is not None:
        options["input_size"] = (3, size, size)
    return options


def _unknown(name: str) -> ValueError:
    import timm

    names = [*timm.list_models(), *_torchvision_names()]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ValueError(
        f"no model {name!r}: expected a name of timm or torchvision, a folder or name of Hugging "
        f"Face, or module:function{hint}"
    )


def find_preparation(model: nn.Module, size: int | None = None) -> dict[str, Any]:
    """Return the options of timm's transform with which a model takes photographs.

    Those of timm's models are known. For other models, the attribute ``pretrained_cfg`` gives them,
    as in timm, or the photographs are resized to the model's own size, or 224 pixels, and
    normalised by ImageNet's mean and standard deviation, and the option "guessed" is True.
    """
    network = unwrap(model)
    if getattr(network, "pretrained_cfg", None):
        config = preparation(model)
        channels = config["input_size"][0]
        return config if size is None else config | {"input_size": (channels, size, size)}
    places = [
        getattr(network, "config", None),
        network,
        getattr(network, "patch_embed", None),
    ]
    sizes = (getattr(place, key, None) for place in places for key in _SIZES)
    own = next(filter(None, sizes), 224)
    height, width = own if isinstance(own, (list, tuple)) else (own, own)
    if size is not None:
        height = width = size
    return {
        **_IMAGENET,
        "input_size": (3, height, width),
        "crop_mode": "center",
        "guessed": True,
    }
