"""``faithfulness()``: how well maps say what the model depends on, by image and method, labelled."""

import inspect
import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.attribution.deletion import area_under
from tcnn_probe.attribution.given_maps import as_masks, find_attributions, targets_of
from tcnn_probe.attribution.methods import Attribution, as_json
from tcnn_probe.attribution.metrics import METRICS, Metric
from tcnn_probe.attribution.saliency import find_targets, maps_of
from tcnn_probe.images import as_images
from tcnn_probe.models import progress_bar, untouched, whole_number
from tcnn_probe.provenance import provenance

__all__ = ["faithfulness"]

_MAPS_ALONE = "given as maps, which cannot be computed for a changed image"


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
    tolerance: float = 0.0,
    samples: int = 16,
    radius: float = 0.02,
    seed: int = 0,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure how well saliency says what a model's score depends on, or where the object is.

    ::

        scores = tcnn_probe.faithfulness(model, images, ["class_attention", "gradcam"], masks=masks)
        print(scores.pointing_game.mean("image").to_pandas())
        print(tcnn_probe.evaluation.mean_interval(scores.sel(attribution="gradcam").pointing_game))

    The metrics are "deletion_auc", "insertion_auc", "energy_inside", "pointing_game", "infidelity", "sensitivity" and
    "rank_correlation". The functions of these names in :mod:`tcnn_probe.attribution` (``deletion_curve`` and
    ``insertion_curve`` with ``area_under`` for the first two) take plain tensors. A constant map scores as chance does,
    and its correlation is NaN. A map with a NaN has NaN for scores.

    Args:
        model: gives a score for each class, shape (B, K).
        images: as the model takes them, shape (B, C, H, W).
        saliency: what :func:`tcnn_probe.saliency` gave; or methods as it takes them, to compute now; or a mapping from
            names to any of these, or to maps of shape (B, H, W).
        target: as of :func:`tcnn_probe.saliency`; None for the target that the given maps are of, where they say so.
        masks: where the objects are, shape (B, H, W), bool; "energy_inside" and "pointing_game" need them.
        metrics: names; None for all that can be computed from what is given.
        options: of the methods that are computed now, by name.
        batch_size: images in the model at a time.
        steps: of the deletion and insertion curves.
        baseline: what replaces pixels, in deletion and infidelity: a number, or an image (C, H, W).
        start: of insertion: "blur", or a number or an image.
        tolerance: of the pointing game, in pixels.
        samples: of infidelity and sensitivity: how many random changes of each image.
        radius: of sensitivity: by how much each number of the image changes at most.
        seed: of all that is random; the same for each image, whatever the batches are.
        progress: as of :func:`tcnn_probe.saliency`.

    Returns:
        dims (attribution, image), and (attribution, other, image) of "rank_correlation", float64; ``attrs`` say what
        each variable is, and ``attrs["missing"]`` of sensitivity, in JSON, why it is NaN for some: it needs a method
        that can be computed again.

    Raises:
        ValueError, TypeError: images, maps, masks, methods, metrics or options of another kind or out of range; a
            metric that was asked for, and lacks masks or a method that can be computed again.
    """
    images = as_images(images, model)
    batch_size = whole_number(batch_size, "batch_size", 1)
    attributions = find_attributions(saliency, images, options or {})
    masks = None if masks is None else as_masks(masks, images)
    chosen = _choose(metrics, attributions, masks is not None)
    given = targets_of(attributions) if target is None else target
    settings = {"steps": steps, "baseline": baseline, "start": start, "tolerance": tolerance, "samples": samples}
    settings |= {"radius": radius, "seed": seed}
    variables: dict[str, xr.Variable] = {}
    total = len(attributions) * (1 + len(chosen)) * len(images)
    with untouched(model), progress_bar(total, "faithfulness", progress) as bar:
        targets = find_targets(model, images, given, batch_size)
        maps = [maps_of(one, model, images, targets, batch_size, bar.update)[0] for one in attributions]
        for name, metric in chosen.items():
            used = {key: settings[key] for key in inspect.signature(metric.function).parameters if key in settings}
            scores = []
            for one, judged in zip(attributions, maps, strict=True):
                if metric.takes == "masks":
                    score = metric.function(judged, masks, **used)
                elif metric.takes == "others":
                    score = torch.stack([metric.function(judged, other) for other in maps])
                elif metric.takes == "method" and one.explain is None:
                    score = torch.full((len(images),), torch.nan, dtype=torch.float64)
                else:
                    what = partial(_explain, one, model, batch_size) if metric.takes == "method" else judged
                    score = metric.function(model, images, what, targets, batch_size=batch_size, **used)
                scores.append(area_under(*score) if isinstance(score, tuple) else score)
                bar.update(len(images))
            dims = ("attribution", *(["other"] if metric.takes == "others" else []), "image")
            attrs = metric.attrs | {"options": as_json(used)}
            variables[name] = xr.Variable(dims, torch.stack(scores).numpy(), attrs)
    if "sensitivity" in chosen:
        missing = {one.name: _MAPS_ALONE for one in attributions if one.explain is None}
        variables["sensitivity"].attrs["missing"] = json.dumps(missing)

    names = np.array([one.name for one in attributions], dtype=object)
    coords = {"attribution": names, "image": range(len(images)), "target": ("image", targets.numpy())}
    if "rank_correlation" in chosen:
        coords["other"] = names
    attrs = provenance(model, "captum")
    attrs["attributions"] = json.dumps({one.name: dict(one.about) for one in attributions})
    return xr.Dataset(variables, coords, attrs)


def _choose(
    metrics: str | Collection[str] | None, attributions: Sequence[Attribution], has_masks: bool
) -> dict[str, Metric]:
    """The metrics, if they can be computed."""
    given = [one.name for one in attributions if one.explain is None]
    if metrics is None:
        lacking = {"masks": not has_masks, "method": len(given) == len(attributions), "others": len(attributions) == 1}
        names = [name for name, metric in METRICS.items() if not lacking.get(metric.takes)]
    else:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(f"expected metrics among {list(METRICS)}, got {name!r}")
        if METRICS[name].takes == "masks" and not has_masks:
            raise ValueError(f"{name!r} needs masks, which say where the objects are: masks=, shape (B, H, W)")
        if METRICS[name].takes == "method" and given and metrics is not None:
            raise ValueError(f"{name!r} needs methods, by name or as functions; {given[0]!r} was {_MAPS_ALONE}")
    return {name: METRICS[name] for name in names}


def _explain(one: Attribution, model: nn.Module, batch_size: int, images: Tensor, targets: Tensor) -> Tensor:
    assert one.explain is not None
    return one.explain(model, images, targets, batch_size)[0]
