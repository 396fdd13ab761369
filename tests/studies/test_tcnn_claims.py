"""The ungated layer and the information
in attention against loops over the equations in float64.
"""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_claims
import tcnn_probe
from tcnn_model import GPSA

HEIGHT, WIDTH, CHANNELS, OUT = 3, 5, 7, 11


def layer() -> GPSA:
    torch.manual_seed(0)
    # New queries and keys, of standard deviation 0.02, would make content negligible beside
    # position.
    gpsa = GPSA(CHANNELS, OUT, 3, padding=1, qk_scale=40.0).double()
    with torch.no_grad():
        gpsa.value.add_(0.3 * torch.randn_like(gpsa.value))
        gpsa.center.add_(0.4 * torch.randn_like(gpsa.center))
        gpsa.raw_locality.add_(torch.rand_like(gpsa.raw_locality))
        gpsa.gating.copy_(torch.randn_like(gpsa.gating))
    return gpsa


def pixel(x: Tensor, y: int, column: int) -> Tensor:
    """Return the features of one pixel of an image (C, H, W), which is surrounded by zeros."""
    inside = 0 <= y < HEIGHT and 0 <= column < WIDTH
    return x[:, y, column] if inside else torch.zeros_like(x[:, 0, 0])


def by_hand(
    gpsa: GPSA, x: Tensor, head: int, query: tuple[int, int]
) -> dict[tuple[int, int], float]:
    """Return Eq. 3 for one query of one image:
    a softmax of q k^T / sqrt(d) - alpha ||delta - Delta||^2.
    """
    d = gpsa.qk_dim
    rows = slice(head * d, (head + 1) * d)
    q = gpsa.query[rows] @ pixel(x, *query)
    alpha = gpsa.locality_strength[head].item()
    dy, dx = gpsa.center[head].tolist()
    center = query[0] + dy, query[1] + dx
    logits = {}
    for place in itertools.product(range(-1, HEIGHT + 1), range(-1, WIDTH + 1)):
        k = gpsa.key[rows] @ pixel(x, *place)
        content = (q @ k).item() / math.sqrt(d)
        logits[place] = content - alpha * math.dist(place, center) ** 2
    total = sum(map(math.exp, logits.values()))
    return {place: math.exp(logit) / total for place, logit in logits.items()}


