"""Content information by epoch: the figure and the report
for numbers made by hand, and shuffled labels.
"""

from typing import Any

import numpy as np
import torch
import xarray as xr

from common.data import digits_loaders, with_shuffled_labels
from common.figures import COLORS
from common.removal_report import draw_content, gain


def two_layers(start: float, end: float, *, gate: bool = True) -> xr.Dataset:
    """Return two layers of three heads at epochs 0 and 1; the second layer lacks its last head."""
    exists = np.array([[1, 1, 1], [1, 1, np.nan]])
    values = np.array([start, end])[:, None, None] * exists
    coords = {"epoch": [0, 1], "layer": ["a", "b"], "head": [0, 1, 2]}
    dims = ("epoch", "layer", "head")
    types = [["content", "mixed", "convolutional"], ["content", "averaging", ""]]
    variables: dict[str, Any] = {
        "content_information": (dims, values),
        "head_type": (dims[1:], types),
    }
    return xr.Dataset(variables | ({"gate": (dims, values / 2)} if gate else {}), coords)


def test_gain_is_reported_against_both_controls() -> None:
    seeds = xr.DataArray([3, 4], dims="training", name="training")
    content = xr.concat([two_layers(0.1, 0.4), two_layers(0.1, 0.6)], seeds)
    shuffled = xr.concat([two_layers(0.1, 0.1), two_layers(0.1, 0.3)], seeds)
    lines = gain(content, shuffled).splitlines()
    assert lines[1] == (
        "  seed 3: trained 0.400 [0.400, 0.400], untrained 0.100 [0.100, 0.100], "
        "on shuffled labels 0.100 [0.100, 0.100]"
    )
    # 12.706 is the quantile of Student's t with one degree of freedom.
    half = 12.706204736 * np.std([0.3, 0.5], ddof=1) / 2**0.5
    assert (
        lines[3]
        == f"  trained less untrained: +0.400, t interval over trainings [{0.4 - half:+.3f}, "
        f"{0.4 + half:+.3f}]"
    )
    assert (
        lines[4]
        == "  trained less on shuffled labels: +0.300, t interval over trainings [+0.300, +0.300]"
    )
    assert lines[5].endswith(
        "by seed: trained 0.40, 0.60; untrained 0.10, 0.10; on shuffled labels 0.10, 0.30"
    )
    assert "shuffled" not in gain(content, None)
    assert gain(content[{"training": [0]}], None).splitlines()[2] == (
        "  trained less untrained: +0.300, one training gives no t interval"
    )


def test_each_head_is_a_line_in_the_colour_of_its_type() -> None:
    figure = draw_content(
        {
            "one": two_layers(0.1, 1.4),
            "other": two_layers(0.2, 0.3, gate=False).isel(layer=[0]),
        }
    )
    assert len(figure.axes) == 2 + 2 + 1
    gates, _, information = figure.axes[:3]
    assert gates.get_ylabel() == "one\ngate"
    assert [line.get_color() for line in gates.lines] == [
        COLORS[kind] for kind in ("content", "mixed", "convolutional")
    ]
    np.testing.assert_allclose(information.lines[0].get_ydata(), [0.1, 1.4])
    assert information.get_ylim()[0] == 0
    assert information.get_ylim()[1] > 1.4
    np.testing.assert_allclose(figure.axes[4].lines[2].get_ydata(), [0.2, 0.3])


def test_shuffled_labels_are_a_permutation_of_the_labels() -> None:
    train, _ = digits_loaders(size=32, batch_size=16, seed=0, limit=400, clutter=0)
    first, second = (with_shuffled_labels(train, seed) for seed in (1, 2))
    labels = torch.as_tensor(train.dataset.labels)
    for shuffled in (first, second):
        assert shuffled.dataset.digits is train.dataset.digits
        assert torch.equal(shuffled.dataset.labels.bincount(), labels.bincount())
        # With ten classes, a tenth of the labels agrees by chance.
        assert (shuffled.dataset.labels == labels).double().mean() < 0.2
    assert not torch.equal(first.dataset.labels, second.dataset.labels)
