"""Memory on large maps: no operation makes a tensor
of N x N attention weights, not even in a whole model.
"""

import pytest
import torch

from tcnn_model import gpsa, gpsa_layers, reparameterize
from tcnn_model.gpsa import blocks
from tcnn_model.gpsa.positional import Axis, gaussian_position
from tests.tcnn_model.families import build
from tests.tcnn_model.numerics import LargestTensor, random


def test_large_maps_never_hold_n_by_n_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks are made smaller than usual, so that a small map needs many of them.
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", 2**17)
    # The N x N weights of 48 x 48 pixels are 80 times the largest block, so they would show.
    side, heads, dim = 48, 2, 3
    axis = Axis(side, 1, 1, 3)
    tokens = side * side
    arguments = {
        "query": random(1, heads, tokens, dim, dtype=torch.float32).requires_grad_(),
        "key": random(1, heads, tokens, dim, seed=1, dtype=torch.float32).requires_grad_(),
        "values": random(1, 1, tokens, 7, seed=2, dtype=torch.float32).requires_grad_(),
        "position": gaussian_position(
            torch.ones(heads).double(), random(heads, 2)
        ).requires_grad_(),
        "gate": torch.full((heads,), 0.5),
    }
    with LargestTensor() as largest:
        gpsa(**arguments, y=axis, x=axis, statistics=True)[0].sum().backward()
    # The factor 1.1 allows for the padding.
    assert largest.elements < 1.1 * blocks._BLOCK_ELEMENTS_CPU < heads * tokens**2 / 50


def test_late_stages_at_224_pixels_hold_no_n_by_n_weights() -> None:
    """Two stages have stride 1, so that all their layers work on 28 x 28 pixels."""
    model = reparameterize(build("resnet50"), layers=["layer3", "layer4"])
    with LargestTensor() as largest:
        features = model.forward_features(random(1, 3, 224, 224, dtype=torch.float32))
        features.sum().backward()
    assert features.shape == (1, 128, 28, 28)
    assert all(bool(layer.gating.grad.isfinite().all()) for layer in gpsa_layers(model).values())
    # The bound is the size of the N x N weights of nine heads.
    assert largest.elements < 9 * 784**2
