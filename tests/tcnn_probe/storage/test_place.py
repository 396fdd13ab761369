"""Places for a recording, and places that are refused without changes."""

import dataclasses
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore, ZipStore

from tcnn_probe.schema import Group, Variable, difference
from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tests.tcnn_probe.storage.tables import (
    GROUPS,
    LAYERS,
    MAPS,
    Remote,
    add,
    assert_holds,
    contents,
    create,
    recording,
)


@pytest.mark.parametrize(
    "kind",
    ["memory", "path", "text", "file URL", "URL", "zarr directory", "zarr store"],
)
def test_all_kinds_of_places_hold_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.zarr"
    target = {
        "memory": None,
        "path": path,
        "text": str(path),
        "file URL": f"file://{path}",
        "URL": f"memory://{path}",
        "zarr directory": LocalStore(path),
        # This store is no directory of zarr, so nothing may depend on paths.
        "zarr store": Remote(),
    }[kind]
    # No float holds sevenths exactly, so equality is to the bit.
    expected = {"top1": {k: k / 7 for k in (0, 1, 5)}}
    store = recording(target, 2)
    store.close()
    assert_holds(store, [0, 1], expected)
    with pytest.raises(StoreError, match="was closed: open it again to continue it"):
        add(store, 5)
    if target is not None:
        again = create(target)
        # 5 follows 1, as marks need not be consecutive.
        add(again, 5, top1=5 / 7)
        assert_holds(again, [0, 1, 5], expected)
        assert open_recording(target).epoch.values.tolist() == [0, 1, 5]
    # Places in memory leave nothing on the disk.
    assert path.exists() == (kind in ("path", "text", "file URL", "zarr directory"))


def with_version(path: Path) -> None:
    recording(path)
    root = json.loads((path / "zarr.json").read_text())
    # This is the version before the current one.
    root["attributes"]["tcnn_probe_schema"] = 2
    (path / "zarr.json").write_text(json.dumps(root))


def with_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("precious")


