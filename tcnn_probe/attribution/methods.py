"""The methods by name: what each is, where it comes from, and how it is run on some images."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.captum_methods import input_x_gradient, integrated_gradients, occlusion
from tcnn_probe.attribution.class_attention import class_attention
from tcnn_probe.attribution.given import captum
from tcnn_probe.attribution.gradcam import gradcam
from tcnn_probe.attribution.rollout import rollout

__all__ = ["METHODS", "Explainer", "Method", "OwnMethod", "find_explainers", "name_of"]

OwnMethod = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""A method of the user's: model, images (B, C, H, W) and targets (B,) to maps (B, H, W)."""

_OF_ALL = {"model", "images", "target", "batch_size"}


@dataclass(frozen=True)
class Method:
    """A kind of saliency.

    Args:
        function: (model, images, target, **options) -> maps (B, H, W) and the name of the layer that they are of.
        units: of the maps.
        definition: in a sentence or two.
        source: where it comes from.
        by_captum: whether captum computes it.
    """

    function: Callable[..., tuple[Tensor, str]]
    units: str
    definition: str
    source: str
    by_captum: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Its options, as they are if nobody says otherwise."""
        parameters = inspect.signature(self.function).parameters
        return {name: one.default for name, one in parameters.items() if name not in _OF_ALL}

    @property
    def takes_batch_size(self) -> bool:
        """Whether it runs more images than it is given at a time."""
        return "batch_size" in inspect.signature(self.function).parameters


_SCORE = "score of the class"
METHODS: Mapping[str, Method] = {
    "class_attention": Method(
        class_attention,
        "1",
        "Attention weight, mean over heads, of the class token (the target's, where each class has one) on each patch; "
        "interpolated to pixels, and nothing else.",
        "Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation, section 3",
    ),
    "rollout": Method(
        rollout,
        "1",
        "Row of the class token in the product over layers of (W + I) / 2, W being attention, mean over heads; "
        "interpolated to pixels.",
        "Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers",
    ),
    "gradcam": Method(
        gradcam,
        _SCORE,
        "Feature maps of a layer weighted by the mean gradient of the target's score, summed; interpolated to pixels.",
        "Selvaraju et al. 2017, Grad-CAM; by captum's LayerGradCam",
        by_captum=True,
    ),
    "integrated_gradients": Method(
        integrated_gradients,
        _SCORE,
        "Difference from a baseline times the mean gradient of the target's score between the two, sum over channels.",
        "Sundararajan et al. 2017, Axiomatic Attribution for Deep Networks; by captum's IntegratedGradients",
        by_captum=True,
    ),
    "input_x_gradient": Method(
        input_x_gradient,
        _SCORE,
        "Pixel times gradient of the target's score, sum over channels.",
        "Shrikumar et al. 2016, Not Just a Black Box; by captum's InputXGradient",
        by_captum=True,
    ),
    "occlusion": Method(
        occlusion,
        _SCORE,
        "Fall of the target's score when a window is covered, mean over the windows that cover the pixel.",
        "Zeiler & Fergus 2014, Visualizing and Understanding Convolutional Networks; by captum's Occlusion",
        by_captum=True,
    ),
}


@dataclass(frozen=True)
class Explainer:
    """A method with its options.

    Args:
        name: of the method.
        method: one of ours, or a function of the user's.
        options: those that were given.
    """

    name: str
    method: Method | OwnMethod
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, model: nn.Module, images: Tensor, target: Tensor, batch_size: int) -> tuple[Tensor, str]:
        """Maps of some images, shape (B, H, W), and the name of their layer or "".

        Raises:
            TypeError, ValueError: the user's method gave something else.
        """
        if isinstance(self.method, Method):
            size = {"batch_size": batch_size} if self.method.takes_batch_size else {}
            return self.method.function(model, images, target, **size, **self.options)
        with torch.enable_grad():
            maps = self.method(model, images, target)
        expected = (len(images), *images.shape[2:])
        if not isinstance(maps, Tensor):
            raise TypeError(f"expected the method {self.name!r} to give a tensor, got {type(maps).__name__}")
        if tuple(maps.shape) != expected:
            raise ValueError(f"expected the method {self.name!r} to give shape {expected}, got {tuple(maps.shape)}")
        return maps.detach(), ""

    @property
    def about(self) -> dict[str, str]:
        """What it is, as attributes."""
        if not isinstance(self.method, Method):
            note = inspect.getdoc(self.method) or "a method of the user's"
            return {"units": "", "definition": note, "source": "", "options": "{}"}
        options = {name: value for name, value in {**self.method.defaults, **self.options}.items() if name != "layer"}
        return {
            "units": self.method.units,
            "definition": self.method.definition,
            "source": self.method.source,
            "options": json.dumps(options, default=_in_words),
        }

    @property
    def packages(self) -> tuple[str, ...]:
        """That took part in it, beside those that always do."""
        return ("captum",) if isinstance(self.method, Method) and self.method.by_captum else ()


def find_explainers(method: Any, options: Mapping[str, Mapping[str, Any]]) -> list[Explainer]:
    """The methods that were asked for.

    Args:
        method: a name or a function, or several of these.
        options: of each method, by its name.

    Raises:
        ValueError: a name that is unknown or comes twice, or options of a method that was not asked for.
        TypeError: no method, or an option that it does not have.
        ModuleNotFoundError: captum is needed, and not there.
    """
    several = [method] if isinstance(method, str) or callable(method) else method
    if not isinstance(several, Sequence) or not several:
        _refuse(method)
    found = [_explainer(one, options) for one in several]
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"expected methods of different names, got {twice!r} twice")
    if strange := next((name for name in options if name not in names), None):
        raise ValueError(f"options for {strange!r}, which is none of the methods {names}")
    return found


def _explainer(method: Any, options: Mapping[str, Mapping[str, Any]]) -> Explainer:
    if callable(method):
        name = name_of(method)
        if options.get(name):
            raise TypeError(f"{name!r} is a function of yours: bind its options yourself, as functools.partial does")
        return Explainer(name, method)
    if not isinstance(method, str) or method not in METHODS:
        _refuse(method)
    known, given = METHODS[method], options.get(method, {})
    if strange := sorted(given.keys() - known.defaults.keys()):
        raise TypeError(f"{method!r} has no option {strange[0]!r}; it has {sorted(known.defaults)}")
    if known.by_captum:
        captum("attr")
    return Explainer(method, known, given)


def name_of(method: Any) -> str:
    """Of a method: its own, or that of the function or its class."""
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def _refuse(method: Any) -> NoReturn:
    raise ValueError(
        f"expected a method, one of {list(METHODS)}, or a function (model, images, target) -> maps, or several of "
        f"these; got {method!r}"
    )


def _in_words(value: Any) -> str:
    return f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else str(value)
