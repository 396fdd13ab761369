"""CKA compared with the definition of HSIC, element by element in float64."""

import itertools
import math
import tracemalloc

import numpy as np
import pytest
import xarray as xr

from tcnn_probe.representation import layer_cka, linear_cka


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """Compute the U-statistic itself: the mean
    of its kernel over all ordered quadruples of different images.
    """
    n = len(x)
    gram_x = x @ x.T
    gram_y = y @ y.T
    pairs, triples, quadruples = 0.0, 0.0, 0.0
    for i, j in itertools.permutations(range(n), 2):
        pairs += gram_x[i, j] * gram_y[i, j]
        for q in set(range(n)) - {i, j}:
            triples += gram_x[i, j] * gram_y[i, q]
            for r in set(range(n)) - {i, j, q}:
                quadruples += gram_x[i, j] * gram_y[q, r]
    # The means are over pairs, triples and quadruples of different images.
    pairs /= math.perm(n, 2)
    triples /= math.perm(n, 3)
    quadruples /= math.perm(n, 4)
    return pairs + quadruples - 2 * triples


def cka_by_hand(x: np.ndarray, y: np.ndarray) -> float:
    squared_norms = hsic(x, x) * hsic(y, y)
    return hsic(x, y) / math.sqrt(squared_norms)


def make_features(*channels: int, n: int = 11, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    # Two common directions keep CKA away from 0 and 1; a mean of 5 makes centring matter.
    shared = rng.standard_normal((n, 2))
    features = []
    for c in channels:
        signal = shared @ rng.standard_normal((2, c))
        noise = rng.standard_normal((n, c))
        features.append(signal + noise + 5)
    return features


def test_cka_equals_the_u_statistic() -> None:
    x, y = make_features(3, 7)
    expected = cka_by_hand(x, y)
    assert 0.05 < abs(expected) < 0.95
    assert linear_cka(x, y) == pytest.approx(expected, rel=1e-10)


def test_whole_feature_maps_need_no_matrix_of_channels() -> None:
    # A matrix of the channels would take 8 MB; the features take 56 kB each.
    x, y = make_features(1009, 1013, n=7)
    tracemalloc.start()
    cka = linear_cka(x, y.reshape(7, -1, 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Both ignore a shift; without the mean of 5 the sums of the definition cancel less.
    assert cka == pytest.approx(cka_by_hand(x - 5, y - 5), rel=1e-10)
    assert peak < 20 * x.nbytes < 1009 * 1013 * 8


def test_shift_rotation_and_scale_do_not_matter() -> None:
    x, y = make_features(3, 7, n=13)
    cka = linear_cka(x, y)
    assert linear_cka(x, x) == pytest.approx(1, rel=1e-12)
    (square,) = make_features(7, n=7)
    rotation, _ = np.linalg.qr(square)
    moved = 3 * (y + 1e4) @ rotation
    # Adding 1e4 costs features of size one four digits.
    assert linear_cka(x, moved) == pytest.approx(cka, rel=1e-6)
    assert linear_cka(x, -2 * x + 1e3) == pytest.approx(1, rel=1e-10)


def test_cka_of_unrelated_features_is_0_on_average() -> None:
    """The biased estimate from as few images would be above 0.9."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(40):
        x = rng.standard_normal((17, 101))
        y = rng.standard_normal((17, 103))
        values.append(linear_cka(x, y))
    standard_error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values)) < 3 * standard_error


def test_bad_arguments_are_refused() -> None:
    x, y = make_features(3, 7)
    with pytest.raises(ValueError, match=r"of 4 images or more.*got the shape \(3, 3\)"):
        linear_cka(x[:3], y[:3])
    with pytest.raises(ValueError, match="the same images, got 11 and 5"):
        linear_cka(x, y[:5])
    # The mean of five copies of the second number differs from the number.
    for images, value in ((11, 1.0), (5, 123456.789)):
        assert math.isnan(linear_cka(x[:images], np.full((images, 7), value)))


def test_labelled_cka_is_the_same_and_nan_for_missing_features() -> None:
    x, y = make_features(5, 3)
    padded = np.full((2, 2, 11, 5), np.nan, dtype=np.float32)
    padded[0, 0] = x
    padded[0, 1, :, :3] = y
    padded[1, 0] = 2 * x
    padded[1, 1, :4, :3] = y[:4]  # the other images are missing
    dims = ("epoch", "layer", "image", "channel")
    features = xr.DataArray(padded, {"epoch": [0, 1], "layer": ["a", "b"]}, dims)
    cka = layer_cka(features)
    # The labelled features are float32.
    labelled = cka.sel(epoch=0, layer="a", other_layer="b").item()
    assert labelled == pytest.approx(linear_cka(x, y), rel=1e-4)
    assert cka.sel(epoch=1).isnull().values.tolist() == [[False, True], [True, True]]
    fixed = layer_cka(features, features.sel(epoch=0, drop=True))
    np.testing.assert_allclose(fixed.sel(layer="a", other_layer="a"), 1, rtol=1e-5)
    # Numbers beyond the range of float16 are stored as infinities.
    features[0, 0, 3, 2] = np.inf
    missing = layer_cka(features).sel(epoch=0).isnull()
    assert missing.values.tolist() == [[True, True], [True, False]]
