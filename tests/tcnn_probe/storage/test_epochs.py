"""Marks: accepted and refused ones, and their division into chunks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tcnn_probe.schema import Group
from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tcnn_probe.storage.marks import chunk_shape
from tests.tcnn_probe.storage.tables import (
    GROUPS,
    MAPS,
    Crash,
    Remote,
    add,
    assert_holds,
    create,
    steps,
    values,
)


@pytest.mark.parametrize(
    ("row", "itemsize", "chunk"),
    [
        ((), 8, (64,)),  # at most 64 marks
        ((23, 31), 8, (45, 23, 31)),  # of numbers, at most 256 kB, which each mark rewrites
        ((24, 4, 16, 14, 14), 2, (1, 24, 4, 16, 14, 14)),  # of maps, a mark
        ((24, 4, 16, 64, 64), 4, (1, 16, 4, 16, 64, 64)),  # but at most 16 MB
        ((0, 5), 8, (64, 1, 5)),
    ],
)
def test_chunks_have_a_bounded_size(
    row: tuple[int, ...], itemsize: int, chunk: tuple[int, ...]
) -> None:
    assert chunk_shape(row, itemsize) == chunk


def test_marks_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcnn_probe.storage.marks.MOST_MARKS", 4)
    store = create(path := Remote())
    for mark in range(9):
        add(store, mark, **({"late": mark / 7} if mark > 5 else {}))
        if mark in (2, 3, 4, 7):  # the store is resumed on both sides of a boundary
            store = create(path)
    assert_holds(store, list(range(9)), {"late": {mark: mark / 7 for mark in range(6, 9)}})
    assert store.groups == GROUPS
    store.close()
    unconsolidated = zarr.open_group(path, mode="r", use_consolidated=False)
    assert [
        unconsolidated[name].shape[0] for name in ("epoch", "gate", "late", f"{MAPS}/saliency")
    ] == [9] * 4


def test_another_default_format_of_zarr() -> None:
    with zarr.config.set({"default_zarr_format": 2}):
        store = create(Remote())
        for mark in range(2):
            add(store, mark)
        assert_holds(store, [0, 1])
    store.close()


def with_late_layer(groups: Mapping[str, Group], number: int) -> dict[str, Group]:
    """Return the groups with one more layer, of more heads, and another group of maps."""
    grown = {}
    for path, group in groups.items():
        layers = {**group.layers, f"late.{number}": {"kind": "late"}}
        sizes = {**group.sizes, "head": group.sizes["head"] + 3}
        grown[path] = replace(group, layers=layers, sizes=sizes)
    return grown | {f"maps/{number}": groups[MAPS]}


def row_of(groups: Mapping[str, Group], mark: int) -> dict[str, dict[str, np.ndarray]]:
    generator = np.random.default_rng(mark)
    return {
        path: {
            name: generator.integers(0, 2000, group.shape(name)).astype(about.dtype)
            for name, about in group.variables.items()
        }
        for path, group in groups.items()
    }


def assert_rows(place: Any, groups: Sequence[Mapping[str, Group]]) -> None:
    """Assert that each mark has the values of its groups, and fill values around them."""
    tree = open_recording(place)
    assert tree.epoch.values.tolist() == list(range(len(groups)))
    for path, group in groups[-1].items():
        for name in group.variables:
            array = tree[path or "heads"][name].values
            expected = np.full_like(array, -1 if array.dtype.kind == "i" else np.nan)
            for mark, by_path in enumerate(groups):
                if path in by_path and name in by_path[path].variables:
                    row = row_of(by_path, mark)[path][name]
                    expected[mark][tuple(slice(0, size) for size in row.shape)] = row
            np.testing.assert_array_equal(array, expected, err_msg=f"{path}/{name}")


@pytest.mark.study
def test_layers_join_and_a_crash_meanwhile_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers join on both sides of a boundary of chunks, and within a chunk of layers."""
    monkeypatch.setattr("tcnn_probe.storage.marks.MOST_MARKS", 4)
    path = tmp_path / "run.zarr"
    groups = {"": Group({}, {})}
    store = EpochStore(path)
    stored: list[dict[str, Group]] = []
    for mark in range(9):
        if mark == 1:  # a recording may begin with scalars alone
            groups = {path: GROUPS[path] for path in ("", MAPS)}
        elif mark in (2, 6, 7):
            groups = with_late_layer(groups, mark)
        if mark in (1, 2, 6, 7):
            # The array is wider already, and has no fill values yet for the marks before.
            with steps(0, "replace .*5x3x11/saliency/c/"), pytest.raises(Crash):
                store.append(mark, groups, row_of(groups, mark), {})
            assert_rows(path, stored)
            store.close()
            store = EpochStore(path)
        store.append(mark, groups, row_of(groups, mark), {})
        stored.append(groups)
    assert_rows(path, stored)
    store.close()
    assert EpochStore(path).groups == groups
    unconsolidated = zarr.open_group(path, mode="r", use_consolidated=False)
    assert unconsolidated["layer"][:].tolist() == [*groups[""].layers]


def test_marks_that_are_not_integers(tmp_path: Path) -> None:
    store = create(tmp_path / "run.zarr", along="tokens")
    # The first mark decides the kind: later integers become floats.
    for mark, seed in {0.5: 1, 1: 2, np.float32(2.25): 3}.items():
        add(store, mark, seed)
        store.close()
        store = create(tmp_path / "run.zarr", along="tokens")
    assert [(mark, type(mark)) for mark in store.marks] == [
        (mark, float) for mark in (0.5, 1.0, 2.25)
    ]
    assert_holds(tmp_path / "run.zarr", {0.5: 1, 1.0: 2, 2.25: 3}, {}, along="tokens")


def test_wrong_marks_and_values_are_refused() -> None:
    store = create(None)
    right = values(1)
    for mark in (0, 1):
        add(store, mark)
    for wrong, message in (
        (2.5, "expected an integer for 'epoch' as for the marks before, got 2.5"),
        (1, "epoch 1 is already marked"),
        (math.nan, "later than the last one marked, 1, got nan"),
    ):
        with pytest.raises(StoreError, match=message):
            add(store, wrong, 2)
    for target_store in (store, create(None)):
        for name in ("gate", "epoch", "layer", "maps", "heads", "a/b"):
            with pytest.raises(ValueError, match=f"'{name}' is the name of something else"):
                target_store.append(2, GROUPS, right, {name: 1.0})
    assert_holds(store, [0, 1])
