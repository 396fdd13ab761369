"""Where a recording can be, and what is refused, with nothing changed."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore, StoreError, open_recording, repack
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS, Remote, add, assert_holds, contents, create, values


@pytest.mark.parametrize("kind", ["memory", "path", "text", "file URL", "URL", "zarr directory", "zarr store"])
def test_everywhere_the_same(tmp_path: Path, kind: str) -> None:
    target = {
        "memory": None,
        "path": tmp_path / "run.zarr",
        "text": str(tmp_path / "run.zarr"),
        "file URL": f"file://{tmp_path}/run.zarr",
        "URL": f"memory://{tmp_path}/run.zarr",
        "zarr directory": LocalStore(tmp_path / "run.zarr"),
        "zarr store": Remote(),
    }[kind]
    store = create(target)
    expected = {"top1": {k: k / 7 for k in (0, 1, 5)}}
    for mark in (0, 1):
        add(store, mark, top1=mark / 7)
    assert_holds(store, [0, 1], expected)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="was closed: open it again to continue it"):
        add(store, 5)
    if target is not None:
        again = create(target)
        assert again.marks == (0, 1)
        add(again, 5, top1=5 / 7)
        assert_holds(again, [0, 1, 5], expected)
        tree = open_recording(target)
        assert tree.epoch.values.tolist() == [0, 1, 5]
        np.testing.assert_array_equal(tree["heads"].gate[2], values(5)[""]["gate"])
    assert (tmp_path / "run.zarr").exists() == (kind in ("path", "text", "file URL", "zarr directory"))


def with_root(**attributes: object) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        recording(path)
        root = json.loads((path / "zarr.json").read_text())
        root["attributes"] |= attributes
        (path / "zarr.json").write_text(json.dumps(root))

    return make


def recording(path: Path, **options: str) -> None:
    store = create(path, **options)
    add(store, 0)
    store.close()


def foreign(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("precious")


def consolidated(path: Path) -> None:
    xr.Dataset({"gate": ("epoch", np.arange(3.0))}).to_zarr(path, zarr_format=3, consolidated=False)


def repacked(path: Path) -> None:
    recording(path.with_name("source"))
    repack(path.with_name("source"), path)


SOMETHING_ELSE = r"run.zarr holds something else than a recording"
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda path: path.write_text("precious"), SOMETHING_ELSE + r" \(a file\): choose another path"),
    "other content": (foreign, SOMETHING_ELSE + r" \(\['notes.txt'\]\)"),
    "other zarr": (consolidated, SOMETHING_ELSE),
    "an array": (lambda path: zarr.create_array(path, shape=(3,), dtype="float64"), SOMETHING_ELSE),
    "zarr 2": (lambda path: zarr.open_group(path, mode="w", zarr_format=2), SOMETHING_ELSE),
    "not consolidated": (
        lambda path: zarr.open_group(path, mode="w", attributes={"tcnn_probe_schema": 3, "along": "epoch"}),
        "run.zarr has damaged metadata",
    ),
    "other version": (with_root(tcnn_probe_schema=2), "run.zarr has schema version 2, expected 3"),
    "other marks": (lambda path: recording(path, along="step"), "has its marks along 'step', expected 'epoch'"),
    "repacked": (repacked, "run.zarr was repacked for reading: continue the recording that it was made of"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_and_nothing_changed(tmp_path: Path, what: str) -> None:
    make, message = REFUSED[what]
    make(tmp_path / "run.zarr")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=message):
        EpochStore(tmp_path / "run.zarr")
    if what not in ("other marks", "repacked"):
        with pytest.raises(StoreError, match=message):
            open_recording(tmp_path / "run.zarr")
    assert contents(tmp_path) == before


def other(path: str = "", **changes: object) -> dict[str, Group]:
    return {**GROUPS, path: dataclasses.replace(GROUPS[path], **changes)}


GATE = GROUPS[""].variables["gate"]
DIFFERENT = {
    "no maps": ({"": GROUPS[""], "layer_scale": GROUPS["layer_scale"]}, f"group '{MAPS}': present there, absent here"),
    "another group": ({**GROUPS, "extra": GROUPS[""]}, "group 'extra': absent there, present here"),
    "fewer layers": (
        other(layers={"a.conv": LAYERS["a.conv"]}),
        r"\(layer 'слой#1': {'kind': 'gpsa', 'heads': 3} there, absent here\): choose another path",
    ),
    "more layers": (other(layers={**LAYERS, "d": {}}), "layer 'd': absent there, {} here"),
    "another order": (other(layers=dict(reversed(LAYERS.items()))), "order of layers"),
    "other heads": (
        other(layers={**LAYERS, "層": {"kind": "gpsa", "heads": 4}}),
        "'heads': 5} there, .*'heads': 4} here",
    ),
    "sizes": (
        other(MAPS, sizes={**GROUPS[MAPS].sizes, "x": 13}),
        f"in group '{MAPS}', dimension 'x': 11 there, 13 here",
    ),
    "labels": (other(MAPS, coords={"image": [3, 18]}), r"labels along 'image': \[3, 17\] there, \[3, 18\] here"),
    "fewer variables": (other(variables={"gate": GATE}), "variable 'entropy': .* there, absent here"),
    "units": (
        other(variables={**GROUPS[""].variables, "gate": dataclasses.replace(GATE, units="cell")}),
        r"variable 'gate': float64 of \(layer, head\), units '1' there, float64 of \(layer, head\), units 'cell' here",
    ),
}


def test_recording_of_something_else(tmp_path: Path) -> None:
    recording(tmp_path / "run.zarr")
    store = EpochStore(tmp_path / "run.zarr")
    for groups, message in DIFFERENT.values():
        with pytest.raises(StoreError, match=message):
            store.check(groups)
    store.check(other(layers={name: dict(reversed(about.items())) for name, about in LAYERS.items()}))


def test_nothing_is_there(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.zarr"
    store = EpochStore(path)
    assert (store.groups, store.attrs, store.marks) == (None, None, ())
    for use in (store.dataset, store.tree, lambda: add(store, 0), lambda: store.check(GROUPS)):
        with pytest.raises(StoreError, match=r"run.zarr holds nothing yet"):
            use()
    store.close()
    for read in (open_recording, lambda path: repack(path, tmp_path / "b")):
        with pytest.raises(StoreError, match=r"run.zarr holds no recording: nothing is there"):
            read(path)
    assert list(tmp_path.iterdir()) == []
    store = create(path)
    add(store, 0)
    with pytest.raises(StoreError, match=r"run.zarr holds a recording already"):
        store.create(GROUPS, {})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({MAPS: GROUPS[MAPS]}, "expected a root group"),
        ({**GROUPS, "heads/x": GROUPS[""]}, "expected other names than 'heads'"),
        (other(variables={"heads": GATE}), "expected other names than 'heads'"),
        ({**GROUPS, "/maps": GROUPS[""]}, "got ''"),
        (other(variables={"..": GATE}), r"got '\.\.'"),
        (other(variables={"a/b": GATE}), "got 'a/b'"),
        (other(variables={"zarr.json": GATE}), "got 'zarr.json'"),
        ({**GROUPS, "maps": GROUPS[""]}, f"twice or in each other: .*'{MAPS}'"),
        ({**GROUPS, "gate": GROUPS[MAPS]}, "twice or in each other: .*'gate'"),
        ({**GROUPS, "gate/x": GROUPS[MAPS]}, "twice or in each other: .*'gate/x'"),
        (other(variables={"layer": GATE}), "twice or in each other: .*'layer'"),
        (other(variables={"epoch": GATE}), "twice or in each other: .*'epoch'"),
    ],
)
def test_names_that_clash(groups: dict[str, Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochStore(None).create(groups, {})


@pytest.mark.parametrize("attrs", [{"x": np.array(1)}, {"x": float("nan")}])
def test_attributes_that_are_not_json(attrs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        EpochStore(None).create(GROUPS, attrs)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory is taken, and a relative path means the same when the working directory has changed."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stores = [create("run.zarr"), create("empty")]
    monkeypatch.chdir(tmp_path / "elsewhere")
    for store in stores:
        add(store, 0)
        store.close()
    assert_holds(tmp_path / "run.zarr", [0])
    assert_holds(tmp_path / "empty", [0])
    assert list(Path.cwd().iterdir()) == []


def test_unwritable_path_is_refused_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"the file .*file stands in its way"):
        EpochStore(tmp_path / "file" / "a" / "run.zarr")
    recording(tmp_path / "run.zarr")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may write everywhere
    for path, folder in (("run.zarr", "run.zarr"), ("a/b/other.zarr", tmp_path.name)):
        with pytest.raises(StoreError, match=f"no permission to write in .*{folder}$"):
            EpochStore(tmp_path / path)
    assert open_recording(tmp_path / "run.zarr").epoch.values.tolist() == [0]


def test_targets_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording(tmp_path / "run.zarr")
    with pytest.raises(StoreError, match="expected a store that can be written"):
        EpochStore(LocalStore(tmp_path / "run.zarr", read_only=True))
    assert open_recording(LocalStore(tmp_path / "run.zarr", read_only=True)).epoch.values.tolist() == [0]
    with pytest.raises(StoreError, match="expected the path of a directory, got an empty one"):
        EpochStore("")
    with pytest.raises(StoreError, match=r"nonsense://bucket/run.zarr cannot be opened \(.*nonsense"):
        EpochStore("nonsense://bucket/run.zarr")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"s3://bucket/run.zarr cannot be opened .* URLs need the package fsspec"):
        EpochStore("s3://bucket/run.zarr")
    taken = MemoryStore({"mine/c/0": default_buffer_prototype().buffer.from_bytes(b"precious")})
    with pytest.raises(StoreError, match=r"holds something else than a recording \(\['mine'"):
        EpochStore(taken)


def test_what_the_user_keeps_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    recording(path)
    mine = zarr.open_group(path, mode="r+", use_consolidated=False)
    mine.create_array("mine", shape=(2,), dtype="float64")[:] = 7
    mine.create_group("more")
    store = create(path)
    add(store, 1)
    for name in ("mine", "more", "zarr.json", ".."):
        with pytest.raises(ValueError, match=f"'{name}' is the name of something else"):
            add(store, 2, **{name: 1.0})
    add(store, 2)
    store.close()
    assert_holds(path, [0, 1, 2])
    assert mine["mine"][:].tolist() == [7, 7]
    assert "more" in mine


def test_a_recording_of_other_shapes(tmp_path: Path) -> None:
    """Without numbers of heads, maps of few dimensions, along something that is no integer."""
    kinds = {"maps/a": ("layer", "y"), "maps/b": ("image",), "maps/c": ()}
    sizes = {"maps/a": {"y": 3}, "maps/b": {"image": 5}, "maps/c": {}}
    groups = {"": Group({}, {})} | {
        path: Group({"m": Variable(dims, "1", "m", "m", dtype="float32")}, {"a": {}, "b": {}}, sizes[path], maps=True)
        for path, dims in kinds.items()
    }
    store = EpochStore(tmp_path / "run.zarr", along="tokens")
    store.create(groups, {})
    rows = {path: np.arange(2 * np.prod(groups[path].shape("m"), dtype=int)) for path in kinds}
    rows = {path: row.reshape(2, *groups[path].shape("m")).astype("float32") for path, row in rows.items()}
    for mark in (0, 1):
        store.append(mark + 0.5, {path: {"m": row[mark]} for path, row in rows.items()}, {"top1": 0.5})
    repack(tmp_path / "run.zarr", tmp_path / "packed.zarr")
    for name in ("run.zarr", "packed.zarr"):
        tree = open_recording(tmp_path / name)
        assert (tree.top1.values.tolist(), tree.tokens.values.tolist()) == ([0.5, 0.5], [0.5, 1.5])
        for path, row in rows.items():
            np.testing.assert_array_equal(tree[path].m, row)
    assert EpochStore(tmp_path / "run.zarr", along="tokens").groups == groups
