"""``saliency()``: labelled maps of images by one or several methods; and the table of methods."""

import difflib
import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_model.outputs import class_scores
from tcnn_probe.attribution.captum_methods import captum_class, captum_maps
from tcnn_probe.attribution.class_attention import class_attention
from tcnn_probe.attribution.layer_choice import UnsupportedMethodError
from tcnn_probe.attribution.rollout import rollout
from tcnn_probe.attribution.scores import (
    NoScoreError,
    Score,
    check_head,
    check_score,
    scored,
)
from tcnn_probe.images import (
    as_images,
    as_pictures,
    beside_images,
    calls_given,
    preparation,
)
from tcnn_probe.models import (
    batches,
    class_indices,
    progress_bar,
    untouched,
    whole_number,
)
from tcnn_probe.provenance import provenance

__all__ = [
    "METHODS",
    "Attribution",
    "Method",
    "OwnMethod",
    "as_json",
    "find_methods",
    "find_targets",
    "first_paragraph",
    "maps_of",
    "name_of",
    "saliency",
    "warn_unsupported",
]

OwnMethod = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Method of the user: a function from model,
images (B, C, H, W) and targets (B,) to maps (B, H, W).
"""


@dataclass(frozen=True)
class Method:
    """A method: its definition, its source and the code that computes it.

    Args:
        computed_by: Function, whose docstring defines the method, or name of a class of
            captum.attr.
        source: Publication.
        definition: Definition in a sentence; "" for the first paragraph of the docstring.
        units: Units of the maps.
        options: Defaults that differ from captum's.
        needs_score: Whether the maps depend on the score of a class.
    """

    computed_by: Callable[..., Any] | str
    source: str
    definition: str = ""
    units: str = "score of the class"
    options: Mapping[str, Any] = field(default_factory=dict)
    needs_score: bool = True


METHODS: Mapping[str, Method] = {
    "class_attention": Method(
        class_attention,
        "Touvron et al. 2021, Augmenting Convolutional networks with attention-based aggregation, "
        "section 3",
        units="1",
        needs_score=False,
    ),
    "rollout": Method(
        rollout,
        "Abnar & Zuidema 2020, Quantifying Attention Flow in Transformers",
        units="1",
        needs_score=False,
    ),
    "gradcam": Method(
        "LayerGradCam",
        "Selvaraju et al. 2017, Grad-CAM",
        "Feature maps of a layer weighted by the mean gradient of the target's score, summed; "
        "interpolated to pixels.",
        # The paper's Eq. 2 keeps positive sums; captum's default keeps all.
        options={"relu_attributions": True},
    ),
    "integrated_gradients": Method(
        "IntegratedGradients",
        "Sundararajan et al. 2017, Axiomatic Attribution for Deep Networks",
        "Difference from a baseline times the mean gradient of the target's score between the two, "
        "sum over channels.",
        # The paper's section 5 finds 20 to 300 steps enough; captum takes 50.
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
        "Fall of the target's score when a window is covered, mean over the windows that cover the "
        "pixel.",
    ),
}


@dataclass(frozen=True)
class Attribution:
    """A method with its options, or maps of the user.

    Args:
        name: Name among the attributions.
        about: Attributes of its maps.
        explain: Function from model, images, target and batch size to maps and the layer's name;
            None for maps.
        maps: The user's maps, shape (B, H, W).
        targets: Classes that the user's maps explain, shape (B,), if they have targets.
        needs_score: Whether the maps depend on the score of a class.
    """

    name: str
    about: Mapping[str, str]
    explain: Callable[[nn.Module, Tensor, Tensor, int], tuple[Tensor, str]] | None = None
    maps: Tensor | None = None
    targets: Tensor | None = None
    needs_score: bool = False


def saliency(
    model: nn.Module,
    images: Any,
    target: int | Sequence[int] | Tensor | None = None,
    method: str | type | OwnMethod | Sequence[str | type | OwnMethod] = "class_attention",
    *,
    score: Score | None = None,
    batch_size: int = 32,
    progress: bool | None = None,
    **options: Any,
) -> Any:
    """Show which pixels a model's score for a class depends on,
    by one method or several, at the images' resolution.

    ::

        methods = ["class_attention", "gradcam"]
        maps = tcnn_probe.saliency(model, images, method=methods, gradcam={"layer": "blocks"})
        maps.gradcam.sel(image=0).plot(yincrease=False)

    Methods are "class_attention", "rollout", "gradcam", "integrated_gradients", "input_x_gradient",
    "occlusion" and the attribution classes of captum.attr, or their names ("GuidedBackprop"). Their
    options are those of the functions :func:`class_attention`, :func:`rollout` and
    :func:`captum_maps` in :mod:`tcnn_probe.attribution`.

    The model runs in eval mode; its flags, gradients and hooks are restored afterwards. Calls on
    one model from several threads wait for each other.

    Args:
        model: Model that returns a score for each class, shape (B, K), or an object with such
            ``logits``.
        images: Images that the model takes, shape (B, C, H, W), a tensor or an array, on any
            device; or pictures, see :func:`tcnn_probe.images.as_images`; or the output of a
            processor of transformers, for example with the texts of CLIP as classes. The model then
            gets all images in one batch.
        target: Class to explain, for all images or for each image; None for the model's own
            prediction.
        method: Name or class, as above; your own function ``(model, images, target) -> maps`` with
            tensors (B, C, H, W), (B,) and (B, H, W); or several of these.
        score: Score that is explained: "logit", the output of the model; "softmax", the probability
            of the class among all; or "sigmoid", its probability by itself. None for the logit; a
            model with one output, which may be either, needs ``target=0`` or a score.
        batch_size: Number of images in the model at a time.
        progress: Whether to show a progress bar; None to show it after three seconds, on a terminal
            or in a notebook.
        **options: Options of the method, such as ``layer``, the layer whose attention or feature
            map is shown instead of that of the method's own choice; with several methods,
            ``name={...}`` for each.

    Returns:
        An ``xarray.DataArray`` with the dims (image, y, x) and the coordinate ``target``, whose
        ``attrs`` describe it (method, layer, units, definition, source, options) and give the
        versions of software. For several methods, an ``xarray.Dataset`` of such arrays by name; a
        method that the model does not support is left out, with a warning. Maps of a model without
        scores (features, or one output) have no ``target``. The dtype is float64 for a float64
        model, else float32.

    Raises:
        ValueError, TypeError: Images, targets, a method or an option have another type or are out
            of range; or the model does not support the method, or does not return scores.
    """
    # A class of captum is callable, too.
    is_single = isinstance(method, str) or callable(method)
    if is_single:
        options = {name_of(method): options} if options else {}
    for name, value in options.items():
        if not isinstance(value, dict):
            raise TypeError(
                f"with several methods, expected the options of each, as in gradcam={{'layer': "
                f"...}}; got {name}={value!r}"
            )
    methods = find_methods(method, options)
    # The preparation is kept for plot.saliency_overlay, which gets the same pictures.
    pictures = as_pictures(images)
    drawn = {} if pictures is None else {"pictures": as_json(preparation(model))}
    inputs, images = beside_images(images), as_images(images, model)
    batch_size = whole_number(batch_size, "batch_size", 1)
    if inputs:  # it is not known which of them have a row for each image
        batch_size = len(images)
    labelled, unsupported = {}, {}
    with untouched(model), calls_given(model, inputs):
        coords: dict[str, Any] = {"image": range(len(images))}
        no_score: NoScoreError | TypeError | None = None
        try:
            targets, score = find_targets(model, images, target, batch_size, score, default="logit")
            coords["target"] = "image", targets.numpy()
        except (NoScoreError, TypeError) as error:
            # A model that returns no tensor (B, K), such as one of transformers without a head.
            if isinstance(error, TypeError) and target is not None:
                raise
            # Attention is the same for all targets.
            targets, score, no_score = torch.zeros(len(images)).long(), "logit", error
        with (
            scored(model, score),
            progress_bar(len(images) * len(methods), "saliency", progress) as bar,
        ):
            for attribution in methods:
                try:
                    if no_score is not None and attribution.needs_score:
                        raise no_score
                    maps, layer = maps_of(
                        attribution, model, images, targets, batch_size, bar.update
                    )
                except UnsupportedMethodError as error:
                    unsupported[attribution.name] = error
                    continue
                name = attribution.name
                attrs = {
                    "long_name": "saliency",
                    "method": name,
                    "layer": layer,
                    **attribution.about,
                }
                if attribution.needs_score:
                    attrs["score"] = score
                    if score != "logit":
                        attrs["units"] = attrs["units"].replace("score", score)
                attrs |= provenance(model, "captum") | drawn
                labelled[name] = xr.DataArray(
                    maps.numpy(), coords, ("image", "y", "x"), name, attrs
                )
    if not labelled:
        raise next(iter(unsupported.values()))
    warn_unsupported(unsupported)
    return labelled[methods[0].name].rename("saliency") if is_single else xr.Dataset(labelled)


def warn_unsupported(reasons: Mapping[str, Exception]) -> None:
    """Warn, at the caller's caller, of methods that the model does not support."""
    for name, reason in reasons.items():
        warnings.warn(f"{name!r} is left out: {reason}", RuntimeWarning, stacklevel=3)


