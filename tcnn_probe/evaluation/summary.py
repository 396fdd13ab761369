"""Results of :func:`tcnn_probe.evaluation.robustness` as a dataset,
and their summaries in papers; without torch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.evaluation.intervals import mean_interval, scipy_stats

__all__ = [
    "as_dataset",
    "check_baseline",
    "improvement",
    "mean_by",
    "prefix_of",
    "share_right",
]

_RULE = (
    "the highest score is the label's; of equal scores the first is the highest; a NaN among "
    "them is wrong"
)

# Dimensions of means over images and a description, by the prefix of the variables
# ("clean_correct", ...).
_KINDS = {
    "clean_": (("model",), "of the images as they are"),
    "": (
        ("model", "corruption", "severity", "seed"),
        "of the images corrupted as those of ImageNet-C (Hendrycks & Dietterich 2019)",
    ),
    "adversarial_": (
        ("model", "attack", "seed"),
        "of images perturbed to raise this model's loss (FGSM: Goodfellow et al. 2015; PGD: Madry "
        "et al. 2018)",
    ),
}
_PREFIXES: dict[str | None, str] = {None: "clean_", "attack": "adversarial_"}
_PREFIXES |= {"group": "", "corruption": "", "severity": ""}


def as_dataset(
    decisions: Mapping[str, NDArray[Any]],
    variants: Mapping[str, NDArray[Any]],
    coordinates: Mapping[str, Any],
    attrs: dict[str, str],
) -> xr.Dataset:
    """Collect decisions, right answers, accuracies and standard errors in a dataset.

    Args:
        decisions: Predictions and confidences, (2, model, ..., image), by the prefix of their
            variables.
        variants: Right answers on other test sets, bool, shape (model, image), by the name of the
            set.
        coordinates: Coordinates of the dimensions other than "image" and "variant", of which those
            of dimensions that no variable has are dropped; and "label", the class of each image.
        attrs: Attributes of the dataset.
    """
    label = coordinates["label"][1]
    variables: dict[str, Any] = {}
    for prefix, (dims, subject) in _KINDS.items():
        if prefix not in decisions:
            continue
        predictions, confidences = decisions[prefix]
        predictions = predictions.astype(np.int32)
        # A prediction of -1, for scores with NaN, is not a label and therefore wrong.
        correct = predictions == label
        arrays = {
            "prediction": (
                predictions,
                f"prediction {subject}",
                "class of the highest score; -1: NaN in the scores",
            ),
            "confidence": (
                confidences.astype(np.float32),
                f"confidence {subject}",
                "probability of the highest score, by the softmax or sigmoid of attrs['score']",
            ),
            "correct": (correct, f"right {subject}", _RULE),
        }
        for name, (values, long_name, definition) in arrays.items():
            about = {"long_name": long_name, "definition": definition}
            variables[f"{prefix}{name}"] = (*dims, "image"), values, about
        variables |= _means(f"{prefix}accuracy", dims, correct.mean(-1), len(label), subject)
    if variants:
        # Test sets differ in size, so only their means fit into one array.
        images = np.array([correct.shape[1] for correct in variants.values()])
        shares = np.stack([correct.mean(1) for correct in variants.values()], 1)
        variables |= _means(
            "variant_accuracy",
            ("model", "variant"),
            shares,
            images,
            "on other test sets",
        )
        variables["variant_images"] = (
            "variant",
            images,
            {"long_name": "images of the variant"},
        )
    names = np.array(list(variants), dtype=object)
    coords = {
        **coordinates,
        "variant": names,
        "image": range(len(label)),
    }
    ds = xr.Dataset(variables, coords, attrs | {"prediction": _RULE})
    unused = set(ds.dims).difference(*(variable.dims for variable in ds.data_vars.values()))
    return ds.drop_dims(unused)


def _means(
    name: str, dims: tuple[str, ...], shares: Any, images: Any, subject: str
) -> dict[str, Any]:
    """Describe the share of right answers and its binomial standard error
    for a number of images.
    """
    attrs = {
        "long_name": f"accuracy {subject}",
        "units": "1",
        "definition": f"share of images for which {_RULE}",
    }
    error = {
        "long_name": f"standard error of {name}",
        "units": "1",
        "definition": "sqrt(p (1 - p) / n), n images",
    }
    return {
        name: (dims, shares, attrs),
        f"{name}_se": (dims, np.sqrt(shares * (1 - shares) / images), error),
    }


def improvement(
    results: xr.Dataset,
    baseline: str,
    by: str | None = "group",
    *,
    relative: bool = True,
) -> xr.Dataset:
    """Compare each model's accuracy with a baseline's:
    ``accuracy / baseline's - 1`` (T-CNN paper, Fig. 3).

    Args:
        results: Results of :func:`tcnn_probe.evaluation.robustness`.
        baseline: Name of the model to compare the others with.
        by: "group" of corruptions, "corruption" or "severity" (averaged over the others); "attack";
            None for clean images.
        relative: Whether to divide the difference by the baseline's accuracy.

    Returns:
        ``improvement`` (model, by) of the other models, in units of 1, and ``interval`` (model, by,
        bound) with bound "low" and "high": a 95 % interval over images, the same for both models,
        of :func:`~tcnn_probe.evaluation.mean_interval` or, if relative, Fieller's (1954). NaN where
        a model did not see the images, and, if relative, where the baseline is never right, or so
        rarely that any ratio is possible.

    Raises:
        KeyError: The results lack answers of this kind.
        ValueError: The baseline is not a model or is the only one, or ``by`` is unknown or was not
            measured.
    """
    right = share_right(results, by)
    models = right.model.values.tolist()
    check_baseline(baseline, models)
    if len(models) < 2:
        raise ValueError(f"expected another model beside the baseline, got {models}")
    compared = right.sel(model=[name for name in models if name != baseline])
    reference = right.sel(model=baseline, drop=True)

    def gain(accuracy: NDArray[Any], baseline_accuracy: NDArray[Any]) -> NDArray[Any]:
        difference = accuracy - baseline_accuracy
        if not relative:
            return difference
        # With a baseline that is never right, the ratio becomes NaN below.
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = difference / baseline_accuracy
        return np.where(np.isfinite(ratio), ratio, np.nan)

    gains = xr.apply_ufunc(gain, compared.mean("image"), reference.mean("image"))
    if relative:
        bounds = xr.apply_ufunc(
            _ratio_interval,
            compared,
            reference,
            input_core_dims=[["image"], ["image"]],
            output_core_dims=[["bound"]],
            vectorize=True,
        ).assign_coords(bound=["low", "high"])
    else:
        bounds = mean_interval(compared - reference)
    kind = "relative improvement of accuracy" if relative else "improvement of accuracy"
    gains.attrs = {
        "units": "1",
        "long_name": kind,
        "description": f"{kind} over that of {baseline!r}",
    }
    bounds.attrs = {"units": "1", "long_name": "95 % interval over images"}
    return xr.Dataset({"improvement": gains, "interval": bounds})


def _ratio_interval(answers: NDArray[Any], baseline: NDArray[Any]) -> NDArray[Any]:
    """Return Fieller's interval for mean(answers) / mean(baseline) - 1,
    of two arrays (N,) for the same images.

    It contains each ratio q for which a t test finds the mean of ``answers - q baseline``
    compatible with 0. If answers are right or wrong, two images are added, as in Bonett and Price's
    interval for the difference: only the model has the first right, and only the baseline the
    second.
    """
    t = scipy_stats().t
    if np.isnan(answers).any() or np.isnan(baseline).any():
        return np.full(2, np.nan)
    pairs = np.stack([answers, baseline])
    if np.isin(pairs, (0, 1)).all():
        pairs = np.concatenate([pairs, np.eye(2)], axis=1)
    count = pairs.shape[1]
    (first, second), covariance = (
        pairs.mean(1),
        np.cov(pairs) * t.ppf(0.975, count - 1) ** 2 / count,
    )
    square = second**2 - covariance[1, 1]
    middle = first * second - covariance[0, 1]
    discriminant = middle**2 - square * (first**2 - covariance[0, 0])
    # The baseline's accuracy is compatible with 0, so any ratio is possible.
    if square <= 0 or discriminant < 0:
        return np.full(2, np.nan)
    return (middle + np.array([-1, 1]) * np.sqrt(discriminant)) / square - 1


def share_right(results: xr.Dataset, by: str | None) -> xr.DataArray:
    """Return the share of right answers for each image,
    (model, by, image) or (model, image); see `improvement`.
    """
    name = f"{prefix_of(by)}correct"
    if name not in results:
        raise ValueError(
            f"expected results of tcnn_probe.evaluation.robustness with {name!r}, got "
            f"{', '.join(map(str, results)) or 'no variables'}"
        )
    return mean_by(results[name].compute(), by).transpose("model", ..., "image")


def prefix_of(by: str | None) -> str:
    """Return the prefix of the variables with this coordinate:
    "clean_", "" or "adversarial_"; see `improvement`.
    """
    if by not in _PREFIXES:
        raise ValueError(f"expected by to be one of {', '.join(map(repr, _PREFIXES))}, got {by!r}")
    return _PREFIXES[by]


def mean_by(values: xr.DataArray, by: str | None) -> xr.DataArray:
    """Average over all dimensions but ``by``, "model" and "image",
    with groups in published order: (..., by, image).
    """
    if by is not None and by not in values.coords:
        raise ValueError(
            f"expected {values.name!r} with the coordinate {by!r}, got {tuple(values.coords)}"
        )
    means = values.astype(float)
    dim = "corruption" if by == "group" else by
    if dim is not None and dim not in means.dims:  # a single label was selected
        means = means.expand_dims(dim)
    if by == "group":
        groups = np.atleast_1d(means.group.values)
        means = (
            means.assign_coords(group=("corruption", groups)).groupby("group").mean("corruption")
        )
        # groupby sorts the groups, so their published order is restored.
        means = means.sel(group=list(dict.fromkeys(groups.tolist())))
    return means.mean(set(means.dims) - {"model", "image", by}).transpose(..., "image")


def check_baseline(baseline: str, models: list[str]) -> str:
    """Return the baseline; raise ValueError unless it is one of the models."""
    if baseline not in models:
        raise ValueError(
            f"expected the baseline to be one of the models {models}, got {baseline!r}"
        )
    return baseline
