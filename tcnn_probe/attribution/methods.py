"""The methods: what each is, where it comes from, and how it is run on some images."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.captum_methods import captum_class, captum_maps
from tcnn_probe.attribution.class_attention import class_attention
from tcnn_probe.attribution.rollout import rollout

__all__ = ["METHODS", "Attribution", "Method", "OwnMethod", "as_json", "find_methods", "first_paragraph", "name_of"]

OwnMethod = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A method of the user's: model, images (B, C, H, W) and targets (B,) to maps (B, H, W)."""


@dataclass(frozen=True)
class Method:
    """What a method is."""

    computed_by: Callable[..., Any] | str  # a function, whose docstring defines it; or a class of captum.attr
    source: str
    definition: str = ""
    units: str = "score of the class"
    options: Mapping[str, Any] = field(default_factory=dict)  # defaults, where they are not captum's


METHODS: Mapping[str, Method] = {
    "class_attention": Method(
        class_attention,
        "Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation, section 3",
        units="1",
    ),
    "rollout": Method(rollout, "Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers", units="1"),
    "gradcam": Method(
        "LayerGradCam",
        "Selvaraju et al. 2017, Grad-CAM",
        "Feature maps of a layer weighted by the mean gradient of the target's score, summed; interpolated to pixels.",
        options={"relu_attributions": True},
    ),
    "integrated_gradients": Method(
        "IntegratedGradients",
        "Sundararajan et al. 2017, Axiomatic Attribution for Deep Networks",
        "Difference from a baseline times the mean gradient of the target's score between the two, sum over channels.",
        options={"n_steps": 32},
    ),
    "input_x_gradient": Method(
        "InputXGradient",
        "Shrikumar et al. 2016, Not Just a Black Box",
        "Pixel times gradient of the target's score, sum over channels.",
    ),
    "occlusion": Method(
        "Occlusion",
        "Zeiler & Fergus 2014, Visualizing and Understanding Convolutional Networks",
        "Fall of the target's score when a window is covered, mean over the windows that cover the pixel.",
    ),
}


@dataclass(frozen=True)
class Attribution:
    """A method with its options, or maps that were given."""

    name: str
    about: Mapping[str, str]  # attributes of its maps
    explain: Callable[[nn.Module, Tensor, Tensor, int], tuple[Tensor, str]] | None = None  # as ``captum_maps``
    maps: Tensor | None = None  # (B, H, W), if they were given
    targets: Tensor | None = None  # (B,), if the given maps say so


def find_methods(method: Any, options: Mapping[str, Mapping[str, Any]]) -> list[Attribution]:
    """The methods that were asked for: a name, a class of captum or a function, or several; with options by name."""
    several = [method] if isinstance(method, str) or callable(method) else method
    if not isinstance(several, Sequence) or not several:
        several = [method]
    found = [_find_method(one, options.get(name_of(one), {})) for one in several]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"expected methods of different names, got {twice!r} twice")
    if strange := next((name for name in options if name not in names), None):
        raise ValueError(f"options for {strange!r}, which is none of the methods {names}")
    return found


def name_of(method: Any) -> str:
    """The name of a method: its own, or that of the function or its class."""
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def _find_method(method: Any, given: Mapping[str, Any]) -> Attribution:
    name = name_of(method)
    known = METHODS.get(method) if isinstance(method, str) else None
    function = known.computed_by if known else method
    if cls := captum_class(function):
        known = known or Method(method, "", "As captum computes it, sum over channels.", units="")
        options = {**known.options, **given}
        about = _about(known, options, f"captum's {cls.__name__}")
        maps = partial(captum_maps, cls, **options)
        return Attribution(name, about, lambda m, x, target, n: maps(m, x, target, batch_size=n))
    if not callable(function):
        raise ValueError(
            f"expected a method, one of {list(METHODS)}, a class of captum.attr or its name, or a function "
            f"(model, images, target) -> maps, or several of these; got {method!r}"
        )
    if known is None:
        if given:
            raise TypeError(f"{name!r} is a function of yours: bind its options yourself, as functools.partial does")
        return Attribution(name, _about(Method(method, "", units=""), {}), partial(_by_user, method, name))
    if strange := sorted(given.keys() - inspect.signature(function).parameters.keys()):
        raise TypeError(f"{name!r} has no option {strange[0]!r}")
    return Attribution(name, _about(known, given), lambda m, x, target, _: function(m, x, target, **given))


def _about(method: Method, options: Mapping[str, Any], by: str = "") -> dict[str, str]:
    return {
        "units": method.units,
        "definition": method.definition or first_paragraph(method.computed_by) or "a method of the user's",
        "source": "; by ".join(part for part in (method.source, by) if part),
        "options": as_json({name: value for name, value in options.items() if name != "layer"}),
    }


def first_paragraph(described: object) -> str:
    """What a docstring begins with, in one line."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def as_json(options: Mapping[str, Any]) -> str:
    """Options as an attribute; of arrays, the shape."""
    return json.dumps(options, default=lambda x: f"of shape {tuple(x.shape)}" if hasattr(x, "shape") else str(x))


def _by_user(
    method: OwnMethod, name: str, model: nn.Module, images: Tensor, target: Tensor, batch_size: int
) -> tuple[Tensor, str]:
    with torch.enable_grad():
        maps = method(model, images, target)
    expected = (len(images), *images.shape[2:])
    if not isinstance(maps, Tensor) or tuple(maps.shape) != expected:
        got = f"shape {tuple(maps.shape)}" if isinstance(maps, Tensor) else type(maps).__name__
        raise TypeError(f"expected the method {name!r} to give a tensor of shape {expected}, got {got}")
    return maps.detach(), ""