@torch.no_grad()
def find_targets(
    model: nn.Module,
    images: Tensor,
    target: int | Sequence[int] | Tensor | None,
    batch_size: int,
    score: Score | None,
    default: Score,
) -> tuple[Tensor, Score]:
    """Return classes, shape (B,), the user's or the model's prediction,
    and the score of these classes.

    Raise NoScoreError if there are none: the model gives features, or one number of unknown
    meaning.
    """
    if target is None or (score or default) != "logit":
        check_head(model)
    if target is None:
        predictions = []
        for _, batch in batches(model, images, batch_size):
            scores = class_scores(model, batch)
            used = check_score(score, scores, default)
            predictions.append(scores.argmax(1).cpu())
        return torch.cat(predictions), used
    scores = class_scores(model, next(batches(model, images, batch_size))[1])
    classes = scores.shape[1]
    if default == "logit":  # who names the only output wants to explain it as it is
        score = score or "logit"
    used = check_score(score, scores, default)
    features = " (features, as the model has num_classes=0)" * (
        getattr(model, "num_classes", None) == 0
    )
    indices = class_indices(target, f"targets{features}", classes)
    if indices.ndim and indices.shape != images.shape[:1]:
        raise ValueError(
            f"expected one target, or {len(images)}, one for each image; got shape "
            f"{tuple(indices.shape)}"
        )
    # expand() shares one element between all images, but a coordinate needs its own memory.
    return indices.expand(len(images)).clone(), used


