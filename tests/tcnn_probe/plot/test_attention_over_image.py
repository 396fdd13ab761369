"""plot.attention_maps: each map lies on its layer's row and head's column, over the image, with the query boxed."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import timm
import torch
import xarray as xr

import tcnn_probe

SIZE = (32, 48)


@pytest.fixture(scope="module")
def maps() -> xr.DataTree:
    torch.manual_seed(0)
    options = {"embed_dim": 12, "depth": 3, "num_heads": 3, "num_classes": 5}
    model = timm.create_model(
        "deit_tiny_patch16_224", patch_size=8, img_size=SIZE, **options
    ).eval()
    return tcnn_probe.attention_maps(
        model, torch.randn(2, 3, *SIZE), queries=[(31, 0), (9, 47)]
    )


def drawn(figure: plt.Figure) -> list[np.ndarray]:
    """Return the maps over the image in each panel, in order."""
    return [
        np.asarray(axes.images[1].get_array())
        for axes in figure.axes
        if len(axes.images) == 2
    ]


def boxes(figure: plt.Figure) -> set[tuple[float, ...]]:
    return {patch.get_bbox().bounds for axes in figure.axes for patch in axes.patches}


def test_rows_are_layers_and_columns_heads(maps: xr.DataTree) -> None:
    figure = tcnn_probe.plot.attention_maps(maps, image=1, query=(9, 47))
    expected = maps["3x4x6"].attention[1].isel(query=1)
    for panel, values in zip(
        drawn(figure), expected.values.reshape(-1, 4, 6), strict=True
    ):
        np.testing.assert_allclose(panel, values / values.max(), rtol=1e-6)
    assert boxes(figure) == {(40.0, 8.0, 8.0, 8.0)}  # x, y, width, height
    names = [
        axes.get_ylabel().replace("\n", "") for axes in figure.axes if axes.get_ylabel()
    ]
    assert names == expected.layer.values.tolist()
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["head 0", "head 1", "head 2"]


def test_class_token_and_choices(maps: xr.DataTree) -> None:
    figure = tcnn_probe.plot.attention_maps(
        maps, query="class", layers="*.2.*", heads=[0, 2]
    )
    expected = (
        maps["3x4x6"].class_attention[0].sel(layer="blocks.2.attn", head=[0, 2]).values
    )
    for panel, values in zip(drawn(figure), expected, strict=True):
        np.testing.assert_allclose(panel, values / values.max(), rtol=1e-6)
    assert not boxes(figure)


def test_the_query_by_default(maps: xr.DataTree) -> None:
    assert boxes(tcnn_probe.plot.attention_maps(maps)) == {(0.0, 24.0, 8.0, 8.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image": 2}, "one of 2 images"),
        (
            {"query": (0, 0)},
            r"from the pixels \[\(31, 0\), \(9, 47\)\], not from \(0, 0\)",
        ),
        ({"query": "cls"}, "'class', got 'cls'"),
        ({"query": 5}, "two integers"),
        ({"layers": "head"}, "no such maps of the layer 'head'"),
        ({"heads": 3}, "heads of the layers, got 3"),
    ],
)
def test_refusals(maps: xr.DataTree, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.plot.attention_maps(maps, **options)  # type: ignore[arg-type]


def test_refuses_another_tree() -> None:
    with pytest.raises(TypeError, match="maps gives"):
        tcnn_probe.plot.attention_maps(xr.DataTree())
