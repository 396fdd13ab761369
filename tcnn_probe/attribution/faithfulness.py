"""``faithfulness()``: labelled measures
of how well maps show the pixels on which a model depends.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
from tcnn_probe.attribution.pixels import is_constant
from tcnn_probe.attribution.saliency import as_json, find_targets, first_paragraph
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

        maps = tcnn_probe.saliency(model, images, method=["class_attention", "gradcam"])
        scores = tcnn_probe.faithfulness(model, images, maps, masks=masks)
        print(scores.pointing_game.mean("image").to_pandas())
        print(tcnn_probe.evaluation.mean_interval(scores.sel(attribution="gradcam").pointing_game))

    The metrics are "deletion_auc", "insertion_auc", "energy_inside", "pointing_game" and
    "rank_correlation". The functions of these names in :mod:`tcnn_probe.attribution`
    (``deletion_curve`` and ``insertion_curve`` with ``area_under`` for the first two) take plain
    tensors. A constant map shows nothing: its scores are NaN, with a warning. The scores of a map
    with a NaN are NaN.

    Args:
        model: Model that returns a score for each class, shape (B, K), or an object with such
            ``logits``.
        images: Images that the model takes, shape (B, C, H, W), or the output of a processor of
            transformers, see :func:`tcnn_probe.saliency`.
        saliency: Maps from :func:`tcnn_probe.saliency`, of one method or several; or a mapping from
            names to such maps, or to arrays of shape (B, H, W).
        target: Classes, see :func:`tcnn_probe.saliency`; None for those of the given maps, if they
            have targets.
        masks: Masks of the objects, shape (B, H, W), bool; "energy_inside" and "pointing_game" need
            them.
        metrics: Names; None for all metrics that can be computed from the other arguments.
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
        ValueError, TypeError: Images, maps, masks or metrics have another type or are out of range;
            or a requested metric lacks masks, or a score: the model gives features, or one number
            and no ``score``.
    """
    inputs, images = beside_images(images), as_images(images, model)
    batch_size = whole_number(batch_size, "batch_size", 1)
    if inputs:  # it is not known which of them have a row for each image
        batch_size = len(images)
    labelled = _by_name(saliency)
    maps = {name: _as_maps(values, images, name) for name, values in labelled.items()}
    masks = None if masks is None else _as_masks(masks, images)
    selected = _select_metrics(metrics, len(maps), masks is not None)
    # Maps must be judged by the score of the class that they explain.
    if target is None:
        target = _targets_of(labelled)
    settings = {
        "steps": steps,
        "baseline": baseline,
        "start": start,
        "score": score,
        "tolerance": tolerance,
        "seed": seed,
    }
    variables: dict[str, xr.Variable] = {}
    total = len(maps) * len(selected) * len(images)
    with (
        untouched(model),
        calls_given(model, inputs),
        progress_bar(total, "faithfulness", progress) as bar,
    ):
        try:
            targets, settings["score"] = find_targets(
                model, images, target, batch_size, score, default="softmax"
            )
        except NoScoreError as error:
            needing = [name for name, metric in selected.items() if metric.takes == "maps"]
            if needing:
                free = [name for name, metric in METRICS.items() if metric.takes != "maps"]
                raise ValueError(
                    f"{', '.join(map(repr, needing))}: {error}. Metrics that need no score: {free}"
                ) from error
            targets = None
        constant = {name: is_constant(judged) for name, judged in maps.items()}
        for name, metric in selected.items():
            parameters = inspect.signature(metric.function).parameters
            # A metric gets the settings for which its function has a parameter.
            used = {key: settings[key] for key in parameters if key in settings}
            scores = []
            for attribution, judged in maps.items():
                if metric.takes == "masks":
                    result = metric.function(judged, masks, **used)
                elif metric.takes == "others":
                    result = torch.stack([metric.function(judged, x) for x in maps.values()])
                else:
                    result = metric.function(
                        model, images, judged, targets, batch_size=batch_size, **used
                    )
                values = area_under(*result) if isinstance(result, tuple) else result
                is_flat = constant[attribution].to(values.device)
                scores.append(values.masked_fill(is_flat, torch.nan))
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
    flat_maps = {name: int(is_flat.sum()) for name, is_flat in constant.items()}
    if any(flat_maps.values()):
        counts = ", ".join(f"{n} of {name!r}" for name, n in flat_maps.items() if n)
        warnings.warn(
            f"constant maps, which show nothing and are not scored: {counts}",
            RuntimeWarning,
            stacklevel=2,
        )
    names = np.array(list(maps), dtype=object)
    coords: dict[str, Any] = {"attribution": names, "image": range(len(images))}
    if targets is not None:
        coords["target"] = "image", targets.numpy()
    if "rank_correlation" in selected:
        coords["other"] = names
    attrs = provenance(model, "captum")
    attrs["attributions"] = as_json(
        {name: getattr(values, "attrs", {}) for name, values in labelled.items()}
    )
    return xr.Dataset(variables, coords, attrs)


def _select_metrics(
    metrics: str | Collection[str] | None, attributions: int, has_masks: bool
) -> dict[str, Metric]:
    """Return the metrics by name; raise ValueError for one that cannot be computed."""
    if metrics is None:
        lacking = {"masks": not has_masks, "others": attributions == 1}
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


def _by_name(saliency: Any) -> dict[str, Any]:
    """Return maps by the name of their method, or the user's name."""
    if isinstance(saliency, xr.DataArray):
        saliency = {saliency.attrs.get("method", "saliency"): saliency}
    if not isinstance(saliency, Mapping) or not saliency:
        raise TypeError(
            "expected maps, tcnn_probe.saliency(model, images, method=...), or {'name': maps}; got "
            f"{saliency if isinstance(saliency, str | Mapping) else type(saliency).__name__!r}"
        )
    return {str(name): values for name, values in saliency.items()}


def _targets_of(labelled: Mapping[str, Any]) -> Tensor | None:
    """Return the classes that maps explain, shape (B,), or None if no map has targets."""
    known = {
        # The array is copied because torch warns of arrays that are not writable.
        name: torch.from_numpy(np.array(maps.target))
        for name, maps in labelled.items()
        if isinstance(maps, xr.DataArray) and "target" in maps.coords
    }
    first = next(iter(known), "")
    for name, targets in known.items():
        if not torch.equal(targets, known[first]):
            raise ValueError(
                f"the maps {first!r} and {name!r} explain different targets: choose one with "
                "target="
            )
    return known.get(first)


def _as_masks(masks: Any, images: Tensor) -> Tensor:
    """Return masks as a bool tensor, shape (B, H, W), on the CPU."""
    tensor = _as_tensor(masks, images, "masks")
    if tensor.dtype != torch.bool:
        raise TypeError(f"expected masks of dtype bool, True on the object, got {tensor.dtype}")
    return tensor


def _as_maps(maps: Any, images: Tensor, name: str) -> Tensor:
    """Return maps as a tensor (B, H, W) on the CPU, in float32 at least."""
    if isinstance(maps, xr.DataArray):
        maps = maps.transpose("image", "y", "x")
    tensor = _as_tensor(maps, images, f"maps of {name!r}")
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


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
