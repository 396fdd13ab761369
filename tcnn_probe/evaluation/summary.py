"""Results of :func:`tcnn_probe.evaluation.robustness` as a dataset, and what papers sum them up by; needs no torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.evaluation.intervals import mean_interval

__all__ = ["as_dataset", "check_results", "improvement", "kind_of", "mean_by", "mean_corruption_error", "share_right"]

_RULE = "the highest score is the label's; of equal scores the first is the highest; a NaN among them is wrong"

# By the kind of decisions ("clean_correct", "clean_accuracy", ...): dimensions of their means, and what they are of.
_KINDS = {
    "clean_": (("model",), "of the images as they are"),
    "": (
        ("model", "corruption", "severity", "seed"),
        "of the images corrupted as those of ImageNet-C (Hendrycks & Dietterich 2019)",
    ),
    "adversarial_": (
        ("model", "attack", "seed"),
        "of images perturbed to raise this model's loss (FGSM: Goodfellow et al. 2015; PGD: Madry et al. 2018)",
    ),
}
_KIND_BY: dict[str | None, str] = {None: "clean_", "attack": "adversarial_"}
_KIND_BY |= dict.fromkeys(("group", "corruption", "severity"), "")


def as_dataset(
    decisions: Mapping[str, NDArray[Any]],
    variants: Mapping[str, NDArray[Any]],
    coordinates: Mapping[str, Any],
    attrs: dict[str, str],
) -> xr.Dataset:
    """What was decided of each image, whether it is right, the means of this, and the standard errors of these.

    Decisions are predictions and confidences by the name of the variable, images last, and "label", the class of each
    image; variants, by name, whether models are right on other test sets, (model, image). Coordinates are those of the
    dimensions but "image" and "variant"; those of other dimensions are left out.
    """
    variables: dict[str, xr.Variable] = {}
    for kind, (dims, words) in _KINDS.items():
        if (predictions := decisions.get(f"{kind}prediction")) is not None:
            answers = predictions == decisions["label"]
            of_images = {
                "prediction": (predictions, f"prediction {words}", "class of the highest score; -1: NaN in the scores"),
                "confidence": (decisions[f"{kind}confidence"], f"confidence {words}", "largest softmax of the scores"),
                "correct": (answers, f"right {words}", _RULE),
            }
            for name, (values, long_name, definition) in of_images.items():
                about = {"long_name": long_name, "definition": definition}
                variables[f"{kind}{name}"] = xr.Variable((*dims, "image"), values, about)
            variables |= _means(f"{kind}accuracy", dims, answers.mean(-1), answers.shape[-1], words)
    if variants:
        images = np.array([answers.shape[1] for answers in variants.values()])
        shares = np.stack([answers.mean(1) for answers in variants.values()], 1)
        variables |= _means("variant_accuracy", ("model", "variant"), shares, images, "on other test sets")
        variables["variant_images"] = xr.Variable("variant", images, {"long_name": "images of the variant"})
    found = xr.Dataset(variables, attrs=attrs | {"prediction": _RULE})
    given = {**coordinates, "variant": np.array(list(variants), dtype=object), "image": range(len(decisions["label"]))}
    given = {name: values for name, values in given.items() if (values[0] if name == "group" else name) in found.dims}
    return found.assign_coords(given | {"label": ("image", decisions["label"])})


def _means(name: str, dims: tuple[str, ...], shares: Any, images: Any, words: str) -> dict[str, xr.Variable]:
    attrs = {"long_name": f"accuracy {words}", "units": "1", "definition": f"share of images for which {_RULE}"}
    error = {"long_name": f"standard error of {name}", "units": "1", "definition": "sqrt(p (1 - p) / n), n images"}
    errors = np.sqrt(shares * (1 - shares) / images)
    return {name: xr.Variable(dims, shares, attrs), f"{name}_se": xr.Variable(dims, errors, error)}


def improvement(results: xr.Dataset, baseline: str, by: str | None = "group", *, relative: bool = True) -> xr.Dataset:
    """Compare each model's accuracy with a baseline's: ``accuracy / baseline's - 1`` (T-CNN paper, Fig. 3).

    Args:
        results: what :func:`tcnn_probe.evaluation.robustness` gave.
        baseline: name of the model that the others are compared with.
        by: "group" of corruptions, "corruption" or "severity" (the others averaged over); "attack"; None for clean
            images.
        relative: whether to divide the difference by the baseline's accuracy.

    Returns:
        ``improvement`` (model, by) of the other models, in units of 1, and ``interval`` (model, by, bound) with bound
        "low" and "high": a 95 % interval over images, the same for both models, of
        :func:`~tcnn_probe.evaluation.mean_interval` or, if relative, Fieller's (1954). NaN where a model did not see
        the images, and, if relative, where the baseline is never right, or so rarely that any ratio is possible.

    Raises:
        TypeError: no Dataset.
        ValueError: no such model or no other, or ``by`` unknown or not measured.
    """
    right = share_right(results, by)
    models = _names_of_models(right, baseline)
    if len(models) < 2:
        raise ValueError(f"expected another model beside the baseline, got {models}")
    others = right.sel(model=[name for name in models if name != baseline])
    compared = (others, right.sel(model=baseline, drop=True))

    def ratio(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (ours - theirs) / theirs if relative else ours - theirs
        return np.where(np.isfinite(found), found, np.nan)

    means = xr.apply_ufunc(ratio, *(x.mean("image") for x in compared))
    if relative:
        bounds = xr.apply_ufunc(
            _ratio_interval, *compared, input_core_dims=[["image"]] * 2, output_core_dims=[["bound"]], vectorize=True
        ).assign_coords(bound=["low", "high"])
    else:
        bounds = mean_interval(compared[0] - compared[1])
    kind = "relative improvement of accuracy" if relative else "improvement of accuracy"
    means.attrs = {"units": "1", "long_name": kind, "description": f"{kind} over that of {baseline!r}"}
    bounds.attrs = {"units": "1", "long_name": "95 % interval over images"}
    return xr.Dataset({"improvement": means, "interval": bounds})


def _ratio_interval(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[Any]:
    """Fieller's interval for mean(ours) / mean(theirs) - 1, of two arrays (N,) of the same images.

    It holds each ratio q for which a t test finds the mean of ``ours - q theirs`` compatible with 0. If answers are
    right or wrong, two images are added, one that only ours has right and one that only theirs has, as in Bonett and
    Price's interval for the difference.
    """
    from scipy.stats import t

    if np.isnan(ours).any() or np.isnan(theirs).any():
        return np.full(2, np.nan)
    pairs = np.stack([ours, theirs])
    if np.isin(pairs, (0, 1)).all():
        pairs = np.concatenate([pairs, np.eye(2)], axis=1)
    count = pairs.shape[1]
    (first, second), covariance = pairs.mean(1), np.cov(pairs) * t.ppf(0.975, count - 1) ** 2 / count
    square = second**2 - covariance[1, 1]
    middle = first * second - covariance[0, 1]
    inside = middle**2 - square * (first**2 - covariance[0, 0])
    if square <= 0 or inside < 0:
        return np.full(2, np.nan)
    return (middle + np.array([-1, 1]) * np.sqrt(inside)) / square - 1


def mean_corruption_error(ds: xr.Dataset, baseline: str) -> xr.Dataset:
    """Corruption errors relative to a baseline's, and their mean, the mCE; as a ratio, where papers give per cent.

    With the error rates E of model f at corruption c and severity s, means over seeds:

    - CE_c = Σ_s E_{s,c}^f / Σ_s E_{s,c}^baseline: below 1, fewer errors than the baseline's;
    - relative CE_c = Σ_s (E_{s,c}^f - E_clean^f) / Σ_s (E_{s,c}^baseline - E_clean^baseline): how much is lost to
      corruption, whatever the clean accuracy is.

    (Hendrycks & Dietterich 2019, Benchmarking neural network robustness to common corruptions and perturbations, §4.2;
    their baseline is AlexNet on ImageNet.)

    Args:
        ds: what :func:`tcnn_probe.evaluation.robustness` gave, or a part of it: severities and seeds, or one of them.
        baseline: one of its models.

    Returns:
        ``corruption_error`` and ``relative_corruption_error`` (model, corruption); their means over the corruptions of
        each group, ``group_corruption_error`` and ``relative_group_corruption_error`` (model, group), and over all of
        them, ``mean_corruption_error`` and ``relative_mean_corruption_error`` (model). NaN where the baseline makes no
        errors, or loses nothing.

    Raises:
        TypeError: no Dataset.
        ValueError: no accuracies under corruption, or no such model.
    """
    check_results(ds, "accuracy", "clean_accuracy", "group")
    errors = 1 - ds.accuracy
    _names_of_models(errors, baseline)
    if "corruption" not in errors.dims:  # one was selected
        errors = errors.expand_dims("corruption")
    errors = errors.assign_coords(group=("corruption", np.atleast_1d(ds.group.values)))
    errors = errors.mean([dim for dim in errors.dims if dim == "seed"])
    lost = errors - (1 - ds.clean_accuracy)
    found = xr.Dataset(attrs=ds.attrs | {"baseline": baseline})
    for kind, rates in (("", errors), ("relative_", lost)):
        sums = rates.sum([dim for dim in rates.dims if dim == "severity"], skipna=False)
        own = sums.sel(model=baseline, drop=True)
        ratio = (sums / own.where(own != 0)).transpose("model", "corruption", ...)
        found[f"{kind}corruption_error"] = ratio
        found[f"{kind}group_corruption_error"] = ratio.groupby("group").mean("corruption", skipna=False)
        found[f"{kind}mean_corruption_error"] = ratio.mean("corruption", skipna=False)
    for name, variable in found.data_vars.items():
        variable.attrs = {"long_name": f"{name}, of {baseline}'s".replace("_", " "), "units": "1"}
    return found


def share_right(results: xr.Dataset, by: str | None) -> xr.DataArray:
    """The share of right answers of each image, (model, by, image) or (model, image); see :func:`improvement`."""
    name = f"{kind_of(by)}correct"
    check_results(results, name)
    if missing := [dim for dim in ("model", "image") if dim not in results[name].dims]:
        raise ValueError(f"expected {name!r} with the dimension {missing[0]!r}, got {results[name].dims}")
    return mean_by(results[name].compute(), by).transpose("model", ..., "image")


def kind_of(by: str | None) -> str:
    """The kind of decisions, "clean_", "" or "adversarial_", that have this coordinate; see :func:`improvement`."""
    if by not in _KIND_BY:
        raise ValueError(f"expected by to be one of {', '.join(map(repr, _KIND_BY))}, got {by!r}")
    return _KIND_BY[by]


def mean_by(values: xr.DataArray, by: str | None) -> xr.DataArray:
    """Means of what is known of each image, over all but ``by``, "model" and "image": (..., by, image)."""
    if by is not None and by not in values.coords:
        raise ValueError(f"expected {values.name!r} with the coordinate {by!r}, got {tuple(values.coords)}")
    found = values.astype(float)
    along_by = "corruption" if by == "group" else by
    if along_by is not None and along_by not in found.dims:  # one was selected
        found = found.expand_dims(along_by)
    if by == "group":
        groups = np.atleast_1d(found.group.values)
        found = found.assign_coords(group=("corruption", groups)).groupby("group").mean("corruption")
        found = found.sel(group=list(dict.fromkeys(str(group) for group in groups)))  # in the published order
    along = [dim for dim in found.dims if dim not in ("model", "image", by)]
    return found.mean(along).transpose(..., "image")


def check_results(given: object, *names: str) -> None:
    """Refuse what is no Dataset, such as one of its variables, or lacks some of these."""
    if not isinstance(given, xr.Dataset):
        raise TypeError(f"expected the results of evaluation.robustness, an xarray.Dataset; got {type(given).__name__}")
    if missing := [name for name in names if name not in given.variables]:
        raise ValueError(f"expected the results of evaluation.robustness with {missing[0]!r}, got {list(given)}")


def _names_of_models(values: xr.DataArray, baseline: str) -> list[str]:
    """All of them; ValueError if the baseline is none."""
    if "model" not in values.dims:
        raise ValueError(f"expected accuracies with the dimension 'model', got {values.dims}")
    models = [str(name) for name in values.model.values]
    if baseline not in models:
        raise ValueError(f"expected the baseline to be one of the models {models}, got {baseline!r}")
    return models