OURS = {"tcnn_probe_schema": 3, "along": "epoch"}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (
        lambda path: path.write_text("precious"),
        r"something else than a recording \(a file\): (choose|tcnn)",
    ),
    "notes": (
        with_notes,
        r"run.zarr holds something else than a recording \(\['notes.txt'\]\)",
    ),
    "an array": (
        lambda path: zarr.create_array(path, shape=(3,), dtype="float64"),
        "something else than a recording",
    ),
    "zarr 2": (
        lambda path: zarr.open_group(path, mode="w", zarr_format=2),
        "something else than a recording",
    ),
    # The attributes are those of a recording, but without the consolidated metadata that every recording has.
    "not consolidated": (
        lambda path: zarr.open_group(path, mode="w", attributes=OURS),
        "has damaged metadata",
    ),
    "other version": (with_version, "run.zarr has schema version 2, expected 3"),
    "other marks": (
        lambda path: recording(path, along="step"),
        "has its marks along 'step', expected 'epoch'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsuitable_places_are_refused_and_unchanged(tmp_path: Path, what: str) -> None:
    make, message = REFUSED[what]
    make(tmp_path / "run.zarr")
    # Contents are compared byte by byte, so that a repair or change by a refusal is noticed.
    before = contents(tmp_path)
    for read in (
        (EpochStore,)
        # It can be read, but not continued.
        if what == "other marks"
        else (EpochStore, open_recording)
    ):
        with pytest.raises(StoreError, match=message):
            read(tmp_path / "run.zarr")
    assert contents(tmp_path) == before


def changed(path: str = "", **changes: object) -> dict[str, Group]:
    return {**GROUPS, path: dataclasses.replace(GROUPS[path], **changes)}


GATE = GROUPS[""].variables["gate"]
VARIABLES = GROUPS[""].variables


def test_recording_of_something_else_is_refused() -> None:
    stored = recording(None).groups
    for groups, message in (
        (
            {"": GROUPS[""], "layer_scale": GROUPS["layer_scale"]},
            f"group '{MAPS}': present there, absent here",
        ),
        (
            changed(layers={"a.conv": LAYERS["a.conv"]}),
            "layer 'слой#1': .* there, absent here$",
        ),
        (changed(layers={**LAYERS, "d": {}}), "layer 'd': absent there, {} here"),
        (changed(layers=dict(reversed(LAYERS.items()))), "order of layers"),
        (
            # Layers may have any name, also beyond ASCII.
            changed(layers={**LAYERS, "層": {"kind": "gpsa"}}),
            "'層': {'kind': 'gpsa', 'heads': 5} there",
        ),
        (
            # 13 and 11 are primes that no other axis has.
            changed(MAPS, sizes={**GROUPS[MAPS].sizes, "x": 13}),
            f"in group '{MAPS}', dimension 'x': 11 there, 13 here",
        ),
        (
            changed(MAPS, coords={"image": [3, 18]}),
            r"labels along 'image': \[3, 17\] there, \[3, 18\] here",
        ),
        (
            changed(variables={"gate": GATE}),
            "variable 'entropy': .* there, absent here",
        ),
        (
            changed(
                variables={**VARIABLES, "gate": dataclasses.replace(GATE, units="cell")}
            ),
            # The message contains the old and the new definition, so that the reader sees the change.
            r"float64 of \(layer, head\), units '1' there, float64 of \(layer, head\), units 'cell' here",
        ),
    ):
        assert re.search(message, difference(stored, groups) or "")
    # The order of a layer's attributes is JSON's and means nothing.
    turned = {name: dict(reversed(about.items())) for name, about in LAYERS.items()}
    assert difference(stored, changed(layers=turned)) is None


def test_missing_recordings_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run.zarr"
    store = EpochStore(path)
    assert store.groups is None
    assert store.attrs is None
    assert store.marks == ()
    for use in (store.dataset, store.tree, lambda: add(store, 0)):
        with pytest.raises(StoreError, match=r"run.zarr holds nothing yet"):
            use()
    with pytest.raises(
        StoreError, match=r"run.zarr holds no recording: nothing is there"
    ):
        open_recording(path)
    # Reading must not create the missing directory.
    assert list(tmp_path.iterdir()) == []
    store.create(GROUPS, {})
    add(store, 0)
    with pytest.raises(StoreError, match=r"run.zarr holds a recording already"):
        store.create(GROUPS, {})


@pytest.mark.parametrize(
    # xarray keeps groups and variables in one namespace: one would hide the other.
    ("groups", "message"),
    [
        (
            changed(variables={"heads": GATE}),
            "none of them inside another, got .*'heads'",
        ),
        (
            {**GROUPS, "heads/a": GROUPS[""]},
            "none of them inside another, got .*'heads/a'",
        ),
        (
            {**GROUPS, "maps": GROUPS[""]},
            f"none of them inside another, got .*'{MAPS}'",
        ),
        ({**GROUPS, "gate": GROUPS[MAPS]}, "none of them inside another, got .*'gate'"),
        (
            changed(variables={"layer": GATE}),
            "none of them inside another, got .*'layer'",
        ),
        (
            changed(variables={"epoch": GATE}),
            "none of them inside another, got .*'epoch'",
        ),
    ],
)
def test_clashing_names_are_refused(groups: dict[str, Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochStore(None).create(groups, {})


# JSON has no NaN, but Python writes it anyway.
@pytest.mark.parametrize("value", [np.array(1), float("nan")])
def test_attributes_beyond_json_are_refused(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="JSON"):
        EpochStore(None).create(GROUPS, {"x": value})


def test_empty_directories_and_relative_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty directory is accepted, and a relative path keeps its meaning after a change of the working directory."""
    for name in ("empty", "elsewhere"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    # One directory is new and one is there and empty.
    stores = {name: create(name) for name in ("run.zarr", "empty")}
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name, store in stores.items():
        add(store, 0)
        assert_holds(tmp_path / name, [0])
    assert list(Path.cwd().iterdir()) == []


def test_impossible_targets_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording(tmp_path / "run.zarr")
    (tmp_path / "file").write_text("")
    only_read = LocalStore(tmp_path / "run.zarr", read_only=True)
    assert open_recording(only_read).epoch.values.tolist() == [0]
    occupied = MemoryStore(
        {"mine/c/0": default_buffer_prototype().buffer.from_bytes(b"precious")}
    )
    # Tests may run as root, who has all rights.
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path)
    # None makes an import fail, as if the package were not installed.
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for target, message in (
        ("", "expected the path of a directory, got an empty path"),
        (only_read, "expected a store that can be written"),
        (occupied, r"holds something else than a recording \(\['mine/"),
        (tmp_path / "file" / "a" / "run.zarr", "the file .*file stands in its way"),
        (tmp_path / "run.zarr", "no permission to write in .*run.zarr$"),
        # The parents are missing too; the first existing one decides.
        ("/a/b/run.zarr", "no permission to write in /$"),
        (
            "nonsense://bucket/run.zarr",
            r"nonsense://bucket/run.zarr cannot be opened \(.*nonsense",
        ),
        (
            "s3://bucket/run.zarr",
            "cannot be opened .* URLs need the package fsspec and, for most protocols, one more",
        ),
    ):
        with pytest.raises(StoreError, match=message):
            EpochStore(target)
    # The check must not refuse a folder that can be written.
    assert EpochStore(tmp_path / "c" / "run.zarr").marks == ()


def test_replacing_needs_the_parent_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new recording is made there."""
    recording(path := tmp_path / "run.zarr")
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(StoreError, match=rf"no permission to write in {tmp_path}$"):
        EpochStore(path, mode="w")
    assert EpochStore(path).marks == (0,)


def zipped(path: Path) -> Path:
    recording(path)
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as archive:
        for name, data in contents(path).items():
            if data is not None:
                archive.writestr(name, data)
    return path.with_suffix(".zip")


def test_zip_files_opened_or_closed(tmp_path: Path) -> None:
    """A zip file is read if it is opened or closed, and refused if it is no zip file."""
    store = ZipStore(zipped(tmp_path / "run.zarr"))
    # The file is already open the second time.
    for _ in range(2):
        assert open_recording(store)["heads"].gate.sizes["epoch"] == 1
    (tmp_path / "notes.zip").write_text("precious")
    for name in ("notes.zip", "nothing.zip"):
        with pytest.raises(StoreError, match=f"{name} cannot be opened"):
            open_recording(ZipStore(tmp_path / name))


@pytest.mark.parametrize("name", ["zarr.json", "gate/c/0/0/0"])
def test_damaged_zip_files(tmp_path: Path, name: str) -> None:
    """A flipped bit of an object raises an error."""
    path = zipped(tmp_path / "run.zarr")
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(name).header_offset
    content = bytearray(path.read_bytes())
    # A local header has 30 bytes and the name, and 200 bytes are within both objects.
    content[start + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(StoreError, match="is damaged"):
        # Only reading the values meets damage in the data.
        open_recording(ZipStore(path))["heads"].gate.load()


def test_contents_of_the_user_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    recording(path)
    # A user might do this, with zarr alone and without the package's metadata.
    users = zarr.open_group(path, mode="r+", use_consolidated=False)
    users.create_array("mine", shape=(2,), dtype="float64")[:] = 7
    users.create_group("more")
    store = create(path)
    for name in ("mine", "more"):
        with pytest.raises(ValueError, match=f"'{name}' is the name of something else"):
            add(store, 1, **{name: 1.0})
    add(store, 1)
    store.close()
    assert_holds(path, [0, 1])
    # The values are compared in addition to the names.
    assert users["mine"][:].tolist() == [7, 7]
    assert "more" in users


def test_recordings_of_other_shapes(tmp_path: Path) -> None:
    """Recordings may lack numbers of heads, have maps of few dimensions, and run along fractions."""
    # Each kind lacks dimensions that usual maps have.
    kinds = {
        "maps/a": (("layer", "y"), {"y": 3}),
        "maps/b": (("image",), {"image": 5}),
        "maps/d": ((), {}),
    }
    groups = {"": Group({}, {})}
    rows = {}
    for path, (dims, sizes) in kinds.items():
        m = Variable(dims, "1", "m", "m", dtype="float32")
        groups[path] = Group({"m": m}, {"a": {}, "b": {}}, sizes, maps=True)
        shape = (2, *groups[path].shape("m"))
        rows[path] = np.arange(np.prod(shape)).reshape(shape)
    # The dimension may have any name besides epoch and step.
    store = EpochStore(tmp_path / "run.zarr", along="tokens")
    store.create(groups, {})
    for mark in (0, 1):
        store.append(
            # An integer coordinate would round halves.
            mark + 0.5,
            {path: {"m": row[mark]} for path, row in rows.items()},
            {"top1": 0.5},
        )
    tree = open_recording(tmp_path / "run.zarr")
    assert tree.top1.values.tolist() == [0.5, 0.5]
    assert tree.tokens.values.tolist() == [0.5, 1.5]
    for path, row in rows.items():
        np.testing.assert_array_equal(tree[path].m, row)
    assert EpochStore(tmp_path / "run.zarr", along="tokens").groups == groups
