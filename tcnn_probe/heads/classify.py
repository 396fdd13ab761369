"""``head_types()``: the types of a recording's heads."""

import json
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.heads.features import LEAST_IMAGES, By, Features, features_of
from tcnn_probe.heads.mixture import fit_mixture
from tcnn_probe.heads.thresholds import (
    CONCENTRATED,
    GATED,
    TYPES,
    Thresholds,
    content_types,
    gate_types,
)

__all__ = ["head_types"]

_DEFINITIONS: Mapping[By, Mapping[str, str]] = {
    "content": {
        "convolutional": "content_information <= {information[0]:.4g} log keys, entropy <= "
        "{entropy[0]:.4g} uniform_entropy, attention_distance <= {distance:.4g} uniform_distance, "
        "translation_equivariance >= {equivariance:.4g}",
        "averaging": "content_information <= {information[0]:.4g} log keys, entropy >= {entropy[1]:.4g} "
        "uniform_entropy",
        "content": "content_information >= {information[1]:.4g} log keys",
    },
    "gate": {
        "convolutional": "gate >= {gate[1]:.4g}, positional_entropy <= {concentrated:.4g} uniform_entropy, "
        "attention_distance <= uniform_distance",
        "content": "gate <= {gate[0]:.4g}",
    },
}
_OTHER_LABELS = {
    "mixed": "all others",
    "": "no such head, or something that is needed is NaN (see unlabelled)",
}
_TYPES: Mapping[By, tuple[Sequence[str], Callable[..., np.ndarray]]] = {
    "content": (TYPES, content_types),
    "gate": (GATED, gate_types),
}


def head_types(
    ds: xr.Dataset,
    method: Literal["thresholds", "mixture"] = "thresholds",
    *,
    by: By = "content",
    information: Sequence[float] = Thresholds.information,
    entropy: Sequence[float] = Thresholds.entropy,
    distance: float = Thresholds.distance,
    equivariance: float = Thresholds.equivariance,
    gate: Sequence[float] = Thresholds.gate,
    least_images: int = LEAST_IMAGES,
    seed: int = 0,
) -> xr.DataArray:
    """Classify the heads of a recording at each mark.

    ::

        types = tcnn_probe.head_types(recorder.dataset)
        print((types == "content").sum("head").to_pandas())  # by epoch and layer
        ds = recorder.dataset.assign(head_type=types)

    Heads of any attention are "convolutional" (their attention is the same for all images, near, and depends on the
    offset), "averaging" (the same for all images, and nearly even), "content" (it depends on the image) or "mixed".
    With ``by="gate"`` heads of GPSA and ConViT are "convolutional", "content" or "mixed" by their gate, as in the
    papers; other heads have no type. :class:`~tcnn_probe.heads.Thresholds` and the attribute ``definitions`` give the
    limits. Distances and entropies are divided by those of uniform attention on the same grid (for the entropies of
    GPSA and ConViT: over the real pixels), and information by log keys.

    "thresholds" classifies each head and mark separately, so that later marks do not change labels. "mixture" fits one
    to three Gaussians to the same numbers of all heads and marks together. Each component has the type that its mean
    has by the thresholds, and each head has the most probable type. A type then has the same meaning at all marks, but
    further marks can change the fit and therefore the labels. Several components can have the same type.

    Args:
        ds: A recording: ``recorder.dataset``, ``xarray.open_zarr(path)``, or a selection of one.
        method: "thresholds", or "mixture" for scikit-learn's Gaussian mixture.
        by: "content" for types by measured attention, "gate" for types by the gate.
        information, entropy, distance, equivariance, gate: Thresholds; see :class:`~tcnn_probe.heads.Thresholds`.
        least_images: Number of images that types by attention need at each mark. With fewer images, content information
            is too uncertain, and heads have no type. At least 2.
        seed: Seed of the mixture.

    Returns:
        Types as strings, with the dims of ``ds.attention_distance``, dtype object, named "head_type". The type is ""
        where there is no head, or where a required number is not finite: ``attrs["unlabelled"]`` has the layers and the
        reasons, in JSON. A mixture adds the coordinates ``posterior_convolutional``, ..., which sum to one over the
        types and are NaN where there is no label; ``attrs["mixture"]`` has the components, in JSON.

    Raises:
        ValueError: A required variable is missing, the method is unknown, or thresholds do not ascend.
        TypeError: ``ds`` is not a dataset, or an argument has another type.
    """
    if method not in ("thresholds", "mixture"):
        raise ValueError(f"expected method='thresholds' or 'mixture', got {method!r}")
    if by not in _TYPES:
        raise ValueError(f"expected by='content' or 'gate', got {by!r}")
    thresholds = Thresholds(information, entropy, distance, equivariance, gate)
    seed, least_images = operator.index(seed), operator.index(least_images)
    if least_images < 2:
        raise ValueError(
            f"expected least_images of at least 2, got {least_images}: one image does not show differences of images"
        )
    features = features_of(ds, by, least_images)
    # The gate is a parameter, which is known without images.
    if by == "content" and (ds.images < least_images).any():
        warnings.warn(
            f"types need at least {least_images} images at each mark, and some have {int(ds.images.min())}: "
            "their heads have no type (least_images= asks for fewer)",
            RuntimeWarning,
            stacklevel=2,
        )
    posterior: dict[str, np.ndarray] = {}
    attrs = _attrs(method, by, thresholds)
    if method == "thresholds":
        labels = _types(by, features.points, thresholds)
    else:
        labels, posterior, mixture = _by_mixture(by, features, thresholds, seed)
        attrs |= {"seed": seed, "mixture": json.dumps(mixture)}
    types = features.exists.copy(data=labels).rename("head_type")
    types.attrs = attrs | {"unlabelled": json.dumps(features.reasons(labels == ""))}
    for name, probability in posterior.items():
        types.coords[f"posterior_{name}"] = types.dims, probability, _about(name)
    # If a single layer or head was selected, the dataset lacks this dimension, and so do the types.
    dims = ds.attention_distance.dims
    return types.isel(
        {dim: 0 for dim in ("layer", "head") if dim not in dims}
    ).transpose(*dims)