def maps_of(
    attribution: Attribution,
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    batch_size: int,
    done: Callable[[int], Any],
) -> tuple[Tensor, str]:
    """Compute maps of all images, (B, H, W) on the CPU,
    and the layer's name; the model is in eval mode.
    """
    if attribution.explain is None:
        assert attribution.maps is not None
        done(len(images))
        return attribution.maps, ""
    parts, layer = [], ""
    for rows, batch in batches(model, images, batch_size):
        maps, layer = attribution.explain(model, batch, targets[rows].to(batch.device), batch_size)
        # Maps are moved batch by batch, so that maps of all images need not fit on the device.
        parts.append(maps.to(torch.promote_types(maps.dtype, torch.float32)).cpu())
        done(len(batch))
    return torch.cat(parts), layer


def find_methods(method: Any, options: Mapping[str, Mapping[str, Any]]) -> list[Attribution]:
    """Return the methods for a name, a class of captum or a function,
    or a list of these; options are by name.
    """
    methods = method
    if (
        isinstance(method, str)
        or callable(method)
        or not isinstance(method, Sequence)
        or not method
    ):
        methods = [method]
    attributions = [_find_method(method, options.get(name_of(method), {})) for method in methods]
    names = [attribution.name for attribution in attributions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"expected methods of different names, got {name!r} twice")
    for name in options:
        if name not in names:
            raise ValueError(f"options for {name!r}, which is not one of the methods {names}")
    return attributions


