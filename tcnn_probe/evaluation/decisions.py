"""Comparison of models by their decisions:
disagreement, McNemar's test, calibration; without torch.
"""

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.evaluation.intervals import scipy_stats
from tcnn_probe.evaluation.summary import check_results, mean_by, prefix_of

__all__ = ["calibration_error", "disagreement", "mcnemar"]

GROUND_TRUTH = "ground truth"


def disagreement(results: xr.Dataset, by: str | None = None) -> xr.Dataset:
    """Compute the share of images that two models classify differently (Touvron's thesis, Table
    3.4).

    ::

        pairs = tcnn_probe.evaluation.disagreement(ds, by="group")
        pairs.disagreement.sel(group="noise").to_pandas()
        tcnn_probe.evaluation.mean_interval(pairs.differ)

    The labels are included as a model named "ground truth", so its row has the error rates. Two
    predictions of -1 (scores with NaN) do not differ. NaN predictions, of a model that did not see
    these images, are left out.

    Args:
        results: Results of :func:`tcnn_probe.evaluation.robustness`.
        by: None for clean images; "group" of corruptions, "corruption", "severity" or "attack",
            with the mean over all other dimensions (severities, seeds).

    Returns:
        ``differ`` (model, other, by, image), the share of conditions in which the two decide
        differently, and its mean over images, ``disagreement`` (model, other, by), both in units of
        1.

    Raises:
        TypeError: The results are not a Dataset.
        ValueError: ``by`` is unknown or was not measured, or the predictions are those of a single
            model.
    """
    name = f"{prefix_of(by)}prediction"
    check_results(results, name, "label")
    predictions = results[name]
    if "model" not in predictions.dims:
        raise ValueError(f"expected {name!r} with the dimension 'model', got {predictions.dims}")
    truth = results.label.broadcast_like(predictions.isel(model=0, drop=True)).expand_dims(
        model=[GROUND_TRUTH]
    )
    predictions = xr.concat([truth, predictions], "model")
    rows = []
    # All pairs at once would need memory quadratic in the number of models.
    for number in range(len(predictions.model)):
        row = predictions.isel(model=number, drop=True)
        # NaN differs from everything, even from itself.
        differ = (predictions != row).where(predictions.notnull() & row.notnull())
        rows.append(mean_by(differ.rename(name), by))
    names = predictions.model.rename(model="other").variable
    differ = xr.concat(rows, names).transpose("model", "other", ..., "image")
    phrase = "two models classify differently"
    differ.attrs = {
        "long_name": phrase,
        "units": "1",
        "definition": "share of conditions (severities, seeds, ...)",
    }
    shares = differ.mean("image")
    shares.attrs = {"long_name": f"share of images that {phrase}", "units": "1"}
    return xr.Dataset({"disagreement": shares, "differ": differ}, attrs=results.attrs)


def mcnemar(first: xr.DataArray, second: xr.DataArray) -> xr.Dataset:
    """Test whether two models are right equally often on the same images,
    with McNemar's exact test.

    ::

        right = ds.correct.sel(severity=3, seed=0)
        test = tcnn_probe.evaluation.mcnemar(right.sel(model="tcnn"), right.sel(model="cnn"))
        test.p_value  # for each corruption

    Only images that one model has right and the other has wrong count. If both models are right
    equally often, each of these images is like the toss of a fair coin (McNemar 1947), so SciPy's
    two-sided binomial test applies. Each label of further dimensions has its own test: correct for
    their number before you call one of many significant.

    Args:
        first, second: Whether each model is right, bool, with the dimension "image": two selections
            of ``ds.correct``.

    Returns:
        ``first_only`` and ``second_only``, the numbers of images that only this model has right,
        and ``p_value``, which is 1 where the models differ in no image; each with the dimensions of
        the arguments except "image".

    Raises:
        TypeError: An argument is not bool.
        ValueError: There is no dimension "image", or the two have different images.
    """
    binomtest = scipy_stats().binomtest
    _check_right(first)
    _check_right(second)
    first, second = xr.align(first.compute(), second.compute(), join="exact")
    first_only = (first & ~second).sum("image")
    second_only = (second & ~first).sum("image")

    def test(wins: int, losses: int) -> float:
        trials = int(wins + losses)
        return binomtest(int(wins), trials).pvalue if trials else 1.0

    p_value = xr.apply_ufunc(test, first_only, second_only, vectorize=True, output_dtypes=[float])
    p_value.attrs = {"long_name": "p-value of McNemar's exact test", "units": "1"}
    return xr.Dataset({"first_only": first_only, "second_only": second_only, "p_value": p_value})


def calibration_error(
    confidence: xr.DataArray, correct: xr.DataArray, bins: int = 15
) -> xr.DataArray:
    """Compute the expected calibration error (Guo et al. 2017, On Calibration of Modern Neural
    Networks, Eq. 3).

    ::

        # (model, corruption, ...)
        errors = tcnn_probe.evaluation.calibration_error(ds.confidence, ds.correct)

    Images are assigned by their confidence to bins of equal width, the m-th of which is ((m - 1) /
    bins, m / bins]. The error is the mean over images of abs(accuracy - mean confidence) of their
    bin. It depends on the bins, and is above 0 even for a calibrated model if the sample is small:
    compare errors at equal numbers of bins and images.

    Args:
        confidence: Confidence of each prediction, in [0, 1], with the dimension "image":
            ``ds.confidence``.
        correct: Right predictions, bool, with the same dimensions.
        bins: Number of bins.

    Returns:
        Errors, in units of 1, with the dimensions of the arguments except "image"; NaN where a
        confidence is NaN.

    Raises:
        TypeError: ``correct`` is not bool.
        ValueError: There is no dimension "image" or no bin, the images differ, or confidences are
            outside of [0, 1].
    """
    _check_right(correct)
    if bins < 1:
        raise ValueError(f"expected at least one bin, got {bins}")
    if bool(((confidence < 0) | (confidence > 1)).any()):
        raise ValueError(
            "expected confidences in [0, 1], as ds.confidence: the softmax of scores, not scores"
        )
    # With only the inner edges, a confidence of 0 is in the first bin, and a confidence of 1 in the
    # last.
    edges = np.linspace(0, 1, bins + 1)[1:-1]

    def error(confidence: NDArray[np.floating], correct: NDArray[np.bool_]) -> float:
        # n_m (accuracy - mean confidence) of each bin m, which is the sum of the differences in the
        # bin.
        gaps = np.bincount(
            np.searchsorted(edges, confidence), correct - confidence.astype(float), bins
        )
        return float(np.abs(gaps).sum() / len(confidence))

    errors = xr.apply_ufunc(
        error,
        confidence.compute(),
        correct.compute(),
        input_core_dims=[["image"], ["image"]],
        join="exact",
        vectorize=True,
        output_dtypes=[float],
    )
    return errors.rename("calibration_error").assign_attrs(
        long_name="expected calibration error",
        units="1",
        definition=f"{bins} bins of equal width",
    )


def _check_right(answers: xr.DataArray) -> None:
    if not isinstance(answers, xr.DataArray) or answers.dtype != bool:
        got = answers.dtype if isinstance(answers, xr.DataArray) else type(answers).__name__
        raise TypeError(f"expected True or False for each image, bool, as ds.correct; got {got}")
    if "image" not in answers.dims:
        raise ValueError(
            f"expected True or False for each image, with the dimension 'image'; got {answers.dims}"
        )
