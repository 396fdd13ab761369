"""Corruption errors of ImageNet-C, relative to those
of a baseline or to AlexNet's published errors; without torch.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from tcnn_probe.evaluation.summary import check_baseline

__all__ = ["ALEXNET_ERRORS", "mean_corruption_error"]

ALEXNET_ERRORS = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
    # From the accuracy that torchvision reports for its weights; the paper prints 43.5 %.
    "clean": 0.434780,
}
"""AlexNet's mean error over severities 1 to 5 of each corruption
of ImageNet-C (github.com/hendrycks/robustness).
"""


def mean_corruption_error(ds: xr.Dataset, baseline: str | Mapping[str, float]) -> xr.Dataset:
    """Compute corruption errors relative to those of a baseline,
    and their mean, the mCE, as ratios (papers: per cent).

    With the error rates E of model f at corruption c and severity s, averaged over seeds:

    - CE_c = Σ_s E_{s,c}^f / Σ_s E_{s,c}^baseline: below 1, there are fewer errors than with the
      baseline;
    - relative CE_c = Σ_s (E_{s,c}^f - E_clean^f) / Σ_s (E_{s,c}^baseline - E_clean^baseline): the
      loss by corruption, without the effect of the clean accuracy.

    (Hendrycks & Dietterich 2019, Benchmarking neural network robustness to common corruptions and
    perturbations, §4.2; their baseline is AlexNet on ImageNet, ``evaluation.ALEXNET_ERRORS``.)

    Args:
        ds: Results of :func:`tcnn_probe.evaluation.robustness` or
            :func:`tcnn_probe.evaluation.imagenet_c`, or a selection of severities and seeds.
        baseline: Name of the model to compare the others with; or published errors by corruption,
            means over all five severities, and the error on clean images as "clean", which relative
            errors need.

    Returns:
        ``corruption_error`` and ``relative_corruption_error`` (model, corruption); their means over
        the corruptions of each group, ``group_corruption_error`` and
        ``relative_group_corruption_error`` (model, group), and over all corruptions,
        ``mean_corruption_error`` and ``relative_mean_corruption_error`` (model). NaN where the
        baseline makes no errors, or loses nothing. Relative errors are left out if clean images
        were not measured.

    Raises:
        AttributeError, KeyError: The results have no accuracies under corruption, or corruptions
            without a published error.
        ValueError: The results lack the baseline, or have other severities than the published
            errors.
    """
    errors = 1 - ds.accuracy
    if "corruption" not in errors.dims:  # a single corruption was selected
        errors = errors.expand_dims("corruption")
    errors = errors.assign_coords(group=("corruption", np.atleast_1d(ds.group.values)))
    errors = errors.mean({"seed"} & set(errors.dims))
    rates = {"": errors}
    if "clean_accuracy" in ds:
        rates["relative_"] = errors - (1 - ds.clean_accuracy)
    sums = {
        prefix: rate.sum({"severity"} & set(rate.dims), skipna=False)
        for prefix, rate in rates.items()
    }
    if isinstance(baseline, Mapping):
        baseline_name = owner = "published errors"
        baseline_sums = _published(errors, baseline)
    else:
        baseline_name = check_baseline(baseline, errors.model.values.tolist())
        owner = f"{baseline}'s"
        baseline_sums = {
            prefix: total.sel(model=baseline, drop=True) for prefix, total in sums.items()
        }
    summary = xr.Dataset(attrs=ds.attrs | {"baseline": baseline_name})
    # Published errors may lack the clean error, without which there are no relative errors.
    for prefix in [name for name in sums if name in baseline_sums]:
        divisor = baseline_sums[prefix]
        ratio = sums[prefix] / divisor.where(divisor != 0)
        ratio = ratio.transpose("model", "corruption", ...)
        # With skipna=False, a corruption under which the baseline makes no errors is not dropped
        # from the means.
        summary[f"{prefix}corruption_error"] = ratio
        summary[f"{prefix}group_corruption_error"] = ratio.groupby("group").mean(
            "corruption", skipna=False
        )
        summary[f"{prefix}mean_corruption_error"] = ratio.mean("corruption", skipna=False)
    for name, variable in summary.data_vars.items():
        variable.attrs = {
            "long_name": f"{name}, of {owner}".replace("_", " "),
            "units": "1",
        }
    return summary


def _published(errors: xr.DataArray, published: Mapping[str, float]) -> dict[str, xr.DataArray]:
    """Return published errors summed over severities,
    (corruption), and relative errors if there is a clean error.
    """
    # Sums over severities are compared, so with other severities models would seem to differ from
    # the published one.
    severities = np.atleast_1d(errors.coords.get("severity", [])).tolist()
    if sorted(severities) != [1, 2, 3, 4, 5]:
        raise ValueError(
            f"expected results at severities 1 to 5, as the published errors are, got {severities}"
        )
    names = errors.corruption.values.tolist()
    means = xr.DataArray([published[name] for name in names], {"corruption": names}, ["corruption"])
    sums = {"": 5 * means}
    if "clean" in published:
        sums["relative_"] = 5 * (means - published["clean"])
    return sums
