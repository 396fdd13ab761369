"""What :func:`tcnn_probe.robustness` is asked for, checked before anything is measured."""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.models import check_batch_size
from tcnn_probe.perturbations.adversarial import Ascent, fgsm_ascent
from tcnn_probe.perturbations.corruptions import CORRUPTIONS, GROUPS
from tcnn_probe.perturbations.given import Model, as_labels, as_pixels
from tcnn_probe.perturbations.imagenet_variants import Variant

__all__ = ["Settings", "as_batches", "as_models"]


@dataclass(frozen=True)
class Settings:
    """See :func:`tcnn_probe.robustness`."""

    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    attacks: Mapping[str, Ascent]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]

    @classmethod
    def asked(
        cls,
        corruptions: str | Collection[str] | None,
        severities: int | Collection[int],
        attacks: str | Collection[str],
        seeds: int | Collection[int],
        variants: Variant | Collection[Variant],
        ascent: Ascent,
    ) -> "Settings":
        """From the arguments.

        Raises:
            ValueError, TypeError: what cannot be.
        """
        known = {"fgsm": fgsm_ascent(ascent.epsilon), "pgd": ascent}
        asked = (attacks,) if isinstance(attacks, str) else tuple(attacks)
        if unknown := [name for name in asked if name not in known]:
            raise ValueError(f"expected attacks among {', '.join(known)}; got {unknown[0]!r}")
        sets = (variants,) if isinstance(variants, Variant) else tuple(variants)
        for one in sets:
            if not isinstance(one, Variant):
                raise TypeError(f"expected variants, as imagenet_variant gives them, got {type(one).__name__}")
        _check_distinct("variants", [one.name for one in sets])
        return cls(
            _corruptions(corruptions),
            _numbers("severities", severities, 1, 5),
            {name: known[name] for name in known if name in asked},
            _numbers("seeds", seeds, 0, None),
            sets,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many corruptions, severities and seeds."""
        return len(self.corruptions), len(self.severities), len(self.seeds)

    @property
    def images(self) -> int:
        """How often a model sees each image, perturbed or not."""
        return 1 + int(np.prod(self.shape)) + len(self.attacks) * len(self.seeds)


def as_models(models: Any) -> dict[str, Model]:
    """Models by name.

    Raises:
        TypeError, ValueError: they are none.
    """
    named = dict(models) if isinstance(models, Mapping) else {"model": models}
    if not named:
        raise ValueError("expected one model at least, got none")
    for name, model in named.items():
        if not isinstance(name, str):
            raise TypeError(f"expected names of models, got {name!r}")
        if not callable(model) or isinstance(model, type):
            raise TypeError(
                f"expected a module or a function from images to scores, or a mapping from names to these; got "
                f"{type(model).__name__}"
            )
    return named


def as_batches(images: Any, labels: Any, batch_size: int) -> tuple[Iterator[tuple[Tensor, Tensor]], int | None]:
    """Batches of images and labels, each read and checked when it is due; and how many there are, if that is known.

    Raises:
        TypeError, ValueError: what are none.
    """
    if isinstance(images, Tensor | np.ndarray):
        check_batch_size(batch_size)
        pixels = as_pixels(images)
        if labels is None:
            raise ValueError("expected labels of the images, or an iterable of (images, labels) batches; got no labels")
        targets = as_labels(labels, len(pixels))
        starts = range(0, len(pixels), batch_size)
        return ((pixels[i : i + batch_size], targets[i : i + batch_size]) for i in starts), len(starts)
    if not isinstance(images, Iterable) or isinstance(images, str | nn.Module):
        raise TypeError(
            "expected images as a tensor or an array (N, C, H, W), or an iterable of (images, labels) batches; got "
            f"{type(images).__name__}"
        )
    if labels is not None:
        raise ValueError("expected no labels beside an iterable of (images, labels) batches")
    return (_as_batch(each) for each in images), len(images) if isinstance(images, Sized) else None


def _as_batch(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(f"expected batches (images, labels), got {type(batch).__name__}")
    images, labels = batch
    pixels = as_pixels(images)
    several = isinstance(labels, Tensor) and labels.dtype == torch.bool
    if several and (labels.ndim != 2 or len(labels) != len(pixels)):
        raise ValueError(f"expected labels of {len(pixels)} images, (B,), or, bool, (B, K); got {tuple(labels.shape)}")
    return pixels, labels.detach().cpu() if several else as_labels(labels, len(pixels))


def _corruptions(asked: str | Collection[str] | None) -> tuple[str, ...]:
    """Names, in the published order."""
    if asked is None:
        return tuple(CORRUPTIONS)
    names = (asked,) if isinstance(asked, str) else tuple(asked)
    for name in names:
        if name not in CORRUPTIONS and name not in GROUPS:
            near = difflib.get_close_matches(str(name), [*CORRUPTIONS, *GROUPS], 1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"expected names in tcnn_probe.CORRUPTIONS or groups ({', '.join(GROUPS)}); got {name!r}{hint}"
            )
    return tuple(name for name, each in CORRUPTIONS.items() if name in names or each.group in names)


def _numbers(what: str, given: int | Collection[int], least: int, most: int | None) -> tuple[int, ...]:
    numbers = (given,) if isinstance(given, int) else tuple(given)
    span = f"integers from {least}" + (f" to {most}" if most is not None else "")
    for number in numbers:
        whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not whole or number < least or (most is not None and number > most):
            raise ValueError(f"expected {span} for {what}, got {number!r}")
    if not numbers:
        raise ValueError(f"expected {span} for {what}, got none")
    _check_distinct(what, numbers)
    return tuple(int(number) for number in numbers)


def _check_distinct(what: str, given: Collection[Any]) -> None:
    if repeated := [each for each in given if list(given).count(each) > 1]:
        raise ValueError(f"expected distinct {what}, got {repeated[0]!r} twice")
