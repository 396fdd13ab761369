"""Where a recording can be, and what is refused, with nothing changed."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore, MemoryStore

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore, StoreError, compact, migrate, open_recording
from tests.tcnn_probe.storage.crashes import Remote
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS, add, assert_holds, create


def contents(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def a_file(path: Path) -> None:
    path.write_text("precious")


def other_content(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("precious")


def other_zarr(path: Path) -> None:
    xr.Dataset({"gate": ("epoch", np.arange(3.0))}).to_zarr(path, zarr_format=3, consolidated=False)


def zarr_array(path: Path) -> None:
    zarr.create_array(path, shape=(3,), dtype="float64")


def zarr_2(path: Path) -> None:
    zarr.open_group(path, mode="w", zarr_format=2).create_array("gate", shape=(3,), dtype="float64")


def half_a_file(path: Path) -> None:
    create(path)
    (path / "zarr.json").write_text((path / "zarr.json").read_text()[:100])


def not_consolidated(path: Path) -> None:
    zarr.open_group(path, mode="w", attributes={"tcnn_probe_schema": 2})


def with_version(path: Path, version: int) -> None:
    create(path)
    root = json.loads((path / "zarr.json").read_text())
    root["attributes"]["tcnn_probe_schema"] = version
    (path / "zarr.json").write_text(json.dumps(root))


def older(path: Path) -> None:
    with_version(path, 1)


def newer(path: Path) -> None:
    with_version(path, 99)


def other_marks(path: Path) -> None:
    create(path, along="step").close()


def unequal_lengths(path: Path) -> None:
    create(path)
    root = json.loads((path / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"]["gate"]["shape"][0] = 1
    (path / "zarr.json").write_text(json.dumps(root))


SOMETHING_ELSE = r"run.zarr holds something else than a recording"
REFUSED: dict[Callable[[Path], None], str] = {
    a_file: SOMETHING_ELSE + r" \(a file\): choose another path",
    other_content: SOMETHING_ELSE + r" \(\['notes.txt'\]\)",
    other_zarr: SOMETHING_ELSE,
    zarr_array: SOMETHING_ELSE,
    zarr_2: SOMETHING_ELSE,
    half_a_file: SOMETHING_ELSE,
    not_consolidated: SOMETHING_ELSE,
    older: r"run.zarr has schema version 1, expected 2: tcnn_probe.migrate\('.*run.zarr'\) upgrades it",
    newer: "run.zarr has schema version 99, expected 2: it needs a newer tcnn_probe",
    other_marks: "run.zarr has its marks along 'step', expected 'epoch'",
    unequal_lengths: "arrays of unequal lengths along 'epoch'",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_refused_and_nothing_changed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "run.zarr")
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=REFUSED[make]):
        EpochStore(tmp_path / "run.zarr")
    for reader in (open_recording, compact):
        if make is not other_marks:
            with pytest.raises(StoreError, match=REFUSED[make]):
                reader(tmp_path / "run.zarr")
    assert contents(tmp_path) == before


def other(path: str = "", **changes: object) -> dict[str, Group]:
    return {**GROUPS, path: dataclasses.replace(GROUPS[path], **changes)}


GATE = GROUPS[""].variables["gate"]
DIFFERENT = {
    "no maps": (
        {"": GROUPS[""], "layer_scale": GROUPS["layer_scale"]},
        f"group '{MAPS}': 1 variables there, absent here",
    ),
    "another group": ({**GROUPS, "extra": GROUPS[""]}, "group 'extra': absent there, 3 variables here"),
    "fewer layers": (
        other(layers={"a.conv": LAYERS["a.conv"]}),
        r"\(layer 'b.conv': {'kind': 'gpsa', 'heads': 3} there, absent here\): choose another path",
    ),
    "more layers": (other(layers={**LAYERS, "d": {}}), "layer 'd': absent there, {} here"),
    "another order": (other(layers=dict(reversed(LAYERS.items()))), "the layers are in another order"),
    "other heads": (
        other(layers={**LAYERS, "b.conv": {"kind": "gpsa", "heads": 4}}),
        "layer 'b.conv': {'kind': 'gpsa', 'heads': 3} there, {'kind': 'gpsa', 'heads': 4} here",
    ),
    "sizes": (
        other(MAPS, sizes={**GROUPS[MAPS].sizes, "x": 13}),
        f"in group '{MAPS}', dimension 'x': 11 there, 13 here",
    ),
    "fewer variables": (other(variables={"gate": GATE}), "variable 'entropy': .* there, absent here"),
    "units": (
        other(variables={**GROUPS[""].variables, "gate": dataclasses.replace(GATE, units="cell")}),
        r"variable 'gate': float64 of \(layer, head\), units '1' there, float64 of \(layer, head\), units 'cell' here",
    ),
    "dims": (
        other(variables={**GROUPS[""].variables, "gate": Variable(("layer",), "1", "gate", "The gate.")}),
        r"variable 'gate': .*\(layer, head\).* there, float64 of \(layer\), units '1' here",
    ),
}


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_recording_of_something_else(tmp_path: Path, different: tuple[dict[str, Group], str]) -> None:
    add(create(tmp_path / "run.zarr"), 0, top1=0.5)
    before = contents(tmp_path)
    with pytest.raises(StoreError, match=different[1]):
        EpochStore(tmp_path / "run.zarr").check(different[0])
    assert contents(tmp_path) == before


def test_recording_of_the_same(tmp_path: Path) -> None:
    add(create(tmp_path / "run.zarr"), 0, top1=0.5)
    tuples = {name: {**about, "heads": about["heads"]} for name, about in LAYERS.items()}
    EpochStore(tmp_path / "run.zarr").check(other(layers=tuples))


def test_refusal_is_a_value_error() -> None:
    assert issubclass(StoreError, ValueError)


def test_nothing_is_made_before_create(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "a" / "run.zarr")
    assert (store.groups, store.attrs, store.marks) == (None, None, ())
    for use in (store.dataset, store.tree, lambda: add(store, 0), lambda: store.check(GROUPS)):
        with pytest.raises(StoreError, match=r"run.zarr holds nothing yet: create\(\) comes first"):
            use()
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reader", [open_recording, compact, migrate])
def test_nothing_to_read(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    with pytest.raises(StoreError, match=r"run.zarr holds no recording: nothing is there"):
        reader(tmp_path / "run.zarr")
    assert list(tmp_path.iterdir()) == []


def test_created_twice(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for again in (store, EpochStore(tmp_path / "run.zarr")):
        with pytest.raises(StoreError, match=r"run.zarr holds a recording already"):
            again.create(GROUPS, {})


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({MAPS: GROUPS[MAPS]}, "expected a root group"),
        ({**GROUPS, "heads/x": GROUPS[""]}, "expected other names than 'heads'"),
        (other(variables={"heads": GATE}), "expected other names than 'heads'"),
        ({**GROUPS, "/maps": GROUPS[""]}, "got '/maps'"),
        ({**GROUPS, "maps": GROUPS[""]}, f"twice or in each other: .*'{MAPS}'"),
        ({**GROUPS, "gate": GROUPS[MAPS]}, "twice or in each other: .*'gate'"),
        ({**GROUPS, "gate/x": GROUPS[MAPS]}, "twice or in each other: .*'gate/x'"),
        (other(variables={"layer": GATE}), "twice or in each other: .*'layer'"),
        (other(variables={"epoch": GATE}), "twice or in each other: .*'epoch'"),
    ],
)
def test_names_that_clash(tmp_path: Path, groups: dict[str, Group], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EpochStore(tmp_path / "run.zarr").create(groups, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attrs", [{"x": np.array(1)}, {"x": float("nan")}])
def test_attributes_that_are_not_json(tmp_path: Path, attrs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="JSON"):
        EpochStore(tmp_path / "run.zarr").create(GROUPS, attrs)
    assert list(tmp_path.iterdir()) == []


def test_parents_are_made_and_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "run.zarr", tmp_path / "empty"):
        add(create(path), 0)
        assert_holds(path, [0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty"]
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["run.zarr"]


def test_relative_path_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = create("run.zarr")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    add(store, 0)
    assert_holds(tmp_path / "run.zarr", [0])
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_path_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="a file stands in its way"):
        EpochStore(tmp_path / "file" / "a" / "run.zarr")


def test_empty_path() -> None:
    with pytest.raises(StoreError, match="expected the path of a directory, got an empty one"):
        EpochStore("")


def test_url_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match=r"nonsense://bucket/run.zarr cannot be opened \(.*nonsense"):
        EpochStore("nonsense://bucket/run.zarr")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(StoreError, match=r"s3://bucket/run.zarr cannot be opened .* URLs need the package fsspec"):
        EpochStore("s3://bucket/run.zarr")


def test_stores_that_cannot_be_written(tmp_path: Path) -> None:
    add(create(tmp_path / "run.zarr"), 0)
    with pytest.raises(StoreError, match="expected a store that can be written"):
        EpochStore(LocalStore(tmp_path / "run.zarr", read_only=True))
    assert open_recording(LocalStore(tmp_path / "run.zarr", read_only=True)).epoch.values.tolist() == [0]


def test_other_content_of_a_zarr_store() -> None:
    store = MemoryStore()
    zarr.open_group(store, path="mine", mode="w").create_array("a", shape=(1,), dtype="int8")
    with pytest.raises(StoreError, match=r"holds something else than a recording \(\['mine'"):
        EpochStore(store)


def test_neighbouring_folders_are_left_alone(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent, tmp_path / "run.zarr.init")
    before = contents(tmp_path / "run.zarr.init")
    create(tmp_path / "run.zarr")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.zarr", "run.zarr.init"]
    assert contents(tmp_path / "run.zarr.init") == before


@pytest.mark.parametrize("remote", [False, True])
def test_another_recorder_on_the_same_store_is_noticed(tmp_path: Path, remote: bool) -> None:
    target = Remote() if remote else tmp_path / "run.zarr"
    first = create(target)
    second = create(target)
    add(first, 0)
    for _ in range(2):
        with pytest.raises(StoreError, match="another recorder writes to this store: expected 0 marks in it, found 1"):
            add(second, 0, 7)
    add(first, 1)
    second.close()
    assert_holds(first, [0, 1])
    first.close()
    assert_holds(create(target), [0, 1])


def test_arrays_of_the_user_are_left_alone(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0)
    mine = zarr.open_group(tmp_path / "run.zarr", mode="r+", use_consolidated=False)
    mine.create_array("mine", shape=(2,), dtype="float64")[:] = 7
    mine.create_group("more")
    add(store, 1)
    store.close()
    store = create(tmp_path / "run.zarr")
    add(store, 2)
    assert_holds(tmp_path / "run.zarr", [0, 1, 2])
    assert mine["mine"][:].tolist() == [7, 7]
    assert "more" in mine


def test_closed() -> None:
    store = create(None)
    add(store, 0)
    store.close()
    with pytest.raises(StoreError, match="memory was closed: open it again to continue it"):
        add(store, 1)
    assert_holds(store, [0])
