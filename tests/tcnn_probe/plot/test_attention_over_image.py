"""plot.attention_maps: each map is in its layer's row and its head's column,
over the image, with the query boxed.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import timm
import torch
import xarray as xr
from matplotlib.text import Text

import tcnn_probe
from tests.extras import need
from tests.tcnn_probe.plot.layout import texts_within_and_apart

SIZE = (32, 48)


@pytest.fixture(scope="module")
def maps() -> xr.DataTree:
    torch.manual_seed(0)
    options = {"embed_dim": 12, "depth": 3, "num_heads": 3, "num_classes": 5}
    model = timm.create_model(
        "deit_tiny_patch16_224", patch_size=8, img_size=SIZE, **options
    ).eval()
    # The queries are the first pixel of the last row, and a pixel of the last column; transposed,
    # neither would be in the image.
    return tcnn_probe.attention_maps(model, torch.randn(2, 3, *SIZE), queries=[(31, 0), (9, 47)])


def drawn(figure: plt.Figure) -> list[np.ndarray]:
    """Return the map over the image in each panel, in order."""
    return [np.asarray(axes.images[1].get_array()) for axes in figure.axes if len(axes.images) == 2]


def boxes(figure: plt.Figure) -> set[tuple[float, ...]]:
    return {patch.get_bbox().bounds for axes in figure.axes for patch in axes.patches}


def test_rows_are_layers_and_columns_heads(maps: xr.DataTree) -> None:
    figure = tcnn_probe.plot.attention_maps(maps, image=1, query=(9, 47))
    expected = maps["3x4x6"].attention[1].isel(query=1)
    for panel, values in zip(drawn(figure), expected.values.reshape(-1, 4, 6), strict=True):
        np.testing.assert_allclose(panel, values / values.max(), rtol=1e-6)
    assert boxes(figure) == {(40.0, 8.0, 8.0, 8.0)}  # x, y, width, height
    names = [axes.get_ylabel().replace("\n", "") for axes in figure.axes if axes.get_ylabel()]
    assert names == expected.layer.values.tolist()
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["head 0", "head 1", "head 2"]


def test_maps_of_the_class_token_and_selections(maps: xr.DataTree) -> None:
    figure = tcnn_probe.plot.attention_maps(maps, query="class", layers="*.2.*", heads=[0, 2])
    expected = maps["3x4x6"].class_attention[0].sel(layer="blocks.2.attn", head=[0, 2]).values
    for panel, values in zip(drawn(figure), expected, strict=True):
        np.testing.assert_allclose(panel, values / values.max(), rtol=1e-6)
    assert not boxes(figure)


def drawn_titles(figure: plt.Figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes if len(axes.images) == 2]


def test_many_heads_are_wrapped_into_rows() -> None:
    """25 heads have rows of 9, 9 and 7, on a page,
    with names where the panel above has another head.
    """
    options = {"patch_size": 8, "img_size": SIZE, "embed_dim": 50, "depth": 1}
    model = timm.create_model("deit_tiny_patch16_224", **options, num_heads=25).eval()
    maps = tcnn_probe.attention_maps(model, torch.randn(1, 3, *SIZE), queries=[(9, 47)])
    figure = tcnn_probe.plot.attention_maps(maps)
    assert figure.get_size_inches()[0] < 12
    assert drawn_titles(figure) == [f"head {head}" for head in range(25)]
    panels = [axes for axes in figure.axes if len(axes.images) == 2]
    columns = {round(axes.get_position().x0, 2) for axes in panels}
    assert len(columns) == 9
    texts_within_and_apart(figure)
    for values, panel in zip(
        maps["25x4x6"].attention[0, :, :, 0].values.reshape(-1, 4, 6),
        drawn(figure),
        strict=True,
    ):
        np.testing.assert_allclose(panel, values / values.max(), rtol=1e-6)


def test_layers_of_different_numbers_of_heads() -> None:
    options = {
        "img_size": 64,
        "embed_dim": 30,
        "window_size": 4,
        "depths": (1, 1, 1),
        # There are more and fewer heads than columns.
        "num_heads": (2, 5, 3),
    }
    swin = timm.create_model("swin_tiny_patch4_window7_224", **options).eval()
    maps = tcnn_probe.attention_maps(swin, torch.randn(1, 3, 64, 64), queries=[(9, 47)])
    figure = tcnn_probe.plot.attention_maps(maps, col_wrap=3)
    titles = [
        "head 0",
        "head 1",
        "",
        "",
        "head 2",
        "head 3",
        "head 4",
        "head 0",
        "head 1",
        "",
    ]
    assert drawn_titles(figure) == titles
    texts_within_and_apart(figure)


def test_scales_are_stated(maps: xr.DataTree) -> None:
    values = maps["3x4x6"].attention[0, :, :, 1].values.reshape(-1, 4, 6)
    figure = tcnn_probe.plot.attention_maps(maps, query=(9, 47), scale="common")
    for panel, expected in zip(drawn(figure), values, strict=True):
        np.testing.assert_allclose(panel, expected / values.max(), rtol=1e-6)
    assert figure.get_supxlabel() == f"opacity and colour: all maps from 0 to {values.max():.2g}"
    figure = tcnn_probe.plot.attention_maps(maps)
    assert figure.get_supxlabel().endswith("each map from 0 to its own largest value")


@pytest.mark.parametrize("show_image", [True, False])
def test_captions_fit_into_a_column(maps: xr.DataTree, show_image: bool) -> None:
    with plt.rc_context({"font.size": 7}):
        figure = plt.figure(figsize=(3.3, 2.4), layout="constrained")
        tcnn_probe.plot.attention_maps(maps, show_image=show_image, figure=figure)
    texts_within_and_apart(figure)


def test_the_grid_of_one_query_boxes_its_cell(maps: xr.DataTree) -> None:
    of_query = maps["3x4x6"].dataset.attention.isel(image=0, query=1)
    for heads in (of_query, of_query.isel(layer=1)):
        figure = tcnn_probe.plot.attention_grid(heads, query=(0, 0))
        assert boxes(figure) == {(5, 1, 1, 1)}  # of pixel (9, 47)


def test_sizes_follow_the_settings_of_matplotlib(maps: xr.DataTree) -> None:
    heads = maps["3x4x6"].dataset.attention.isel(image=0, query=1)
    saliency = maps["3x4x6"].dataset.class_attention.isel(layer=0, head=0)
    with plt.rc_context({"font.size": 5, "lines.linewidth": 0.5}):
        figures = [
            tcnn_probe.plot.attention_maps(maps),
            tcnn_probe.plot.attention_grid(heads, query=(1, 2)),
            tcnn_probe.plot.saliency_overlay(saliency, torch.randn(2, 3, 4, 6))[0, 0].figure,
        ]
    for figure in figures:
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert max(text.get_fontsize() for text in texts) <= 5
        assert {box.get_linewidth() for axes in figure.axes for box in axes.patches} <= {0.5}


def test_maps_without_the_image(maps: xr.DataTree) -> None:
    figure = tcnn_probe.plot.attention_maps(maps, image=1, query=(9, 47), show_image=False)
    expected = maps["3x4x6"].attention[1, :, :, 1].values.reshape(-1, 4, 6)
    for axes, values in zip(figure.axes, expected, strict=True):
        (panel,) = axes.images
        np.testing.assert_allclose(panel.get_array(), values / values.max(), rtol=1e-6)
        assert panel.get_alpha() is None
        assert (axes.get_xlim(), axes.get_ylim()) == ((0, SIZE[1]), (SIZE[0], 0))
    assert boxes(figure) == {(40.0, 8.0, 8.0, 8.0)}
    assert figure.get_supxlabel() == "colour: each map from 0 to its own largest value"
    assert plt.gca() is figure.axes[0]
    wide = tcnn_probe.plot.attention_maps(maps)
    assert figure.get_size_inches()[0] < wide.get_size_inches()[0]


def test_default_query(maps: xr.DataTree) -> None:
    assert boxes(tcnn_probe.plot.attention_maps(maps)) == {(0.0, 24.0, 8.0, 8.0)}


def test_the_next_plot_has_its_own_figure(maps: xr.DataTree) -> None:
    """Curves in README were once drawn over the last head's map;
    pyplot's titles belong to the image.
    """
    figure = tcnn_probe.plot.attention_maps(maps)
    assert plt.gca() is figure.axes[0]
    panels = [len(axes.lines) for axes in figure.axes]
    curves = xr.DataArray(np.ones((4, 2)), dims=("epoch", "head"), name="gate")
    ax = tcnn_probe.plot.evolution(curves)
    assert ax.figure is not figure
    assert [len(axes.lines) for axes in figure.axes] == panels
    # On the current axes, as without maps.
    assert tcnn_probe.plot.evolution(curves) is ax


# This prints, for each cell, the number of pictures among its outputs.
NOTEBOOK = """
import pickle, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
with open(sys.argv[1], "rb") as file:
    shell.user_ns["maps"] = pickle.load(file)
