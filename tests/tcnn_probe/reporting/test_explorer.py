"""Attention maps in a browser: a click on the image,
a head and a layer show the map of the arrays.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from numpy.typing import NDArray

import tcnn_probe
from tests.tcnn_probe.reporting.browsing import (
    errors,
    needs_browser,
    open_browser,
    requests,
    until,
)
from tests.tcnn_probe.reporting.made import NAUGHTY

IMAGES, ROWS, COLUMNS, SIDE = 2, 3, 5, 13  # cells have 13 x 13 pixels
PIXELS = [(2, 60), (30, 20)]


def tree(**nodes: xr.Dataset) -> xr.DataTree:
    """Return a tree in the form of ``attention_maps``."""
    images = np.random.default_rng(1).normal(size=(IMAGES, 3, ROWS * SIDE, COLUMNS * SIDE))
    root = xr.Dataset({"input": (("image", "channel", "input_y", "input_x"), images)})
    layers = [layer for ds in nodes.values() for layer in ds.layer.values.tolist()]
    root.attrs = {
        "layers": json.dumps(layers),
        "missing": json.dumps({"queries": "a reason"}),
    }
    return xr.DataTree.from_dict({"/": root, **nodes})


def dataset(layers: list[str], heads: int, variables: Mapping[str, tuple[int, ...]]) -> xr.Dataset:
    """Return random maps, by the dimensions of their queries."""
    rng = np.random.default_rng(len(layers))
    dims = {
        "attention": ("query_y", "query_x"),
        "class_attention": (),
        "attention_by_query": ("query",),
    }
    arrays = {}
    for name, sizes in variables.items():
        of_queries = dims[name] if len(sizes) == len(dims[name]) else ("query",)
        shape = (IMAGES, len(layers), heads, *sizes, ROWS, COLUMNS)
        arrays[name] = (
            ("image", "layer", "head", *of_queries, "y", "x"),
            # Maps of cubes have peaks, and most cells are far below the largest value, which is at
            # most a half, so that a value differs from its share of the largest.
            rng.random(shape, dtype=np.float32) ** 3 / 2,
        )
    coords = {"layer": layers, "head": range(heads)}
    for dim, count in (("y", ROWS), ("x", COLUMNS)):
        coords[f"pixel_{dim}"] = (dim, (SIDE - 1) / 2 + SIDE * np.arange(count))
    return xr.Dataset(arrays, coords)


@pytest.fixture(scope="module")
def maps() -> xr.DataTree:
    """Return two layers with maps of every query,
    one with a class token, and a third with queries off the grid.
    """
    # The queries of the second layer are pooled to 1 x 5.
    first = dataset([NAUGHTY], 2, {"attention": (ROWS, COLUMNS), "class_attention": ()})
    second = dataset(["pooled"], 7, {"attention": (1, COLUMNS)})
    third = dataset(["queries"], 3, {"attention_by_query": (4,)})
    return tree(first=first, second=second, third=third)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, maps: xr.DataTree, tmp_path: Path) -> Any:
    """Open the page in a notebook's frame."""
    return show(browser, maps, tmp_path)


def show(browser: Any, maps: xr.DataTree, folder: Path) -> Any:
    notebook = folder / "notebook.html"
    notebook.write_text(
        '<meta charset="utf-8"><body style="margin: 0">' + tcnn_probe.explore(maps)._repr_html_(),
        encoding="utf-8",
    )
    browser.switch_to.default_content()
    browser.get(notebook.as_uri())
    browser.switch_to.frame(browser.find_element("css selector", "iframe"))
    until(browser, "document.body?.dataset.ready")
    return browser


def choose(driver: Any, **options: str) -> None:
    """Choose entries of lists by their text."""
    from selenium.webdriver.support.ui import Select

    for name, text in options.items():
        Select(driver.find_element("id", name.rstrip("_"))).select_by_visible_text(text)


def click(driver: Any, y: int, x: int) -> None:
    """Click a pixel of the image."""
    from selenium.webdriver import ActionChains

    frame = driver.find_element("id", "map")
    # Selenium counts from the middle of an element.
    right = ((x + 0.5) / (COLUMNS * SIDE) - 0.5) * frame.size["width"]
    down = ((y + 0.5) / (ROWS * SIDE) - 0.5) * frame.size["height"]
    pointer = ActionChains(driver)
    pointer.move_to_element_with_offset(frame, int(right), int(down)).click().perform()


def opacity(driver: Any, frame: str = "#map") -> NDArray[Any]:
    """Return the opacity of the cells, from 0 to 255."""
    flat = driver.execute_script(
        """const canvas = document.querySelector(`${arguments[0]} canvas`)
        const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
        return Array.from(data).filter((_, i) => i % 4 === 3)""",
        frame,
    )
    return np.array(flat).reshape(ROWS, COLUMNS)


def expected(values: xr.DataArray, largest: float | None = None) -> NDArray[Any]:
    share = values.values / (float(values.max()) if largest is None else largest)
    return 255 * (0.35 + 0.6 * share)


def same(drawn: NDArray[Any], values: xr.DataArray, largest: float | None = None) -> bool:
    # The tolerance covers one step of the map's bytes and the rounding of the opacity.
    return bool(abs(drawn - expected(values, largest)).max() < 1)


