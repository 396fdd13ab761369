"""``faithfulness()``: how well maps say what the model depends on, by image and method, labelled."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.attribution.agreement import rank_correlation
from tcnn_probe.attribution.candidates import Candidate, as_masks, find_candidates, targets_of
from tcnn_probe.attribution.deletion import area_under, deletion_curve, insertion_curve
from tcnn_probe.attribution.given import captum, find_targets
from tcnn_probe.attribution.localization import energy_inside, pointing_game
from tcnn_probe.attribution.metrics import METRICS
from tcnn_probe.attribution.perturbation import infidelity, sensitivity
from tcnn_probe.attribution.saliency import compute_maps
from tcnn_probe.models import as_images, check_batch_size, progress_bar, untouched
from tcnn_probe.provenance import provenance

__all__ = ["faithfulness"]

_OF_MASKS = ("energy_inside", "pointing_game")
_BY_CAPTUM = ("infidelity", "sensitivity")


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
    """How well saliency says what a model's score depends on, or where the object is.

    ::

        scores = tcnn_probe.faithfulness(model, images, ["class_attention", "gradcam"], masks=masks)
        print(scores.pointing_game.mean("image").to_pandas())
        print(tcnn_probe.bootstrap_interval(scores.pointing_game).to_pandas())

    ================== ========= ======= ===========================================================================
    metric             range     better  what it is
    ================== ========= ======= ===========================================================================
    "deletion_auc"     0 to 1    lower   mean probability of the target while pixels are replaced by the baseline,
                                         the most salient first (RISE)
    "insertion_auc"    0 to 1    higher  the same while they are put into a blurred image (RISE)
    "energy_inside"    0 to 1    higher  share of the positive saliency inside the mask (Score-CAM)
    "pointing_game"    0 to 1    higher  whether the most salient pixel lies on the mask (Zhang et al. 2018)
    "infidelity"       from 0    lower   squared error of what saliency says of covering a square (Yeh et al. 2019)
    "sensitivity"      from 0    lower   how far a map moves when the image hardly does (Yeh et al. 2019)
    "rank_correlation" -1 to 1   neither Spearman's, between each two methods (Adebayo et al. 2018)
    ================== ========= ======= ===========================================================================

    The functions of these names in :mod:`tcnn_probe.attribution` (``deletion_curve`` and ``insertion_curve`` with
    ``area_under`` for the first two) give the definitions and take plain tensors. A constant map says nothing and
    scores as chance does: pixels of equal saliency go in random order, several maxima count by their share on the
    mask, and its correlation is NaN. A map with a NaN has NaN for scores.

    Args:
        model: gives a score for each class, shape (B, K).
        images: as the model takes them, shape (B, C, H, W).
        saliency: what :func:`tcnn_probe.saliency` gave; or names of its methods, or functions
            ``(model, images, target) -> maps``, to compute now; or a mapping from names to any of these, or to maps of
            shape (B, H, W).
        target: see :func:`tcnn_probe.saliency`; None for the target that the given maps are of, where they say so.
        masks: where the objects are, shape (B, H, W), bool; ``energy_inside`` and ``pointing_game`` need them.
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
        progress: see :func:`tcnn_probe.saliency`.

    Returns:
        dims (method, image), and (method, other, image) of ``rank_correlation``, float64; ``attrs`` say what each
        variable is, and ``attrs["missing"]`` of sensitivity, in JSON, why it is NaN for a method: it needs one that can
        be computed again. One method is ``scores.sel({"method": "gradcam"})``: a keyword ``method`` of xarray's ``sel``
        means something else.

    Raises:
        ValueError, TypeError: images, maps, masks, methods, metrics or options that cannot be; or a metric that was
            asked for and lacks masks, or a method that can be computed again.
        ModuleNotFoundError: captum is needed, and not installed.
    """
    images = as_images(images)
    check_batch_size(batch_size)
    candidates = find_candidates(saliency, images, options or {})
    masks = None if masks is None else as_masks(masks, images)
    chosen = _choose(metrics, candidates, masks is not None)
    given = targets_of(candidates) if target is None else target
    settings = {"steps": steps, "baseline": baseline, "start": start, "tolerance": tolerance, "samples": samples}
    settings |= {"radius": radius, "seed": seed}
    with untouched(model):
        targets = find_targets(model, images, given, batch_size)
        scoring = _Scoring(model, images, targets, masks, batch_size, settings)
        with progress_bar(len(candidates) * (1 + len(chosen)) * len(images), "faithfulness", progress) as bar:
            found = _scores(scoring, candidates, chosen, lambda: bar.update(len(images)))
    return _dataset(found, candidates, scoring)


@dataclass(frozen=True)
class _Scoring:
    """All that measures need but the maps."""

    model: nn.Module
    images: Tensor
    targets: Tensor
    masks: Tensor | None
    batch_size: int
    settings: Mapping[str, Any]

    def score(self, metric: str, maps: Tensor, candidate: Candidate) -> Tensor:
        """Of each image, shape (B,)."""
        options = {name: self.settings[name] for name in METRICS[metric].options}
        if metric in _OF_MASKS:
            assert self.masks is not None
            of_masks = energy_inside if metric == "energy_inside" else pointing_game
            return of_masks(maps, self.masks, **options)
        options["batch_size"] = self.batch_size
        if metric == "sensitivity":
            if candidate.explainer is None:
                return torch.full((len(maps),), torch.nan, dtype=torch.float64)
            explain = partial(_explain, candidate, self.model, self.batch_size)
            return sensitivity(self.model, self.images, explain, self.targets, **options)
        if metric == "infidelity":
            return infidelity(self.model, self.images, maps, self.targets, **options)
        curve = deletion_curve if metric == "deletion_auc" else insertion_curve
        return area_under(*curve(self.model, self.images, maps, self.targets, **options))


def _explain(candidate: Candidate, model: nn.Module, batch_size: int, images: Tensor, targets: Tensor) -> Tensor:
    assert candidate.explainer is not None
    return candidate.explainer(model, images, targets, batch_size)[0]


def _scores(scoring: _Scoring, candidates: Sequence[Candidate], chosen: Sequence[str], done: Any) -> dict[str, Tensor]:
    maps = []
    for one in candidates:
        maps.append(
            compute_maps(one.explainer, scoring.model, scoring.images, scoring.targets, scoring.batch_size)[0]
            if one.maps is None and one.explainer is not None
            else one.maps
        )
        done()
    found: dict[str, Tensor] = {}
    for metric in chosen:
        rows = []
        for one, of_one in zip(candidates, maps, strict=True):
            assert of_one is not None
            if metric == "rank_correlation":
                rows.append(torch.stack([rank_correlation(of_one, other) for other in maps if other is not None]))
            else:
                rows.append(scoring.score(metric, of_one, one))
            done()
        found[metric] = torch.stack(rows)
    return found


def _choose(metrics: str | Collection[str] | None, candidates: Sequence[Candidate], has_masks: bool) -> list[str]:
    """The names of the metrics, if they can be computed."""
    computed = any(one.explainer is not None for one in candidates)
    if metrics is None:
        without = [*([] if has_masks else _OF_MASKS), *([] if computed else ["sensitivity"])]
        without += [] if len(candidates) > 1 else ["rank_correlation"]
        chosen = [name for name in METRICS if name not in without]
    else:
        chosen = [metrics] if isinstance(metrics, str) else list(metrics)
        if strange := [name for name in chosen if name not in METRICS]:
            raise ValueError(f"expected metrics among {list(METRICS)}, got {strange[0]!r}")
        if not has_masks and (lacking := [name for name in chosen if name in _OF_MASKS]):
            raise ValueError(f"{lacking[0]!r} needs masks, which say where the objects are: masks=, shape (B, H, W)")
        if "sensitivity" in chosen and not all(one.explainer for one in candidates):
            given = next(one.name for one in candidates if one.explainer is None)
            raise ValueError(
                f"'sensitivity' needs methods that can be computed again, by name or as functions; {given!r} was given "
                "as maps"
            )
    if "captum" in _packages(chosen):
        captum("metrics")
    return chosen


def _packages(chosen: Collection[str]) -> set[str]:
    return {"captum"} if any(name in _BY_CAPTUM for name in chosen) else set()


def _dataset(found: Mapping[str, Tensor], candidates: Sequence[Candidate], scoring: _Scoring) -> xr.Dataset:
    names = np.array([one.name for one in candidates], dtype=object)
    coords = {"method": names, "image": range(len(scoring.images)), "target": ("image", scoring.targets.numpy())}
    if "rank_correlation" in found:
        coords["other"] = names
    variables = {name: _variable(name, values, scoring.settings) for name, values in found.items()}
    if "sensitivity" in variables:
        missing = {one.name: one.reason for one in candidates if one.explainer is None}
        variables["sensitivity"].attrs["missing"] = json.dumps(missing)
    packages = _packages(found).union(*(one.packages for one in candidates))
    methods = json.dumps({one.name: one.about for one in candidates})
    return xr.Dataset(variables, coords, {**provenance(scoring.model, *sorted(packages)), "methods": methods})


def _variable(name: str, values: Tensor, settings: Mapping[str, Any]) -> xr.Variable:
    dims = ("method", "other", "image") if values.ndim == 3 else ("method", "image")
    used = {option: settings[option] for option in METRICS[name].options}
    attrs = METRICS[name].attrs | {"options": json.dumps(used, default=lambda x: f"tensor of shape {tuple(x.shape)}")}
    return xr.Variable(dims, values.numpy(), attrs)