shell.run_cell("import matplotlib.pyplot as plt; import tcnn_probe")
shell.run_cell("gate = tcnn_probe.load_example()['heads'].gate")
for cell in sys.argv[2:]:
    with capture_output() as captured:
        shell.run_cell(cell)
    print(cell, sum("image/png" in output.data for output in captured.outputs), sep=": ")
"""


@pytest.mark.study
def test_a_notebook_shows_a_figure_once(maps: xr.DataTree, tmp_path: Path) -> None:
    """The inline backend shows figures that a cell leaves open,
    and IPython also shows the cell's value.
    """
    need("IPython")
    file = tmp_path / "maps.pickle"
    file.write_bytes(pickle.dumps(maps))
    pictures = {
        "tcnn_probe.plot.attention_maps(maps, layers='*.0.*', heads=0)": 1,
        "figure = tcnn_probe.plot.attention_maps(maps, layers='*.0.*', heads=0)": 1,
        # A figure that was shown can be shown again.
        "display(figure)": 1,
        "tcnn_probe.plot.evolution(gate)": 1,
        "ax = tcnn_probe.plot.evolution(gate)": 1,
        "figure.axes": 0,
    }
    # Jupyter's kernels set this backend to show figures.
    ran = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, str(file), *pictures],
        env={**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [f"{cell}: {count}" for cell, count in pictures.items()]
    assert ran.stdout.splitlines() == expected


def test_figures_can_be_pickled(maps: xr.DataTree) -> None:
    """A method of the instance that refers to the figure could not be pickled."""
    figure = pickle.loads(pickle.dumps(tcnn_probe.plot.attention_maps(maps)))
    # There are three layers of three heads, and the image.
    assert len(figure.axes) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"query": (0, 0)},
            r"from the pixels \[\(31, 0\), \(9, 47\)\], not from \(0, 0\)",
        ),
        ({"query": "cls"}, "'class', got 'cls'"),
        ({"query": 5}, "two integers"),
        ({"layers": "head"}, "no such maps of the layer 'head'"),
        ({"layers": -1}, r"no such maps of the layer -1; there are of \['blocks"),
        ({"heads": 3}, "heads of the layers, got 3"),
        ({"scale": "each"}, "scale 'own' or 'common' .* got 'each'"),
        ({"col_wrap": 0}, "col_wrap from 1, got 'own' and 0"),
    ],
)
def test_bad_arguments_are_refused(
    maps: xr.DataTree, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.plot.attention_maps(maps, **options)  # type: ignore[arg-type]


def test_a_chosen_image_keeps_its_dimension(maps: xr.DataTree) -> None:
    expected, chosen = (
        drawn(tcnn_probe.plot.attention_maps(tree, image=image, query=(9, 47)))
        for tree, image in ((maps, 1), (maps.isel(image=[1]), 0))
    )
    np.testing.assert_array_equal(chosen, expected)
    for function in (tcnn_probe.plot.attention_maps, tcnn_probe.explore):
        with pytest.raises(ValueError, match=r"maps.isel\(image=\[0\]\)"):
            function(maps.isel(image=1))


def test_another_tree_is_refused(maps: xr.DataTree) -> None:
    node = next(iter(maps.children.values()))
    with pytest.raises(TypeError, match="as a whole, with its input; got a part of it"):
        tcnn_probe.plot.attention_maps(node)
    with pytest.raises(TypeError, match="attention_maps, got Dataset"):
        tcnn_probe.plot.attention_maps(node.to_dataset())  # type: ignore[arg-type]
