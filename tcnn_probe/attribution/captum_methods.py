"""Any attribution method of captum as maps of the images."""

import inspect
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.outputs import class_scores, scores_of
from tcnn_probe.architectures.grids import pair
from tcnn_probe.attribution.layer_choice import (
    WITHOUT_GRADIENTS,
    UnsupportedMethodError,
    map_layer,
)
from tcnn_probe.attribution.pixels import background, to_pixels
from tcnn_probe.extras import needed_for

__all__ = ["captum_class", "captum_maps"]

# Parameters of captum that are filled in here, or that would change the type of the result.
_FILLED_IN = {
    "self",
    "model",
    "forward_func",
    "device_ids",
    "inputs",
    "target",
    "additional_forward_args",
    "kwargs",
}
_FILLED_IN |= {
    "internal_batch_size",
    "perturbations_per_eval",
    "show_progress",
    "return_convergence_delta",
    "verbose",
}
# Our options, and the parameters of captum to which they belong; "inputs" is a parameter of all
# methods.
_OURS = {
    "layer": "layer",
    "interpolation": "layer",
    "baseline": "baselines",
    "window": "sliding_window_shapes",
    "stride": "strides",
    "absolute": "inputs",
}


def captum_class(method: Any) -> Any:
    """Return an attribution class of captum,
    given the class or its name; None for anything else.
    """
    with needed_for("a method of captum"):
        from captum import attr  # a second to import, as it needs matplotlib's pyplot

    cls = getattr(attr, method, None) if isinstance(method, str) else method
    if not isinstance(cls, type) or not issubclass(cls, attr.Attribution):
        return None
    # Abstract classes of captum take neither a model nor a function.
    return cls if {"forward_func", "model"} & inspect.signature(cls).parameters.keys() else None


