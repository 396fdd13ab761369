"""Mean attention of chosen queries over images, compared with float64 over all images at once."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

# The queries are the middle and a corner in the last column, which begins below 1.
QUERIES = [(0.5, 0.5), (0.0, 0.99)]


def means(model: nn.Module, x: Tensor) -> xr.Dataset:
    # Batches are uneven, so the plain mean of the batch means would be wrong.
    recorder = recorded(model, *x.split([3, 2]), probes=tcnn_probe.mean_attention(QUERIES))
    return recorder.tree["mean-attention"].dataset.isel(epoch=0)


def test_mean_attention_of_a_vit_with_a_class_token() -> None:
    torch.manual_seed(0)
    options = {"img_size": (48, 80), "depth": 2, "embed_dim": 12, "num_heads": 3}
    model = sharpen(timm.create_model("vit_tiny_patch16_224", **options)).eval()
    x = torch.randn(5, 3, 48, 80)
    recording = means(model, x)
    assert recording["query"].values.tolist() == ["0.5, 0.5", "0, 0.99"]
    assert (recording.images == 5).all()
    for reference in attention_of(model, x):  # the grid is 3 x 5, after a class token
        # After the class token, the middle is row 1 and column 2, the corner row 0 and column 4.
        rows = reference.weights[:, :, [1 + 1 * 5 + 2, 1 + 4], 1:].mean(0).numpy()
        # Weights are at most 1 and stored as float32.
        np.testing.assert_allclose(
            recording.mean_attention.sel(layer=reference.layer),
            rows.reshape(3, 2, 3, 5),
            atol=1e-6,
        )


def test_mean_attention_of_gated_layers() -> None:
    torch.manual_seed(0)
    # The gate is about a quarter and the content sharp, so that both parts contribute.
    layer = GPSA(3, 4, 3, padding=1, gating=-1.0, qk_scale=50.0)
    x = torch.randn(5, 3, 7, 5)
    mean = means(nn.Sequential(layer).eval(), x).mean_attention[0]
    # The axes are (B, heads, N_query, padded keys).
    padded = layer.double().attention(x.double()).detach()
    # Without the padding, the middle of 7 x 5 is row 3 and column 2, the corner column 4 of the
    # first row.
    rows = padded.unflatten(-1, (9, 7))[:, :, [3 * 5 + 2, 4], 1:-1, 1:-1].mean(0)
    # Weights are at most 1 and stored as float32.
    np.testing.assert_allclose(mean, rows, atol=1e-6)


def test_images_of_another_size_are_refused() -> None:
    model = nn.Sequential(GPSA(3, 4, 3, padding=1)).eval()
    wrong = pytest.raises(
        ValueError, match=r"as of earlier images, got .*: give images of one size, .* heads"
    )
    with wrong, tcnn_probe.record(model, probes=tcnn_probe.mean_attention()):
        model(torch.randn(2, 3, 7, 5))
        model(torch.randn(2, 3, 5, 7))


@pytest.mark.parametrize(
    "queries", [[], [(0.5, 1.0)], [(-0.1, 0.5)], (0.5, 0.5), torch.tensor([[0.5, 1.0]])]
)
def test_queries_that_lie_outside_or_are_no_pairs_are_refused(queries: Any) -> None:
    with pytest.raises(ValueError, match="from 0 and below 1, got"):
        tcnn_probe.mean_attention(queries)
