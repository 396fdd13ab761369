"""``robustness()``: which images models get right, corrupted, attacked or from elsewhere, labelled."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sized
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from tcnn_probe.models import progress_bar
from tcnn_probe.perturbations.adversarial import Ascent
from tcnn_probe.perturbations.corrupt import corrupt
from tcnn_probe.perturbations.corruptions import CORRUPTIONS
from tcnn_probe.perturbations.corruptions.frosted import read_photographs
from tcnn_probe.perturbations.given import Classifier, Model, Normalization, as_classifier, check_classes, quiet
from tcnn_probe.perturbations.imagenet_variants import Variant
from tcnn_probe.perturbations.settings import Settings, as_batches, as_models
from tcnn_probe.perturbations.summary import Results

__all__ = ["robustness"]


def robustness(
    models: Model | Mapping[str, Model],
    images: Any,
    labels: Any = None,
    *,
    corruptions: str | Collection[str] | None = None,
    severities: int | Collection[int] = (1, 2, 3, 4, 5),
    attacks: str | Collection[str] = ("fgsm", "pgd"),
    seeds: int | Collection[int] = (0,),
    variants: Variant | Collection[Variant] = (),
    normalization: Normalization | Mapping[str, Normalization | None] | None = None,
    classes: Collection[int] | None = None,
    batch_size: int = 64,
    device: torch.device | str | None = None,
    epsilon: float = 1 / 255,
    step: float = 0.5 / 255,
    steps: int = 5,
    random_start: bool = True,
    frost: Any = None,
    progress: bool | None = None,
) -> xr.Dataset:
    """What models get right of images as they are, corrupted, attacked, and from other test sets.

    ::

        ds = tcnn_probe.robustness({"cnn": cnn, "tcnn": tcnn}, images, labels, severities=(1, 3, 5))
        print(ds.accuracy.groupby("group").mean(["corruption", "severity", "seed"]).to_pandas())

    A prediction is the class of the highest score, the first of equal ones; with a NaN among the scores it is wrong,
    which is counted in ``attrs["nan_scores"]`` and warned of. Each model is attacked itself, with the true classes;
    ``adversarial_accuracy`` is over all images, those it had wrong before included.

    Args:
        models: a module, which runs in eval mode and is afterwards as it was, or a function, which is called as it is
            (one that ablates heads, for example); or several, by name. From normalised images to scores (B, K).
        images: in pixel space, in [0, 1], before normalisation: a tensor or an array, shape (N, C, H, W), with
            ``labels``; or batches (images, labels), such as a DataLoader, which is read once: each batch is corrupted
            once for each setting and shown to all models.
        labels: classes, shape (N,).
        corruptions: names in ``tcnn_probe.CORRUPTIONS``, or groups of them; None for all, () for none.
        severities: 1 to 5.
        attacks: of "fgsm" and "pgd"; () for none.
        seeds: of what is random in corruptions and attacks; image i is that of (seed, i), whatever the batches are.
        variants: other test sets, see :func:`tcnn_probe.imagenet_variant`.
        normalization: see :func:`tcnn_probe.pgd`; or by the models' names.
        classes: the classes that predictions on ``images`` are taken of; None for all. Variants have their own.
        batch_size: of a tensor or an array.
        device: where images are put; None: where each module is, and for functions, where they are.
        epsilon, step, steps, random_start: of the attacks, see :func:`tcnn_probe.pgd`.
        frost: see :func:`tcnn_probe.corrupt`.
        progress: whether to show a progress bar; None: once it takes more than three seconds, on a terminal.

    Returns:
        a dataset of what was asked for, ready for ``to_zarr``. Per image, bool: ``clean_correct`` (model, image),
        ``correct`` (model, corruption, severity, seed, image), ``adversarial_correct`` (model, attack, seed, image).
        Their means over images are ``clean_accuracy``, ``accuracy`` and ``adversarial_accuracy``, and of the variants
        ``variant_accuracy`` (model, variant), each with its binomial standard error √(p(1 - p)/n) under the same name
        with ``_se``; ``variant_images`` (variant) is n. Coordinates: ``group`` of each corruption, ``label`` of each
        image. ``attrs`` hold definitions, sources, options and versions.

    Raises:
        ValueError, TypeError: models, images, labels or options that cannot be.
    """
    members = as_models(models)
    ascent = Ascent(epsilon, step, steps, random_start)
    settings = Settings.asked(corruptions, severities, attacks, seeds, variants, ascent)
    batches, count = as_batches(images, labels, batch_size)
    pictures = None if frost is None else read_photographs(frost)
    work = _Measuring(members, settings, _normalizations(members, normalization), device, pictures)
    allowed = _allowed(classes)
    results = Results(tuple(members), settings)
    total = None if count is None else (count * settings.images + _count(settings.variants)) * len(members)
    with quiet(*members.values()), progress_bar(total, "robustness", progress, "batch") as bar:
        work.done = bar.update
        first = 0
        for pixels, targets in batches:
            results.add(work.of_batch(pixels, targets, first, allowed), targets)
            first += len(pixels)
        if not first:
            raise ValueError("expected batches (images, labels), got none")
        for variant in settings.variants:
            results.add_variant(variant.name, work.of_variant(variant))
    if work.nan:
        warnings.warn(f"scores with NaN, counted as wrong: {dict(work.nan)}", RuntimeWarning, stacklevel=2)
    options: dict[str, Any] = {"normalization": work.normalized, "nan_scores": work.nan}
    options["classes"] = None if allowed is None else allowed.tolist()
    options |= {"frost": "made" if frost is None else "given", **asdict(ascent), "random_start": int(random_start)}
    return results.dataset(members, options)


@dataclass
class _Measuring:
    """The models, and what they are shown."""

    models: Mapping[str, Model]
    settings: Settings
    normalizations: Mapping[str, Normalization | None]
    device: torch.device | str | None
    frost: Any
    done: Callable[[int], Any] = lambda count: None
    nan: Counter[str] = field(default_factory=Counter)
    normalized: dict[str, Any] = field(default_factory=dict)

    def of_batch(self, images: Tensor, labels: Tensor, first: int, classes: Tensor | None) -> dict[str, Tensor]:
        """Which images are right, as they are and perturbed: (models, ..., B), ``...`` being the settings in order."""
        if labels.ndim != 1:
            raise ValueError("expected one label for each image, (B,); only variants have several")
        judges = self._judges(images, classes)
        found = {"clean": self._right(judges, images, labels)}
        if self.settings.corruptions:
            found["corrupted"] = self._corrupted(judges, images, labels, first)
        if self.settings.attacks:
            found["attacked"] = self._attacked(judges, images, labels, first)
        return found

    def of_variant(self, variant: Variant) -> Tensor:
        """Which images are right, (models, images)."""
        rows = []
        for images, labels in as_batches(variant.loader, None, 1)[0]:
            rows.append(self._right(self._judges(images, _allowed(variant.classes)), images, labels))
        if not rows:
            raise ValueError(f"expected images of the variant {variant.name!r}, got none")
        return torch.cat(rows, -1)

    def _judges(self, images: Tensor, classes: Tensor | None) -> dict[str, Classifier]:
        channels, given = images.shape[1], self.normalizations
        judges = {n: as_classifier(m, given[n], channels, classes, self.device) for n, m in self.models.items()}
        self.normalized = {name: [judge.mean, judge.std] for name, judge in judges.items()}
        return judges

    def _corrupted(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor, first: int) -> Tensor:
        rows: list[Tensor] = []
        for name in self.settings.corruptions:
            for severity in self.settings.severities:
                for number, seed in enumerate(self.settings.seeds):
                    if number and not CORRUPTIONS[name].random:
                        rows.append(rows[-1])
                        self.done(len(judges))
                        continue
                    worse = corrupt(images, name, severity, seed=seed, first=first, frost=self.frost, progress=False)
                    rows.append(self._right(judges, worse, labels))
        return torch.stack(rows, 1).unflatten(1, self.settings.shape)

    def _attacked(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor, first: int) -> Tensor:
        rows: list[Tensor] = []
        for ascent in self.settings.attacks.values():
            for number, seed in enumerate(self.settings.seeds):
                if number and not ascent.random_start:
                    rows.append(rows[-1])
                    self.done(len(judges))
                    continue
                row = []
                for name, judge in judges.items():
                    worse = ascent(judge, images, labels, seed, first)
                    row.append(self._right({name: judge}, worse, labels)[0])
                rows.append(torch.stack(row))
        return torch.stack(rows, 1).unflatten(1, (len(self.settings.attacks), len(self.settings.seeds)))

    @torch.no_grad()
    def _right(self, judges: Mapping[str, Classifier], images: Tensor, labels: Tensor) -> Tensor:
        """Whether each model's best class is the label, or one of the labels, (models, B), bool."""
        rows = []
        for name, judge in judges.items():
            scores = judge(judge.place(images))
            _check_labels(name, labels, scores.shape[1], judge.classes)
            best, nan = scores.argmax(1).cpu(), scores.isnan().any(1).cpu()
            hit = best == labels if labels.ndim == 1 else labels.gather(1, best[:, None])[:, 0]
            rows.append(hit & ~nan)
            if nan.any():
                self.nan[name] += int(nan.sum())
            self.done(1)
        return torch.stack(rows)