def captum_maps(
    method: str | type,
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    /,
    *,
    batch_size: int = 32,
    **options: Any,
) -> tuple[Tensor, str]:
    """Sum the attributions of a captum method over channels;
    a layer's map is interpolated to pixels.

    Args:
        method: Class of ``captum.attr`` or its name: "IntegratedGradients", "GuidedBackprop",
            "LayerGradCam", ...
        model: Model that returns class scores, with a gradient if the method needs it.
        images: Images, shape (B, C, H, W).
        target: Classes, shape (B,).
        batch_size: Number of images in the model at a time, if captum has such an option.
        **options: Options of captum's class and of its ``attribute``; ``absolute=False``, whether
            to return the magnitude of the sum; and if captum has a corresponding parameter

            - ``layer=None``: Module or its name; None for the last layer with a map of several
              pixels on which the score depends: a feature map, or tokens on a known grid;
            - ``interpolation="bilinear"`` (or "nearest"): Interpolation between the layer's pixels;
            - ``baseline=0.0``: Reference of the images, a number, 0 being the grey of images
              normalised by their mean, or an image that broadcasts to (C, H, W);
            - ``window=None``, ``stride=None``: Sizes of Occlusion in pixels, a number or (height,
              width); None for an eighth of the image and half a window. All channels are covered
              together, and count once.

    Returns:
        Shape (B, H, W), and the layer's name, or "".

    Raises:
        ValueError: The layer or interpolation is unknown, or the layer has no map (B, C, H, W).
        AssertionError: captum refuses an option, such as a window larger than the image.
        TypeError: The method does not have an option.
    """
    cls = captum_class(method)
    known = {
        *inspect.signature(cls).parameters,
        *inspect.signature(cls.attribute).parameters,
    }
    allowed = known - _FILLED_IN - {*_OURS.values()}
    allowed |= {option for option, parameter in _OURS.items() if parameter in known}
    if strange := sorted(options.keys() - allowed):
        raise TypeError(
            f"captum's {cls.__name__} has no option {strange[0]!r} here; it has {sorted(allowed)}"
        )
    layer, occludes = None, "sliding_window_shapes" in known
    # A class and its ``attribute`` get those of the values for which they have a parameter.
    values = {
        "target": target,
        "baselines": background(options.get("baseline", 0.0), images),
        **options,
    }
    # captum warns if this is smaller than the number of images.
    values["internal_batch_size"] = max(batch_size, len(images))
    # captum repeats all images for each perturbation.
    values["perturbations_per_eval"] = max(1, batch_size // len(images))
    if occludes:
        values |= _windows(images, options.get("window"), options.get("stride"))
    with ExitStack() as stack:
        if "layer" in known:
            layer = map_layer(model, images[:1], options.get("layer"))
            values["layer"] = stack.enter_context(layer.as_feature_map())
        try:
            attributions = _attribute(cls, model, images, values)
        except (RuntimeError, AssertionError) as error:
            if not _uses_gradients(cls) or _has_gradient(model, images):
                raise
            raise UnsupportedMethodError(WITHOUT_GRADIENTS) from error
    name = "" if layer is None else layer.name
    if not isinstance(attributions, Tensor) or attributions.ndim != 4:
        got = (
            f"shape {tuple(attributions.shape)}"
            if isinstance(attributions, Tensor)
            else "several tensors"
        )
        raise ValueError(
            "expected a layer that gives a feature map (B, C, H, W), or tokens on a known grid; "
            f"{name!r} gives {got}"
        )
    if len(attributions) != len(images):
        raise UnsupportedMethodError(
            f"{name!r} gives {len(attributions)} maps of {len(images)} images, because the model "
            "turns each image into several: give the model inside it"
        )
    maps = attributions.detach().to(torch.promote_types(images.dtype, torch.float32))
    if layer is not None and not layer.matters and not maps.any():
        advice = (
            "it depends on no layer, as that of a class whose weights are still zero"
            if options.get("layer") is None
            else "in a ViT, only the class token counts behind the last attention. layer=None "
            "takes the last layer that matters"
        )
        warnings.warn(
            f"the score does not depend on the map of {name!r}, so that its maps by {cls.__name__} "
            f"are zero: {advice}",
            RuntimeWarning,
            stacklevel=2,
        )
    # A window covers all channels, each of which gets the whole effect, so only one channel is
    # used.
    maps = maps[:, 0] if occludes else maps.sum(1)
    if layer is not None:
        size = images.shape[2], images.shape[3]
        maps = to_pixels(maps, size, options.get("interpolation", "bilinear"), layer.fields)
    return (maps.abs() if options.get("absolute") else maps), name


def _attribute(cls: Any, model: nn.Module, images: Tensor, values: dict[str, Any]) -> Any:
    """Run a captum method, and remove the attributes
    that DeepLift and LRP leave on modules, also after exceptions.
    """
    by_gradient = _uses_gradients(cls)
    before = [(module, {*vars(module)}) for module in model.modules()]
    # captum accepts no other outputs than tensors, and some of its classes accept only modules, so
    # a hook is needed.
    handle = model.register_forward_hook(lambda module, inputs, output: scores_of(output))
    try:
        with torch.set_grad_enabled(by_gradient):
            method = cls(model, **_accepted(cls, values))
            inputs = images.detach().requires_grad_(by_gradient)
            return method.attribute(inputs, **_accepted(method.attribute, values))
    finally:
        handle.remove()
        for module, names in before:
            for name in {*vars(module)} - names:
                delattr(module, name)


def _uses_gradients(cls: Any) -> bool:
    with needed_for("a method of captum"):
        from captum.attr import PerturbationAttribution

    return not issubclass(cls, PerturbationAttribution)


def _has_gradient(model: nn.Module, images: Tensor) -> bool:
    """Return whether the scores have a gradient in the images."""
    images = images.detach().clone().requires_grad_()
    try:
        with torch.enable_grad():
            scores = class_scores(model, images)
            return torch.autograd.grad(scores.sum(), images)[0] is not None
    except (
        RuntimeError
    ):  # a part of the forward has no gradient, or no derivative, as sums of integers
        return False


def _accepted(function: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values for which a function has a parameter."""
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def _windows(images: Tensor, window: Any, stride: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape (C, height, width) of the windows
    and of the steps between them, by captum's names.
    """
    channels, *size = images.shape[1:]
    if window is None:
        # This gives about 15 x 15 windows on images of any size, at steps of half a window.
        window = [max(1, round(length / 8)) for length in size]
    side = pair(window)
    if stride is None:
        stride = [max(1, length // 2) for length in side]
    return {"sliding_window_shapes": (channels, *side), "strides": (channels, *pair(stride))}
