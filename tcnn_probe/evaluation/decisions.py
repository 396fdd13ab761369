"""Comparison of models by their decisions; without torch."""

import xarray as xr

from tcnn_probe.evaluation.summary import mean_by, prefix_of

__all__ = ["disagreement"]

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
        KeyError: The results lack predictions of this kind.
        ValueError: ``by`` is unknown or was not measured, or the predictions are those of a single
            model.
    """
    name = f"{prefix_of(by)}prediction"
    predictions = results[name]
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
