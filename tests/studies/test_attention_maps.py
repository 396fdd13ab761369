"""Maps of heads for one pixel of the input, against the attention of the layers, and the user's own
images.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from attention_maps import maps_of, open_images, tap_on_image
from common.digits import cluttered_digits
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


def test_maps_are_those_of_the_layers() -> None:
    model = model_of_two_layers().eval()
    images = torch.randn(2, 2, 11, 7, dtype=torch.float64)
    maps = maps_of(model, images, (9, 4))
    assert dict(maps.sizes) == {"layer": 2, "image": 2, "head": 15, "y": 11, "x": 7}
    cases = [
        # The query at the pixel (9, 4) of 11 x 7: in the first layer row 9 * 6 // 11 = 4 of 6
        # queries, which are two pixels apart; in the second row 9 * 5 // 11 = 4.
        ("0", images, (4, 4), (8, 4)),
        ("2", model[0](images).detach(), (4, 4), (4, 4)),
    ]
    for name, inputs, (row, column), query in cases:
        layer = model.get_submodule(name)
        in_layer = maps.sel(layer=name)
        assert (int(in_layer.query_y), int(in_layer.query_x)) == query
        height, width = inputs.shape[2:]
        top, left = layer.padding
        y, x = layer.axes(height, width)
        attention = layer.attention(inputs).detach()[:, :, row * x.queries + column]
        padded = attention.unflatten(-1, (y.keys, x.keys)).numpy()
        inside = padded[:, :, top : top + height, left : left + width]
        for image, head in np.ndindex(len(inputs), layer.heads):
            cell = in_layer.isel(image=image, head=head)
            of_head = inside[image, head]
            # The maps are float32.
            np.testing.assert_allclose(cell.attention[:height, :width], of_head, atol=1e-7)
            assert float(cell.outside) == pytest.approx(1 - of_head.sum(), abs=1e-6)
            # The peak is relative to the query.
            peak = np.unravel_index(of_head.argmax(), of_head.shape)
            assert (float(cell.peak_y), float(cell.peak_x)) == tuple(np.subtract(peak, query))
            tap = np.add(query, layer.center[head].tolist())
            on_image = bool(((tap >= 0) & (tap < (height, width))).all())
            assert bool(tap_on_image(maps).sel(layer=name)[head]) == on_image
        np.testing.assert_allclose(in_layer.center_y[: layer.heads], layer.center[:, 0].detach())
        np.testing.assert_allclose(in_layer.gate[: layer.heads], layer.gate.detach())
    # The second layer has only two heads and six rows.
    attention = maps.attention.sel(layer="2")
    assert np.isnan(attention.isel(head=slice(2, None))).all()
    assert np.isnan(attention.isel(y=slice(6, None))).all()


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