@needs_browser
def test_a_click_shows_the_map_of_the_query_there(page: Any, maps: xr.DataTree) -> None:
    choose(page, layer=NAUGHTY, head="1")
    click(page, 14, 40)  # row 1 and column 3
    attention = maps["first"].attention[0, 0]
    assert same(opacity(page), attention[1, 1, 3])
    assert not same(opacity(page), attention[1, 3 % ROWS, 1])
    caption = page.find_element("id", "chosen").text
    largest = float(attention[1, 1, 3].max())
    assert caption == (
        f"{NAUGHTY}, head 1, from pixel (y, x) = (14, 40): largest value {largest:.3g}"
    )
    box = page.execute_script(
        "const {top, left, width, height} = document.querySelector('#map .query').style;"
        "return [top, left, width, height].map(parseFloat)"
    )
    # Row 1 of 3 and column 3 of 5 are given in per cent.
    assert box == pytest.approx([100 / 3, 60, 20, 100 / 3], rel=1e-4)
    choose(page, image="1")
    assert same(opacity(page), maps["first"].attention[1, 0, 1, 1, 3])
    choose(page, layer="pooled", head="6")
    assert same(opacity(page), maps["second"].attention[1, 0, 6, 0, 3])


@needs_browser
def test_heads_next_to_the_image_have_separate_scales_or_a_common_one(
    page: Any, maps: xr.DataTree
) -> None:
    choose(page, layer="pooled", head="0")
    click(page, 14, 40)
    attention = maps["second"].attention[0, 0, :, 0, 3]
    thumbnails = "#heads button:nth-child({})"
    for head in range(7):
        assert same(opacity(page, thumbnails.format(head + 1)), attention[head])
    page.find_element("id", "common").click()
    for head in range(7):
        drawn = opacity(page, thumbnails.format(head + 1))
        assert same(drawn, attention[head], float(attention.max()))
    page.find_element("css selector", thumbnails.format(3)).click()
    assert page.find_element("id", "chosen").text.startswith("pooled, head 2, ")


@needs_browser
def test_class_token_and_queries_off_the_grid(page: Any, maps: xr.DataTree) -> None:
    choose(page, layer=NAUGHTY, from_="the class token", head="1")
    assert same(opacity(page), maps["first"].class_attention[0, 0, 1])
    choose(page, from_="query 2")
    assert "no map of this layer" in page.find_element("id", "chosen").text
    choose(page, layer="queries", head="2")
    assert same(opacity(page), maps["third"].attention_by_query[0, 0, 2, 2])
    choose(page, from_="a pixel: click the image")
    assert "no map, a reason" in page.find_element("id", "chosen").text


@needs_browser
def test_keys_move_the_query_and_the_pointer_reads_values(page: Any, maps: xr.DataTree) -> None:
    choose(page, layer=NAUGHTY, head="0")
    click(page, 14, 40)
    for key in ("ArrowUp", "ArrowLeft", "ArrowLeft"):
        for kind in ("keyDown", "keyUp"):
            page.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, "key": key})
    attention = maps["first"].attention[0, 0, 0, 0, 1]
    assert same(opacity(page), attention)
    click(page, 14, 40)  # the pointer is over the image now
    attention = maps["first"].attention[0, 0, 0, 1, 3]
    page.execute_script(
        """const {left, top, width, height} = document.getElementById("map").getBoundingClientRect()
        const place = {clientX: left + width * 0.5, clientY: top + height * 0.9, bubbles: true}
        document.getElementById("map").dispatchEvent(new MouseEvent("mousemove", place))"""
    )
    text = page.find_element("id", "under").text
    assert text.startswith("under the pointer: row 2, column 2 of 3 x 5, attention ")
    value = float(text.rsplit(" ", 1)[1])
    # Maps are stored as bytes, of which 255 is NaN.
    step = float(attention.max()) / 254
    assert value == pytest.approx(float(attention[2, 2]), abs=step)


@needs_browser
def test_maps_of_listed_pixels(browser: Any, tmp_path: Path) -> None:
    node = dataset(["layer"], 2, {"attention": (len(PIXELS),)})
    rows = np.array(PIXELS)
    node = node.assign_coords(from_y=("query", rows[:, 0]), from_x=("query", rows[:, 1]))
    page = show(browser, tree(node=node), tmp_path)
    assert "(y, x) = (2, 60)" in page.find_element("id", "chosen").text
    click(page, 36, 25)  # the second pixel is the nearest
    assert "(y, x) = (30, 20)" in page.find_element("id", "chosen").text
    assert same(opacity(page), node.attention[0, 0, 0, 1])


@needs_browser
def test_nothing_is_requested_and_nothing_fails(page: Any) -> None:
    click(page, 14, 40)
    assert errors(page) == []
    page.switch_to.default_content()
    assert page.execute_script(  # the frame with its border is as wide as the notebook
        "const page = document.documentElement; return page.scrollWidth <= page.clientWidth"
    )
    assert [
        url for url in requests(page) if not url.startswith(("file:", "data:", "about:srcdoc"))
    ] == []


def test_unsuitable_arguments_are_refused(maps: xr.DataTree) -> None:
    with pytest.raises(ValueError, match=r"at most 0\.001 MB \(max_mb\), got 0 MB"):
        tcnn_probe.explore(maps, max_mb=0.001)
    with pytest.raises(TypeError, match=r"DataTree of tcnn_probe\.attention_maps"):
        tcnn_probe.explore(maps["first"].dataset)  # type: ignore[arg-type]
