"""A report in a browser without network access:
its first view, and the reactions to clicks and keys.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from bokeh.palettes import Viridis256
from PIL import Image, ImageColor

import tcnn_probe
from tcnn_probe.reporting.figures import MISSING
from tests.tcnn_probe.reporting.browsing import (
    errors,
    needs_browser,
    open_browser,
    requests,
    until,
)
from tests.tcnn_probe.reporting.made import NAUGHTY, recording

pytestmark = needs_browser
EPOCHS = [0, 5, 7]
LAYER, HEAD = 11, 3
FORMULA = "=1+1"
"""Name of a layer that a spreadsheet would compute."""
LAYERS = (
    {NAUGHTY: 3, FORMULA: 5} | {f"blocks.{number}": 5 for number in range(2, 11)} | {"blocks.11": 9}
)
FEWER_HEADS = LAYERS | {FORMULA: 4}


EVERYWHERE = """(all = (root, kind) => [...root.querySelectorAll("*")].flatMap(
    node => [node, ...node.shadowRoot ? all(node.shadowRoot, "*") : []]
    ).filter(node => node.matches(kind)))"""
"""JavaScript: the elements of a kind, those of Bokeh's shadow trees as well."""


@pytest.fixture(scope="module")
def runs() -> list[xr.DataTree]:
    """Return runs of twelve layers of 3 to 9 heads;
    the second ends earlier, lacks some heads and has no maps.
    """
    first = recording(LAYERS, EPOCHS)
    first["heads"]["entropy"][:, 1, 1] = np.nan
    maps = first["maps/class_attention"]
    # The bright cell in the corner shows the orientation of a map.
    maps[:, LAYER, 0, HEAD] = 0.01
    maps[:, LAYER, 0, HEAD, 0, 0] = 0.5
    two = recording(FEWER_HEADS, EPOCHS[:2], seed=1, grid=None)
    two["heads"]["entropy"] *= 2  # the range of colours must extend to these values
    return [first, two]


