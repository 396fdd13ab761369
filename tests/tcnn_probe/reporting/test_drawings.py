"""Drawings of a report: bars as high as the parts,
kernels the right way round, and text that the page colours.
"""

import base64
import io
import re
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from PIL import Image

import tcnn_probe
from tcnn_probe.plot import OKABE_ITO
from tcnn_probe.reporting.drawings import draw_heads
from tcnn_probe.reporting.recordings import read_run
from tests.tcnn_probe.reporting.made import NAUGHTY, held, recording

SVG = "{http://www.w3.org/2000/svg}"
COLORS = {
    "offset_information": "blue",
    "position_information": "sky blue",
    "key_content_information": "orange",
    "query_key_content_information": "vermillion",
}


def anatomical(epochs: list[int]) -> xr.DataTree:
    """Return a recording of layers of 3 and 5 heads with parts of attention,
    and with the kernel of a head.
    """
    tree = recording({NAUGHTY: 3, "b": 5}, epochs)
    heads, rng = tree["heads"], np.random.default_rng(0)
    exists = heads.entropy.notnull()
    for name in COLORS:
        part = heads.entropy.copy(data=rng.gamma(2, 1, exists.shape) + 1)
        heads[name] = part.where(exists)
        # Halves of the images between which the offset's share varies from all to nothing.
        heads[f"{name}_halves"] = heads[name] * (2 if name.startswith("offset") else 0)
    heads["selectivity"] = sum(heads[name] for name in COLORS)
    heads["images"] = heads.uniform_entropy * 0 + 64
    kernel = rng.random((len(epochs), 1, 1, 3, 5))
    kernel[-1, 0, 0, 2, 1] = 2
    dims = ("epoch", "layer", "head", "offset_y", "offset_x")
    coords = {"layer": ["b"], "head": [2], "offset_y": range(-1, 2)}
    tree["offset-kernel"] = xr.Dataset(
        {"offset_kernel": (dims, kernel)}, coords | {"offset_x": range(-2, 3)}
    )
    return tree


def heights(svg: str, color: str) -> list[float]:
    """Return the heights of paths with four corners and a colour, in points, the smallest first."""
    paths = [
        [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
        for path in ElementTree.fromstring(svg).iter(f"{SVG}path")
        if f"fill: {color.lower()}" in path.get("style", "")
    ]
    return sorted(np.ptp(corners) for corners in paths if len(corners) == 4)


@pytest.mark.study
def test_bars_bands_and_kernels_are_drawn() -> None:
    tree, figures = anatomical([0, 7]), plt.get_fignums()
    with plt.style.context("dark_background"):
        page = tcnn_probe.report(tree).html
    assert plt.get_fignums() == figures
    drawings = draw_heads([read_run(tree)])
    bars, bands, kernels = [drawing["svg"] for drawing in drawings]
    # A user's style changes nothing, and neither does drawing twice.
    assert all(svg in page for svg in (bars, bands, kernels))
    last, scales = tree["heads"].dataset.isel(epoch=-1), []
    for name, color in COLORS.items():
        values = np.sort(last[name].values[last[name].notnull()])
        scales += [heights(bars, OKABE_ITO[color])[-8:] / values]
        assert OKABE_ITO[color].lower() in bands
    # Points for a nat, the same for all bars. Six digits are written after the point.
    np.testing.assert_allclose(scales, scales[0][0], rtol=1e-5)
    (image,) = ElementTree.fromstring(kernels).iter(f"{SVG}image")
    data = image.get("{http://www.w3.org/1999/xlink}href", "").partition(",")[2]
    with Image.open(io.BytesIO(base64.b64decode(data))) as opened:
        picture = np.asarray(opened.convert("L"))
    # Matplotlib stores the lowest row first, and mirrors the image.
    assert image.get("transform", "").startswith("scale(1 -1)")
    picture = picture[::-1]
    height, width = picture.shape
    # The middles of 3 x 5 offsets; the largest is the lightest, below and left of the query.
    middles = picture[
        np.ix_([int((row + 0.5) * height / 3) for row in range(3)],
               [int((column + 0.5) * width / 5) for column in range(5)])
    ]  # fmt: skip
    assert np.unravel_index(middles.argmax(), (3, 5)) == (2, 1)
    for svg in (bars, bands, kernels):
        texts = list(ElementTree.fromstring(svg).iter(f"{SVG}text"))
        assert texts
        assert all("fill: var(--ink)" in text.get("style", "") for text in texts)
        assert "fill: #ffffff" not in svg  # no white card on a dark page
    assert "offset_kernel" not in page
    assert "_halves" not in page


def test_uncertain_types_are_a_variable() -> None:
    tree = anatomical([7])
    facts, numbers, _ = held(tcnn_probe.report(tree).html)
    variable = next(row for row in facts["variables"] if row["name"] == "uncertain_type")
    shown = numbers[variable["starts"][0] :][:10]
    types = tcnn_probe.head_types(tree["heads"].dataset)
    assert types.uncertain.any()
    expected = types.uncertain.astype(float).where(types != "").values.ravel()
    np.testing.assert_array_equal(shown, expected)


def test_a_run_without_parts_and_kernels_draws_nothing() -> None:
    tree = anatomical([7])
    plain = recording({"b": 5}, [7])
    runs = draw_heads([read_run(plain)])
    assert runs == []
    page = tcnn_probe.report({"plain": plain, "anatomy": tree}).html
    captions = re.findall(r'<figure class="drawing"><figcaption[^>]*>([^<]*)<', page)
    assert captions == ["anatomy", "anatomy"]
