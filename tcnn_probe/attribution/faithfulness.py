"""``faithfulness()``: labelled measures
of how well maps show the pixels on which a model depends.
"""

import inspect
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.attribution.agreement import (
    energy_inside,
    pointing_game,
    rank_correlation,
)
from tcnn_probe.attribution.deletion import area_under, deletion_curve, insertion_curve
from tcnn_probe.attribution.layer_choice import UnsupportedMethodError
from tcnn_probe.attribution.pixels import is_constant
from tcnn_probe.attribution.saliency import (
    Attribution,
    as_json,
    find_methods,
    find_targets,
    first_paragraph,
    maps_of,
    name_of,
    warn_unsupported,
)
from tcnn_probe.attribution.scores import NoScoreError, Score
from tcnn_probe.images import as_images, beside_images, calls_given
from tcnn_probe.models import progress_bar, untouched, whole_number
from tcnn_probe.provenance import provenance

__all__ = ["METRICS", "Metric", "faithfulness"]


@dataclass(frozen=True)
class Metric:
    """A measure of maps. Its definition is the first paragraph of its function's docstring.

    Args:
        function: Function that returns a number for each image, (B,), or a curve: shares and
            values.
        takes: Its input: "maps" of a model, maps and "masks", or maps and "others".
        long_name: Name in words.
        range: Possible values.
        better: Direction of better maps.
        source: Publication.
    """

    function: Callable[..., Any]
    takes: Literal["maps", "masks", "others"]
    long_name: str
    range: str
    better: Literal["higher", "lower", "neither"]
    source: str

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of the measure's variable."""
        names = ("long_name", "range", "better", "source")
        attrs = {name: getattr(self, name) for name in names}
        return attrs | {"units": "1", "definition": first_paragraph(self.function)}


_RISE = "Petsiuk et al. 2018, RISE: Randomized Input Sampling for Explanation of Black-box Models"
_ZHANG = "Zhang et al. 2018, Top-down Neural Attention by Excitation Backprop"
METRICS: Mapping[str, Metric] = {
    "deletion_auc": Metric(
        deletion_curve,
        "maps",
        "area under the deletion curve",
        "0 to 1",
        "lower",
        _RISE,
    ),
    "insertion_auc": Metric(
        insertion_curve,
        "maps",
        "area under the insertion curve",
        "0 to 1",
        "higher",
        _RISE,
    ),
    "energy_inside": Metric(
        energy_inside,
        "masks",
        "positive saliency inside the mask",
        "0 to 1",
        "higher",
        "Wang et al. 2020, Score-CAM",
    ),
    "pointing_game": Metric(
        pointing_game,
        "masks",
        "most salient pixel on the mask",
        "0 to 1",
        "higher",
        _ZHANG,
    ),
    "rank_correlation": Metric(
        rank_correlation,
        "others",
        "rank correlation between methods",
        "-1 to 1",
        "neither",
        "Adebayo et al. 2018, Sanity Checks for Saliency Maps",
    ),
}


