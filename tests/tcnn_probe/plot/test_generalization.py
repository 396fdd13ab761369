"""Scatter plot of two test sets: its points, and its intervals by Wilson's formula."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes

from tcnn_probe.plot import generalization
from tests.tcnn_probe.plot.layout import texts_within_and_apart


def measured(trainings: int) -> xr.Dataset:
    """Return results of 3 models and the given number of trainings,
    on 23 images and on variants of 17 and 7.
    """
    random = np.random.default_rng(0)
    right = random.random((trainings, 3, 23)) < np.array([0.5, 0.7, 0.9])[:, None]
    ds = xr.Dataset(
        {"clean_correct": (("training", "model", "image"), right)},
        {"model": ["a", "b", "c"]},
    )
    # Intervals depend on the number of images, which differs between the sets.
    images = np.array([17, 7])
    # These are possible accuracies for these numbers of images.
    shares = random.integers(0, images + 1, (trainings, 3, 2)) / images
    ds["variant_accuracy"] = ("training", "model", "variant"), shares
    return ds.assign(
        clean_accuracy=ds.clean_correct.mean("image"), variant_images=("variant", images)
    ).assign_coords(variant=["v2", "real"])  # fmt: skip


def drawn(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    points = {container.get_label(): container[0].get_data() for container in axes.containers}
    return {label: (x.tolist(), y.tolist()) for label, (x, y) in points.items()}


def wilson(p: float, n: int) -> list[float]:
    z = 1.959963984540054  # the quantile for 95 %
    scale = 1 + z * z / n
    middle = p + z * z / (2 * n)
    variance = p * (1 - p) / n + z * z / (4 * n * n)
    half = z * math.sqrt(variance)
    return [(middle - half) / scale, (middle + half) / scale]


@pytest.mark.parametrize("trainings", [1, 5])
def test_points_and_intervals(trainings: int) -> None:
    ds = measured(trainings)
    selected = ds.sel(variant="real")
    axes = generalization(selected if trainings > 1 else selected.squeeze("training", drop=True))
    points = drawn(axes)
    assert list(points) == ["a", "b", "c"]
    pairs = []
    for container, model in zip(axes.containers, "abc", strict=True):
        expected = [
            ds.clean_accuracy.sel(model=model),
            ds.variant_accuracy.sel(model=model, variant="real"),
        ]
        np.testing.assert_allclose(points[model], expected)
        for axis, (bars, images) in enumerate(zip(container[2], (23, 7), strict=True)):
            for segment, share in zip(bars.get_segments(), expected[axis].values, strict=True):
                np.testing.assert_allclose(
                    segment[:, axis], wilson(float(share), images), atol=1e-12
                )
        pairs += zip(*points[model], strict=True)
    (line,) = (item for item in axes.lines if item.get_label() == "least squares")
    x, y = (np.array(item) for item in zip(*pairs, strict=True))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    np.testing.assert_allclose(line.get_ydata(), y.mean() + slope * (line.get_xdata() - x.mean()))
    assert axes.get_ylabel() == "accuracy on real"
    texts_within_and_apart(axes.figure)


def test_one_model_on_given_axes() -> None:
    axes = plt.figure().subplots()
    ds = measured(1).isel(training=0).sel(variant=["v2"], model="a")
    assert generalization(ds, axes) is axes
    assert drawn(axes) == {"a": ([float(ds.clean_accuracy)], [float(ds.variant_accuracy[0])])}
    assert len(axes.lines) == 1  # a single point has no line


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ds.sel\(variant='v2'\), got \['v2', 'real'\]"):
        generalization(measured(1))
    assert plt.get_fignums() == []
