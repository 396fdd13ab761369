"""The store as its reader meets it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import LocalStore

from tcnn_probe.schema import Group, Variable
from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tcnn_probe.storage import chunks as layout
from tests.tcnn_probe.storage.crashes import Remote
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS, add, assert_holds, create, values


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
    assert_holds(store, [])
    for mark in range(3):
        add(store, mark, top1=mark / 7)
        assert_holds(store, list(range(mark + 1)), {"top1": {k: k / 7 for k in range(mark + 1)}})
    store.close()
    store.close()
    assert_holds(store, [0, 1, 2])
    if target is not None:
        again = create(target)
        assert again.marks == (0, 1, 2)
        add(again, 5, top1=5 / 7)
        assert_holds(again, [0, 1, 2, 5], {"top1": {k: k / 7 for k in (0, 1, 2, 5)}})
        tree = open_recording(target)
        assert tree.epoch.values.tolist() == [0, 1, 2, 5]
        np.testing.assert_array_equal(tree["heads"].gate[3], values(5)[""]["gate"])
        np.testing.assert_array_equal(tree[MAPS].saliency[3], values(5)[MAPS]["saliency"])
    if (tmp_path / "run.zarr").exists():
        assert kind in ("path", "text", "file URL", "zarr directory")
        assert_holds(tmp_path / "run.zarr", [0, 1, 2, 5], {"top1": {k: k / 7 for k in (0, 1, 2, 5)}})


def test_tree(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    for mark in (2, 3):
        add(store, mark, top1=mark / 7)
    for tree in (store.tree(), open_recording(tmp_path / "run.zarr")):
        assert set(tree.groups) == {"/", "/heads", "/layer_scale", "/maps", f"/{MAPS}"}
        assert tree.attrs["made_by"] == "a test"
        assert set(tree.dataset.data_vars) == {"top1"}
        assert dict(tree["heads"].sizes) == {"epoch": 2, "layer": 3, "head": 5}
        assert dict(tree[MAPS].sizes) == {"epoch": 2, "layer": 2, "image": 2, "head": 5, "y": 3, "x": 11}
        assert json.loads(tree["heads"].attrs["layers"]) == LAYERS
        assert tree[MAPS].saliency.sel(epoch=3, layer="c.conv", head=4, image=1).values.shape == (3, 11)
        assert not tree[MAPS].saliency._in_memory  # read when looked at


def test_attributes(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.5)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.attrs == dict(store.attrs)
    assert (ds.attrs["made_by"], ds.attrs["tcnn_probe_schema"], ds.attrs["along"]) == ("a test", 2, "epoch")
    assert ds.entropy.attrs["units"] == "nat"
    assert ds.top1.attrs["description"] == "As given to mark()."
    assert "kernel tap" in ds["head"].attrs["description"]
    assert json.loads(xr.open_zarr(tmp_path / "run.zarr", group="layer_scale").attrs["layers"]).keys() == {
        "a.ls1",
        "a.ls2",
    }
    assert store.groups == GROUPS


def test_other_implementations_can_read_the_metadata(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    add(store, 0, top1=0.5)
    fills = {}
    for name in tmp_path.rglob("zarr.json"):
        about = json.loads(name.read_text(), parse_constant=pytest.fail)
        assert about["zarr_format"] == 3
        if about["node_type"] == "array":
            fills.setdefault((about["data_type"], about["fill_value"]), set()).update(
                codec["name"] for codec in about["codecs"]
            )
    assert fills == {
        ("int64", -1): {"bytes", "zstd"},
        ("float64", "NaN"): {"bytes", "zstd"},
        ("float16", "NaN"): {"sharding_indexed"},
        ("string", ""): {"vlen-utf8", "zstd"},
    }


def test_spare_room_is_not_shown_and_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    lengths = {}
    store = create(path)
    for when in ("before", "while", "after"):
        group = zarr.open_group(path, mode="r", use_consolidated=False)
        lengths[when] = [group[name].shape[0] for name in ("epoch", "gate", f"{MAPS}/saliency")]
        assert_holds(path, [] if when == "before" else [0, 1])
        if when == "before":
            add(store, 0)
            add(store, 1)
        else:
            store.close()
    assert lengths == {"before": [64, 64, 64], "while": [64, 64, 64], "after": [2, 2, 2]}


def test_chunks_are_of_a_bounded_size() -> None:
    for shape, marks in {(): 64, (12, 6): 64, (23, 31): 45, (53, 64): 16}.items():
        about = layout.new_array(Variable(("layer", "head")[: len(shape)], "", "", ""), shape, "epoch")
        assert about["chunk_grid"]["configuration"]["chunk_shape"] == [marks, *shape]


@pytest.mark.parametrize("target", ["memory", "directory"])
def test_marks_in_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setattr(layout, "_MARKS_PER_CHUNK", (1, 7))
    path = Remote() if target == "memory" else tmp_path / "run.zarr"
    store = create(path)
    for mark in range(17):
        add(store, mark, **({"late": mark / 7} if mark > 9 else {}))
        if mark in (5, 6, 7, 13):  # resumed on both sides of a boundary
            store = create(path)
            assert_holds(store, list(range(mark + 1)))
    assert_holds(store, list(range(17)), {"late": {mark: mark / 7 for mark in range(10, 17)}})
    if target == "directory":
        assert len(list((tmp_path / "run.zarr" / "gate" / "c").iterdir())) == 3
        assert len(list((tmp_path / "run.zarr" / "late" / "c").iterdir())) == 2


def test_hundreds_of_marks_take_few_files(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "run.zarr")
    store.create({"": GROUPS[""]}, {})
    for mark in range(259):
        store.append(mark, {"": values(mark)[""]}, {})
    ds = xr.open_zarr(tmp_path / "run.zarr")
    np.testing.assert_array_equal(ds.gate, np.stack([values(mark)[""]["gate"] for mark in range(259)]))
    assert len([p for p in tmp_path.rglob("*") if p.is_file()]) < 40


@pytest.mark.parametrize("kept", [True, False])
def test_dataset_taken_before_further_marks_keeps_its_own(tmp_path: Path, kept: bool) -> None:
    store = create(None if kept else tmp_path / "run.zarr")
    early = {}
    for mark in range(4):
        early[mark] = store.dataset()
        add(store, mark)
    for count, ds in early.items():
        assert ds.epoch.values.tolist() == list(range(count))
        expected = np.array([values(mark)[""]["gate"] for mark in range(count)]).reshape(-1, 3, 5)
        np.testing.assert_array_equal(ds.gate, expected)


def test_scalars_come_and_go(tmp_path: Path) -> None:
    store, expected = create(tmp_path / "run.zarr"), {"a": {}, "b": {}}
    for mark, names in enumerate(["", "a", "ab", "b", "", "a"]):
        for name in names:
            expected[name][mark] = mark + 0.25
        add(store, mark, **dict.fromkeys(names, mark + 0.25))
        if mark == 3:
            store = create(tmp_path / "run.zarr")
    assert_holds(tmp_path / "run.zarr", list(range(6)), expected)
    assert store.groups == GROUPS


@pytest.mark.parametrize("resumed", [False, True])
def test_marks_that_are_no_integers(tmp_path: Path, resumed: bool) -> None:
    store = create(tmp_path / "run.zarr", along="tokens")
    for mark, seed in {0.5: 1, 1: 2, np.float32(2.25): 3}.items():
        add(store, mark, seed)
        store = create(tmp_path / "run.zarr", along="tokens") if resumed else store
    assert store.marks == (0.5, 1.0, 2.25)
    assert [type(mark) for mark in store.marks] == [float] * 3
    assert_holds(tmp_path / "run.zarr", {0.5: 1, 1.0: 2, 2.25: 3}, {}, along="tokens")
    assert xr.open_zarr(tmp_path / "run.zarr", group=MAPS).tokens.dtype == "float64"


def test_first_mark_that_failed_does_not_decide_on_the_dtype(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr")
    with pytest.raises(ValueError, match="could not convert"):
        store.append(1, values(1), {"top1": "high"})  # type: ignore[dict-item]
    add(store, 0.5, 1)
    add(store, 1, 2)
    assert_holds(tmp_path / "run.zarr", {0.5: 1, 1.0: 2})


WRONG_MARKS = {
    "a fraction among integers": (2.5, "expected an integer for 'epoch' as for the marks before, got 2.5"),
    "the last again": (1, "expected 'epoch' later than the last mark, 1, got 1"),
    "earlier": (0, "later than the last mark, 1, got 0"),
    "not a number": (math.nan, "expected a finite number for 'epoch', got nan"),
    "text": ("2", "expected a finite number for 'epoch', got '2'"),
}


@pytest.mark.parametrize("wrong", WRONG_MARKS.values(), ids=WRONG_MARKS.keys())
def test_wrong_marks(wrong: tuple[object, str]) -> None:
    store = create(None)
    for mark in (0, 1):
        add(store, mark)
    with pytest.raises(StoreError, match=wrong[1]):
        add(store, wrong[0], 2)  # type: ignore[arg-type]
    assert_holds(store, [0, 1])


def test_wrong_values() -> None:
    store, right = create(None), values(1)
    without = {**right, "": {"gate": right[""]["gate"]}}
    flat = {**right, "": {**right[""], "gate": right[""]["gate"].T}}
    for wrong, scalars, message in (
        (without, {}, r"group '': expected the variables \['entropy', 'gate', 'images'\], got \['gate'\]"),
        (flat, {}, r"gate: expected shape \(3, 5\), got \(5, 3\)"),
        ({**right, "other": {}}, {}, r"expected values for the groups .* got also \['other'\]"),
        ({"": right[""]}, {}, "group 'layer_scale': expected the variables"),
        (right, {"gate": 1.0}, "'gate' is the name of something else"),
        (right, {"epoch": 1.0}, "'epoch' is the name of something else"),
        (right, {"layer": 1.0}, "'layer' is the name of something else"),
        (right, {"maps": 1.0}, "'maps' is the name of something else"),
        (right, {"a/b": 1.0}, "'a/b' is the name of something else"),
        (right, {"heads": 1.0}, "'heads' is the name of something else"),
    ):
        with pytest.raises(ValueError, match=message):
            store.append(1, wrong, scalars)
    assert_holds(store, [])


def test_a_recording_without_numbers(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "run.zarr")
    store.create({"": Group({}, {}), MAPS: GROUPS[MAPS]}, {})
    store.append(0, {MAPS: values(0)[MAPS]}, {"top1": 0.5})
    tree = open_recording(tmp_path / "run.zarr")
    assert set(tree.groups) == {"/", "/maps", f"/{MAPS}"}
    assert tree.top1.values.tolist() == [0.5]
    np.testing.assert_array_equal(tree[MAPS].saliency[0], values(0)[MAPS]["saliency"])
    assert EpochStore(tmp_path / "run.zarr").groups == {"": Group({}, {}), MAPS: GROUPS[MAPS]}


def test_integers(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "run.zarr")
    groups = {"": Group({"seen": Variable(("layer",), "1", "seen", "Seen.", dtype="int64")}, LAYERS)}
    store.create(groups, {})
    store.append(3, {"": {"seen": np.array([5, 7, 11])}}, {})
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert (ds.seen.dtype, ds.seen.values.tolist()) == (np.dtype("int64"), [[5, 7, 11]])


def test_layer_names_in_any_language(tmp_path: Path) -> None:
    names = ["conv.1", "слой", "層", ""]
    store = EpochStore(tmp_path / "run.zarr")
    store.create({"": Group({"g": GROUPS[""].variables["images"]}, {name: {"kind": name} for name in names})}, {})
    assert xr.open_zarr(tmp_path / "run.zarr").layer.values.tolist() == names
    assert list(EpochStore(tmp_path / "run.zarr").groups[""].layers) == names
