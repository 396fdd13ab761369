"""Damaged stores raise an error that says so, give no other values and lead to no files outside."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zarr

from tcnn_probe.schema import difference
from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tests.tcnn_probe.storage.tables import (
    MAPS,
    add,
    assert_holds,
    create,
    recording,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recording(tmp_path / "run.zarr", 2)
    return tmp_path / "run.zarr"


def test_every_flipped_byte_of_every_chunk_is_noticed(path: Path) -> None:
    """Flip bits in each file at eight places; files are numbers, shards with their index, labels and the marks."""
    chance = random.Random(0)
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "zarr.json"]
    # With an empty list everything below would pass.
    assert len(files) > 17
    for file in files:
        name = str(file.relative_to(path)).split("/c/")[0]
        intact = file.read_bytes()
        # The places are the first and last byte and six more, as all bytes of all files would take minutes.
        places = [
            0,
            len(intact) - 1,
            *(chance.randrange(len(intact)) for _ in range(6)),
        ]
        damaged = [
            intact[:n]
            + bytes([intact[n] ^ (1 << chance.randrange(8))])
            + intact[n + 1 :]
            for n in places
        ]
        # Half a file, as left by a full disk or an incomplete copy, is added. The checksum must detect truncated data
        # as well.
        for data in (*damaged, intact[: len(intact) // 2]):
            file.write_bytes(data)
            with pytest.raises(ValueError, match=r"checksum|bytes"):
                zarr.open_group(path, mode="r")[name][...]
        # The package's own reading meets one of the damaged files.
        file.write_bytes(damaged[0])
        with pytest.raises(StoreError, match=f"the chunk '{name}/c/.* is damaged"):
            load(path)
        # The next mark extends the chunks of these.
        if name in (
            "gate",
            "top1",
            "layer_scale/scale",
        ):
            with pytest.raises(StoreError, match=f"'{name}/c/.* is damaged"):
                mark(path)
        file.write_bytes(intact)
    # After all this, the restored store is as good as before.
    add(create(path), 2)
    assert_holds(path, [0, 1, 2])


def mark(path: Path) -> None:
    store = create(path)
    try:
        add(store, 2)
    finally:
        store.close()


def load(path: Path) -> None:
    for node in open_recording(path).subtree:
        node.to_dataset().load()


def test_every_empty_or_missing_chunk_is_noticed(path: Path) -> None:
    """A missing chunk would be read as NaN, extended and copied."""
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "zarr.json"]
    assert len(files) > 17
    for file in files:
        name = str(file.relative_to(path)).split("/c/")[0]
        data = file.read_bytes()
        # zarr itself reads a missing chunk as NaN.
        uses = [load]
        if name in ("gate", "top1", "layer_scale/scale", "epoch"):
            uses.append(mark)
        for damage in (file.unlink, lambda file=file: file.write_bytes(b"")):
            damage()
            for use in uses:
                with pytest.raises(StoreError, match="empty or not there"):
                    use(path)
            file.write_bytes(data)
    add(create(path), 2)
    assert_holds(path, [0, 1, 2])


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in (
        tree
        if isinstance(tree, dict)
        else range(len(tree))
        if isinstance(tree, list)
        else ()
    ):
        yield (*at, key)
        yield from places(tree[key], (*at, key))


def test_damaged_roots_are_refused_or_read(path: Path) -> None:
    """A root with a part deleted or replaced raises no error other than StoreError."""
    text = (path / "zarr.json").read_text()
    root = json.loads(text)
    chance = random.Random(1)
    refused = 0
    # These are a sample of hundreds of places, which would take a minute.
    for at in chance.sample(sorted(places(root), key=str), 70):
        damaged = inner = copy.deepcopy(root)
        wrong = chance.choice(
            [None, -1, 2**70, 0.5, "", "x", [], ["x"], {}, {"x": 1}, "delete"]
        )
        # The place may be deep in the tree; the last key is changed.
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = wrong
        if wrong == "delete":
            del inner[at[-1]]
        (path / "zarr.json").write_text(json.dumps(damaged))
        try:
            open_recording(path)
            groups = EpochStore(path).groups
            assert groups is not None
            assert difference(groups, groups) is None
        except StoreError:
            refused += 1
    # At least half of the changes do harm; others, as to a description, may be read.
    assert refused > 35
    for broken in (
        "",
        text[:100],
        text[:-1],
        "[]",
        "3",
        '"x"',
        "\x00",
        '{"attributes": []}',
    ):
        (path / "zarr.json").write_text(broken)
        for read in (open_recording, EpochStore):
            with pytest.raises(StoreError, match="or a damaged one"):
                read(path)


@pytest.mark.parametrize(
    ("name", "shape"), [("gate", [3, 3, 5]), (f"{MAPS}/saliency", [2, 2, 2, 5, 3, 12])]
)
def test_lengths_of_arrays_that_do_not_fit(
    path: Path, name: str, shape: list[int]
) -> None:
    root = json.loads((path / "zarr.json").read_text())
    root["consolidated_metadata"]["metadata"][name]["shape"] = shape
    (path / "zarr.json").write_text(json.dumps(root))
    with pytest.raises(
        StoreError,
        match=r"damaged metadata.*(unequal lengths|has the shape)",
    ):
        open_recording(path)
