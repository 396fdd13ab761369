"""Tokens of videos are on a grid of frames, rows and columns:
statistics and maps against brute force in float64.
"""

from collections import defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.attention.bruteforce import Place, attention_of, equivariance, grid
from tests.tcnn_probe.attention.checking import check, same
from tests.tcnn_probe.attention.sharpen import sharpen
from tests.tcnn_probe.contracts.helpers import recorded

transformers = need("transformers")

FRAMES, ROWS, COLUMNS = 3, 2, 5
CELLS = FRAMES, ROWS, COLUMNS
TUBE, SIDE = 2, 8  # frames and pixels per token
FLOAT32 = 1.2e-7


def video_model(name: str, **options: Any) -> nn.Module:
    """Return a small VideoMAE, VideoMAEForPreTraining or Vivit."""
    family = name.removesuffix("ForPreTraining")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=17,
        image_size=(ROWS * SIDE, COLUMNS * SIDE),
        patch_size=SIDE,
        num_frames=FRAMES * TUBE,
        tubelet_size=[TUBE, SIDE, SIDE] if family == "Vivit" else TUBE,
        **options,
    )
    ending = "" if name.endswith("ForPreTraining") else "Model"
    return sharpen(getattr(transformers, f"{name}{ending}")(config).eval())


def videos(count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    size = FRAMES * TUBE, 3, ROWS * SIDE, COLUMNS * SIDE
    return torch.randn(count, *size, generator=generator)


@pytest.mark.parametrize("name", ["VideoMAE", "Vivit"])
def test_distances_in_space_and_in_time(name: str) -> None:
    class_tokens: list[None] = [None] * (name == "Vivit")
    places: list[Place] = [*class_tokens, *grid(ROWS, COLUMNS) * FRAMES]
    frames = [(float(f),) for f in range(FRAMES) for _ in range(ROWS * COLUMNS)]
    layout = same(places, frames=[*class_tokens, *frames])
    check(video_model(name), videos(), defaultdict(lambda: layout))


@pytest.mark.parametrize("name", ["VideoMAE", "Vivit"])
def test_maps_by_frame(name: str) -> None:
    model = video_model(name)
    prefix = int(name == "Vivit")
    first, *_ = attention_of(model, videos())
    on_grid = first.weights[:, :, prefix:, prefix:]
    expected = on_grid.unflatten(3, CELLS).unflatten(2, CELLS).numpy()
    maps = tcnn_probe.attention_maps(model, {"pixel_values": videos()})
    node = maps["3x3x2x5"].dataset.isel(layer=0)
    cells = "frame", "y", "x"
    asking = tuple(f"query_{dim}" for dim in cells)
    assert node.attention.dims == ("image", "head", *asking, *cells)
    np.testing.assert_allclose(node.attention, expected, atol=20 * FLOAT32)
    assert maps.input.dims == ("image", "input_frame", "channel", "input_y", "input_x")
    np.testing.assert_array_equal(maps.input, videos())
    if prefix:
        row = first.weights[:, :, 0, 1:].unflatten(2, CELLS).numpy()
        np.testing.assert_allclose(node.class_attention, row, atol=20 * FLOAT32)
    # Frame 3 is in the second tube, and pixel (9, 20) in its second row and third column.
    from_pixel = tcnn_probe.attention_maps(model, videos(), queries=[(3, 9, 20)])
    node = from_pixel["3x3x2x5"].dataset.isel(layer=0)
    np.testing.assert_allclose(node.attention[:, :, 0], expected[:, :, 1, 1, 2], atol=20 * FLOAT32)
    places = [node[f"{kind}_{dim}"].item() for kind in ("query", "from") for dim in cells]
    assert places == [1, 1, 2, 3, 9, 20]


def test_maps_of_videos_with_channels_first() -> None:
    """Maps equal those with frames first, as torchvision's models take videos;
    one frame is drawn and explored.
    """

    class ChannelsFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = video_model("VideoMAE")

        def forward(self, x: Tensor) -> Any:
            return self.model(x.transpose(1, 2))

    maps = tcnn_probe.attention_maps(ChannelsFirst(), videos().transpose(1, 2))
    np.testing.assert_array_equal(maps.input, videos())
    frame = maps.isel(input_frame=3, frame=1, query_frame=2)
    figure = tcnn_probe.plot.attention_maps(frame, query=(9, 20))
    # Panels are the image and three heads of two layers, row by row.
    drawn = figure.axes[2].images[-1].get_array()
    values = maps["3x3x2x5"].attention[0, 0, 1, 2, 1, 2, 1]
    np.testing.assert_allclose(drawn, values / values.max(), atol=20 * FLOAT32)
    assert "(y, x)" in str(tcnn_probe.explore(frame).html)
    for draw in (tcnn_probe.plot.attention_maps, tcnn_probe.explore):
        with pytest.raises(ValueError, match=r"isel\(frame=0, input_frame=0, query_frame=0\)"):
            draw(maps)


def test_queries_in_videos_have_frames() -> None:
    model = video_model("VideoMAE")
    for queries in ([(9, 20)], [(1, 2, 3.5)]):
        with pytest.raises(ValueError, match=r"expected queries=\[\(frame, y, x\), "):
            tcnn_probe.attention_maps(model, videos(), queries=queries)
    with pytest.raises(ValueError, match=r"inside images of 6 x 16 x 40 pixels"):
        tcnn_probe.attention_maps(model, videos(), queries=[(6, 0, 0)])


def test_equivariance_includes_time() -> None:
    model = video_model("VideoMAE").double()
    mean = attention_of(model, videos())[0].weights.mean(0).numpy()
    probes = [*tcnn_probe.DEFAULT, "health", tcnn_probe.mean_attention([(0.6, 0.3)])]
    recorder = recorded(model, videos().double(), probes=probes)
    layer = recorder.dataset.isel(epoch=0, layer=0)
    cells = list(product(*map(range, CELLS)))
    expected = [equivariance(head, cells) for head in mean]
    np.testing.assert_allclose(layer.translation_equivariance, expected, atol=1e-9)
    # The query is in the middle frame, in its second row and column; frames are stacked vertically.
    query = 1 * ROWS * COLUMNS + 1 * COLUMNS + 1
    row = mean[:, query].reshape(3, FRAMES * ROWS, COLUMNS)
    pattern = recorder.tree["mean-attention"].mean_attention.isel(epoch=0, layer=0, query=0)
    np.testing.assert_allclose(pattern, row, atol=FLOAT32)
    # Two rows have no inner tokens.
    kinds = recorder.dataset.sink_kind.isel(epoch=0)
    assert (kinds.sel(token_kind="border") == 1).all()


def test_other_orders_of_tokens_have_no_grid() -> None:
    """VideoMAE's decoder puts mask tokens behind visible ones;
    V-JEPA's predictor sorts them in among these.
    """
    model = video_model(
        "VideoMAEForPreTraining",
        decoder_num_hidden_layers=1,
        decoder_hidden_size=12,
        decoder_num_attention_heads=3,
        decoder_intermediate_size=17,
    )
    hidden = torch.zeros(2, 30, dtype=torch.bool)
    hidden[:, [1, 4, 11, 14, 21, 24]] = True
    config = transformers.VJEPA2Config(
        crop_size=32,
        patch_size=8,
        frames_per_clip=4,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        pred_hidden_size=24,
        pred_num_hidden_layers=1,
        pred_num_attention_heads=2,
    )
    vjepa = transformers.VJEPA2Model(config).eval()
    reasons = {}

    def look(attention: tcnn_probe.Attention) -> None:
        reasons[attention.name] = attention.layout.reason

    # What its processor calls them.
    inputs = {"pixel_values_videos": torch.randn(1, 4, 3, 32, 32)}
    maps = tcnn_probe.attention_maps(vjepa, inputs, layers="encoder.*")
    assert list(maps.children) == ["2x2x4x4"]
    with torch.no_grad():
        with tcnn_probe.attention_stream(model, look):
            model(videos(), bool_masked_pos=hidden)
        with tcnn_probe.attention_stream(vjepa, look):
            vjepa(torch.randn(1, 4, 3, 32, 32))
    assert "30 keys" in reasons["decoder.decoder_layers.0.attention.attention"]
    assert not reasons["encoder.layer.0.attention"]
    assert "beside the grid" in reasons["predictor.layer.0.attention"]


def test_frames_in_another_order_have_no_grid() -> None:
    class Backwards(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            model.embeddings.register_forward_hook(lambda m, i, tokens: tokens.flip(1))

        def forward(self, x: Tensor) -> Any:
            return self.model(x)

    with pytest.raises(ValueError, match="not in the order of the image's rows"):
        tcnn_probe.attention_maps(Backwards(video_model("VideoMAE")), videos())
