"""``robustness()``: what models decide of images, corrupted, attacked or from other test sets, as a dataset."""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from tcnn_probe.evaluation.adversarial import Ascent, as_attacks
from tcnn_probe.evaluation.checks import as_labels, as_pixels, check_distinct, check_labels, whole_numbers
from tcnn_probe.evaluation.classifier import Classifier, Model, Normalization, as_classifier, quiet
from tcnn_probe.evaluation.corrupt_images import corrupt
from tcnn_probe.evaluation.corruptions.frost_pictures import read_photographs
from tcnn_probe.evaluation.corruptions.table import CORRUPTIONS, named_corruptions
from tcnn_probe.evaluation.imagenet_variants import Variant
from tcnn_probe.evaluation.summary import as_dataset
from tcnn_probe.models import progress_bar, whole_number
from tcnn_probe.provenance import versions

__all__ = ["robustness"]

Decisions = tuple[NDArray[Any], NDArray[Any]]
"""Predictions and confidences, images last."""


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
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure which images models get right: as they are, corrupted, attacked, and from other test sets.

    ::

        ds = tcnn_probe.evaluation.robustness({"cnn": cnn, "tcnn": tcnn}, images, labels, severities=(1, 3, 5))
        print(ds.accuracy.groupby("group").mean(["corruption", "severity", "seed"]).to_pandas())

    A prediction is the class of the highest score, the first of equal ones; its confidence is the softmax of the scores
    there. With a NaN among the scores the prediction is -1, which is wrong, and the confidence NaN; this is counted in
    ``attrs["nan_scores"]`` and warned of. Each model is attacked itself, with the true classes, and also on images that
    it had wrong before.

    Args:
        models: a module, which runs in eval mode and is afterwards as it was, or a function, which is called as it is
            (one that ablates heads, for example); or several, by name. From normalised images to scores (B, K).
        images: in pixel space, in [0, 1], before normalisation: a tensor or an array, shape (N, C, H, W), with
            ``labels``; or batches (images, labels), such as a DataLoader, which is read once: each batch is corrupted
            once for each setting and shown to all models.
        labels: classes, shape (N,).
        corruptions: names in ``tcnn_probe.evaluation.CORRUPTIONS``, or groups of them; None for all, () for none.
        severities: 1 to 5.
        attacks: of "fgsm" and "pgd"; () for none. With options: ``{"pgd": {"epsilon": 2 / 255, "steps": 10}}``.
        seeds: of what is random in corruptions and attacks; image i is that of (seed, i), whatever the batches are.
        variants: other test sets (:func:`tcnn_probe.evaluation.imagenet_variant`).
        normalization: as of :func:`tcnn_probe.evaluation.pgd`; or by the models' names.
        frost: as of :func:`tcnn_probe.evaluation.corrupt`.
        batch_size: of a tensor or an array.
        device: where images are put; None: where each module is, and for functions, where they are.
        progress: whether to show a progress bar; None: once it takes more than three seconds, on a terminal.

    Returns:
        a dataset of what was asked for. Per image: ``prediction`` (int32), ``confidence`` (float32) and ``correct``
        (bool), each (model, corruption, severity, seed, image); ``clean_prediction``, ... (model, image) and
        ``adversarial_prediction``, ... (model, attack, seed, image). Means of correct over images: ``accuracy``,
        ``clean_accuracy``, ``adversarial_accuracy``; and ``variant_accuracy`` (model, variant) over ``variant_images``
        (variant). Each mean has its binomial standard error √(p(1 - p)/n), with ``_se`` added to its name.
        Coordinates: ``group`` of each corruption, ``label`` of each image.

    Raises:
        ValueError, TypeError: models, images, labels or options of another kind or out of range.
    """
    members = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not members:
        raise ValueError("expected one model at least, got none")
    sets = _as_variants(variants)
    measuring = _Measurement(
        members,
        _by_model(normalization, members),
        named_corruptions(corruptions),
        whole_numbers(severities, "severities", 1, 5),
        as_attacks(attacks),
        whole_numbers(seeds, "seeds"),
        None if frost is None else read_photographs(frost),
        device,
    )
    batches, count = _as_batches(images, labels, batch_size)
    known = sum(len(one.loader) for one in sets if isinstance(one.loader, Sized))
    total = None if count is None else (count * measuring.passes() + known) * len(members)
    found: dict[str, list[NDArray[Any]]] = {}
    first = 0
    with quiet(*members.values()), progress_bar(total, "robustness", progress, "batch") as bar:
        measuring.done = bar.update
        for pixels, targets in batches:
            for name, part in measuring.batch(pixels, targets, first).items():
                found.setdefault(name, []).append(part)
            first += len(pixels)
        if not first:
            raise ValueError("expected batches (images, labels), got none")
        by_variant = {one.name: measuring.variant(one) for one in sets}
    if measuring.nan:
        warnings.warn(f"scores with NaN, counted as wrong: {dict(measuring.nan)}", RuntimeWarning, stacklevel=2)
    decisions = {name: np.concatenate(rows, -1) for name, rows in found.items()}
    return as_dataset(decisions, by_variant, measuring.coordinates(), measuring.attrs())


@dataclass
class _Measurement:
    """The models at work on what was asked for."""

    models: Mapping[str, Model]
    normalizations: Mapping[str, Normalization | None]
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    attacks: dict[str, Ascent]
    seeds: tuple[int, ...]
    frost: list[NDArray[Any]] | None
    device: torch.device | str | None
    done: Callable[[int], Any] = lambda count: None
    nan: Counter[str] = field(default_factory=Counter)
    normalized: dict[str, Any] = field(default_factory=dict)

    def passes(self) -> int:
        """How often a model sees each image; what is not random is seen once for all seeds."""
        draws = [bool(CORRUPTIONS[name].random) for name in self.corruptions for _ in self.severities]
        draws += [ascent.random_start for ascent in self.attacks.values()]
        return 1 + sum(len(self.seeds) if random else 1 for random in draws)

    def batch(self, images: Tensor, labels: Tensor, first: int) -> dict[str, NDArray[Any]]:
        """Predictions and confidences, as they are and perturbed, (model, ..., B), and the images' labels, (B,)."""
        if labels.ndim != 1:
            raise ValueError("expected one label for each image, (B,); only variants have several")
        judges = self._judges(images, None)
        found = {"label": labels.numpy()} | _named("clean_", self._decide(judges, images, labels))
        if self.corruptions:
            found |= _named("", self._corrupted(judges, images, labels, first))
        if self.attacks:
            found |= _named("adversarial_", self._attacked(judges, images, labels, first))
        return found

    def variant(self, variant: Variant) -> NDArray[Any]:
        """Which images are right, (model, image)."""
        rows = []
        for images, labels in _as_batches(variant.loader, None, 1)[0]:
            predictions = self._decide(self._judges(images, variant.classes), images, labels)[0]
            rows.append(_right(predictions, labels.numpy()))
        if not rows:
            raise ValueError(f"expected images of the variant {variant.name!r}, got none")
        return np.concatenate(rows, -1)

    def coordinates(self) -> dict[str, Any]:
        """The dimensions of the arrays by image."""
        groups = [CORRUPTIONS[name].group for name in self.corruptions]
        names = {"model": self.models, "corruption": self.corruptions, "attack": self.attacks}
        found: dict[str, Any] = {dim: np.array(list(labels), dtype=object) for dim, labels in names.items()}
        found["group"] = "corruption", np.array(groups, dtype=object)
        return found | {"severity": list(self.severities), "seed": list(self.seeds)}

    def attrs(self) -> dict[str, str]:
        """Options, found numbers and versions."""
        options = {
            "models": {name: getattr(model, "__name__", type(model).__name__) for name, model in self.models.items()},
            "normalization": self.normalized,
            "nan_scores": self.nan,
            "attacks": {name: vars(ascent) for name, ascent in self.attacks.items()},
        }
        about = versions() | {"frost": "made" if self.frost is None else "given"}
        return about | {name: json.dumps(option) for name, option in options.items()}

    def _judges(self, images: Tensor, classes: tuple[int, ...] | None) -> dict[str, Classifier]:
        channels, given = images.shape[1], self.normalizations
        judges = {n: as_classifier(m, given[n], channels, classes, self.device) for n, m in self.models.items()}
        self.normalized = {name: [judge.mean, judge.std] for name, judge in judges.items()}
        return judges

    def _corrupted(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor, first: int) -> Decisions:
        rows: list[Decisions] = []
        for name, severity, seed in product(self.corruptions, self.severities, self.seeds):
            if seed != self.seeds[0] and not CORRUPTIONS[name].random:
                rows.append(rows[-1])
                continue
            worse = corrupt(images, name, severity, seed=seed, first=first, frost=self.frost)
            rows.append(self._decide(judges, worse, labels))
        return _stacked(rows, (len(self.corruptions), len(self.severities), len(self.seeds)))

    def _attacked(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor, first: int) -> Decisions:
        rows: list[Decisions] = []
        for ascent, seed in product(self.attacks.values(), self.seeds):
            if seed != self.seeds[0] and not ascent.random_start:
                rows.append(rows[-1])
                continue
            attacked = ((name, judge, ascent(judge, images, labels, seed, first)) for name, judge in judges.items())
            each = [self._decide({name: judge}, x, labels) for name, judge, x in attacked]
            rows.append((np.concatenate([one[0] for one in each]), np.concatenate([one[1] for one in each])))
        return _stacked(rows, (len(self.attacks), len(self.seeds)))

    @torch.no_grad()
    def _decide(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor) -> Decisions:
        """Each model's best class, (model, B), -1 where a score is NaN; and the softmax of the scores there."""
        rows = []
        for name, judge in judges.items():
            scores = judge(judge.place(images))
            check_labels(labels, scores.shape[1], f"the model {name!r}")
            best, sure = scores.argmax(1), scores.float().softmax(1).amax(1)
            nan = scores.isnan().any(1)
            if nan.any():
                self.nan[name] += int(nan.sum())
                best, sure = best.masked_fill(nan, -1), sure.masked_fill(nan, torch.nan)
            rows.append((best.int().cpu().numpy(), sure.cpu().numpy()))
            self.done(1)
        predictions, confidences = (np.stack(each) for each in zip(*rows, strict=True))
        return predictions, confidences


