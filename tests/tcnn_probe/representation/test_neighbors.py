"""Nearest neighbours and retrieval compared with loops over the thesis' equations in float64."""

import math

import numpy as np
import pytest
import xarray as xr
from sklearn.datasets import load_iris

from tcnn_probe import representation
from tcnn_probe.representation import (
    average_precision,
    knn_correct,
    linear_probe_correct,
)
from tests.extras import need

Q, G, K = 7, 23, 5


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / math.hypot(*a) / math.hypot(*b)


def make_features(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features of three overlapping classes, with labels other than 0, 1 and 2."""
    rng = np.random.default_rng(seed)
    labels = rng.choice([11, 4, 30], count)
    centers = np.stack([labels % 7, labels % 3, labels % 2], 1)
    return centers + 2 * rng.standard_normal((count, 3)), labels


def voted(x: np.ndarray, gallery: np.ndarray, labels: np.ndarray) -> int:
    """Classify by the weighted vote of Eq. 2.6."""
    cosines = [cosine(x, candidate) for candidate in gallery]
    votes = dict.fromkeys(labels.tolist(), 0.0)
    for j in np.argsort(cosines)[-K:]:
        votes[labels[j]] += math.exp(cosines[j] / 0.05)
    return max(votes, key=votes.__getitem__)


def test_knn_follows_the_thesis() -> None:
    x, y = make_features(Q, 0)
    gallery, known = make_features(G, 1)
    expected = [voted(query, gallery, known) == label for query, label in zip(x, y, strict=True)]
    # Some predictions are right and some wrong, as otherwise any vote would pass.
    assert len({*expected}) == 2
    assert knn_correct(x, y, gallery, known, neighbors=K).tolist() == expected
    # As the temperature approaches 0, the nearest neighbour outvotes all others.
    nearest = [np.argmax([cosine(query, image) for image in gallery]) for query in x]
    correct = knn_correct(x, y, gallery, known, neighbors=K, temperature=1e-4)
    assert correct.tolist() == (known[nearest] == y).tolist()
    alone = []
    for query in range(G):
        rest = np.arange(G) != query
        alone.append(voted(gallery[query], gallery[rest], known[rest]) == known[query])
    assert knn_correct(gallery, known, neighbors=K).tolist() == alone


def precision(scores: list[float], relevant: list[bool]) -> float:
    """Return the mean, over the relevant images, of the precision at their rank."""
    precisions: list[float] = []
    for rank, j in enumerate(np.argsort(scores)[::-1], 1):
        if relevant[j]:
            precisions.append((len(precisions) + 1) / rank)
    return math.fsum(precisions) / len(precisions)


def test_retrieval_follows_the_thesis() -> None:
    x, y = make_features(Q, 0)
    gallery, known = make_features(G, 1)
    y[2] = 99  # the gallery lacks this class
    coarse = (known == 30).astype(int)
    rng = np.random.default_rng(2)
    p = rng.uniform(0.1, 0.9, Q)
    p = np.stack([1 - p, p], 1)
    plain = average_precision(x, y, gallery, known)
    conditioned = average_precision(
        x, y, gallery, known, coarse_probabilities=p, gallery_coarse=coarse
    )
    for query in range(Q):
        cosines = [cosine(x[query], candidate) for candidate in gallery]
        odds = [math.log(p[query, c] / (1 - p[query, c])) for c in coarse]
        relevant = (known == y[query]).tolist()
        if query == 2:
            assert np.isnan([plain[2], conditioned[2]]).all()
            continue
        assert plain[query] == pytest.approx(precision(cosines, relevant), rel=1e-12)
        scores = [c + o for c, o in zip(cosines, odds, strict=True)]
        assert conditioned[query] == pytest.approx(precision(scores, relevant), rel=1e-12)
    assert not np.allclose(plain, conditioned, equal_nan=True)


def test_images_with_equal_scores_share_a_rank() -> None:
    x, y = make_features(G, 1)
    # All cosines are equal, so the precision is the share of the class, in any order.
    (precision_of_one,) = average_precision(x[:1], y[:1], np.ones((G, 3)), y)
    assert precision_of_one == pytest.approx(np.mean(y == y[0]), rel=1e-12)


def test_an_oracle_ranks_its_coarse_class_first_and_by_cosine_within_it() -> None:
    x, y = make_features(Q, 0)
    gallery, known = make_features(G, 1)
    coarse = (known == 30).astype(int)
    oracle = np.stack([y != 30, y == 30], 1).astype(float)
    precisions = average_precision(
        x, y, gallery, known, coarse_probabilities=oracle, gallery_coarse=coarse
    )
    for query in range(Q):
        first = coarse == (y[query] == 30)
        cosines = [cosine(x[query], candidate) for candidate in gallery[first]]
        assert precisions[query] == pytest.approx(
            precision(cosines, (known[first] == y[query]).tolist()), rel=1e-12
        )


def test_shuffled_labels_are_at_chance_and_true_ones_are_not() -> None:
    x, y = load_iris(return_X_y=True)
    # The features of Iris are positive, so all cosines would be near 1 without centring.
    x = x - x.mean(0)
    shuffled = [np.random.default_rng(seed).permutation(y) for seed in range(4)]
    train = slice(0, None, 2)
    test = slice(1, None, 2)

    def linear(labels: np.ndarray) -> float:
        return linear_probe_correct(x[test], labels[test], x[train], labels[train]).mean()

    for measure, chance in (
        (lambda labels: knn_correct(x, labels).mean(), 1 / 3),
        (linear, 1 / 3),
    ):
        scores = [measure(labels) for labels in shuffled]
        # Two of the three classes of Iris overlap a little.
        assert measure(y) > 0.85
        # The margin is three standard deviations of a share of as many draws.
        assert abs(np.mean(scores) - chance) < 3 * math.sqrt(
            chance * (1 - chance) / (75 * len(scores))
        )
    third = slice(None, None, 3)
    assert average_precision(x[third], y[third]).mean() > 0.7
    assert average_precision(x[third], shuffled[0][third]).mean() == pytest.approx(1 / 3, abs=0.08)


def test_labelled_scores_are_the_same() -> None:
    x, y = make_features(G, 1)
    features_by_layer = np.full((3, G, 5), np.nan)
    # The second layer lacks an image.
    features_by_layer[0, :, :3] = x
    features_by_layer[1, 1:, :] = 1.0
    # This imitates large numbers in float16.
    features_by_layer[2, :, :3] = x
    features_by_layer[2, 5, 1] = np.inf
    features = xr.DataArray(
        features_by_layer, {"layer": ["a", "b", "c"]}, ("layer", "image", "channel")
    )
    scores = representation.layer_scores(features, y, neighbors=K)
    np.testing.assert_array_equal(scores.knn_correct.sel(layer="a"), knn_correct(x, y, neighbors=K))
    assert scores.participation_ratio.sel(layer="a").item() == pytest.approx(
        representation.participation_ratio(x)
    )
    assert all(scores[name].sel(layer=["b", "c"]).isnull().all() for name in scores)
    need("dask")
    assert representation.layer_scores(features.chunk(image=7), y, neighbors=K).identical(scores)
    assert representation.layer_cka(features.chunk(image=7)).identical(
        representation.layer_cka(features)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"neighbors": 23}, "n_neighbors < n_samples_fit"),
        ({"temperature": 0}, "a temperature above 0, got 0"),
        ({"gallery": np.ones((4, 3))}, "gallery and gallery_labels together"),
        (
            {"gallery": np.ones((4, 2)), "gallery_labels": np.ones(4)},
            "X has 3 features, but .* is expecting 2 features",
        ),
        ({"labels": np.ones(22)}, r"labels of shape \(23,\)"),
        ({"features": np.full((23, 3), np.nan)}, "finite features"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, object], message: str) -> None:
    features, labels = make_features(G, 1)
    with pytest.raises(ValueError, match=message):
        knn_correct(**{"features": features, "labels": labels} | change)


def test_coarse_labels_require_their_probabilities() -> None:
    features, labels = make_features(G, 1)
    with pytest.raises(ValueError, match="coarse_probabilities and gallery_coarse together"):
        average_precision(features, labels, gallery_coarse=labels)
    # As an index, -7 would give the seventh class from the end.
    for wrong in (labels - 11, labels):
        with pytest.raises(ValueError, match=r"expected gallery_coarse from 0 to 29, got \["):
            average_precision(
                features,
                labels,
                gallery_coarse=wrong,
                coarse_probabilities=np.full((23, 30), 0.5),
            )
    with pytest.raises(ValueError, match=r"from 0 to 1 of shape \(23, K\)"):
        average_precision(
            features,
            labels,
            gallery_coarse=labels,
            coarse_probabilities=2 * np.ones((23, 31)),
        )
