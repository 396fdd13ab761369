"""Accuracy on a second test set against accuracy on the first (Touvron's thesis, Figs. 6.7 and
6.11).
"""

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from tcnn_probe.evaluation.intervals import scipy_stats
from tcnn_probe.plot.style import OKABE_ITO, axes_or_current, legend_beside

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["generalization"]


def generalization(ds: xr.Dataset, ax: "Axes | None" = None) -> "Axes":
    """Draw the accuracy of each model on another test set against that on the clean images.

    ::

        ds = tcnn_probe.evaluation.robustness(
            models, clean.loader, corruptions=(), attacks=(), variants=[imagenet_v2]
        )
        tcnn_probe.plot.generalization(ds)

    A model below the line fits the first test set, on which choices are often made, better than the
    other models do. The dashed line is the least-squares fit to all points; there is none if all
    clean accuracies are equal. Lines through a point are Wilson intervals (95 %), as if images were
    drawn at random; another training may differ by more. Join several trainings by
    ``xr.concat(runs, "training")``: each is then a point, in the colour of its model.

    Args:
        ds: Results of :func:`tcnn_probe.evaluation.robustness`: ``clean_accuracy`` and
            ``variant_accuracy``, of one other test set.
        ax: Axes to draw on; None for the current axes.

    Returns:
        The axes.

    Raises:
        AttributeError, KeyError: Accuracies are missing.
        ValueError: There are several other test sets.
        ModuleNotFoundError: SciPy is not installed.
    """
    names = [str(name) for name in np.atleast_1d(ds["variant"].values)]
    if len(names) > 1:
        raise ValueError(
            f"expected one other test set, as ds.sel(variant={names[0]!r}), got {names}"
        )
    selected = ds.squeeze("variant") if "variant" in ds.dims else ds
    axes, points = axes_or_current(ax), []
    for number, model in enumerate(np.atleast_1d(ds["model"].values)):
        results = selected.sel(model=model) if "model" in ds.dims else selected
        arrays = xr.broadcast(
            results.clean_accuracy, results.variant_accuracy, results.variant_images
        )
        first, second, images = (array.values.ravel() for array in arrays)
        errors = [
            _wilson(first, np.full(len(first), ds.sizes["image"])),
            _wilson(second, images),
        ]
        axes.errorbar(
            first, second, errors[1], errors[0], fmt="o", ms=4, elinewidth=0.8, label=str(model),
            color=list(OKABE_ITO.values())[number % len(OKABE_ITO)],
        )  # fmt: skip
        points.append((first, second))
    x, y = (np.concatenate(values) for values in zip(*points, strict=True))
    if np.ptp(x) > 0:
        ends = np.array([x.min(), x.max()])
        axes.plot(
            ends,
            np.polynomial.Polynomial.fit(x, y, 1)(ends),
            "--",
            color="0.4",
            lw=1,
            label="least squares",
        )
    axes.set(
        xlabel="accuracy on the clean images",
        ylabel=f"accuracy on {names[0]}",
    )
    legend_beside(axes)
    return axes


def _wilson(accuracy: NDArray[np.floating], images: NDArray[np.integer]) -> NDArray[np.floating]:
    """Return the lengths of the 95 % Wilson interval below and above each accuracy: (2, points)."""
    binomtest = scipy_stats().binomtest
    # The accuracy is a quotient of integers, back to the one that it was made of.
    right = np.rint(accuracy * images).astype(int)
    tests = [binomtest(int(k), int(n)) for k, n in zip(right, images, strict=True)]
    bounds = np.array([test.proportion_ci(0.95, method="wilson") for test in tests])
    # At accuracies of 0 and 1 rounding can make a length negative, which errorbar refuses.
    return np.clip([accuracy - bounds[:, 0], bounds[:, 1] - accuracy], 0, None)