def _named(kind: str, decisions: Decisions) -> dict[str, NDArray[Any]]:
    return {f"{kind}prediction": decisions[0], f"{kind}confidence": decisions[1]}


def _stacked(rows: list[Decisions], shape: tuple[int, ...]) -> Decisions:
    """Rows of (model, B) as (model, *shape, B)."""
    first, second = (np.stack([row[of] for row in rows], 1) for of in (0, 1))
    models, _, images = first.shape
    return first.reshape(models, *shape, images), second.reshape(models, *shape, images)


def _right(predictions: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
    """Whether predictions (model, B) are the labels (B,) or one of the labels, bool (B, K)."""
    if labels.ndim == 1:
        return predictions == labels
    return np.take_along_axis(labels.T, predictions, 0) & (predictions >= 0)


def _by_model(given: Any, models: Mapping[str, Model]) -> dict[str, Normalization | None]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(models, given)
    if unknown := [name for name in given if name not in models]:
        raise ValueError(f"expected normalization by the models' names, {', '.join(models)}; got {unknown[0]!r}")
    return {name: given.get(name) for name in models}


def _as_variants(given: Any) -> tuple[Variant, ...]:
    variants = (given,) if isinstance(given, Variant) else tuple(given)
    for one in variants:
        if not isinstance(one, Variant):
            raise TypeError(f"expected variants, as imagenet_variant gives them, got {type(one).__name__}")
    check_distinct([one.name for one in variants], "variants")
    return variants


def _as_batches(images: Any, labels: Any, batch_size: int) -> tuple[Iterator[tuple[Tensor, Tensor]], int | None]:
    """Batches of images and labels, each checked when it is due; and how many there are, if that is known."""
    if isinstance(images, Tensor | np.ndarray):
        step = whole_number(batch_size, "batch_size", 1)
        pixels = as_pixels(images)
        targets = as_labels(labels, len(pixels))
        starts = range(0, len(pixels), step)
        return ((pixels[i : i + step], targets[i : i + step]) for i in starts), len(starts)
    if not isinstance(images, Iterable) or labels is not None:
        raise TypeError(
            "expected images, a tensor or an array (N, C, H, W), and labels, or only an iterable of (images, labels) "
            f"batches; got {type(images).__name__}"
        )
    return (_as_batch(each) for each in images), len(images) if isinstance(images, Sized) else None


def _as_batch(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"expected batches (images, labels), got {type(batch).__name__}")
    pixels, labels = as_pixels(batch[0]), batch[1]
    if not isinstance(labels, Tensor) or labels.dtype != torch.bool:
        return pixels, as_labels(labels, len(pixels))
    if labels.ndim != 2 or len(labels) != len(pixels):
        raise ValueError(f"expected labels of {len(pixels)} images, (B,), or, bool, (B, K); got {tuple(labels.shape)}")
    return pixels, labels.detach().cpu()
