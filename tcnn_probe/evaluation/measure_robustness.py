"""``robustness()``: the decisions of models on corrupted,
attacked and other images, as a dataset.
"""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from tcnn_probe.evaluation.adversarial import Ascent, as_attacks
from tcnn_probe.evaluation.checks import (
    as_labels,
    as_pixels,
    check_distinct,
    check_labels,
    whole_numbers,
)
from tcnn_probe.evaluation.classifier import (
    Classifier,
    Model,
    Normalization,
    as_classifier,
    restored,
)
from tcnn_probe.evaluation.corrupt_images import corrupt
from tcnn_probe.evaluation.corruptions.frost_pictures import read_photographs
from tcnn_probe.evaluation.corruptions.table import CORRUPTIONS, named_corruptions
from tcnn_probe.evaluation.imagenet_variants import Variant
from tcnn_probe.evaluation.summary import as_dataset
from tcnn_probe.images import as_pictures
from tcnn_probe.models import progress_bar, whole_number
from tcnn_probe.provenance import versions

__all__ = ["robustness"]

Classifiers = Mapping[str, Classifier]
Decisions = NDArray[np.float32]
"""Predictions and confidences, (2, model, ..., image); float32 holds class indices exactly."""


def robustness(
    models: Model | Mapping[str, Model],
    images: Any,
    labels: Any = None,
    *,
    corruptions: str | Collection[str] | None = None,
    severities: int | Collection[int] = (1, 2, 3, 4, 5),
    attacks: str | Collection[str] | Mapping[str, Mapping[str, Any]] = ("fgsm", "pgd"),
    seeds: int | Collection[int] = (0,),
    variants: Variant | Collection[Variant] = (),
    normalization: Normalization | Mapping[str, Normalization | None] | None = None,
    frost: Any = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    progress: bool | None = None,
) -> xr.Dataset:
    """Classify clean, corrupted and attacked images,
    and images of other test sets; record each decision.

    ::

        models = {"cnn": cnn, "tcnn": tcnn}
        ds = tcnn_probe.evaluation.robustness(models, images, labels, severities=(1, 3, 5))
        print(ds.accuracy.groupby("group").mean(["corruption", "severity", "seed"]).to_pandas())

    A prediction is the class with the highest score, the first of several equal ones; its
    confidence is its probability (``score``). With a NaN among the scores the prediction is -1,
    which is wrong, and the confidence NaN; such images are counted in ``attrs["nan_scores"]``, with
    a warning. Each model gets its own attacks, with the true classes, even on images that it
    classified wrongly before.

    Args:
        models: A module, which runs in eval mode and is restored afterwards, or a function, which
            is called as it is (to ablate heads, for example); or several, by name. They map
            normalised images to scores (B, K).
        images: Images in pixel space, in [0, 1], before normalisation: a tensor or an array, shape
            (N, C, H, W), with ``labels``; or pictures (:func:`tcnn_probe.images.as_images`) with
            ``labels``, which pass through the models' transform of timm without its normalisation;
            or batches (images, labels), such as a DataLoader, which is read once: each batch is
            corrupted once for each setting and passed to all models.
        labels: Classes of the images, shape (N,).
        corruptions: Names in ``tcnn_probe.evaluation.CORRUPTIONS``, or groups of them; None for
            all, () for none.
        severities: Severities of the corruptions, 1 to 5.
        attacks: "fgsm" and "pgd", or one of them; () for none. With options:
            ``{"pgd": {"epsilon": 2 / 255, "steps": 10}}``.
        seeds: Seeds of corruptions and attacks. Image i depends only on (seed, i), not on the
            batches.
        variants: Other test sets (:func:`tcnn_probe.evaluation.imagenet_variant`).
        normalization: Argument of :func:`tcnn_probe.evaluation.pgd`; or a mapping by the models'
            names.
        frost: Argument of :func:`tcnn_probe.evaluation.corrupt`.
        batch_size: Size of the batches of a tensor or an array.
        device: Device on which images are placed; None for that of each module, and for functions,
            that of the images.
        score: Probabilities of classes, for confidences: "softmax" over all classes, or "sigmoid"
            of each class by itself; a model with one output, the log-odds of class 1 against class
            0, needs "sigmoid".
        progress: Whether to show a progress bar; None to show it after three seconds, on a terminal
            or in a notebook.

    Returns:
        A dataset. For each image it has ``prediction`` (int32), ``confidence`` (float32) and
        ``correct`` (bool), each (model, corruption, severity, seed, image); ``clean_prediction``,
        ... (model, image) and ``adversarial_prediction``, ... (model, attack, seed, image). Means
        of correct over images are ``accuracy``, ``clean_accuracy``, ``adversarial_accuracy``; and
        ``variant_accuracy`` (model, variant) over ``variant_images`` (variant). Each mean has its
        binomial standard error √(p(1 - p)/n), with ``_se`` added to its name. Coordinates:
        ``group`` of each corruption, ``label`` of each image.

    Raises:
        ValueError, TypeError: Models, images, labels or options have another type or are out of
            range.
    """
    members = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not members:
        raise ValueError("expected at least one model, got none")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(
            f"expected score='softmax' or 'sigmoid', as predictions are classes, got {score!r}"
        )
    # Variants are classified last, but checked before the first forward.
    test_sets = _as_variants(variants)
    measurement = _Measurement(
        members,
        _by_model(normalization, members),
        named_corruptions(corruptions),
        whole_numbers(severities, "severities", 1, 5),
        as_attacks(attacks),
        whole_numbers(seeds, "seeds"),
        None if frost is None else read_photographs(frost),
        device,
        score,
    )
    batches, count = _as_batches(images, labels, batch_size, members)
    variant_batches = sum(
        len(variant.loader) for variant in test_sets if isinstance(variant.loader, Sized)
    )
    total = (
        None if count is None else (count * measurement.passes() + variant_batches) * len(members)
    )
    parts: defaultdict[str, list[Decisions]] = defaultdict(list)
    true_classes: list[NDArray[Any]] = []
    first = 0
    with (
        restored(*members.values()),
        progress_bar(total, "robustness", progress, "batch") as bar,
    ):
        measurement.update_progress = bar.update
        for pixels, targets in batches:
            for prefix, part in measurement.batch(pixels, targets, first).items():
                parts[prefix].append(part)
            true_classes.append(targets.numpy())
            # Images are numbered across batches, so that random draws do not depend on the batch
            # size.
            first += len(pixels)
        if not first:
            raise ValueError("expected batches (images, labels), got none")
        by_variant = {variant.name: measurement.variant(variant) for variant in test_sets}
    nan = dict(measurement.nan_scores)
    if nan:
        warnings.warn(f"scores with NaN, counted as wrong: {nan}", RuntimeWarning, stacklevel=2)
    # Images are the last axis of all arrays.
    decisions = {prefix: np.concatenate(rows, -1) for prefix, rows in parts.items()}
    coordinates = measurement.coordinates() | {"label": ("image", np.concatenate(true_classes))}
    return as_dataset(decisions, by_variant, coordinates, measurement.attrs())


