"""The layer against the equations of the paper, computed slowly in float64."""

import pytest
import torch
from torch import Tensor

from tcnn_model import GPSA
from tcnn_model.gpsa import blocks
from tcnn_model.gpsa import layer as gpsa_layer
from tcnn_model.gpsa.functional import Backend
from tests.tcnn_model.cases import Case, every_case
from tests.tcnn_model.equations import gpsa_attention_reference, gpsa_reference
from tests.tcnn_model.numerics import (
    LargestTensor,
    assert_same,
    assert_same_gradients,
    disturb,
    random,
)

pytestmark = pytest.mark.numerical


@every_case
@pytest.mark.parametrize("backend", ["auto", "blocks"])
def test_output_attention_and_gradients_are_those_of_the_paper(
    case: Case, backend: Backend
) -> None:
    layer = disturb(case.gpsa(backend=backend))
    x = random(2, layer.in_channels, *case.grid).requires_grad_()
    output = layer(x).flatten(2)
    expected = gpsa_reference(layer, x)
    assert_same(output, expected)
    assert_same(layer.attention(x), gpsa_attention_reference(layer, x))
    assert_same_gradients(output, expected, {"x": x, **dict(layer.named_parameters())})


# Blocks hold one row at a time, a few rows, or all rows.
@pytest.mark.parametrize(
    ("elements", "together"), [(1, False), (300, False), (2**18, False), (2**18, True)]
)
@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_layers_weight_the_values_first(
    multiplier: int, elements: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients equal the equations for any block size,
    and with a hook on the outputs of heads.
    """
    # The threshold is lowered, because so small a map would take the other path, which is faster
    # there.
    monkeypatch.setattr(gpsa_layer, "_WEIGHTED_FROM", 0)
    monkeypatch.setattr(blocks, "_WEIGHTED_ELEMENTS", elements)
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS_CPU", elements)
    monkeypatch.setattr(blocks, "_IMAGES_TOGETHER_CPU", together)
    # The axes differ in every number, so that exchanged axes would show.
    geometry = {"stride": (1, 2), "padding": (1, 2), "dilation": (2, 1), "groups": 5}
    layer = disturb(GPSA(5, 5 * multiplier, (2, 3), **geometry, dtype=torch.float64))
    x = random(2, 5, 6, 7).requires_grad_()
    with LargestTensor() as largest:
        output = layer(x).flatten(2)
    # Tensors stay smaller than the outputs of all heads, for both images.
    assert largest.elements < layer.heads * output[0, 0].numel() * 5 * 2
    expected = gpsa_reference(layer, x)
    assert_same(output, expected)
    assert_same_gradients(output, expected, {"x": x, **dict(layer.named_parameters())})
    # A hook needs the output of each head, which this path never computes otherwise.
    with layer.head_outputs.register_forward_hook(lambda *_: None):
        assert_same(layer(x).flatten(2), expected)


def test_padding_gets_positional_attention_only() -> None:
    layer = GPSA(5, 3, 3, padding=(1, 2), dtype=torch.float64)
    x = random(2, 5, 7, 11)

    def on_padding(gating: float) -> Tensor:
        torch.nn.init.constant_(layer.gating, gating)
        attention = layer.attention(x).unflatten(-1, (9, 15)).detach()
        attention[..., 1:-1, 2:-2] = 0
        return attention.sum((-2, -1)).reshape(2, 9, 7, 13)

    assert float(on_padding(-50.0).max()) < 1e-20  # content attention alone
    # Positional attention alone: the first tap looks one pixel up and two to the left.
    mass = on_padding(50.0)
    assert float(mass[:, 0, 0, 0].min()) > 0.9
    assert float(mass[:, 0, 3, 6].max()) < 0.1


def test_content_attention_reads_the_query_pixel_and_the_key_pixels() -> None:
    layer = GPSA(2, 3, 3, stride=2, padding=1, qk_dim=1, dtype=torch.float64)
    with torch.no_grad():
        layer.gating.fill_(-50.0)
        layer.query.zero_()[:, 0] = 1.0  # queries read channel 0, keys channel 1
        layer.key.zero_()[:, 1] = 1.0
    x = random(1, 2, 5, 7)
    queries = x[0, 0, ::2, ::2].flatten()
    expected = torch.softmax(queries[:, None] * x[0, 1].flatten()[None, :], dim=-1)
    actual = layer.attention(x).unflatten(-1, (7, 9))[0, :, :, 1:-1, 1:-1].flatten(2)
    for head in range(9):
        assert_same(actual[head], expected)


def test_central_weight_at_the_papers_locality_strengths() -> None:
    """Section 3.1 of the design gives the weight
    of the central pixel at alpha = 1, 2, 3, 5 and 10.
    """
    layer = GPSA(
        1,
        1,
        # The taps form a row, so that their centres lie on one line; each head has its own
        # locality.
        (1, 5),
        padding=(0, 2),
        locality_strength=[1, 2, 3, 5, 10],
        gating=50.0,
        dtype=torch.float64,
    )
    # On 13 pixels, the border cuts off nothing of a central Gaussian with alpha = 1.
    x = random(1, 1, 13, 13)
    attention = layer.attention(x).reshape(5, 13, 13, 13, 17).detach()
    weights = [float(attention[h, 6, 6, 6, 2 + 6 + (h - 2)]) for h in range(5)]
    # The tolerance is that of the digits in the documents.
    assert weights == pytest.approx([0.318, 0.619, 0.827, 0.974, 0.9998], abs=5e-4)