def _attrs(method: str, by: By, thresholds: Thresholds) -> dict[str, Any]:
    values = asdict(thresholds) | {"concentrated": CONCENTRATED}
    # Definitions contain the numbers, so that saved labels can be understood by themselves.
    definitions = {
        name: text.format(**values) for name, text in _DEFINITIONS[by].items()
    } | _OTHER_LABELS
    return {
        "long_name": "type of head",
        "description": "Type of a head by its attention; see the attribute definitions.",
        "method": method,
        "by": by,
        "definitions": json.dumps(definitions),
    }


def _about(name: str) -> dict[str, str]:
    return {
        "units": "1",
        "long_name": f"probability of {name}",
        "description": f"Posterior of the components of the mixture that are {name}.",
    }


def _types(by: By, points: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Classify points by the thresholds: (..., F) -> (...)."""
    return _TYPES[by][1](*np.moveaxis(points, -1, 0), thresholds)


def _by_mixture(
    by: By, features: Features, thresholds: Thresholds, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    """Return labels, the posterior of each type, and the mixture in plain JSON."""
    finite = np.isfinite(features.points).all(-1)
    # The dtype is object because NumPy's own strings would be cut to one character, the length of the initial ones.
    labels = np.full(finite.shape, "", dtype=object)
    if not finite.any():
        return labels, {}, {}
    points, names = features.points[finite], _TYPES[by][0]
    mixture, criteria = fit_mixture(points, seed=seed)
    # Components have no fixed order, so each gets its type from its mean.
    components = _types(by, mixture.means_, thresholds)
    probabilities = mixture.predict_proba(points)
    by_type = {name: probabilities[:, components == name].sum(1) for name in names}
    # argmax takes the first of equal probabilities, so that a head between two types is mixed.
    order = ("mixed", *(name for name in names if name != "mixed"))
    labels[finite] = np.array(order, dtype=object)[
        np.argmax([by_type[name] for name in order], axis=0)
    ]
    posterior = {}
    for name in names:
        posterior[name] = np.full(finite.shape, np.nan)
        posterior[name][finite] = by_type[name]
    about = {
        "features": list(features.names),
        "components": components.tolist(),
        "weights": mixture.weights_.tolist(),
        "means": mixture.means_.tolist(),
        "covariances": mixture.covariances_.tolist(),
        "bic": criteria,
        "converged": bool(mixture.converged_),
    }
    return labels, posterior, about
