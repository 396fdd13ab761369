"""The published summary of accuracies under corruption: errors relative to those of a baseline."""

import numpy as np
import xarray as xr

from tcnn_probe.perturbations.comparison import check_results

__all__ = ["mean_corruption_error"]


def mean_corruption_error(ds: xr.Dataset, baseline: str) -> xr.Dataset:
    """Corruption errors relative to a baseline's, and their mean, the mCE; as a ratio, where papers give per cent.

    With the error rates E of model f at corruption c and severity s, means over seeds (of those seeds and severities
    that ``ds`` has, one perhaps, selected):

    - CE_c = Σ_s E_{s,c}^f / Σ_s E_{s,c}^baseline: below 1, fewer errors than the baseline's;
    - relative CE_c = Σ_s (E_{s,c}^f - E_clean^f) / Σ_s (E_{s,c}^baseline - E_clean^baseline): how much is lost to
      corruption, whatever the clean accuracy is.

    (Hendrycks & Dietterich 2019, Benchmarking neural network robustness to common corruptions and perturbations, §4.2;
    their baseline is AlexNet on ImageNet.)

    Args:
        ds: what :func:`tcnn_probe.robustness` gave.
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
    check_results(ds)
    if missing := [name for name in ("accuracy", "clean_accuracy", "group") if name not in ds.variables]:
        raise ValueError(f"expected what tcnn_probe.robustness gives for corruptions, got no {', '.join(missing)}")
    if "model" not in ds.accuracy.dims:
        raise ValueError(f"expected accuracies with the dimension 'model', got {ds.accuracy.dims}")
    if baseline not in (names := ds.model.values.tolist()):
        raise ValueError(f"expected one of the models {', '.join(names)} for baseline, got {baseline!r}")
    errors = 1 - ds.accuracy
    if "corruption" not in errors.dims:  # one was selected
        errors = errors.expand_dims("corruption")
    errors = errors.assign_coords(group=("corruption", np.atleast_1d(ds.group.values)))
    errors = errors.mean([dim for dim in errors.dims if dim == "seed"])
    lost = errors - (1 - ds.clean_accuracy)
    found = xr.Dataset(attrs=ds.attrs | {"baseline": baseline})
    for kind, rates in (("", errors), ("relative_", lost)):
        sums = rates.sum([dim for dim in rates.dims if dim == "severity"], skipna=False)
        own = sums.sel(model=baseline, drop=True)
        ratio = (sums / own.where(own != 0)).transpose("model", "corruption")
        found[f"{kind}corruption_error"] = ratio
        found[f"{kind}group_corruption_error"] = ratio.groupby("group").mean("corruption", skipna=False)
        found[f"{kind}mean_corruption_error"] = ratio.mean("corruption", skipna=False)
    for name, variable in found.data_vars.items():
        words = str(name).replace("_", " ")
        variable.attrs = {"long_name": f"{words}, of {baseline}'s", "units": "1"}
    return found
