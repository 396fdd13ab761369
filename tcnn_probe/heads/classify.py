"""``head_types()``: types of the heads of a recording, labelled."""

import json
import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import xarray as xr

from tcnn_probe.heads.features import Features, features_of
from tcnn_probe.heads.mixture import fit_mixture
from tcnn_probe.heads.thresholds import GATED, PLAIN, Thresholds, gated_types, plain_types

__all__ = ["head_types"]

_DEFINITIONS = {
    "convolutional": "gate >= {gate[1]:.4g}, positional_entropy <= {entropy:.4g} uniform_entropy, "
    "attention_distance <= uniform_distance",
    "content": "gate <= {gate[0]:.4g}",
    "local": "no gate, attention_distance <= {distance[0]:.4g} uniform_distance",
    "global": "no gate, attention_distance >= {distance[1]:.4g} uniform_distance",
    "mixed": "all others",
    "": "no such head, or something that is needed is NaN (see unlabelled)",
}
_FEATURES = {
    "gated": ("gate", "positional_entropy / uniform_entropy", "attention_distance / uniform_distance"),
    "plain": ("attention_distance / uniform_distance", "entropy / uniform_entropy"),
}
_NAMES = {"gated": GATED, "plain": PLAIN}


def head_types(
    ds: xr.Dataset,
    method: Literal["thresholds", "mixture"] = "thresholds",
    *,
    gate: Sequence[float] = Thresholds.gate,
    distance: Sequence[float] = Thresholds.distance,
    entropy: float = Thresholds.entropy,
    seed: int = 0,
) -> xr.DataArray:
    """Give each head of a recording a type, at each mark.

    ::

        types = tcnn_probe.head_types(recorder.dataset)
        print((types == "content").sum("head").to_pandas())  # by epoch and layer
        ds = recorder.dataset.assign(head_type=types)

    Heads of layers with gates (GPSA, ConViT) are "convolutional", "content" or "mixed", those of plain attention
    "local", "global" or "mixed". :class:`~tcnn_probe.heads.Thresholds` and the attribute ``definitions`` say from where
    to where. Distances and entropies count as shares of what they are if attention is uniform on the same grid.

    "thresholds" looks at each head and mark by itself: later marks change no label. "mixture" fits one to three
    Gaussians to the gate, positional entropy and distance of all heads and marks at once (of plain attention, to
    distance and entropy). Each component has the type that its mean has by the thresholds, and each head the type that
    is most probable. So a type means the same at all marks, but more marks can move the fit, and with it labels. Two
    components can have one type.

    Args:
        ds: a recording: ``recorder.dataset``, ``xarray.open_zarr(path)``, or a selection of one.
        method: "thresholds" or "mixture" (scikit-learn's).
        gate, distance, entropy: the thresholds.
        seed: of the mixture.

    Returns:
        strings with the dims of ``ds.attention_distance``, dtype object, named "head_type". "" where there is no head,
        or where a number that is needed is not finite: ``attrs["unlabelled"]`` names the layers and the reasons, in
        JSON. Of the mixture also the coordinates ``posterior_convolutional``, ...: they sum to one over the types, and
        are NaN where there is no label; ``attrs["mixture"]`` has the components, in JSON.

    Raises:
        ValueError: a variable that is needed is missing, an unknown method, or thresholds that do not ascend.
        TypeError: no dataset, or an argument of another type.
    """
    if method not in ("thresholds", "mixture"):
        raise ValueError(f"expected method='thresholds' or 'mixture', got {method!r}")
    thresholds = Thresholds(gate, distance, entropy)
    seed = operator.index(seed)
    features = features_of(ds, entropies=method == "mixture")
    attrs = _attrs(method, thresholds, features)
    posterior: dict[str, np.ndarray] = {}
    if method == "thresholds":
        by_kind = {kind: _types(kind, points, thresholds) for kind, (_, points) in _kinds(features).items()}
        labels = np.where(features.gated, by_kind["gated"], by_kind["plain"])
    else:
        labels, posterior, mixtures = _by_mixture(features, thresholds, seed)
        attrs |= {"seed": seed, "mixture": json.dumps(mixtures)}
    types = features.reach.copy(data=labels).rename("head_type")
    types.attrs = attrs
    types = types.assign_coords({f"posterior_{one}": (types.dims, p, _about(one)) for one, p in posterior.items()})
    alone = {dim: 0 for dim in ("layer", "head") if dim not in ds.attention_distance.dims}
    return types.isel(alone).transpose(*ds.attention_distance.dims)


def _attrs(method: str, thresholds: Thresholds, features: Features) -> dict[str, Any]:
    known = {"gate": thresholds.gate, "distance": thresholds.distance, "entropy": thresholds.entropy}
    return {
        "long_name": "type of head",
        "description": "What kind of attention a head has: see definitions.",
        "method": method,
        "gate_thresholds": list(thresholds.gate),
        "distance_thresholds": list(thresholds.distance),
        "entropy_threshold": thresholds.entropy,
        "definitions": json.dumps({name: text.format(**known) for name, text in _DEFINITIONS.items()}),
        "unlabelled": json.dumps(dict(features.why)),
    }


def _about(name: str) -> dict[str, str]:
    return {
        "units": "1",
        "long_name": f"probability of {name}",
        "description": f"Posterior of the components of the mixture that are {name}.",
    }


def _kinds(features: Features) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By kind of attention, which heads have it, (...), and what their types depend on, (..., F)."""
    of_gated, of_plain = (features.gate, features.spread, features.reach), (features.reach, features.evenness)
    gated = features.gated.values
    return {"gated": (gated, np.stack(of_gated, -1)), "plain": (~gated, np.stack(of_plain, -1))}


def _types(kind: str, points: np.ndarray, thresholds: Thresholds) -> np.ndarray:
    """Types by the thresholds: (..., F) -> (...)."""
    if kind == "plain":
        return plain_types(points[..., 0], thresholds)
    return gated_types(points[..., 0], points[..., 1], points[..., 2], thresholds)


def _by_mixture(
    features: Features, thresholds: Thresholds, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    """Labels; the posterior of each type that heads of these kinds can have; and the mixtures in plain JSON."""
    shape = features.gated.shape
    labels = np.full(shape, "", dtype=object)
    posterior: dict[str, np.ndarray] = {}
    mixtures = {}
    for kind, (of_kind, points) in _kinds(features).items():
        where = of_kind & np.isfinite(points).all(-1)
        if not where.any():
            continue
        mixture = fit_mixture(points[where], seed=seed)
        components = _types(kind, mixture.means, thresholds)
        found = mixture.posterior(points[where])
        by_type = {name: found[:, components == name].sum(1) for name in _NAMES[kind]}
        order = ("mixed", *_NAMES[kind][:2])  # of types that are equally probable, the first
        labels[where] = np.array(order, dtype=object)[np.argmax([by_type[name] for name in order], axis=0)]
        for name, value in by_type.items():
            posterior.setdefault(name, np.zeros(shape))[where] = value
        mixtures[kind] = {
            "features": _FEATURES[kind],
            "components": components.tolist(),
            "weights": mixture.weights.tolist(),
            "means": mixture.means.tolist(),
            "covariances": mixture.covariances.tolist(),
            "bic": list(mixture.bic),
            "converged": mixture.converged,
        }
    return labels, {name: np.where(labels != "", value, np.nan) for name, value in posterior.items()}, mixtures