@pytest.fixture(scope="module")
def browser(runs: list[xr.DataTree], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return a browser that has loaded the page of both runs."""
    with open_browser() as driver:
        path = tmp_path_factory.mktemp("page") / "report.html"
        tcnn_probe.report(runs, path)
        driver.get(path.as_uri())
        until(driver, "document.body.dataset.ready")
        yield driver


def at(driver: Any, grid: int, row: int, column: int) -> tuple[float, float]:
    """Locate the middle of a cell, in pixels of the window, after the layout is done."""
    until(driver, "Bokeh.index.roots.every(view => view.has_finished())")
    return tuple(
        driver.execute_script(
            """const view = Bokeh.index.roots.find(
                view => view.model.name === `grid ${arguments[0]}`)
            view.el.scrollIntoView({block: "center"})
            const {left, top} = view.el.getBoundingClientRect(), frame = view.frame.bbox
            const {x_range, y_range} = view.model
            return [left + frame.left + frame.width * (arguments[2] + 0.5) / x_range.end.toFixed(),
                    top + frame.top
                        + frame.height * (arguments[1] + 0.5) / y_range.start.toFixed()]""",
            grid, row, column,
        )
    )  # fmt: skip


def click(driver: Any, grid: int, row: int, column: int) -> None:
    x, y = at(driver, grid, row, column)
    for kind in ("mousePressed", "mouseReleased"):
        event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
        driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    until(
        driver,
        f"document.getElementById('chosen').textContent.endsWith('head {column}')",
    )


def color(driver: Any, row: int, column: int) -> tuple[int, ...]:
    """Return the color of a cell, slightly off its middle, after everything has been painted."""
    x, y = at(driver, 0, row, column)
    # The drawing of one frame is on the screen after the next frame.
    driver.execute_async_script(
        "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], 100)))"
    )
    return (
        Image.open(io.BytesIO(driver.get_screenshot_as_png()))
        .convert("RGB")
        .getpixel((int(x) + 4, int(y) + 4))
    )


def to(driver: Any, mark: int, colour: str) -> None:
    """Move the slider and choose the variable."""
    driver.execute_script(
        """const [mark, colour] = ["marks", "colour"].map(id => document.getElementById(id))
        mark.value = arguments[0]; mark.dispatchEvent(new Event("input"))
        colour.value = arguments[1]; colour.dispatchEvent(new Event("change"))""",
        mark, colour,
    )  # fmt: skip


def test_page_opens_at_the_last_epoch_that_both_runs_have(browser: Any) -> None:
    browser.refresh()
    until(browser, "document.body.dataset.ready")
    assert (
        browser.execute_script("return document.getElementById('now').textContent")
        == "epoch 5 (2 of 3)"
    )


def test_a_click_shows_the_numbers_of_its_head(browser: Any, runs: list[xr.DataTree]) -> None:
    for mark, epoch in enumerate(EPOCHS):
        to(browser, mark, "gate")
        # The click is in the grid of either run or of the difference.
        click(browser, mark % 3, LAYER, HEAD)
        assert (
            browser.execute_script("return document.getElementById('chosen').textContent")
            == "blocks.11, head 3"
        )
        for name in ("entropy", "gate"):
            cells = browser.find_elements("xpath", f"//*[@id='value {name}']//data")
            for run, cell in zip(runs, cells, strict=True):
                if epoch not in run.epoch:
                    assert cell.text == "no value"
                    continue
                value = run["heads"][name].sel(epoch=epoch, layer="blocks.11", head=3).item()
                assert float(cell.get_attribute("value")) == np.float32(value)
                assert float(cell.text.removesuffix(" nat")) == float(f"{value:.5g}")
    source = browser.execute_script(
        "const d = Bokeh.documents[0].get_model_by_name('curve "
        "entropy').renderers[0].data_source.data;return [d.epoch, d.entropy, d['entropy "
        "mean']].map(values => Array.from(values))"
    )
    heads = runs[0]["heads"].entropy.sel(layer="blocks.11")
    assert source[:2] == [EPOCHS, heads.sel(head=3).astype("f4").values.tolist()]
    # Numbers of the page are in float32, of which a mean is less than a rounding away.
    assert source[2] == pytest.approx(heads.mean("head").values.tolist(), rel=2**-24)


def test_colours_mean_the_same_at_every_epoch(browser: Any, runs: list[xr.DataTree]) -> None:
    """Colours are ``(value - low) / (high - low)`` over all epochs and both runs;
    selecting a head dims no others.
    """
    values = [run["heads"].entropy.values for run in runs]
    low, high = (f([f(array) for array in values]) for f in (np.nanmin, np.nanmax))
    for mark, (row, column) in ((0, (2, 4)), (1, (5, 0)), (2, (9, 2))):
        to(browser, mark, "entropy")
        click(browser, 0, LAYER, HEAD)
        share = (values[0][mark, row, column] - low) / (high - low)
        step = min(255, int(share * 256))
        assert color(browser, row, column) == ImageColor.getrgb(Viridis256[step])
    assert color(browser, 1, 1) == ImageColor.getrgb(MISSING)
    to(browser, 1, "entropy")
    cells = browser.execute_script(
        "const {value, row, column} = Bokeh.documents[0].get_model_by_name('grid "
        "2').renderers[0].data_source.data;return [value, row, column].map(each => "
        "Array.from(each))"
    )
    for value, row, column in zip(*cells, strict=True):
        first, second = (np.float32(array[1, row, column]) for array in values)
        expected = float(second) - float(first)
        assert value == expected or (value is None and np.isnan(expected))
    assert len(cells[0]) == sum(FEWER_HEADS.values())


def test_the_first_row_of_a_map_is_at_the_top(browser: Any) -> None:
    to(browser, 2, "gate")
    click(browser, 0, LAYER, HEAD)
    frame = browser.find_element("css selector", ".frame")
    light = np.asarray(Image.open(io.BytesIO(frame.screenshot_as_png)).convert("L"), dtype=int)
    height, width = light.shape
    # These are the middles of 3 x 5 cells.
    cells = light[height // 6 :: height // 3, width // 10 :: width // 5][:3, :5]
    assert cells[0, 0] > 200
    assert cells.ravel()[1:].max() < 60


def test_the_table_is_sorted_and_copied(browser: Any, runs: list[xr.DataTree]) -> None:
    to(browser, 1, "gate")
    # A clipboard requires a gesture of the user, so the copied text is intercepted.
    browser.execute_script(
        "document.execCommand = () => { window.copied = document.activeElement.value }"
    )
    browser.execute_script(
        "for (const cell of document.querySelectorAll('#heads th')) if (cell.textContent === "
        "'gate') cell.click()"
    )
    browser.execute_script("document.getElementById('copy').click()")
    title, *rows = (
        line.split("\t") for line in browser.execute_script("return window.copied").splitlines()
    )
    assert title == ["run", "layer", "head", "entropy", "gate"]
    # The page has float32, which it copies in seven digits and shows in five.
    gates = {
        (
            f"Net ({which})",
            f"'{layer}" if layer == FORMULA else layer,
            head,
        ): np.float32(run["heads"].gate.sel(epoch=5, layer=layer, head=head))
        for which, run, layers in zip("AB", runs, (LAYERS, FEWER_HEADS), strict=True)
        for layer, count in layers.items()
        for head in range(count)
    }
    copied = {(row[0], row[1], int(row[2])): float(row[4]) for row in rows}
    assert copied == {place: float(f"{gate:.7g}") for place, gate in gates.items()}
    assert [*copied.values()] == sorted(copied.values())
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#heads td:last-child')].map(x => x.textContent)"
    )
    assert [float(number) for number in shown] == [float(f"{gates[place]:.5g}") for place in copied]


def press(driver: Any, key: str) -> str:
    """Press a key and return the head that is chosen afterwards."""
    for kind in ("keyDown", "keyUp"):
        driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, "key": key})
    return driver.execute_script("return document.getElementById('chosen').innerText")


def test_arrow_keys_choose_heads(browser: Any, runs: list[xr.DataTree]) -> None:
    to(browser, 1, "gate")
    click(browser, 1, LAYER, HEAD)
    assert press(browser, "ArrowRight") == f"blocks.11, head {HEAD + 1}"
    assert press(browser, "ArrowLeft") == f"blocks.11, head {HEAD}"
    assert press(browser, "ArrowDown") == f"blocks.11, head {HEAD}"  # the last layer
    for _ in range(5):
        press(browser, "ArrowRight")
    # The layer above has fewer heads.
    assert press(browser, "ArrowUp") == "blocks.10, head 4"
    shown = browser.execute_script(
        "return document.querySelector('[id=\"value gate\"] data').value"
    )
    gates = runs[0]["heads"].gate
    gate = gates.sel(epoch=5, layer="blocks.10", head=4).item()
    assert float(shown) == np.float32(gate)
    browser.execute_script("document.getElementById('colour').focus()")
    # The list handles this key itself.
    assert press(browser, "ArrowLeft") == "blocks.10, head 4"


def test_charts_have_labels_and_names(browser: Any) -> None:
    click(browser, 0, LAYER, HEAD)
    labels = browser.execute_script(
        """return Bokeh.documents[0].roots().filter(root => root.below).map(root =>
            [root.name, root.below[0].axis_label, root.left[0].axis_label])"""
    )
    assert ["curve entropy", "epoch", "entropy (nat)"] in labels
    assert ["grid 0", "head", "layer"] in labels
    assert all(x and y for _, x, y in labels)
    names = browser.execute_script(
        "return [...document.querySelectorAll('[role=img], [role=application]')].map(node => "
        "node.ariaLabel)"
    )
    assert len(names) >= len(labels)
    assert all(names)
    (entropy,) = [name for name in names if name.startswith("entropy")]
    assert "entropy by epoch, blocks.11, head 3; Net (A): " in entropy
    unnamed = browser.execute_script(
        f"""return {EVERYWHERE}(document, "[tabindex='0'], button, select, input").filter(node =>
            !node.textContent.trim() && !node.ariaLabel && !node.labels?.length
            && node.offsetParent).length"""
    )
    assert unnamed == 0


def test_a_finding_leads_to_its_head(browser: Any) -> None:
    link = browser.find_element("css selector", "#tohealth")
    assert link.text.startswith("health: ")
    button = browser.find_element("css selector", "button[data-row]")
    place = {name: int(button.get_attribute(f"data-{name}")) for name in ("row", "column", "mark")}
    to(browser, (place["mark"] + 1) % len(EPOCHS), "gate")
    browser.execute_script("arguments[0].click()", button)
    layer = [*LAYERS][place["row"]]
    title = browser.execute_script("return document.getElementById('chosen').textContent")
    assert title == f"{layer}, head {place['column']}"
    now = browser.execute_script("return document.getElementById('now').textContent")
    assert now.startswith(f"epoch {EPOCHS[place['mark']]} ")


def emulate(driver: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def test_a_dark_page_has_light_lines(browser: Any) -> None:
    script = """const roots = Bokeh.documents[0].roots()
        const [plot] = roots.filter(root => root.name === "curve entropy")
        const styles = getComputedStyle(document.body)
        const lines = plot.renderers.filter(line => line.name === "run 0")
        return [styles.backgroundColor, styles.color, ...lines
            .map(line => line.glyph.line_color.value)]"""

    def lightness(color: str) -> float:
        rgb = re.findall(r"\d+", color)[:3] if color[0] == "r" else ImageColor.getrgb(color)
        return sum(map(int, rgb)) / 3

    try:
        for scheme in ("dark", "light"):
            emulate(browser, scheme)
            until(browser, f"matchMedia('(prefers-color-scheme: {scheme})').matches")
            # The page is notified of the change at its next frame.
            browser.execute_async_script(
                "requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(arguments[0], "
                "100)))"
            )
            background, *drawn = map(lightness, browser.execute_script(script))
            assert len(drawn) >= 3
            assert (background < 40) == (scheme == "dark") == (background < 128)
            assert all(abs(ink - background) > 150 for ink in drawn)
    finally:
        emulate(browser, "")


def test_nothing_is_requested_and_nothing_fails(
    browser: Any, runs: list[xr.DataTree], tmp_path: Path
) -> None:
    """The actions of all tests above, and a notebook's frame, request nothing and log no errors."""
    browser.execute_script("document.getElementById('play').click()")
    until(browser, "document.getElementById('now').textContent.startsWith('epoch 7')")
    x, y = at(browser, 0, 0, 1)
    browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    until(browser, EVERYWHERE + "(document, '.bk-tooltip-row-value').length")
    assert NAUGHTY in browser.execute_script("return document.body.innerText")
    assert browser.execute_script(f"return {EVERYWHERE}(document, 'img').length") == 0
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        '<meta charset="utf-8">' + tcnn_probe.report(runs[1])._repr_html_(),
        encoding="utf-8",
    )
    browser.get(notebook.as_uri())
    until(browser, "document.querySelector('iframe').contentDocument.body?.dataset.ready")
    assert errors(browser) == []
    urls = requests(browser)
    assert len(urls) >= 2
    assert [url for url in urls if not url.startswith(("file:", "data:", "about:srcdoc"))] == []
