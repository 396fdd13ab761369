"""Damaged stores raise an error that says so, and give no other values."""

import json
import random
from pathlib import Path

import pytest
import zarr

from tcnn_probe.storage import EpochStore, StoreError, open_recording
from tests.tcnn_probe.storage.tables import add, assert_holds, create, recording

# The next mark extends their chunks.
EXTENDED = ("gate", "top1", "layer_scale/scale", "epoch")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recording(tmp_path / "run.zarr", 2)
    return tmp_path / "run.zarr"


def mark(path: Path) -> None:
    store = create(path)
    try:
        add(store, 2)
    finally:
        store.close()


def load(path: Path) -> None:
    for node in open_recording(path).subtree:
        node.to_dataset().load()


@pytest.mark.study(but=["a bit", "missing"])
@pytest.mark.parametrize("damage", ["a bit", "half", "empty", "missing"])
def test_every_damaged_chunk_is_noticed(path: Path, damage: str) -> None:
    """A missing chunk would be read as NaN and copied."""
    chance = random.Random(0)
    files = [p for p in path.rglob("*") if p.is_file() and p.name != "zarr.json"]
    # With an empty list everything below would pass.
    assert len(files) > 17
    for file in files:
        name = str(file.relative_to(path)).split("/c/")[0]
        intact = file.read_bytes()
        place = chance.randrange(len(intact))
        flipped = bytearray(intact)
        flipped[place] ^= 1 << chance.randrange(8)
        data = {"a bit": flipped, "half": intact[: len(intact) // 2], "empty": b""}
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(data[damage])
        error, message = ValueError, "checksum|bytes|Zstd"
        if damage in ("empty", "missing"):
            error, message = StoreError, f"the chunk '{name}/c/.* empty or not there"
        for use in (load, mark) if name in EXTENDED else (load,):
            with pytest.raises(error, match=message):
                use(path)
        # zarr alone reads a missing chunk as fill values.
        if damage in ("a bit", "half"):
            with pytest.raises(ValueError, match=r"checksum|bytes"):
                zarr.open_group(path, mode="r")[name][...]
        file.write_bytes(intact)
    # The restored store is as good as before.
    add(create(path), 2)
    assert_holds(path, [0, 1, 2])


def test_damaged_roots_are_refused(path: Path) -> None:
    text = (path / "zarr.json").read_text()
    document = json.loads(text)
    epoch = document["consolidated_metadata"]["metadata"]["epoch"]
    epoch["shape"] = []
    # As xarray writes a copy of isel(epoch=-1).
    one_mark = json.dumps(document)
    del epoch["shape"]
    # xarray writes such a copy with consolidated=False.
    alone = {k: v for k, v in document.items() if k != "consolidated_metadata"}
    for broken, message in (
        ("", "or a damaged one"),
        (text[:-1], "or a damaged one"),
        ("[]", "or a damaged one"),
        (json.dumps(document), "has damaged metadata"),
        (one_mark, r"as after isel\(epoch=\[-1\]\)"),
        (json.dumps(alone), "need zarr.consolidate_metadata"),
    ):
        (path / "zarr.json").write_text(broken)
        for read in (open_recording, EpochStore):
            with pytest.raises(StoreError, match=message):
                read(path)
