"""Content of a report's file: the recording's numbers and maps,
names as text, and nothing from other addresses.
"""

import html
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr

import tcnn_probe
from tcnn_probe.command_line import main
from tcnn_probe.reporting.maps import Choice, choose_maps
from tcnn_probe.reporting.recordings import read_run
from tests.tcnn_probe.reporting.made import NAUGHTY, held, recording


class Tags(HTMLParser):
    """Parser that collects every tag of a page with its attributes."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def runs() -> list[xr.DataTree]:
    """Return runs of layers of 3 and 9 heads, one named by markup;
    the second has other epochs and a layer more.
    """
    first = recording({"a.attn": 3, NAUGHTY: 9}, [0, 5, 7])
    # Only one head has a NaN, which must stay in its place and not shift the numbers after it.
    first["heads"]["entropy"][0, 1, 4] = np.nan
    peaks = np.random.default_rng(2).random((3, 1, 4))
    # The group next to "heads" has a layer of its own.
    first["peaks"] = xr.Dataset(
        {"peak": (("epoch", "layer", "head"), peaks)},
        {"layer": ["d"], "head": range(4)},
    )
    return [
        first,
        recording({"a.attn": 3, NAUGHTY: 7, "c": 2}, [0, 7, 8], seed=1, grid=None),
    ]


@pytest.fixture(scope="module")
def page(runs: list[xr.DataTree]) -> str:
    return tcnn_probe.report(runs).html


def test_numbers_equal_those_of_the_recordings(runs: list[xr.DataTree], page: str) -> None:
    facts, numbers, _ = held(page)
    assert facts["marks"] == [0, 5, 7, 8]
    heads = {"a.attn": 3, NAUGHTY: 9, "d": 4, "c": 2}
    assert facts["layers"] == [{"name": layer, "heads": count} for layer, count in heads.items()]
    sizes = {"head": (4, 4, 9), "layer": (4, 4), "model": (4,)}
    compared = {}
    for number, run in enumerate(runs):
        for about in facts["variables"]:
            ds = next(
                (node.dataset for node in run.subtree if about["name"] in node.data_vars),
                None,
            )
            if ds is None:
                assert about["starts"][number] is None
                continue
            shape = sizes[about["of"]]
            values = numbers[about["starts"][number] :][: np.prod(shape)].reshape(shape)
            for at in np.ndindex(shape):
                labels = (
                    facts["marks"],
                    [layer["name"] for layer in facts["layers"]],
                    facts["heads"],
                )
                place = {
                    dim: labels[n][at[n]]
                    for n, dim in enumerate(("epoch", "layer", "head")[: len(at)])
                }
                exists = all(value in ds[dim].values for dim, value in place.items())
                # Values are compared by label, so that the order on the page does not matter.
                expected = ds[about["name"]].sel(place).item() if exists else np.nan
                expected = np.float32(expected)
                assert np.array_equal(values[at], expected, equal_nan=True), (
                    about["name"],
                    place,
                )
                compared[about["name"], exists] = True
    # There are five variables, each at places that exist and at places that do not.
    assert len(compared) == 10


def test_maps_equal_those_of_the_recording(runs: list[xr.DataTree], page: str) -> None:
    facts, _, blocks = held(page)
    maps = runs[0]["maps/class_attention"]
    assert [tile["layer"] for tile in facts["tiles"]] == ["a.attn", NAUGHTY]
    for tile, block in zip(facts["tiles"], blocks, strict=True):
        expected = maps.sel(layer=tile["layer"]).values.astype(float)
        shape = 3, 2, 9, 3, 5
        assert tile["shape"] == list(shape) == list(expected.shape)
        largest = np.frombuffer(block, "<f4", 54).reshape(shape[:3])
        # The cells, a byte each with 255 for NaN, follow 54 largest values of 4 bytes.
        cells = np.frombuffer(block, np.uint8, offset=216).reshape(shape)
        assert np.array_equal(largest, np.nan_to_num(expected).max((-2, -1)))
        assert np.array_equal(cells == 255, np.isnan(expected))
        shown = np.where(cells == 255, np.nan, cells / 254 * largest[..., None, None])
        assert (
            np.nanmax(np.abs(shown - expected) / largest.max())
            # The tolerance is half a step of 254 and the rounding of two float32 numbers.
            <= 0.5 / 254 + 4 * np.finfo("f4").eps
        )


def test_names_are_text_and_nothing_is_loaded(page: str) -> None:
    tags = Tags(page).found
    assert {tag for tag, _ in tags} >= {"style", "script", "table"}
    assert not {tag for tag, _ in tags} & {
        "img",
        "b-onerror",
        "link",
        "iframe",
        "object",
        "base",
    }
    assert not [attrs for _, attrs in tags if {"src", "href", "onerror"} & attrs.keys()]
    assert html.escape(NAUGHTY) in page  # the name appears in the list of missing parts


def test_missing_parts_are_listed(page: str) -> None:
    words = html.unescape(page)
    for said in (
        "Net (A): stem is not supported: no softmax",
        "Net (A): the other run has layers that this one has not: c",
        "Net (A): the other run has epochs that this one has not: 8",
        "Net (B): the other run has epochs that this one has not: 5",
        f"Net (B): the other run has heads that this one has not: 2 of {NAUGHTY}",
        "Net (B): maps: none were recorded",
    ):
        assert said in words


def test_of_three_runs_each_is_compared_with_the_others(
    runs: list[xr.DataTree],
) -> None:
    page = tcnn_probe.report([*runs, runs[0]])
    facts, _, _ = held(page.html)
    assert [run["name"] for run in facts["runs"]] == ["Net (A)", "Net (B)", "Net (C)"]
    words = html.unescape(page.html)
    assert "Attention heads: Net (A), Net (B) and Net (C)<" in words
    assert "Net (C): another run has layers that this one has not: c" in words


def test_variables_without_a_value_are_named() -> None:
    run = recording({"a": 3}, [1, 2])
    run["heads"]["gate"][:] = np.nan
    run["top1"][:] = np.nan
    assert "no value at any epoch: gate, top1" in tcnn_probe.report(run).html


@pytest.mark.study
def test_maps_are_thinned_with_a_notice() -> None:
    run = recording({"a": 3, "b": 5}, list(range(40)), grid=(31, 37))
    complete = tcnn_probe.report(run, max_mb=100)
    # Here is room for all maps, so the thinning below is due to max_mb.
    assert "because max_mb" not in complete.html
    assert len(complete.html) <= run["maps/class_attention"].nbytes + 5e6
    # There is room for ten of the forty epochs. Base64 takes four characters for three bytes; a
    # cell has a byte, and a map four more for its largest value.
    room = 1.6 + 4 / 3 * 10.5 * 2 * 2 * 5 * (31 * 37 + 4) / 1e6
    thinned = tcnn_probe.report(run, max_mb=room)
    assert (
        f"this page has those of 10 of 40 epochs, evenly spread, because max_mb={room:g}"
        in thinned.html
    )
    marks = held(thinned.html)[0]["runs"][0]["kept"]
    assert len(marks) == 10
    # Nine rounded steps span 39 epochs.
    assert set(np.diff(marks)) <= {4, 5}
    assert marks[-1] == 39
    assert len(thinned.html) <= room * 1e6
    assert np.array_equal(held(thinned.html)[1], held(complete.html)[1], equal_nan=True)


def test_numbers_are_thinned_with_a_notice() -> None:
    """Evenly spread epochs are left, the last of each run, and a place for each finding."""
    long = recording({"a": 37}, list(range(211)), grid=None)
    long["heads"]["max_logit"] = long["heads"].entropy.copy()
    long["heads"]["max_logit"][57:, 0, 5] = 1e4
    short = recording({"a": 37}, [0, 3, 101], grid=None, seed=1)
    complete = tcnn_probe.report([long, short], max_mb=100)
    assert held(complete.html)[0]["marks"] == list(range(211))
    thinned = tcnn_probe.report([long, short], max_mb=1.63)
    assert len(thinned.html) <= 1.63e6
    facts, numbers, _ = held(thinned.html)
    marks = facts["marks"]
    assert (
        f"this page has {len(marks)} of 211 epochs, evenly spread, because max_mb=1.63"
        in thinned.html
    )
    assert 20 < len(marks) < 200
    assert {101, 210} <= {*marks}
    assert max(np.diff(marks)) <= 211 / (len(marks) - 1) + 1
    entropy = next(row for row in facts["variables"] if row["name"] == "entropy")
    shown = numbers[entropy["starts"][0] :][: len(marks) * 37].reshape(-1, 37)
    expected = long["heads"].entropy.sel(epoch=marks, layer="a").values
    assert np.array_equal(shown, expected.astype("f4"))
    rows = re.findall(r'data-mark="(\d+)" data-row="0" data-column="5"', thinned.html)
    assert {marks[int(row)] for row in rows} == {min(mark for mark in marks if mark >= 57)}


def test_images_are_left_out_last() -> None:
    run = read_run(recording({"a": 3, "b": 5}, list(range(40)), grid=(31, 37)))
    size = 4 / 3 * 2 * 5 * (31 * 37 + 4)  # bytes of the maps of one image at one epoch
    assert choose_maps(run, 40 * 2 * size) == Choice(list(range(40)), 2, 2)
    assert choose_maps(run, 2 * size) == Choice([39], 2, 2)
    # The limit is a byte too small for both images.
    assert choose_maps(run, 2 * size - 1) == Choice([39], 1, 2)
    assert choose_maps(run, size - 1) == Choice([], 0, 2)
    assert choose_maps(read_run(recording({"a": 3}, [1], grid=None)), 0) == Choice([], 0, 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=(32, 48), depth=2, embed_dim=24, num_classes=3
    ).eval()
    path = tmp_path_factory.mktemp("store") / "run.zarr"
    with (
        tcnn_probe.record(vit, path, images=[0, 2], layers="blocks.1*") as recorder,
        torch.no_grad(),
    ):
        vit(torch.randn(8, 3, 32, 48))
        recorder.mark(epoch=4, top1=0.5)
    return path


@pytest.mark.study
def test_report_of_a_store_and_of_a_dataset(store: Path, tmp_path: Path) -> None:
    ds = xr.open_zarr(store)
    shown = tcnn_probe.report(
        store,
        tmp_path / "page.html",
        images=np.random.default_rng(0).random((2, 3, 32, 48)),
    )
    for page, maps in ((shown, 5), (tcnn_probe.report(ds), 0)):
        # A dataset has no groups and therefore no maps.
        facts, numbers, blocks = held(page.html)
        assert len(blocks) == maps
        start = next(
            about["starts"][0] for about in facts["variables"] if about["name"] == "class_entropy"
        )
        assert (
            numbers[start : start + 3].tolist()
            == ds.class_entropy.values.astype("f4").ravel().tolist()
        )
        assert facts["variables"][0]["types"]
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == shown.html
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert held(shown.html)[0]["pictures"][1].startswith("data:image/jpeg;base64,")
    frame = Tags(shown._repr_html_()).found
    assert [(tag, attrs["srcdoc"]) for tag, attrs in frame] == [("iframe", shown.html)]


@pytest.mark.study
def test_command_writes_a_report(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "two.html"
    shutil.copytree(store, tmp_path / "again" / "run.zarr")
    assert (
        main(
            [
                "report",
                str(store),
                str(tmp_path / "again" / "run.zarr"),
                "-o",
                str(output),
                "--max-mb",
                "9",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == f"wrote {output}\n"
    assert f"{store.parent.name}/run.zarr and again/run.zarr" in output.read_text(encoding="utf-8")
    assert main(["report", *[str(store)] * 5, "-o", str(output)]) == 2
    assert "expected 1 to 4 recordings" in capsys.readouterr().err


def test_bad_arguments_are_refused(
    runs: list[xr.DataTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = recording({"a": 2}, [1]).map_over_datasets(
        lambda ds: ds.rename(epoch="step") if "epoch" in ds.dims else ds
    )
    steps.attrs["along"] = "step"
    for recordings, error, match in (
        ([], ValueError, "expected 1 to 4 recordings beside each other, got 0"),
        (runs[:1] * 5, ValueError, "beside each other, got 5; plot.evolution draws"),
        ({"a": []}, TypeError, "a tree of a recording, got list"),
        (3, TypeError, "got int"),
        (xr.Dataset({"a": 1}), ValueError, "expected a recording"),
        (runs[0].isel(epoch=slice(0)), ValueError, "Net has no epoch yet"),
        (
            {"a": runs[0].map_over_datasets(lambda ds: ds.where(False))},
            ValueError,
            "no variable of a has a value",
        ),
        (
            runs[0].map_over_datasets(lambda ds: ds.expand_dims(run=2)),
            ValueError,
            "give their paths, report([a, b])",
        ),
        ([runs[0], steps], ValueError, "Net (A) was marked by epoch, Net (B) by step"),
    ):
        with pytest.raises(error, match=re.escape(match)):
            tcnn_probe.report(recordings)
    with pytest.raises(
        ValueError,
        match=r"expected the images \[0, 3\], whose maps were recorded; got 3",
    ):
        tcnn_probe.report(runs[0], images=np.zeros((3, 1, 5, 7)))
    # Modules that have already imported Bokeh would not notice its absence.
    for name in [
        name for name in sys.modules if name.startswith(("bokeh", "tcnn_probe.reporting.page"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(ModuleNotFoundError, match=r"a report needs bokeh: pip install bokeh"):
        tcnn_probe.report(runs[0])
