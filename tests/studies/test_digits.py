"""Scenes of the studies: real digits in known places, without leakage between the splits."""

import torch
import torch.nn.functional as F

from common.digits import ClutteredDigits, cluttered_digits
from tcnn_probe.representation import layer_dense_probe


def test_splits_share_no_digit_image_and_use_all() -> None:
    train, validation = cluttered_digits(size=41)
    assert len(train) + len(validation) == 1797
    known = {tuple(digit.flatten().tolist()) for digit in train.digits}
    # Some images of scikit-learn's digits are equal pixel by pixel; these must be in the same
    # split.
    assert len(known) > 1300
    assert not any(tuple(digit.flatten().tolist()) in known for digit in validation.digits)
    assert torch.bincount(validation.labels).min() > 35  # every class in its share


def test_the_digit_is_in_its_box_and_brighter_than_the_clutter_there() -> None:
    digits = torch.zeros(3, 8, 8)
    labels = torch.arange(3)
    digits[1, 2:6, 2:6] = 1
    scenes = ClutteredDigits(digits, labels, size=37, digit_size=16, fragments=0)
    image, (top, left, bottom, right), mask = scenes.scene(1)
    assert image.shape == (1, 37, 37)
    assert bottom - top == 16
    assert right - left == 16
    # Scenes are normalised by a mean of 0.2 and a deviation of 0.3.
    bright = (image[0] > (0.9 - 0.2) / 0.3).nonzero()
    assert len(bright) > 20
    assert mask.shape == (37, 37)
    assert torch.equal(mask, image[0] > (0.5 - 0.2) / 0.3)
    assert (bright.min(0).values >= torch.tensor([top, left])).all()
    assert (bright.max(0).values < torch.tensor([bottom, right])).all()


def test_validation_scenes_are_fixed_and_training_scenes_are_not() -> None:
    train, validation = cluttered_digits(size=41, limit=80)
    assert torch.equal(validation[3][0], validation[3][0])
    assert not torch.equal(train[3][0], train[3][0])
    torch.manual_seed(5)
    first = train[3][0]
    torch.manual_seed(5)
    assert torch.equal(train[3][0], first)
    assert train[3][1] == int(train.labels[3])


def test_a_dense_probe_finds_strokes_as_finely_as_its_grid_allows() -> None:
    """Without clutter, the strokes are the bright pixels."""
    validation = cluttered_digits(size=32, limit=80, fragments=0)[1]
    scenes = [validation.scene(n) for n in range(20)]
    images = torch.stack([scene.image for scene in scenes])
    masks = torch.stack([scene.mask for scene in scenes])
    features = {"pixels": images, "cells": F.avg_pool2d(images, 4)}
    fit, judged = (
        {name: maps[part] for name, maps in features.items()}
        for part in (slice(10), slice(10, None))
    )
    iou = layer_dense_probe(judged, masks[10:], fit, masks[:10]).sel({"class": True})
    # The pixels of strokes are those above a threshold, which a linear classifier finds. Cells of 4
    # x 4 pixels blur them; a probe that calls every pixel a stroke would have their share as its
    # IoU.
    assert iou.sel(layer="pixels") > 0.95
    assert 0.95 > iou.sel(layer="cells") > 2 * float(masks.double().mean())
    # As a control, the probe must not find the masks of other scenes.
    elsewhere = layer_dense_probe(judged, masks[10:].roll(1, 0), fit, masks[:10]).sel(
        {"class": True}
    )
    assert elsewhere.sel(layer="pixels") < 0.7
