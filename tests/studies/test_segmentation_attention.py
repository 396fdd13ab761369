"""Measures against loops, the weights that fine-tuning trains,
and the check that ends the study.
"""

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from common.digits import Scene
from common.models import small_patchconvnet
from common.saliency_scores import on_object
from tests.extras import need

study = need("segmentation_attention")  # needs transformers


def scenes(count: int) -> list[Scene]:
    torch.manual_seed(0)
    images = torch.randn(count, 1, 32, 32)
    masks = torch.rand(count, 32, 32) < 0.2
    return [Scene(image, (0, 0, 32, 32), mask) for image, mask in zip(images, masks, strict=True)]


def test_pixels_have_the_class_of_their_digit() -> None:
    masks = torch.tensor([[[True, False, True]], [[False, False, True]]])
    labels = study.pixel_labels(torch.tensor([0, 9]), masks)
    assert labels.tolist() == [[[1, 0, 1]], [[0, 0, 10]]]


def test_share_of_attention_on_an_object_matches_loops() -> None:
    torch.manual_seed(0)
    attention = torch.rand(2, 3, 5, dtype=torch.float64)
    masks = torch.rand(2, 6, 20) < 0.4
    share, even = on_object(xr.DataArray(attention, dims=("image", "y", "x")), masks)
    for image in range(2):
        inside = total = area = 0.0
        for y in range(3):
            for x in range(5):
                cell = masks[image, 2 * y : 2 * y + 2, 4 * x : 4 * x + 4]
                covered = sum(cell.flatten().tolist()) / 8
                inside += attention[image, y, x].item() * covered
                total += attention[image, y, x].item()
                area += covered / 15
        assert float(share[image]) == pytest.approx(inside / total, rel=1e-13)
        assert float(even[image]) == pytest.approx(area, rel=1e-13)


class Named(torch.nn.Module):
    """Segmenter that labels the upper half of each image as the digit 3."""

    def forward(self, images: Tensor) -> Tensor:
        scores = torch.zeros(len(images), 11, 32, 32)
        scores[:, 4, :16] = 1.0
        scores[:, 0, 16:] = 1.0
        return scores


def test_intersection_over_union_matches_loops() -> None:
    samples = scenes(3)
    expected = []
    for scene in samples:
        mask = scene.mask.tolist()
        common = sum(mask[y][x] for y in range(16) for x in range(32))
        union = 16 * 32 + sum(mask[y][x] for y in range(16, 32) for x in range(32))
        expected.append(common / union)
    assert study.stroke_iou(Named(), samples).tolist() == pytest.approx(expected, rel=1e-6)


def test_segmentation_trains_the_trunk_of_the_classifier() -> None:
    torch.manual_seed(0)
    model: Any = small_patchconvnet()
    segmenter = study.Segmenter(model)
    images = torch.randn(2, 1, 32, 32)
    scores = segmenter(images)
    assert tuple(scores.shape) == (2, 11, 32, 32)
    scores.square().mean().backward()
    for part, trained in (
        (model.stem, 1),
        (model.blocks, 1),
        (model.pool, 0),
        (model.head, 0),
    ):
        has = [p.grad is not None and bool(p.grad.any()) for p in part.parameters()]
        assert any(has) == bool(trained)


def test_measures_come_from_the_attention_pool() -> None:
    torch.manual_seed(0)
    model: Any = small_patchconvnet().eval()
    samples = scenes(3)
    labels = torch.tensor([0, 1, 2])
    measured = study.measure(model, samples, labels)
    assert dict(measured.attention.sizes) == {"image": 3, "y": 8, "x": 8}
    np.testing.assert_allclose(measured.attention.sum(["y", "x"]), 1, rtol=1e-6)
    with torch.no_grad():
        decided = model(study.images_of(samples)).argmax(1)
    assert float(measured.top1) == pytest.approx(float((decided == labels).float().mean()))


def results(iou: float = 0.6, top1: float = 0.8, on_digit: float = 0.5) -> xr.Dataset:
    """Return results of three trainings for three seeds and 90 images."""
    noise = 0.01 * np.array([-1.0, 0.0, 1.0])[:, None, None]
    dims = ("seed", "training", "image")
    shares = np.full((3, 3, 90), 0.4) + np.zeros((3, 1, 1))
    shares[:, 1] = (on_digit + noise)[:, 0]
    return xr.Dataset(
        {
            "on_digit": (dims, shares),
            "even": (("seed", "image"), np.full((3, 90), 0.2)),
            "change": (dims, np.zeros((3, 3, 90))),
            "iou": (("seed", "image"), np.full((3, 90), iou)),
            "top1": (dims[:2], np.full((3, 3), top1)),
        },
        {"training": [study.BEFORE, study.SEGMENTED, study.LABELED], "seed": range(3)},
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {},
            "the segmenters find strokes: IoU of at least 0.60; of all pixels they are 0.20",
        ),
        ({"iou": 0.39}, "the segmenters do NOT find strokes"),
        ({"top1": 0.12}, "a classifier did NOT learn"),
    ],
)
def test_the_check_can_fail(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.check(results(**changes)) == (not changes)
    assert message in capsys.readouterr().out
