"""Spectra compared with NumPy's singular values, and cosines of tokens with a loop over pairs."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch

from tcnn_probe.representation import participation_ratio, pca_energy, token_cosine


@pytest.mark.parametrize("shape", [(17, 5), (5, 17)])
def test_spectrum_matches_singular_values(shape: tuple[int, int]) -> None:
    # The variances differ, and centring has to remove a mean.
    x = np.random.default_rng(0).standard_normal(shape) * np.geomspace(1, 0.1, shape[1]) + 3
    variances = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
    np.testing.assert_allclose(pca_energy(x), np.cumsum(variances) / variances.sum(), rtol=1e-10)
    assert participation_ratio(x) == pytest.approx(
        variances.sum() ** 2 / (variances**2).sum(), rel=1e-10
    )


def test_known_spectra() -> None:
    # The variance is equal along each of three axes.
    corners = np.concatenate([np.eye(3), -np.eye(3)])
    assert participation_ratio(corners) == pytest.approx(3)
    np.testing.assert_allclose(pca_energy(corners), [1 / 3, 2 / 3, 1])
    line = np.arange(7.0)[:, None] * np.array([1.0, 2, 3])
    assert participation_ratio(line) == pytest.approx(1)
    # The mean of seven copies of 0.1 is not 0.1.
    for same in (np.ones((4, 3)), np.full((7, 3), 0.1)):
        assert math.isnan(participation_ratio(same))
        assert np.isnan(pca_energy(same)).all()


def test_token_cosine_is_the_mean_over_pairs() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 7)) + 0.5
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    cosines = [[a @ b for a, b in permutations(tokens, 2)] for tokens in unit]
    np.testing.assert_allclose(token_cosine(x), np.mean(cosines, 1), rtol=1e-12)
    np.testing.assert_allclose(token_cosine(torch.tensor(x)), token_cosine(x), rtol=1e-12)
    np.testing.assert_allclose(token_cosine(np.array([[1.0, 0], [1, 0], [0, 0]])), 1 / 3)
    np.testing.assert_allclose(token_cosine(np.stack([x[0, 0], 3 * x[0, 0]])), 1)
    same = np.full((2, 300), 20)
    for narrow in (
        same.astype(np.float16),
        same.astype(np.int8),
        torch.tensor(same).half(),
    ):
        # The squares and their sum overflow.
        np.testing.assert_allclose(token_cosine(narrow), 1, rtol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"two tokens or more, shape \(..., N, C\), got the shape \(3, 1, 7\)",
    ):
        token_cosine(x[:, :1])


def test_tensors_with_gradients_and_in_half_precision_are_read() -> None:
    features = torch.randn(7, 5, dtype=torch.bfloat16).requires_grad_()
    expected = participation_ratio(features.detach().double().numpy())
    assert participation_ratio(features) == expected