@torch.no_grad()
def test_an_ungated_layer_is_eq_3_and_eq_5() -> None:
    gpsa = layer()
    ungated = tcnn_claims.Ungated(gpsa)
    images = torch.randn(2, CHANNELS, HEIGHT, WIDTH, dtype=torch.float64)
    attention = ungated.attention(images)
    output = ungated(images)
    assert output.shape == (2, OUT, HEIGHT, WIDTH)
    # The queries are two corners, where keys lie on the padding, and the middle.
    for image, (y, column) in ((0, (0, 4)), (1, (1, 2)), (1, (2, 0))):
        expected = gpsa.bias
        for head in range(9):
            shares = by_hand(gpsa, images[image], head, (y, column))
            actual = attention[image, head, y * WIDTH + column]
            assert actual.tolist() == pytest.approx(list(shares.values()), rel=1e-9)
            tap = gpsa.weight[:, :, head // 3, head % 3]
            for place, share in shares.items():
                value = gpsa.value @ pixel(images[image], *place)
                expected = expected + share * (tap @ value)
        at_query = output[image, :, y, column].tolist()
        assert at_query == pytest.approx(expected.tolist(), rel=1e-9)


def entropy(shares: Any) -> float:
    return -sum(p * math.log(p) for p in np.ravel(shares).tolist() if p > 0)


def test_information_by_position_and_by_content() -> None:
    torch.manual_seed(1)
    attention = (2 * torch.randn(5, 2, 3, 7, dtype=torch.float64)).softmax(-1)
    position, content = tcnn_claims.information(attention).numpy()
    weights = attention.numpy()
    for head in range(2):
        by_query = [np.mean([weights[n, head, q] for n in range(5)], 0) for q in range(3)]
        mean_entropy = np.mean([entropy(row) for row in by_query])
        assert position[head] == pytest.approx(
            entropy(np.mean(by_query, 0)) - mean_entropy, rel=1e-12
        )
        by_image = np.mean([entropy(weights[n, head, q]) for n in range(5) for q in range(3)])
        assert content[head] == pytest.approx((mean_entropy - by_image) * 5 / 4, rel=1e-12)
    # Attention that is uniform carries no information. In float32 seven sevenths add up to 1 within
    # eps, far below the bound.
    even = torch.full((4, 1, 3, 7), 1 / 7)
    assert tcnn_claims.information(even).abs().max() < 1e-12


@torch.no_grad()
def test_information_by_content_is_what_the_recorder_keeps() -> None:
    model = nn.Sequential(layer().float())
    images = torch.randn(6, CHANNELS, HEIGHT, WIDTH)
    measured = tcnn_claims.measured(model, images)
    with tcnn_probe.record(model.eval()) as recorder:
        model(images)
        recorder.mark(epoch=0)
    recorded = recorder.dataset.content_information.isel(epoch=0)
    assert measured.layer.values.tolist() == recorded.layer.values.tolist() == ["0"]
    # The recorder computes in float32, from entropies of at most log 35.
    np.testing.assert_allclose(measured.content, recorded, atol=1e-5)
    assert float(recorded.max()) > 0.01


def results(**changes: Any) -> xr.Dataset:
    """Return two seeds and three epochs of each arm,
    with the accuracies and information of the last epoch.
    """
    numbers: dict[str, Any] = {
        "gated": 0.9,
        "ungated": 0.8,
        "filters drawn anew": 0.5,
        "SGD, 0.1": 0.7,
        "SGD, 1": 0.2,
    }
    top1 = np.stack([np.full((2, 3), numbers[arm]) for arm in numbers], 1)
    position = np.full((2, len(numbers), 3, 2, 9), 1.0)
    content = np.full_like(position, 0.1)
    content[:, 0, -1] = 0.5
    content[:, :, 0] = changes.get("start", 0.0)
    gate = np.full_like(position, 0.6)
    gate[..., 4] = 0.4
    dims = ("seed", "arm", "epoch", "layer", "head")
    ds = xr.Dataset(
        {
            "top1": (
                dims[:3],
                top1 if "top1" not in changes else np.full_like(top1, changes["top1"]),
            ),
            "position": (dims, position),
            "content": (dims, content),
            "gate": (dims, gate),
        },
        {"arm": np.array(list(numbers), object), "layer": ["a", "b"], "head": range(9)},
    )
    return ds.assign(head_type=ds.gate.astype(object).where(ds.gate > 2 / 3, "mixed"), images=99)


def test_differences_that_the_paper_claims_to_be_above_zero() -> None:
    means = {
        name: float(values.mean()) for name, values in tcnn_claims.differences(results()).items()
    }
    # The third is the share of position in the information: 1 of 1.1 nat without gates, minus 1 of
    # 1.5 with gates.
    assert list(means.values()) == pytest.approx(
        [-0.2, -0.2, 1 / 1.1 - 1 / 1.5, 0.4, 0.1, 0.4, 0.2]
    )
    assert list(means)[-1] == "accuracy, AdamW less SGD, 0.1"
    text = tcnn_claims.table(results())
    assert "BELOW zero" in next(line for line in text.splitlines() if "centre tap, less" in line)
    assert "in all layers in 0 of 2 trainings" in text


def test_heads_that_switch_between_position_and_content_are_counted() -> None:
    ds = results()
    # Two nats of content exceed one of position: three of eighteen heads switch.
    ds.content[:, 1, -1, 0, :3] = 2.0
    assert tcnn_claims.kept_sides(ds, "ungated").values.tolist() == [15 / 18] * 2
    assert tcnn_claims.kept_sides(ds, "gated").values.tolist() == [1.0] * 2
