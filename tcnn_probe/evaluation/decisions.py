"""How models differ in what they decide, and whether they are as sure as they are right; needs no torch."""

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.evaluation.summary import check_results, kind_of, mean_by

__all__ = ["calibration_error", "disagreement", "mcnemar"]

GROUND_TRUTH = "ground truth"


def disagreement(results: xr.Dataset, by: str | None = None) -> xr.Dataset:
    """The share of images that two models classify differently (Touvron's thesis, Table 3.4).

    ::

        found = tcnn_probe.evaluation.disagreement(ds, by="group")
        found.disagreement.sel(group="noise").to_pandas()
        tcnn_probe.evaluation.mean_interval(found.differ)

    The labels stand among the models as "ground truth", so its row has the error rates. Two predictions of -1 (scores
    with NaN) do not differ. What is NaN, of a model that did not see these images, is left out.

    Args:
        results: what :func:`tcnn_probe.evaluation.robustness` gave.
        by: None for clean images; "group" of corruptions, "corruption", "severity" or "attack", with the mean over all
            other dimensions (severities, seeds).

    Returns:
        ``differ`` (model, other, by, image), the share of conditions in which the two decide differently, and its mean
        over images, ``disagreement`` (model, other, by), both in units of 1.

    Raises:
        TypeError: no Dataset.
        ValueError: ``by`` unknown or not measured, or no predictions of several models.
    """
    name = f"{kind_of(by)}prediction"
    check_results(results, name, "label")
    if "model" not in results[name].dims:
        raise ValueError(f"expected {name!r} with the dimension 'model', got {results[name].dims}")
    kept = results[name]
    truth = results.label.broadcast_like(kept.isel(model=0, drop=True)).expand_dims(model=[GROUND_TRUTH])
    decided = xr.concat([truth, kept], "model")
    ones = [decided.isel(model=n, drop=True) for n in range(len(decided.model))]
    rows = [mean_by((decided != one).where(decided.notnull() & one.notnull()).rename(name), by) for one in ones]
    differ = xr.concat(rows, decided.model.rename(model="other").variable).transpose("model", "other", ..., "image")
    words = "two models decide differently"
    differ.attrs = {"long_name": words, "units": "1", "definition": "share of conditions (severities, seeds, ...)"}
    shares = differ.mean("image")
    shares.attrs = {"long_name": f"share of images of which {words}", "units": "1"}
    return xr.Dataset({"disagreement": shares, "differ": differ}, attrs=results.attrs)


def mcnemar(first: xr.DataArray, second: xr.DataArray) -> xr.Dataset:
    """McNemar's exact test of whether two models are right equally often, on the same images.

    ::

        right = ds.correct.sel(severity=3, seed=0)
        tcnn_probe.evaluation.mcnemar(right.sel(model="tcnn"), right.sel(model="cnn")).p_value  # for each corruption

    Only images that one of the two has right and the other wrong count. If both models are right equally often, each
    of these is a throw of a fair coin (McNemar 1947): a two-sided binomial test, by SciPy. Each label of further
    dimensions has a test of its own: correct for their number before you call one of many significant.

    Args:
        first, second: whether each image is right, bool, with the dimension "image": two of ``ds.correct``.

    Returns:
        ``first_only`` and ``second_only``, numbers of images that only this model has right, and ``p_value``, each with
        the dimensions of the two but "image". 1 where the two differ in no image.

    Raises:
        TypeError: an argument is not bool.
        ValueError: no dimension "image", or the two are of different images.
    """
    from scipy.stats import binomtest

    _check_right(first, second)
    first, second = xr.align(first.compute(), second.compute(), join="exact")
    counts = [(one & ~other).sum("image") for one, other in ((first, second), (second, first))]
    p_value = xr.apply_ufunc(
        lambda ours, theirs: binomtest(int(ours), int(ours + theirs)).pvalue if ours + theirs else 1.0,
        *counts,
        vectorize=True,
        output_dtypes=[float],
    )
    found = xr.Dataset({"first_only": counts[0], "second_only": counts[1], "p_value": p_value})
    found.p_value.attrs = {"long_name": "p-value of McNemar's exact test", "units": "1"}
    return found


def calibration_error(confidence: xr.DataArray, correct: xr.DataArray, bins: int = 15) -> xr.DataArray:
    """Expected calibration error (Guo et al. 2017, On Calibration of Modern Neural Networks, Eq. 3).

    ::

        errors = tcnn_probe.evaluation.calibration_error(ds.confidence, ds.correct)  # (model, corruption, ...)

    Images are put into bins by their confidence: of equal width, the m-th from (m - 1) / bins, without this bound, to
    m / bins. The error is the mean over images of abs(accuracy - mean confidence) of their bin. It depends on the
    bins, and is above 0 in a small sample of a calibrated model too: compare at equal numbers of both.

    Args:
        confidence: of each prediction, in [0, 1], with the dimension "image": ``ds.confidence``.
        correct: whether it is right, bool, with the same dimensions.
        bins: how many.

    Returns:
        the errors, in units of 1, with the dimensions of the two but "image"; NaN where a confidence is NaN.

    Raises:
        TypeError: ``correct`` is not bool.
        ValueError: no dimension "image", other images, confidences outside of [0, 1], or no bin.
    """
    _check_right(correct)
    if bins < 1:
        raise ValueError(f"expected bins from 1, got {bins}")
    if bool(((confidence < 0) | (confidence > 1)).any()):
        raise ValueError("expected confidences in [0, 1], as ds.confidence: the softmax of scores, not scores")
    edges = np.linspace(0, 1, bins + 1)[1:-1]

    def error(sure: NDArray[np.floating], right: NDArray[np.bool_]) -> float:
        gaps = np.bincount(np.searchsorted(edges, sure), weights=right - sure.astype(float), minlength=bins)
        return float(np.abs(gaps).sum() / len(sure))

    given = confidence.compute(), correct.compute()
    found = xr.apply_ufunc(
        error, *given, input_core_dims=[["image"]] * 2, join="exact", vectorize=True, output_dtypes=[float]
    )
    return found.rename("calibration_error").assign_attrs(
        long_name="expected calibration error", units="1", definition=f"{bins} bins of equal width"
    )


def _check_right(*given: xr.DataArray) -> None:
    for each in given:
        if not isinstance(each, xr.DataArray) or each.dtype != bool:
            got = each.dtype if isinstance(each, xr.DataArray) else type(each).__name__
            raise TypeError(f"expected whether each image is right, bool, as ds.correct; got {got}")
        if "image" not in each.dims:
            raise ValueError(f"expected whether each image is right, with the dimension 'image'; got {each.dims}")