@dataclass
class _Measurement:
    """The models, and the conditions under which they classify each batch."""

    models: Mapping[str, Model]
    normalizations: Mapping[str, Normalization | None]
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    attacks: dict[str, Ascent]
    seeds: tuple[int, ...]
    frost: list[NDArray[Any]] | None
    device: torch.device | str | None
    score: str
    update_progress: Callable[[int], Any] = lambda count: None
    nan_scores: Counter[str] = field(default_factory=Counter)
    normalized: dict[str, Any] = field(default_factory=dict)

    def passes(self) -> int:
        """Count the passes of an image through a model;
        conditions that are not random run once for all seeds.
        """
        random = [bool(CORRUPTIONS[name].random) for name in self.corruptions] * len(
            self.severities
        )
        random += [ascent.random_start for ascent in self.attacks.values()]
        return 1 + len(random) + sum(random) * (len(self.seeds) - 1)

    def batch(self, images: Tensor, labels: Tensor, first: int) -> dict[str, Decisions]:
        """Return the decisions on clean and perturbed images,
        by the prefix of their variables.
        """
        if labels.ndim != 1:
            raise ValueError("expected one label for each image, (B,); only variants have several")
        classifiers = self._classifiers(images, None)
        decisions = {"clean_": self._decide(classifiers, images, labels)}
        if self.corruptions:
            decisions[""] = self._corrupted(classifiers, images, labels, first)
        if self.attacks:
            decisions["adversarial_"] = self._attacked(classifiers, images, labels, first)
        return decisions

    def variant(self, variant: Variant) -> NDArray[Any]:
        """Return the right answers to a test set, bool (model, image)."""
        rows = []
        # The batch size has no effect, because a loader has its own.
        for images, labels in _as_batches(variant.loader, None, 1, self.models)[0]:
            classifiers = self._classifiers(images, variant.classes)
            predictions = self._decide(classifiers, images, labels)[0].astype(np.int64)
            rows.append(_right(predictions, labels.numpy()))
        if not rows:
            raise ValueError(f"expected images of the variant {variant.name!r}, got none")
        return np.concatenate(rows, -1)

    def coordinates(self) -> dict[str, Any]:
        """Return the coordinates of the conditions."""
        # Strings of dtype object are the same after a round trip through zarr; fixed-width strings
        # change their dtype.
        groups = [CORRUPTIONS[name].group for name in self.corruptions]
        return {
            "model": np.array(list(self.models), dtype=object),
            "corruption": np.array(self.corruptions, dtype=object),
            "group": ("corruption", np.array(groups, dtype=object)),
            "severity": list(self.severities),
            "attack": np.array(list(self.attacks), dtype=object),
            "seed": list(self.seeds),
        }

    def attrs(self) -> dict[str, str]:
        """Return the options, the number of scores with NaN, and versions."""
        options = {
            "models": {
                name: getattr(model, "__name__", type(model).__name__)
                for name, model in self.models.items()
            },
            "normalization": self.normalized,
            "nan_scores": self.nan_scores,
            "score": self.score,
            "attacks": {name: vars(ascent) for name, ascent in self.attacks.items()},
        }
        about = versions() | {"frost": "made" if self.frost is None else "given"}
        return about | {name: json.dumps(option) for name, option in options.items()}

    def _classifiers(
        self, images: Tensor, classes: tuple[int, ...] | None
    ) -> dict[str, Classifier]:
        classifiers = {}
        for name, model in self.models.items():
            normalization = self.normalizations[name]
            classifier = as_classifier(
                model,
                normalization,
                images.shape[1],
                classes,
                self.device,
                self.score,
            )
            self.normalized[name] = [classifier.mean, classifier.std]
            classifiers[name] = classifier
        return classifiers

    def _corrupted(
        self, classifiers: Classifiers, images: Tensor, labels: Tensor, first: int
    ) -> Decisions:
        rows: list[Decisions] = []
        for name, severity, seed in product(self.corruptions, self.severities, self.seeds):
            # A corruption that is not random is the same for all seeds.
            if seed != self.seeds[0] and not CORRUPTIONS[name].random:
                rows.append(rows[-1])
                continue
            corrupted = corrupt(images, name, severity, seed=seed, first=first, frost=self.frost)
            rows.append(self._decide(classifiers, corrupted, labels))
        return _stacked(rows, (len(self.corruptions), len(self.severities), len(self.seeds)))

    def _attacked(
        self, classifiers: Classifiers, images: Tensor, labels: Tensor, first: int
    ) -> Decisions:
        rows: list[Decisions] = []
        for ascent, seed in product(self.attacks.values(), self.seeds):
            if seed != self.seeds[0] and not ascent.random_start:
                # Without a random start the attack is the same for all seeds.
                rows.append(rows[-1])
                continue
            # Each model gets the images that are attacked against this model.
            by_model = []
            for name, classifier in classifiers.items():
                adversarial = ascent(classifier, images, labels, seed, first)
                by_model.append(self._decide({name: classifier}, adversarial, labels))
            rows.append(np.concatenate(by_model, 1))
        return _stacked(rows, (len(self.attacks), len(self.seeds)))

    @torch.no_grad()
    def _decide(self, classifiers: Classifiers, images: Tensor, labels: Tensor) -> Decisions:
        """Return each model's best class, -1 where a score is NaN, and its probability:
        (2, model, B).
        """
        by_model = []
        for name, classifier in classifiers.items():
            scores = classifier(classifier.place(images))
            check_labels(labels, scores.shape[1], f"the model {name!r}")
            prediction = scores.argmax(1).float()
            confidence = classifier.confidence(scores)
            # argmax treats NaN as the largest score, which would count as a decision.
            nan = scores.isnan().any(1)
            if nan.any():
                self.nan_scores[name] += int(nan.sum())
                prediction.masked_fill_(nan, -1)
                confidence.masked_fill_(nan, torch.nan)
            by_model.append(torch.stack([prediction, confidence]).cpu().numpy())
            self.update_progress(1)
        return np.stack(by_model, 1)