def faithfulness(
    model: nn.Module,
    images: Any,
    saliency: Any,
    target: int | Sequence[int] | Tensor | None = None,
    *,
    masks: Any = None,
    metrics: str | Collection[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    batch_size: int = 32,
    steps: int = 32,
    baseline: float | Tensor = 0.0,
    start: float | Tensor | Literal["blur"] = "blur",
    score: Score | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure how well saliency shows the pixels on which a model's score depends,
    or the position of the object.

    ::

        scores = tcnn_probe.faithfulness(model, images, ["class_attention", "gradcam"], masks=masks)
        print(scores.pointing_game.mean("image").to_pandas())
        print(tcnn_probe.evaluation.mean_interval(scores.sel(attribution="gradcam").energy_inside))

    The metrics are "deletion_auc", "insertion_auc", "energy_inside", "pointing_game" and
    "rank_correlation". The functions of these names in :mod:`tcnn_probe.attribution`
    (``deletion_curve`` and ``insertion_curve`` with ``area_under`` for the first two) take plain
    tensors. A constant map shows nothing: its scores are NaN, with a warning. The scores of a map
    with a NaN are NaN. If the model does not support one of several methods, it is left out, with a
    warning.

    Args:
        model: Model that returns a score for each class, shape (B, K), or an object with such
            ``logits``.
        images: Images that the model takes, shape (B, C, H, W), or the output of a processor of
            transformers, see :func:`tcnn_probe.saliency`.
        saliency: Maps from :func:`tcnn_probe.saliency`; or methods that it takes, which are
            computed now; or a mapping from names to any of these, or to maps of shape (B, H, W).
        target: Classes, see :func:`tcnn_probe.saliency`; None for those of the given maps, if they
            have targets.
        masks: Masks of the objects, shape (B, H, W), bool; "energy_inside" and "pointing_game" need
            them.
        metrics: Names; None for all metrics that can be computed from the other arguments.
        options: Options of the methods that are computed now, by name.
        batch_size: Number of images in the model at a time.
        steps: Number of steps of the deletion and insertion curves.
        baseline: Background that replaces deleted pixels: a number, or an image (C, H, W).
        start: Image at which insertion starts: "blur", or a number or an image.
        score: Score that is measured while pixels are deleted or inserted, see
            :func:`tcnn_probe.attribution.deletion_curve`: "softmax" (None), "sigmoid" for several
            labels or one output that tells two classes apart, or "logit" for numbers, as in
            regression.
        tolerance: Tolerance of the pointing game, in pixels.
        seed: Seed of the order of pixels of equal saliency.
        progress: Whether to show a progress bar, see :func:`tcnn_probe.saliency`.

    Returns:
        Dataset with the dims (attribution, image), and (attribution, other, image) for
        "rank_correlation", float64. The ``attrs`` define each variable.

    Raises:
        ValueError, TypeError: Images, maps, masks, methods, metrics or options have another type or
            are out of range; or a requested metric lacks masks, or a score: the model gives
            features, or one number and no ``score``.
    """
    inputs, images = beside_images(images), as_images(images, model)
    batch_size = whole_number(batch_size, "batch_size", 1)
    if inputs:  # it is not known which of them have a row for each image
        batch_size = len(images)
    attributions = _find_attributions(saliency, images, options or {})
    masks = None if masks is None else _as_masks(masks, images)
    selected = _select_metrics(metrics, attributions, masks is not None)
    # Maps must be judged by the score of the class that they explain.
    if target is None:
        target = _targets_of(attributions)
    settings = {
        "steps": steps,
        "baseline": baseline,
        "start": start,
        "score": score,
        "tolerance": tolerance,
        "seed": seed,
    }
    variables: dict[str, xr.Variable] = {}
    # Computing the maps counts as one more metric.
    total = len(attributions) * (1 + len(selected)) * len(images)
    with (
        untouched(model),
        calls_given(model, inputs),
        progress_bar(total, "faithfulness", progress) as bar,
    ):
        unsupported: dict[str, UnsupportedMethodError] = {}
        try:
            targets, settings["score"] = find_targets(
                model, images, target, batch_size, score, default="softmax"
            )
        except NoScoreError as error:
            _check_without_score(attributions, selected, error)
            targets = None
            unsupported = {x.name: error for x in attributions if x.needs_score}
        # Attention is the same for all targets.
        explained = torch.zeros(len(images)).long() if targets is None else targets
        # Maps are computed once for all metrics.
        maps = []
        for attribution in attributions:
            if attribution.name in unsupported:
                continue
            try:
                maps.append(
                    maps_of(attribution, model, images, explained, batch_size, bar.update)[0]
                )
            except UnsupportedMethodError as error:
                unsupported[attribution.name] = error
        if not maps:
            raise next(iter(unsupported.values()))
        attributions = [x for x in attributions if x.name not in unsupported]
        selected = _select_metrics(metrics, attributions, masks is not None)
        constant = torch.stack([is_constant(judged) for judged in maps])
        for name, metric in selected.items():
            parameters = inspect.signature(metric.function).parameters
            # A metric gets the settings for which its function has a parameter.
            used = {key: settings[key] for key in parameters if key in settings}
            scores = []
            for judged, flat in zip(maps, constant, strict=True):
                if metric.takes == "masks":
                    result = metric.function(judged, masks, **used)
                elif metric.takes == "others":
                    result = torch.stack([metric.function(judged, reference) for reference in maps])
                else:
                    result = metric.function(
                        model, images, judged, explained, batch_size=batch_size, **used
                    )
                values = area_under(*result) if isinstance(result, tuple) else result
                scores.append(values.masked_fill(flat.to(values.device), torch.nan))
                bar.update(len(images))
            dims = (
                "attribution",
                *(["other"] if metric.takes == "others" else []),
                "image",
            )
            attrs = metric.attrs | {"options": as_json(used)}
            if used.get("score") == "logit":
                attrs |= {"units": "score of the class", "range": "any number"}
            variables[name] = xr.Variable(dims, torch.stack(scores).numpy(), attrs)
    warn_unsupported(unsupported)
    flat_maps = {x.name: int(flat.sum()) for x, flat in zip(attributions, constant, strict=True)}
    if any(flat_maps.values()):
        counts = ", ".join(f"{n} of {name!r}" for name, n in flat_maps.items() if n)
        warnings.warn(
            f"constant maps, which show nothing and are not scored: {counts}",
            RuntimeWarning,
            stacklevel=2,
        )
    names = np.array([x.name for x in attributions], dtype=object)
    coords: dict[str, Any] = {"attribution": names, "image": range(len(images))}
    if targets is not None:
        coords["target"] = "image", targets.numpy()
    if "rank_correlation" in selected:
        coords["other"] = names
    attrs = provenance(model, "captum")
    attrs["attributions"] = json.dumps({x.name: dict(x.about) for x in attributions})
    return xr.Dataset(variables, coords, attrs)


def _select_metrics(
    metrics: str | Collection[str] | None,
    attributions: Sequence[Attribution],
    has_masks: bool,
) -> dict[str, Metric]:
    """Return the metrics by name; raise ValueError for one that cannot be computed."""
    if metrics is None:
        lacking = {"masks": not has_masks, "others": len(attributions) == 1}
        names = [name for name, metric in METRICS.items() if not lacking.get(metric.takes)]
    else:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(f"expected metrics among {list(METRICS)}, got {name!r}")
        if METRICS[name].takes == "masks" and not has_masks:
            raise ValueError(
                f"{name!r} needs masks, which say where the objects are: masks=, shape (B, H, W)"
            )
    return {name: METRICS[name] for name in names}


def _check_without_score(
    attributions: Sequence[Attribution],
    selected: Mapping[str, Metric],
    error: NoScoreError,
) -> None:
    """Raise an error if a metric, or all methods, need a score, which the model does not give."""
    free = [name for name, metric in METRICS.items() if metric.takes != "maps"]
    needing = [name for name in selected if name not in free]
    if all(x.needs_score for x in attributions):
        needing += [x.name for x in attributions]
    if needing:
        raise ValueError(
            f"{', '.join(map(repr, needing))}: {error}. Metrics that need no score: {free}"
        ) from error


def _find_attributions(
    saliency: Any, images: Tensor, options: Mapping[str, Mapping[str, Any]]
) -> list[Attribution]:
    """Return the attributions to judge: the user's maps, and methods to compute now."""
    if isinstance(saliency, xr.DataArray):
        saliency = {saliency.attrs.get("method", "saliency"): saliency}
    # Results are labelled by name, but an array has no name.
    if isinstance(saliency, (Tensor, np.ndarray)):
        raise TypeError("maps without a name: give them as {'name': maps}")
    if not isinstance(saliency, Mapping):
        return find_methods(saliency, options)
    if not saliency:
        raise ValueError("expected at least one method, got none")
    attributions = []
    for name, value in saliency.items():
        if isinstance(value, str) or (
            callable(value) and not isinstance(value, (Tensor, xr.DataArray))
        ):
            # Options are given under the user's name of the method.
            own_options = {name_of(value): options[name]} if name in options else {}
            attributions.append(replace(find_methods(value, own_options)[0], name=str(name)))
        else:
            attributions.append(_user_maps(value, images, str(name)))
    computed = [attribution.name for attribution in attributions if attribution.explain]
    for name in options:
        if name not in computed:
            raise ValueError(
                f"options for {name!r}, which is not one of the methods to compute: {computed}"
            )
    return attributions


def _targets_of(attributions: Sequence[Attribution]) -> Tensor | None:
    """Return the classes that the user's maps explain,
    shape (B,), or None if no map has targets.
    """
    known = [
        (attribution.name, attribution.targets)
        for attribution in attributions
        if attribution.targets is not None
    ]
    for name, targets in known[1:]:
        if not torch.equal(targets, known[0][1]):
            raise ValueError(
                f"the maps {known[0][0]!r} and {name!r} explain different targets: choose one with "
                "target="
            )
    return known[0][1] if known else None


def _as_masks(masks: Any, images: Tensor) -> Tensor:
    """Return masks as a bool tensor, shape (B, H, W), on the CPU."""
    tensor = _as_tensor(masks, images, "masks")
    if tensor.dtype != torch.bool:
        raise TypeError(f"expected masks of dtype bool, True on the object, got {tensor.dtype}")
    return tensor


def _user_maps(maps: Any, images: Tensor, name: str) -> Attribution:
    """Return the user's maps as an attribution."""
    targets = None
    if isinstance(maps, xr.DataArray):
        if {*maps.dims} != {"image", "y", "x"}:
            raise ValueError(
                f"expected maps of {name!r} with the dims (image, y, x), got {maps.dims}"
            )
        targets = (
            # The array is copied because torch warns of arrays that are not writable.
            torch.from_numpy(np.array(maps.target)) if "target" in maps.coords else None
        )
        maps = maps.transpose("image", "y", "x")
    tensor = _as_tensor(maps, images, f"maps of {name!r}")
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return Attribution(name, {"definition": "given as maps"}, maps=tensor, targets=targets)


def _as_tensor(values: Any, images: Tensor, noun: str) -> Tensor:
    """Return a tensor on the CPU, with the shape (B, H, W) of the images."""
    try:
        tensor = (
            values.detach().cpu()
            if isinstance(values, Tensor)
            else torch.from_numpy(np.array(values))
        )
    except (TypeError, ValueError) as error:
        raise TypeError(f"expected {noun}, an array (B, H, W), got {values!r}") from error
    expected = (len(images), *images.shape[2:])
    if tuple(tensor.shape) != expected:
        raise ValueError(f"expected {noun} of shape {expected}, got {tuple(tensor.shape)}")
    return tensor
