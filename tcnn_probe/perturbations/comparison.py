"""How much better than a baseline a model does on perturbed images, and how sure that is (T-CNN paper, Fig. 3)."""

import numpy as np
import xarray as xr

from tcnn_probe.bootstrap import resampled_means, tails

__all__ = ["check_results", "improvement", "share_right"]

_OF_CORRUPTIONS = ("group", "corruption", "severity")


def improvement(
    results: xr.Dataset,
    baseline: str,
    by: str | None = "group",
    *,
    relative: bool = True,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> xr.Dataset:
    """Accuracy of each model against that of a baseline: ``accuracy / baseline's - 1``, the papers' "improvement".

    Args:
        results: of :func:`tcnn_probe.robustness`.
        baseline: name of the model that the others are held against.
        by: "group" of corruptions, "corruption" or "severity" (the others averaged over); "attack"; None for clean
            images.
        relative: the difference as a share of the baseline's accuracy, else in accuracy.
        confidence, resamples, seed: of the interval, a percentile bootstrap over images in which both models see the
            same ones.

    Returns:
        ``improvement`` (model, by) of the models but the baseline, in units of 1, and ``interval`` (model, by, bound)
        with bound "low" and "high". If relative, there is no improvement where the baseline is never right, and no
        interval where that is so in even one resample: both NaN; ``relative=False`` has them.

    Raises:
        TypeError: no Dataset.
        ValueError: no such model or no other, a ``by`` that is none or that was not measured, a confidence that is
            none.
    """
    quantiles = tails(confidence)
    right = share_right(results, by)
    models = [str(name) for name in right.model.values]
    if baseline not in models:
        raise ValueError(f"expected the baseline to be one of the models {models}, got {baseline!r}")
    if len(models) < 2:
        raise ValueError(f"expected another model beside the baseline, got {models}")
    others = right.sel(model=[name for name in models if name != baseline])
    compared = (others, right.sel(model=baseline, drop=True))

    def ratio(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = (ours - theirs) / theirs if relative else ours - theirs
        return np.where(np.isfinite(found), found, np.nan)

    def interval(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        drawn = ratio(*(resampled_means(row, resamples, seed) for row in (ours, theirs)))
        return np.full(2, np.nan) if np.isnan(drawn).any() else np.quantile(drawn, quantiles)

    means = xr.apply_ufunc(ratio, *(x.mean("image") for x in compared))
    bounds = xr.apply_ufunc(
        interval, *compared, input_core_dims=[["image"]] * 2, output_core_dims=[["bound"]], vectorize=True
    )
    kind = "relative improvement of accuracy" if relative else "improvement of accuracy"
    means.attrs = {"units": "1", "long_name": kind, "description": f"{kind} over that of {baseline!r}"}
    bounds.attrs = {"units": "1", "long_name": f"{confidence:.0%} bootstrap interval over images"}
    return xr.Dataset({"improvement": means, "interval": bounds.assign_coords(bound=["low", "high"])})


def share_right(results: xr.Dataset, by: str | None) -> xr.DataArray:
    """The share of right answers of each image, (model, by, image) or (model, image); see :func:`improvement`."""
    check_results(results)
    names: dict[str | None, str] = {None: "clean_correct", "attack": "adversarial_correct"}
    names |= dict.fromkeys(_OF_CORRUPTIONS, "correct")
    if by not in names:
        expected = ", ".join(repr(name) for name in names)
        raise ValueError(f"expected by to be one of {expected}, got {by!r}")
    if names[by] not in results:
        raise ValueError(f"expected the results of tcnn_probe.robustness with {names[by]!r}, got {list(results)}")
    right = results[names[by]].astype(float)
    if missing := [dim for dim in ("model", "image") if dim not in right.dims]:
        raise ValueError(f"expected {names[by]!r} with the dimension {missing[0]!r}, got {right.dims}")
    if by is not None and by not in right.coords:
        raise ValueError(f"expected {names[by]!r} with the coordinate {by!r}, got {tuple(right.coords)}")
    along_by = "corruption" if by == "group" else by
    if along_by is not None and along_by not in right.dims:  # one was selected
        right = right.expand_dims(along_by)
    if by == "group":
        groups = np.atleast_1d(right.group.values)
        right = right.assign_coords(group=("corruption", groups)).groupby("group").mean("corruption")
        right = right.sel(group=list(dict.fromkeys(str(group) for group in groups)))  # in the published order
    along = [dim for dim in right.dims if dim not in ("model", "image", by)]
    return right.mean(along).transpose("model", ..., "image")


def check_results(given: object) -> None:
    """Refuse what is no Dataset, such as one of its variables.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(given, xr.Dataset):
        raise TypeError(f"expected what tcnn_probe.robustness gives, an xarray.Dataset; got {type(given).__name__}")