def _stacked(rows: list[Decisions], shape: tuple[int, ...]) -> Decisions:
    """Stack decisions (2, model, B) under several conditions as (2, model, *shape, B)."""
    stacked = np.stack(rows, 2)
    return stacked.reshape(*stacked.shape[:2], *shape, stacked.shape[-1])


def _right(predictions: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """Compare predictions (model, B) with labels (B,),
    or with the set of labels of each image, bool (B, K).
    """
    if labels.ndim == 1:
        return predictions == labels
    # Scores with NaN need a separate condition, because their prediction of -1 would look up the
    # last class.
    return np.take_along_axis(labels.T, predictions, 0) & (predictions >= 0)


def _by_model(normalization: Any, models: Mapping[str, Model]) -> dict[str, Normalization | None]:
    if not isinstance(normalization, Mapping):
        return dict.fromkeys(models, normalization)
    for name in normalization:
        if name not in models:
            raise ValueError(
                f"expected the models' names in normalization, {', '.join(models)}; got {name!r}"
            )
    return {name: normalization.get(name) for name in models}


def _as_variants(variants: Any) -> tuple[Variant, ...]:
    variants = (variants,) if isinstance(variants, Variant) else tuple(variants)
    check_distinct([variant.name for variant in variants], "variants")
    return variants


def _as_batches(
    images: Any, labels: Any, batch_size: int, models: Mapping[str, Model]
) -> tuple[Iterator[tuple[Tensor, Tensor]], int | None]:
    """Return an iterator over checked batches of images and labels,
    and their number, or None if it is unknown.
    """
    pictures = as_pictures(images)
    if pictures is not None or isinstance(images, Tensor | np.ndarray):
        step = whole_number(batch_size, "batch_size", 1)
        pixels = as_pixels(pictures or images, models.values())
        targets = as_labels(labels, len(pixels))
        parts = list(zip(pixels.split(step), targets.split(step), strict=True))
        return iter(parts), len(parts)
    if not isinstance(images, Iterable) or labels is not None:
        raise TypeError(
            "expected images (a tensor, an array (N, C, H, W) or pictures) and labels, or only an "
            f"iterable of (images, labels) batches; got {type(images).__name__}"
        )
    pairs = (_as_batch(batch, models) for batch in images)
    return pairs, len(images) if isinstance(images, Sized) else None


def _as_batch(batch: Any, models: Mapping[str, Model]) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"expected batches (images, labels), got {type(batch).__name__}")
    pixels, labels = as_pixels(batch[0], models.values()), batch[1]
    if not isinstance(labels, Tensor) or labels.dtype != torch.bool:
        return pixels, as_labels(labels, len(pixels))
    if labels.ndim != 2 or len(labels) != len(pixels):
        raise ValueError(
            f"expected labels of {len(pixels)} images, of shape (B,), or (B, K) and bool; got "
            f"{tuple(labels.shape)}"
        )
    return pixels, labels.detach().cpu()
