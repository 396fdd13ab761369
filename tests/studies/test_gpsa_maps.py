"""Maps of heads for one pixel of the input, against sums by hand, and the user's own images."""

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
    first = GPSA(2, 3, (3, 5), stride=(2, 1), padding=(1, 2), locality_strength=0.3, gating=0.4)
    second = GPSA(3, 2, (2, 1), gating=-0.7, locality_strength=0.2)
    for layer in (first, second):
        nn.init.normal_(layer.query)
        nn.init.normal_(layer.key)
        # Centres lie between pixels, and some beyond the border.
        nn.init.normal_(layer.center, std=2)
    # Dropout would reveal a forward in training mode.
    return nn.Sequential(first, nn.Dropout(0.9), second).double()


def by_hand(layer: GPSA, x: torch.Tensor, head: int, query: tuple[int, int]) -> np.ndarray:
    """Return A_ij (T-CNN Eqs. 3, 4, 7) over the padded image,
    for one query of an image (C, H, W).
    """
    d = layer.qk_dim
    of_head = slice(head * d, (head + 1) * d)
    w_qry = layer.query[of_head]
    w_key = layer.key[of_head]
    alpha = layer.locality_strength[head].item()
    gate = torch.sigmoid(layer.gating[head]).item()
    query_y, query_x = query
    delta_y, delta_x = layer.center[head].tolist()
    center = (query_y + delta_y, query_x + delta_x)
    q = w_qry @ x[:, query_y, query_x]

    # The numerators of both softmaxes, key by key.
    top, left = layer.padding
    _, height, width = x.shape
    content = np.zeros((height + 2 * top, width + 2 * left))
    position = np.zeros_like(content)
    for row, column in np.ndindex(content.shape):
        key_y = row - top
        key_x = column - left
        distance = math.dist((key_y, key_x), center)
        position[row, column] = math.exp(-alpha * distance**2)
        # Keys on the padding get positional attention only.
        if 0 <= key_y < height and 0 <= key_x < width:
            k = w_key @ x[:, key_y, key_x]
            logit = (q @ k).item() / math.sqrt(d)
            content[row, column] = math.exp(logit)

    # Eq. (7).
    content /= content.sum()
    position /= position.sum()
    return (1 - gate) * content + gate * position


def test_maps_are_those_of_the_equations() -> None:
    model = model_of_two_layers()
    images = torch.randn(2, 2, 11, 7, dtype=torch.float64)
    maps = maps_of(model, images, (9, 4))
    assert dict(maps.sizes) == {"layer": 2, "image": 2, "head": 15, "y": 11, "x": 7}
    features = model[0](images).detach()
    cases = [
        # The query at the pixel (9, 4) of 11 x 7: in the first layer row 9 * 6 // 11 = 4 of 6
        # queries, which are two pixels apart; in the second row 9 * 5 // 11 = 4.
        ("0", images, (8, 4)),
        ("2", features, (4, 4)),
    ]
    for name, inputs, query in cases:
        layer = model.get_submodule(name)
        in_layer = maps.sel(layer=name)
        query_y, query_x = query
        assert int(in_layer.query_y) == query_y
        assert int(in_layer.query_x) == query_x
        height, width = inputs.shape[2:]
        top, left = layer.padding
        for image, head in np.ndindex(len(inputs), layer.heads):
            expected = by_hand(layer, inputs[image], head, query)
            cell = in_layer.isel(image=image, head=head)

            # Compare attention on the image, and the attention that goes to the padding.
            attention = cell.attention[:height, :width]
            inside = expected[top : top + height, left : left + width]
            np.testing.assert_allclose(attention, inside, rtol=0, atol=1e-9)
            outside = 1 - inside.sum()
            assert float(cell.outside) == pytest.approx(outside, abs=1e-9)

            # The peak is relative to the query.
            row, column = np.unravel_index(expected.argmax(), expected.shape)
            assert float(cell.peak_y) == row - top - query_y
            assert float(cell.peak_x) == column - left - query_x
        center_y = layer.center[:, 0].detach()
        gate = torch.sigmoid(layer.gating).detach()
        np.testing.assert_allclose(in_layer.center_y[: layer.heads], center_y)
        np.testing.assert_allclose(in_layer.gate[: layer.heads], gate)
    # The second layer has only two heads and six rows.
    attention = maps.attention.sel(layer="2")
    assert np.isnan(attention.isel(head=slice(2, None))).all()
    assert np.isnan(attention.isel(y=slice(6, None))).all()


def test_the_model_is_left_unchanged() -> None:
    model = model_of_two_layers()
    model[0].eval()
    maps_of(model, torch.randn(1, 2, 5, 7, dtype=torch.float64), (0, 0))
    # A forward that raises must leave neither hooks nor layers in eval mode behind.
    with pytest.raises(ValueError, match="expected an input of shape"):
        maps_of(model, torch.randn(1, 3, 5, 7, dtype=torch.float64), (0, 0))
    assert [module.training for module in model] == [False, True, True]
    assert not any(module._forward_pre_hooks for module in model)


def test_image_files_are_scaled_like_the_scenes(tmp_path: Path) -> None:
    white = tmp_path / "white.png"
    black = tmp_path / "black.png"
    Image.new("RGB", (31, 17), (255, 255, 255)).save(white)
    Image.new("L", (5, 7), 0).save(black)
    _, validation = cluttered_digits(size=32, limit=40)
    images = open_images([str(white), str(black)], validation, 32)
    assert images.shape == (2, 1, 32, 32)
    # White is 1 and black 0, before 0.2 is subtracted and the difference divided by 0.3.
    expected = torch.tensor([1 - 0.2, -0.2]) / 0.3
    torch.testing.assert_close(images, expected.view(2, 1, 1, 1).expand_as(images))
