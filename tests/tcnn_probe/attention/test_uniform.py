"""Statistics of uniform attention, against every query and key in float64; of softmax attention, all families."""

import math

import numpy as np
import pytest
import torch

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.attention.gated import gated_attention_of
from tcnn_probe.attention.layout import Layout, Tokens
from tests.tcnn_probe.attention.test_gated_statistics import GEOMETRIES
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.oracle import gpsa_statistics

pytestmark = pytest.mark.numerical


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_of_a_layer_whose_attention_is_uniform(geometry: str) -> None:
    """Gates at 1 and no locality: the oracle's own distance and entropy are those of uniform attention."""
    # A gate of 1 - e^-60 leaves position alone, and a locality near zero makes that even.
    layer = GPSA(5, 3, **GEOMETRIES[geometry], gating=60.0).double()
    x = torch.randn(2, 5, 7, 11).double()
    with torch.no_grad():
        # softplus(-200) is next to nothing, so that attention by position is even.
        layer.raw_locality.fill_(-40.0)
    uniform = gated_attention_of(layer, x).uniform_scales()
    expected = gpsa_statistics(layer, x)
    for name, of_heads in (
        ("uniform_entropy", "entropy"),
        # Scales are of images; all heads share them.
        ("uniform_distance", "attention_distance"),
    ):
        assert uniform[name].shape == (2,)
        torch.testing.assert_close(
            uniform[name][:, None].expand(2, layer.heads),
            expected[of_heads],
            rtol=1e-9,
            atol=0,
        )


def test_of_padding_that_is_wider_behind() -> None:
    """Queries 2 pixels apart on 7 x 11, from the pixel that is the kernel's centre; padding "same" of 3 x 2 pixels."""
    layer = GPSA(5, 3, (4, 3), padding="same", stride=2)
    # 3 x 2 pixels of padding: 1 before and 2 behind along y, 1 and 1 along x.
    uniform = gated_attention_of(layer, torch.randn(1, 5, 7, 11)).uniform_scales()
    queries = [(y, x) for y in range(0, 8, 2) for x in range(0, 12, 2)]
    keys = [(y, x) for y in range(-1, 7 + 2) for x in range(-1, 11 + 1)]
    far = [math.dist(query, key) for query in queries for key in keys]
    assert float(uniform["uniform_distance"]) == pytest.approx(np.mean(far), abs=1e-12)
    assert float(uniform["uniform_entropy"]) == pytest.approx(
        math.log(len(keys)), abs=1e-12
    )


def test_of_many_tokens() -> None:
    """66,000 tokens: 4 * 10^9 pairs, which are not made."""
    # Two primes: 65,939 tokens. The sum goes over offsets, each of which occurs so many times.
    rows, columns = 233, 283
    down = np.arange(rows)[:, None]
    right = np.arange(columns)
    pairs = (rows - down) * (1 + (down > 0)) * (columns - right) * (1 + (right > 0))
    expected = (pairs * np.sqrt(down**2 + right**2)).sum() / (rows * columns) ** 2
    tokens = Tokens(0, rows, columns)
    assert Layout(tokens, tokens).uniform_distance == pytest.approx(expected, rel=1e-12)


def test_mean_over_images_of_different_sizes() -> None:
    with tcnn_probe.record(Chain()) as recorder, torch.no_grad():
        for size in ((1, 2, 5, 11), (3, 2, 7, 5)):
            recorder._model(torch.randn(size))
        with pytest.warns(RuntimeWarning, match="images of several sizes"):
            recorder.mark(epoch=0)
    # One image of 7 x 13 keys and three of 9 x 7, with a padding of 1.
    expected = (math.log(7 * 13) + 3 * math.log(9 * 7)) / 4
    assert float(
        recorder.dataset.uniform_entropy.sel(layer="near").item()
    ) == pytest.approx(expected, rel=1e-12)
