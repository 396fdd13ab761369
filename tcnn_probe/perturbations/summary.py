"""What was right, batch by batch, and the labelled arrays it becomes."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from tcnn_probe.perturbations.corruptions import CORRUPTIONS
from tcnn_probe.perturbations.given import Model
from tcnn_probe.perturbations.settings import Settings
from tcnn_probe.provenance import versions

__all__ = ["Results"]

_PER_IMAGE = {
    "clean": ("clean_correct", "clean_accuracy", ("model",), "of the images as they are"),
    "corrupted": (
        "correct",
        "accuracy",
        ("model", "corruption", "severity", "seed"),
        "of the images corrupted as those of ImageNet-C (Hendrycks & Dietterich 2019)",
    ),
    "attacked": (
        "adversarial_correct",
        "adversarial_accuracy",
        ("model", "attack", "seed"),
        "of images perturbed to raise this model's loss (FGSM: Goodfellow et al. 2015; PGD: Madry et al. 2018)",
    ),
}
_RULE = "the highest score is the label's; of equal scores the first is the highest; a NaN among them is wrong"


_PLAIN = str | int | float


class Results:
    """Of all batches."""

    def __init__(self, models: tuple[str, ...], settings: Settings) -> None:
        self.models, self.settings = models, settings
        self.rows: dict[str, list[Tensor]] = {}
        self.labels: list[Tensor] = []
        self.variants: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Tensor], labels: Tensor) -> None:
        """What was right in one more batch, the last axis being images."""
        for what, right in found.items():
            self.rows.setdefault(what, []).append(right)
        self.labels.append(labels)

    def add_variant(self, name: str, right: Tensor) -> None:
        """What was right of a variant, (models, images)."""
        self.variants[name] = right

    def dataset(self, models: Mapping[str, Model], options: Mapping[str, Any]) -> xr.Dataset:
        """All of it, with the means and their standard errors."""
        variables: dict[str, xr.Variable] = {}
        for what, rows in self.rows.items():
            per_image, mean, dims, words = _PER_IMAGE[what]
            right = torch.cat(rows, -1).numpy()
            attrs = {"long_name": f"right {words}", "definition": _RULE}
            variables[per_image] = xr.Variable((*dims, "image"), right, attrs)
            variables |= _means(mean, dims, right.mean(-1), np.asarray(right.shape[-1]), words)
        if self.variants:
            right_of = [right.double().mean(1).numpy() for right in self.variants.values()]
            images = np.array([right.shape[1] for right in self.variants.values()])
            words = "on published variants of the test set"
            variables |= _means("variant_accuracy", ("model", "variant"), np.stack(right_of, 1), images, words)
            variables["variant_images"] = xr.Variable("variant", images, {"long_name": "images of the variant"})
        kinds = {name: _kind(model) for name, model in models.items()}
        about: dict[str, Any] = {**versions(), "models": json.dumps(kinds), "prediction": _RULE}
        about |= {name: value if isinstance(value, _PLAIN) else json.dumps(value) for name, value in options.items()}
        if self.variants:
            about["variant_sources"] = json.dumps({one.name: one.source for one in self.settings.variants})
        return xr.Dataset(variables, self._coordinates(), about)

    def _coordinates(self) -> dict[str, Any]:
        labels = torch.cat(self.labels).numpy()
        coordinates = {"model": _names(self.models), "image": np.arange(len(labels)), "label": ("image", labels)}
        names = self.settings.corruptions
        if names:
            groups = _names([CORRUPTIONS[name].group for name in names])
            coordinates |= {"corruption": _names(names), "group": ("corruption", groups)}
            coordinates["severity"] = np.array(self.settings.severities)
        if self.settings.attacks:
            coordinates["attack"] = _names(self.settings.attacks)
        if names or self.settings.attacks:
            coordinates["seed"] = np.array(self.settings.seeds)
        if self.variants:
            coordinates["variant"] = _names(self.variants)
        return coordinates


def _means(name: str, dims: tuple[str, ...], shares: Any, images: Any, words: str) -> dict[str, xr.Variable]:
    attrs = {"long_name": f"accuracy {words}", "units": "1", "definition": f"share of images for which {_RULE}"}
    error = {"long_name": f"standard error of {name}", "units": "1", "definition": "sqrt(p (1 - p) / n), n images"}
    return {
        name: xr.Variable(dims, shares, attrs),
        f"{name}_se": xr.Variable(dims, np.sqrt(shares * (1 - shares) / images), error),
    }


def _names(names: Any) -> Any:
    return np.array(list(names), dtype=object)


def _kind(model: Model) -> str:
    return getattr(model, "__name__", type(model).__name__)
