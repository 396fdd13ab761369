"""Maps of heads from one pixel of the input, against sums by hand; images of the user's."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from common.digits import cluttered_digits
from common.gpsa_maps import maps_of, open_images
from tcnn_model import GPSA


def model_of_two_layers() -> nn.Module:
    torch.manual_seed(0)
    first = GPSA(
        2, 3, (3, 5), stride=(2, 1), padding=(1, 2), locality_strength=0.3, gating=0.4
    )
    second = GPSA(3, 2, (2, 1), gating=-0.7, locality_strength=0.2)
    for layer in (first, second):
        nn.init.normal_(layer.query)
        nn.init.normal_(layer.key)
        # Centres between pixels, and some beyond the border.
        nn.init.normal_(layer.center, std=2)
    # Dropout, so that a forward in training mode shows.
    return nn.Sequential(first, nn.Dropout(0.9), second).double()


def by_hand(
    layer: GPSA, x: torch.Tensor, head: int, query: tuple[int, int]
) -> np.ndarray:
    """Return A_ij (T-CNN Eqs. 3, 4, 7) of a query at a pixel of one image (C, H, W), over the padded image."""
    (py, px), (height, width) = layer.padding, x.shape[1:]
    of_head = slice(head * layer.qk_dim, (head + 1) * layer.qk_dim)
    q = layer.query[of_head] @ x[:, query[0], query[1]]
    alpha = layer.locality_strength[head].item()
    dy, dx = layer.center[head].tolist()
    center = query[0] + dy, query[1] + dx
    content = np.zeros((height + 2 * py, width + 2 * px))
    position = np.zeros_like(content)
    for row, column in np.ndindex(content.shape):
        y, k = row - py, column - px
        position[row, column] = math.exp(-alpha * math.dist((y, k), center) ** 2)
        # Padding is attended to by position alone.
        if 0 <= y < height and 0 <= k < width:
            logit = (q @ (layer.key[of_head] @ x[:, y, k])).item()
            content[row, column] = math.exp(logit / math.sqrt(layer.qk_dim))
    gate = torch.sigmoid(layer.gating[head]).item()
    by_content = (1 - gate) * content / content.sum()
    return by_content + gate * position / position.sum()


def test_maps_are_those_of_the_equations() -> None:
    model = model_of_two_layers()
    images = torch.randn(2, 2, 11, 7, dtype=torch.float64)
    maps = maps_of(model, images, (9, 4))
    assert dict(maps.sizes) == {"layer": 2, "image": 2, "head": 15, "y": 11, "x": 7}
    inputs = {"0": images, "2": model[0](images).detach()}
    # Row 9 * 6 // 11 = 4 of 6, two pixels apart; and 9 * 5 // 11 of 5.
    queries = {"0": (8, 4), "2": (4, 4)}
    for name, layer in (("0", model[0]), ("2", model[2])):
        in_layer = maps.sel(layer=name)
        query = queries[name]
        assert (int(in_layer.query_y), int(in_layer.query_x)) == query
        height, width = inputs[name].shape[2:]
        top, left = layer.padding
        for image in range(2):
            for head in range(layer.heads):
                expected = by_hand(layer, inputs[name][image], head, query)
                cell = in_layer.isel(image=image, head=head)
                attention = cell.attention[:height, :width]
                inside = expected[top : top + height, left : left + width]
                np.testing.assert_allclose(attention, inside, rtol=0, atol=1e-9)
                outside = 1 - inside.sum()
                assert float(cell.outside) == pytest.approx(outside, abs=1e-9)
                row, column = np.unravel_index(expected.argmax(), expected.shape)
                assert float(cell.peak_y) == row - top - query[0]
                assert float(cell.peak_x) == column - left - query[1]
        np.testing.assert_allclose(
            in_layer.center_y[: layer.heads], layer.center[:, 0].detach()
        )
        np.testing.assert_allclose(
            in_layer.gate[: layer.heads], torch.sigmoid(layer.gating).detach()
        )
    assert np.isnan(maps.attention.sel(layer="2").isel(head=slice(2, None))).all()
    assert np.isnan(maps.attention.sel(layer="2").isel(y=slice(6, None))).all()


def test_the_model_is_as_it_was() -> None:
    model = model_of_two_layers()
    model[0].eval()
    maps_of(model, torch.randn(1, 2, 5, 7, dtype=torch.float64), (0, 0))
    # A forward that raises must not leave hooks, or layers in eval mode, behind.
    with pytest.raises(ValueError, match="expected an input of shape"):
        maps_of(model, torch.randn(1, 3, 5, 7, dtype=torch.float64), (0, 0))
    assert [module.training for module in model] == [False, True, True]
    assert not any(module._forward_pre_hooks for module in model)


def test_files_are_scaled_as_the_scenes_are(tmp_path: Path) -> None:
    Image.new("RGB", (31, 17), (255, 255, 255)).save(tmp_path / "white.png")
    Image.new("L", (5, 7), 0).save(tmp_path / "black.png")
    validation = cluttered_digits(size=32, limit=40)[1]
    images = open_images(
        [str(tmp_path / "white.png"), str(tmp_path / "black.png")], validation, 32
    )
    assert images.shape == (2, 1, 32, 32)
    torch.testing.assert_close(images[0], torch.full((1, 32, 32), (1 - 0.2) / 0.3))
    torch.testing.assert_close(images[1], torch.full((1, 32, 32), -0.2 / 0.3))