def name_of(method: Any) -> str:
    """Return the name of a method: the string itself, or the name of the function or its class."""
    return method if isinstance(method, str) else getattr(method, "__name__", type(method).__name__)


def _find_method(method: Any, options: Mapping[str, Any]) -> Attribution:
    name = name_of(method)
    known = METHODS.get(method) if isinstance(method, str) else None
    function = known.computed_by if known else method
    cls = captum_class(function) if isinstance(function, str | type) else None
    if cls is not None:
        known = known or Method(method, "", "As captum computes it, sum over channels.", units="")
        options = {**known.options, **options}
        about = _about(known, options, f"captum's {cls.__name__}")
        maps = partial(captum_maps, cls, **options)
        return Attribution(
            name,
            about,
            lambda m, x, target, n: maps(m, x, target, batch_size=n),
            needs_score=True,
        )
    if not callable(function):
        near = difflib.get_close_matches(str(method), METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"expected a method, one of {list(METHODS)}, a class of captum.attr or its name, or a "
            f"function (model, images, target) -> maps, or several of these; got {method!r}{hint}"
        )
    if known is None:
        if options:
            raise TypeError(
                f"{name!r} is your own function: bind its options yourself, with functools.partial"
            )
        return Attribution(
            name,
            _about(Method(method, "", units=""), {}),
            partial(_by_user, method, name),
            needs_score=True,
        )
    unknown = sorted(options.keys() - inspect.signature(function).parameters.keys())
    if unknown:
        raise TypeError(f"{name!r} has no option {unknown[0]!r}")
    return Attribution(
        name,
        _about(known, options),
        lambda m, x, target, _: function(m, x, target, **options),
        needs_score=known.needs_score,
    )


def _about(method: Method, options: Mapping[str, Any], by: str = "") -> dict[str, str]:
    """Return the attributes of a method's maps."""
    return {
        "units": method.units,
        "definition": method.definition
        or first_paragraph(method.computed_by)
        or "a method of the user's",
        "source": "; by ".join(part for part in (method.source, by) if part),
        "options": as_json(
            # The layer has its own attribute, with its name even if a module was given.
            {name: value for name, value in options.items() if name != "layer"}
        ),
    }


def first_paragraph(described: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(described) or "").split("\n\n")[0].split())


def as_json(options: Mapping[str, Any]) -> str:
    """Encode options as JSON for an attribute; arrays are described by their shape."""
    return json.dumps(
        options,
        default=lambda x: f"of shape {tuple(x.shape)}" if hasattr(x, "shape") else str(x),
    )


def _by_user(
    method: OwnMethod,
    name: str,
    model: nn.Module,
    images: Tensor,
    target: Tensor,
    batch_size: int,
) -> tuple[Tensor, str]:
    # Methods of the user may need gradients, even if they are disabled around the call.
    with torch.enable_grad():
        maps = method(model, images, target)
    expected = (len(images), *images.shape[2:])
    if not isinstance(maps, Tensor) or tuple(maps.shape) != expected:
        got = f"shape {tuple(maps.shape)}" if isinstance(maps, Tensor) else type(maps).__name__
        raise TypeError(
            f"expected the method {name!r} to give a tensor of shape {expected}, got {got}"
        )
    return maps.detach(), ""
