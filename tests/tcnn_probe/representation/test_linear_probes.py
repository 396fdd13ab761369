"""Dense probe compared with a classifier of single pixels and with loops over pixels."""

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from tcnn_probe.representation import dense_probe, layer_dense_probe

# The sides of grid and cell differ, so that swapped axes change the result.
CHANNELS, GRID, CELL = 3, (2, 5), (3, 2)


def make_features(images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return feature maps and masks of three classes;
    most pixels of a cell have the class that the features encode.
    """
    rng = np.random.default_rng(seed)
    shown = rng.choice([0, 4, 7], (images, *GRID))
    features = np.stack([shown % 3, shown % 4, shown % 2], 1) + 0.3 * rng.standard_normal(
        (images, CHANNELS, *GRID)
    )
    masks = shown.repeat(CELL[0], 1).repeat(CELL[1], 2)
    return features, np.where(
        rng.random(masks.shape) < 0.2, rng.choice([0, 4, 7], masks.shape), masks
    )


def pixels(features: np.ndarray, masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the features and the class of every pixel."""
    at_pixels = [features[n, :, y // CELL[0], x // CELL[1]] for n, y, x in np.ndindex(masks.shape)]
    return np.array(at_pixels), masks.ravel()


def test_dense_probe_is_a_classifier_of_pixels() -> None:
    features, masks = make_features(7, 0)
    train = make_features(11, 1)
    x, y = pixels(*train)
    mean = x.mean(0)
    deviation = x.std(0)
    # The classifier converges in 5000 steps, and may not in its default of 100.
    classifier = LogisticRegression(C=1 / 500, max_iter=5000).fit((x - mean) / deviation, y)
    x, y = pixels(features, masks)
    named = classifier.predict((x - mean) / deviation)
    expected = []
    for label in (0, 4, 7):
        intersection = sum((y == label) & (named == label))
        union = sum((y == label) | (named == label))
        expected.append(intersection / union)
    # Scores are neither perfect nor at chance, so the comparison is meaningful.
    assert 0.3 < min(expected) < max(expected) < 1
    np.testing.assert_allclose(
        dense_probe(features, masks, *train, regularization=500), expected, rtol=1e-12
    )


def test_masks_unrelated_to_the_features_are_at_chance() -> None:
    """At chance, a class of share p predicted for a share q
    of the pixels has the IoU pq / (p + q - pq) <= p.
    """
    features, masks = make_features(40, 0)
    train, known = make_features(40, 1)
    share = (masks == 4).mean()
    # The probe finds most pixels of the class that the features encode.
    assert dense_probe(features, masks == 4, train, known == 4)[1] > 0.6
    unrelated = np.random.default_rng(2).random(known.shape) < 0.5
    chance = dense_probe(features, masks == 4, train, unrelated)[1]
    # The margin is three standard deviations of the class's share of the cells.
    assert chance < share + 3 * math.sqrt(share * (1 - share) / features[:, 0].size)


def test_scores_by_image_are_of_each_image_alone() -> None:
    features, masks = make_features(7, 0)
    train = make_features(11, 1)
    # The image has a single class; the two others have no IoU in it unless they are predicted.
    masks[2] = 4
    iou = dense_probe(features, masks, *train, by_image=True)
    assert iou.shape == (7, 3)
    for image in range(7):
        alone = dense_probe(features[[image]], masks[[image]], *train)
        present = ~np.isnan(iou[image])
        assert present.all() or (image == 2 and present[1])
        np.testing.assert_array_equal(iou[image][present], alone[present])
        assert (alone[~present] == 0).all()


def test_labelled_probe_scores_grids_on_the_same_pixels() -> None:
    features, masks = make_features(7, 0)
    train, known = make_features(11, 1)
    # A single column instead of five, stretched over the image, must do worse.
    fine = features.repeat(CELL[0], 2).repeat(CELL[1], 3)
    coarse = features[..., :1]
    iou = layer_dense_probe(
        {"a": features, "fine": fine, "b": coarse},
        masks,
        {
            "a": train,
            "fine": train.repeat(CELL[0], 2).repeat(CELL[1], 3),
            "b": train[..., :1],
        },
        known,
    )
    assert iou.dims == ("layer", "class")
    assert iou["class"].values.tolist() == [0, 4, 7]
    np.testing.assert_allclose(iou.sel(layer="a"), dense_probe(features, masks, train, known))
    np.testing.assert_allclose(iou.sel(layer="fine"), iou.sel(layer="a"))
    assert iou.sel(layer="b").mean() < iou.sel(layer="a").mean()
    with pytest.raises(
        ValueError,
        match=r"the same layers to fit and to judge, got \['b'\] and \['a'\]",
    ):
        layer_dense_probe({"a": features}, masks, {"b": train}, known)


@pytest.mark.parametrize(
    ("features", "masks", "message"),
    [
        (
            np.ones((7, 2, 3, 4)),
            np.ones((6, 3, 4), int),
            r"got the shapes \(7, 2, 3, 4\) and \(6, 3, 4\)",
        ),
        (np.ones((7, 2, 3)), np.ones((7, 3), int), r"features \(n, C, h, w\)"),
        (
            np.ones((7, 2, 3, 4)),
            np.ones((7, 6, 9), int),
            "multiples of 3 and 4, got 6 and 9: resize them",
        ),
        (np.full((7, 2, 3, 4), math.nan), np.ones((7, 3, 4), int), "finite features"),
    ],
)
def test_bad_arguments_are_refused(features: np.ndarray, masks: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense_probe(features, masks, *make_features(7, 0))
