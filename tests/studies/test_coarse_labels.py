"""Measures of the study of coarse labels against loops over the thesis' equations."""

import math

import numpy as np
import pytest
import torch

import coarse_labels
from tests.tcnn_probe.representation.test_neighbors import cosine, precision

M, N = 23, 7


def test_training_images_are_ranked_by_eq_2_5_and_by_cosine() -> None:
    rng = np.random.default_rng(0)
    known_digits = np.arange(M) % 5
    digits = np.arange(N) % 5
    known = rng.standard_normal((M, 3))
    queries = rng.standard_normal((N, 3))
    odd = rng.uniform(0.1, 0.9, N)
    parity = torch.from_numpy(np.stack([1 - odd, odd], 1))
    features = torch.from_numpy(known), torch.from_numpy(queries)
    ds = coarse_labels.measure(*features, known_digits, digits, parity, 0)
    for n in range(N):
        cosines = [cosine(queries[n], row) for row in known]
        relevant = (known_digits == digits[n]).tolist()
        assert float(ds.precision[n]) == pytest.approx(precision(cosines, relevant), rel=1e-12)
        p = [float(parity[n, digit % 2]) for digit in known_digits]
        conditional = [c + math.log(q / (1 - q)) for c, q in zip(cosines, p, strict=True)]
        assert float(ds.conditional[n]) == pytest.approx(
            precision(conditional, relevant), rel=1e-12
        )
        nearest = sorted(range(M), key=lambda j: -cosines[j])[: coarse_labels.RETRIEVED]
        assert ds.nearest[n].values.tolist() == nearest
    assert not np.allclose(ds.precision, ds.conditional)
    # Without a classifier there is no conditional ranking.
    unknown = coarse_labels.measure(*features, known_digits, digits, None, 0)
    assert unknown.conditional.isnull().all()


def test_random_labels_halve_each_coarse_class() -> None:
    parity = np.repeat([0, 1], [12, 8])
    # A linear classifier fits any labels if the features separate all images. If they separate only
    # the parities, it is right on one half of each.
    alone = torch.eye(20)
    coarse = torch.nn.functional.one_hot(torch.from_numpy(parity)).float()
    assert coarse_labels.random_labels(alone, parity, 3).tolist() == [1.0] * coarse_labels.SPLITS
    assert coarse_labels.random_labels(coarse, parity, 3).tolist() == [0.5] * coarse_labels.SPLITS
