"""Types of heads in recordings of attention that is made for each type."""

from typing import Any

import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import tcnn_model
import tcnn_probe
from tests.tcnn_probe.contracts import helpers


def recorded(model: nn.Module, *size: int) -> xr.Dataset:
    images = torch.randn(size, generator=torch.Generator().manual_seed(0))
    return helpers.recorded(model, images).dataset


@pytest.mark.study
def test_heads_of_a_tcnn_start_convolutional_and_change() -> None:
    """Three GPSA layers of 9 heads on 5 x 7 pixels have the papers' initial values,
    and then other parameters.
    """
    torch.manual_seed(0)
    cnn = timm.create_model("resnet18", in_chans=1, num_classes=2, channels=(16, 32, 64, 128))
    names = [f"layer4.{name}" for name in ("0.conv2", "1.conv1", "1.conv2")]
    model = tcnn_model.reparameterize(cnn, layers=names, input_size=(1, 160, 224)).eval()
    first, second, third = tcnn_model.gpsa_layers(model).values()
    size, conv = (8, 1, 160, 224), "convolutional"
    types = tcnn_probe.head_types(recorded(model, *size))
    assert types.shape == (1, 3, 9)
    assert (types == conv).all()
    with torch.no_grad():
        first.gating[2:5] = -3.0
        # New queries and keys have products near zero, so that attention is uniform.
        first.query.unflatten(0, (9, -1))[4] *= 1e5
    ds = recorded(model, *size)
    # A low gate alone does not make a content head. Sharp queries and keys depend on content and on
    # the padding.
    expected = [conv] * 2 + ["averaging"] * 2 + ["mixed"] + [conv] * 4
    types = tcnn_probe.head_types(ds)
    assert types.values.tolist() == [[expected, [conv] * 9, [conv] * 9]]
    by_gate = [conv] * 2 + ["content"] * 3 + [conv] * 4
    types = tcnn_probe.head_types(ds, by="gate")
    assert types.values.tolist() == [[by_gate, [conv] * 9, [conv] * 9]]
    with torch.no_grad():
        first.gating.fill_(20.0)
        first.raw_locality.fill_(-4.0)  # no locality, which averages
        second.gating.fill_(-0.7)  # a third of the attention is positional
        third.gating.fill_(20.0)
        third.center[8] = torch.tensor([40.0, 40.0])  # all queries attend to one corner
    types = tcnn_probe.head_types(recorded(model, *size))
    # With gates at 1, all attention follows from the offset, also that of queries that all attend
    # to one corner.
    assert types.values.tolist() == [[["averaging"] * 9, [conv] * 9, [conv] * 9]]


@pytest.mark.parametrize(
    ("kernel", "size", "strength"),
    [(3, (5, 7), 1.0), (5, (4, 5), 20.0), (7, (7, 7), 20.0)],
)
def test_convolutions_are_convolutional(
    kernel: int, size: tuple[int, int], strength: float
) -> None:
    """Layers have the papers' initial values,
    where content has a quarter of the weight, or are convolutions.

    Taps of 7 x 7 on 7 x 7 pixels attend up to 4.2 pixels away, and uniform attention 5.5 on
    average.
    """
    torch.manual_seed(0)
    layer = tcnn_model.GPSA(
        8, 2, kernel, padding=kernel // 2, locality_strength=strength, gating=strength
    )
    types = tcnn_probe.head_types(recorded(nn.Sequential(layer).eval(), 11, 8, *size))
    assert (types == "convolutional").all()
    assert types.size == kernel**2


class Four(nn.Module):
    """Four heads on (B, 4, H, W) that attend to neighbours,
    uniformly, to the brightest pixels, and to the middle.
    """

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        y = torch.arange(height).repeat_interleave(width)
        x_ = torch.arange(width).repeat(height)
        squared = ((y[:, None] - y) ** 2 + (x_[:, None] - x_) ** 2).to(x).expand(len(x), -1, -1)
        middle = -((y - height // 2) ** 2) - (x_ - width // 2) ** 2
        middle = middle.to(x).expand_as(squared)
        # This depends on the image, in the same way for all queries: content without a convolution.
        bright = 5 * x[:, 0].flatten(1)[:, None].expand_as(squared)
        tokens = torch.stack([x.flatten(2).transpose(1, 2)] * 4, 1)
        bias = torch.stack([-squared, 0 * squared, bright, middle], 1)
        return scaled_dot_product_attention(0 * tokens, tokens, tokens, attn_mask=bias)


def test_types_of_plain_attention() -> None:
    four = nn.Sequential(nn.Conv2d(3, 4, 8, stride=8), Four()).eval()
    ds = recorded(four, 11, 3, 40, 56)
    assert tcnn_probe.head_types(ds).values.tolist() == [
        [["convolutional", "averaging", "salient", "positional"]]
    ]
    cait = timm.create_model(
        "cait_xxs24_224", img_size=(80, 112), depth=1, embed_dim=8, num_heads=2
    ).eval()
    types = tcnn_probe.head_types(recorded(cait, 11, 3, 80, 112)).isel(epoch=0)
    # Layers whose only queries are class tokens have types, too, although they have no offsets.
    assert (types == "averaging").all()
    assert types.sizes["layer"] == 3


def test_types_from_8_and_from_64_images_agree() -> None:
    """Queries and keys of an untrained network are scaled, so that its heads have several types."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"depth": 6, "embed_dim": 60, "num_heads": 10}
    model = timm.create_model("vit_tiny_patch16_224", img_size=(80, 112), **options)
    with torch.no_grad():
        for depth, block in enumerate(model.blocks):
            # The first 2 x 60 rows are queries and keys; attention becomes sharper with depth.
            block.attn.qkv.weight[:120].mul_(2.0 ** (depth + 1))
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 3, 80, 112, generator=generator)
    types = []
    for count in (8, 64):
        dataset = helpers.recorded(model.eval(), images[:count]).dataset
        types.append(tcnn_probe.head_types(dataset).values)
    assert {"averaging", "content"} <= {*types[0].flat}
    # Heads near a threshold may change their type: up to three of 60.
    assert (types[0] == types[1]).mean() >= 0.95
