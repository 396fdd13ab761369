"""Sentences on one head and several heads claim no more than the intervals over images support."""

import numpy as np
import pytest
import xarray as xr

from class_attention_saliency import parse, plan
from common.saliency_report import beside_one_head, report, several_heads


def scores(hits: float, insertion: float) -> xr.Dataset:
    """Return scores of 40 images, with a share
    of hits on the object and an insertion AUC above that of chance.
    """
    image = np.arange(40)
    # Without noise, the interval would have no width.
    noise = 0.01 * np.sin(image)
    chance = np.stack([image % 5 == 0, 0.3 + noise])
    attention = np.stack([image < 40 * hits, 0.3 + insertion - noise])
    measures = np.stack([attention, chance], 1)
    dims = ("attribution", "image")
    return xr.Dataset(
        {
            "pointing_game": (dims, measures[0]),
            "pointing_game_exact": (dims, measures[0]),
            "insertion_auc": (dims, measures[1]),
            "top1": 0.9,
        },
        {"attribution": ["class_attention", "chance"], "epoch": 3},
    )


@pytest.mark.parametrize(
    ("single", "multiple", "verdict"),
    [
        ((0.9, 0.4), (0.4, 0.1), "one head is better"),
        ((0.4, 0.1), (0.9, 0.4), "several heads are better"),
        ((0.9, 0.4), (0.9, 0.4), "not distinguishable"),
    ],
)
def test_verdicts_follow_from_the_intervals(
    single: tuple[float, float], multiple: tuple[float, float], verdict: str
) -> None:
    models = {"PatchConvNet": scores(*single), several_heads(4): scores(*multiple)}
    title, *lines = beside_one_head(*models.values(), several_heads(4))
    assert title.strip().endswith("PatchConvNet, 4 heads, by image:")
    assert len(lines) == 2
    assert all(line.endswith(verdict) for line in lines)
    difference = single[1] - multiple[1]
    assert f"insertion AUC, above that of chance: {difference:+.2f}" in lines[1]
    by_epoch = {name: ds.expand_dims("epoch") for name, ds in models.items()}
    assert "\n".join([title, *lines]) in report(xr.DataTree.from_dict(by_epoch), 4.0)


def test_patchconvnets_with_one_head_and_several_are_trained() -> None:
    runs, _ = plan(parse(["--small", "--heads", "4", "--device", "cpu"]))
    assert [run.name for run in runs] == ["PatchConvNet", "PatchConvNet, 4 heads"]
    assert [run.make({}).pool.num_heads for run in runs] == [1, 4]
    assert runs[0].epochs == runs[1].epochs == 2
