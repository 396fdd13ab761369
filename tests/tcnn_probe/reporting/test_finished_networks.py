"""The page of a finished network: its answers and signs,
from numbers made for them, and in a browser.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.reporting.browsing import (
    errors,
    needs_browser,
    open_browser,
    requests,
    until,
)
from tests.tcnn_probe.reporting.made import NAUGHTY

LAYERS = ["blocks.0", "blocks.1", NAUGHTY]
HEADS = 5
IMAGES = 11
# Offset, position, key content and query-key content, in nat; the last head of each layer averages.
PARTS = {
    "convolutional": (1.0, 0.1, 0.1, 0.1),
    "salient": (0.1, 0.1, 0.9, 0.2),
    "content": (0.1, 0.1, 0.2, 0.8),
    "averaging": (0.01, 0.01, 0.01, 0.01),
}
TYPES = [
    ["convolutional", "convolutional", "convolutional", "salient", "averaging"],
    ["convolutional", "content", "content", "salient", "averaging"],
    ["salient", "salient", "content", "content", "averaging"],
]


def network() -> xr.DataTree:
    """Return a recording like that of ``look``, in which every sign is seen in some head."""
    dims = ("epoch", "layer", "head")
    parts = np.array([[PARTS[name] for name in row] for row in TYPES])
    names = ("offset", "position", "key_content", "query_key_content")
    ds = xr.Dataset(
        {f"{name}_information": (dims, parts[None, :, :, n]) for n, name in enumerate(names)},
        {"epoch": [0], "layer": LAYERS, "head": range(HEADS)},
    )
    ds["selectivity"] = dims, parts.sum(-1)[None]
    ds["uniform_entropy"] = ("epoch", "layer"), np.full((1, 3), np.log(197))
    ds["entropy"] = ds.uniform_entropy - ds.selectivity
    ds["images"] = ("epoch", "layer"), np.full((1, 3), IMAGES)
    ds["attention_distance"] = xr.full_like(ds.entropy, 5.0)
    ds["attention_distance"][0, 0, :3] = [1.25, 2.5, 0.75]
    ds["sink_images"] = xr.zeros_like(ds.entropy)
    ds["sink_images"][0, :, 2] = 0.75
    ds["sink_value_norm"] = xr.ones_like(ds.entropy)
    ds["sink_value_norm"][0, :, 2] = [0.125, 1.5, np.nan]
    ds["output_norm"] = xr.ones_like(ds.entropy)
    ds["output_norm"][0, 1, 3] = 0.001
    ds["token_outliers"] = ("epoch", "layer"), [[0.0, 0.02, 0.03]]
    cosine = np.full((1, 3, HEADS, HEADS), 0.5)
    cosine[:, :, range(HEADS), range(HEADS)] = 1
    cosine[0, 2, [2, 3], [3, 2]] = cosine[0, 2, [3, 4], [4, 3]] = 0.99
    ds["head_cosine"] = (*dims, "other_head"), cosine
    ds.attrs = {"layers": json.dumps({layer: {"heads": HEADS} for layer in LAYERS})}
    attrs = {
        "along": "epoch", "finished": 1, "photographs": ["a.jpg", "b.jpg"],
        "photographs_chosen": "2 photographs",
        "photographs_unreadable": json.dumps({"c.jpg": "it is no picture"}),
        "unsupported": "{}", "missing": "{}", "objects": "the masks",
    }  # fmt: skip
    objects = xr.Dataset({"object_attention": xr.full_like(ds.entropy, 0.25)}, ds.coords)
    objects["object_attention"][0, 2, 1], objects["object_attention"][0, 1, 1] = (
        0.5,
        0.4,
    )
    # Of two heads, one finds objects from its class token as well.
    objects["class_object_attention"] = 0.2 * objects.object_attention
    objects["class_object_attention"][0, 1, 1] = 0.45
    objects["object_area"] = ("epoch", "layer"), np.full((1, 3), 0.25)
    root = xr.Dataset(coords={"epoch": [0]}, attrs=attrs)
    return xr.DataTree.from_dict({"/": root, "/heads": ds, "/objects": objects})


def named(answer: dict[str, Any]) -> list[tuple[str, int]]:
    return [(head["layer"], head["head"]) for head in answer["heads"]]


def test_answers_name_the_heads_that_the_numbers_show() -> None:
    facts = tcnn_probe.report(network()).facts
    (described,) = facts["networks"]
    what, depth, objects, local, nothing = described["answers"]
    assert what["text"].startswith(
        "Of 15 heads, 4 are convolutional, 4 salient, 4 content, 3 averaging."
    )
    assert "first layer 3 of 5 heads are convolutional" in depth["text"]
    assert "last layer 2 of 5 heads are salient, 2 content, 1 " in depth["text"]
    assert "each salient one looks at patches that stand out in" in depth["text"]
    assert named(objects) == [(NAUGHTY, 1), ("blocks.1", 1)]
    assert objects["text"].endswith("by chance (0.25): 2 from patches, 1 from the class token")
    first, second = (head["why"] for head in objects["heads"])
    assert first == "0.50 from patches, 0.10 from the class token; salient"
    assert second.startswith("0.40 from patches, 0.45 from the class token; ")
    assert named(local) == [("blocks.0", 2), ("blocks.0", 0)]
    assert [head["why"] for head in local["heads"]] == ["0.8 patches", "1.2 patches"]
    assert {*named(nothing)} == {("blocks.1", 3), ("blocks.0", 2)}
    bound = IMAGES / (IMAGES - 1) * np.log(IMAGES)
    assert f"= {bound:.2f} nat" in described["rests_on"]
    assert "c.jpg could not be read: it is no picture" in facts["missing"]


def test_a_single_head_is_named_in_the_singular() -> None:
    tree = network()
    tree["heads"]["attention_distance"][0, 0, 0] = 5
    tree["heads"]["output_norm"][:] = 1
    for name in ("object_attention", "class_object_attention"):
        tree["objects"][name][0, 1, 1] = 0.25
    (described,) = tcnn_probe.report(tree).facts["networks"]
    *_, objects, local, nothing = (answer["text"] for answer in described["answers"])
    assert objects.startswith("1 head puts at least 1.5 times")
    assert local.startswith("1 head is convolutional with a mean distance")
    assert nothing.startswith("1 head is silent, or with a sink")


def test_signs_are_of_finished_networks_without_advice() -> None:
    tree = network()
    findings = tcnn_probe.health(tree)
    seen = {(finding.sign, finding.layer, finding.heads) for finding in findings}
    assert seen == {
        ("no-op sink", "blocks.0", (2,)),
        ("broadcast sink", "blocks.1", (2,)),
        ("sink of unknown value", NAUGHTY, (2,)),
        ("silent head", "blocks.1", (3,)),
        # Head 4 averages, and is no duplicate.
        ("duplicate heads", NAUGHTY, (2, 3)),
        ("high-norm tokens", "blocks.1", ()),
        ("high-norm tokens", NAUGHTY, ()),
    }
    assert not any("learning rate" in finding.leads_to for finding in findings)
    rows = {row["sign"]: row for row in tcnn_probe.report(tree).facts["signs"]}
    assert len(rows) == 6
    assert rows["high-norm tokens"]["where"] == "2 layers"
    assert rows["high-norm tokens"]["seen"] == "token outliers 0.02 to 0.03"
    tree["heads"]["token_outliers"][0, 0] = 0.01
    rows = {row["sign"]: row for row in tcnn_probe.report(tree).facts["signs"]}
    assert rows["high-norm tokens"]["where"] == "all 3 layers"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser() as driver:
        path: Path = tmp_path_factory.mktemp("page") / "page.html"
        tcnn_probe.report(network(), path)
        driver.get(path.as_uri())
        until(driver, "document.body.dataset.ready")
        yield driver


def chosen(driver: Any) -> str:
    text: str = driver.execute_script("return document.getElementById('chosen').textContent")
    return text


@pytest.mark.browser
@needs_browser
def test_page_opens_at_a_named_head_and_its_links_lead_to_heads(browser: Any) -> None:
    assert chosen(browser) == f"{NAUGHTY}, head 1"
    until(browser, "document.querySelectorAll('#heads tbody tr').length")
    click = "document.querySelectorAll(arguments[0])[arguments[1]].click()"
    browser.execute_script(click, ".answers button[data-row]", 1)
    assert chosen(browser) == "blocks.1, head 1"
    browser.execute_script(click, "#heads tbody button", 2)
    assert chosen(browser) == "blocks.0, head 2"
    number = browser.execute_script(
        "return document.querySelector('[id=\"value attention_distance\"] data').value"
    )
    assert float(number) == 0.75
    assert errors(browser) == []
    assert [url for url in requests(browser) if not url.startswith(("file:", "data:"))] == []


@pytest.mark.browser
@needs_browser
def test_strips_show_the_head_among_all_heads(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('#heads tbody button')[0].click()")
    pixels = browser.execute_script(
        """const canvas = document.getElementById("plot attention_distance")
        const {width, height} = canvas
        const {data} = canvas.getContext("2d").getImageData(0, 0, width, height)
        const columns = colour => [...Array(width).keys()].filter(
            x => [...Array(height).keys()].some(y =>
            colour(...data.slice(4 * (y * width + x), 4 * (y * width + x) + 4))))
        return [
            width,
            columns((r, g, b, a) => a > 200 && r > 180 && b < 40),
            columns((r, g, b, a) => a > 0)
        ]"""
    )
    width, own, drawn = pixels
    low, high = 0.75, 5.0
    place = 3 + (width - 6) * (1.25 - low) / (high - low)
    assert abs(np.mean(own) - place) <= 1.5
    # All other numbers are at the ends, or at 2.5.
    ends = [3, 3 + (width - 6) * (2.5 - low) / (high - low), width - 3]
    assert all(min(abs(column - x) for x in [*ends, place]) <= 3 for column in drawn)


@pytest.mark.browser
@needs_browser
@pytest.mark.parametrize("width", [390, 1400])
def test_page_fits_a_phone(browser: Any, width: int) -> None:
    metrics = {
        "width": width,
        "height": 844,
        "deviceScaleFactor": 1,
        "mobile": width < 600,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    until(browser, f"innerWidth === {width}")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    hidden = browser.execute_script("return document.getElementById('play').offsetParent === null")
    assert hidden