def _check_labels(name: str, labels: Tensor, classes: int, allowed: Tensor | None) -> None:
    if labels.ndim == 2:
        if labels.shape[1] != classes:
            raise ValueError(f"expected labels (B, {classes}), the classes of {name!r}, got (B, {labels.shape[1]})")
        return
    check_classes(labels, classes, f"the model {name!r}")
    if allowed is not None and len(other := labels[~torch.isin(labels, allowed)]):
        raise ValueError(f"expected labels among the classes that predictions are taken of, got {int(other[0])}")


def _allowed(classes: Collection[int] | None) -> Tensor | None:
    if classes is None:
        return None
    indices = list(classes)
    if not indices or not all(isinstance(each, int) and each >= 0 for each in indices):
        raise ValueError(f"expected indices of classes, got {classes!r}")
    return torch.tensor(indices)


def _count(variants: Collection[Variant]) -> int:
    """How many batches, as far as this is known."""
    return sum(len(one.loader) for one in variants if isinstance(one.loader, Sized))


def _normalizations(models: Mapping[str, Model], given: Any) -> dict[str, Normalization | None]:
    if not isinstance(given, Mapping):
        return dict.fromkeys(models, given)
    if unknown := [name for name in given if name not in models]:
        raise ValueError(f"expected normalization by the models' names, {', '.join(models)}; got {unknown[0]!r}")
    return {name: given.get(name) for name in models}
