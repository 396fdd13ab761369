"""Malicious stores are refused with StoreError, in little time and memory, and nothing outside is touched."""

import copy
import json
import os
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from numcodecs.checksum32 import CRC32C
from zarr.storage import ZipStore

from tcnn_probe.storage import EpochStore, StoreError, open_recording, repack
from tcnn_probe.storage.chunks import frame_size
from tcnn_probe.storage.directory import LOCK
from tests.tcnn_probe.storage.tables import (
    MAPS,
    add,
    assert_holds,
    contents,
    create,
    recording,
    values,
)

MAP_SHARD = f"{MAPS}/saliency/c/0/0/0/0/0/0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    recording(tmp_path / "run.zarr", 2)
    return tmp_path / "run.zarr"


def refused(path: Path, message: str, *uses: Callable[[Path], object]) -> None:
    """Assert that each use raises StoreError, within 20 seconds of processor time and 300 MiB."""
    for use in uses or (open_recording, EpochStore):
        # On a loaded machine wall-clock time would exceed the limit.
        start = time.process_time()
        tracemalloc.start()
        try:
            with pytest.raises(StoreError, match=message):
                use(path)
            # A chunk of 256 MiB is allowed; these stores claim far more.
            assert tracemalloc.get_traced_memory()[1] < 300 * 2**20
            assert time.process_time() - start < 20
        finally:
            tracemalloc.stop()


def change(
    path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]
) -> None:
    root = json.loads((path / "zarr.json").read_text())
    edit(root["attributes"], root["consolidated_metadata"]["metadata"])
    (path / "zarr.json").write_text(json.dumps(root))


def cut(
    name: str, shape: list[int], chunk: list[int]
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def edit(_: dict[str, Any], documents: dict[str, Any]) -> None:
        documents[name]["shape"] = shape
        documents[name]["chunk_grid"]["configuration"]["chunk_shape"] = chunk

    return edit


def encoded(name: str, codec: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, documents: documents[name]["codecs"].insert(
        1, {"name": codec, "configuration": {"level": 1}}
    )


def crowded(_: dict[str, Any], documents: dict[str, Any]) -> None:
    documents |= {
        f"name{number}": copy.deepcopy(documents["top1"]) for number in range(20_000)
    }


def attributed(
    name: str, value: Any, array: str = ""
) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def edit(attributes: dict[str, Any], documents: dict[str, Any]) -> None:
        (documents[array]["attributes"] if array else attributes)[name] = value

    return edit


# Python's JSON parser is recursive.
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "edit",
    [
        # Coordinates are read when a store is opened, so their size is limited before.
        cut("head", [10**9], [10**9]),
        cut("head", [10**8], [10**8]),
        cut("head", [3 * 10**7], [1]),
        cut("gate", [2, 3, 5], [10**6, 3, 500]),
        encoded("gate", "gzip"),
        encoded("head", "zstd"),
        crowded,
        attributed("layers", DEEP),
        attributed("missing", DEEP),
        attributed("missing", "[1]"),
        attributed("missing", '{"gate": "no reason"}'),
        attributed("unsupported", 3),
        attributed("image_hashes", "{"),
        attributed("images", "null"),
        attributed("coords", "[]"),
        attributed("coordinates", 3, "gate"),
        attributed("units", 3, "gate"),
        attributed("scale_factor", "x", "epoch"),
        attributed("_FillValue", "x", "entropy"),
    ],
)
def test_malicious_metadata_is_refused(
    path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    change(path, edit)
    refused(path, "has damaged metadata")


def test_the_array_whose_metadata_are_damaged_is_named(path: Path) -> None:
    change(path, encoded("gate", "gzip"))
    refused(path, "'gate': its chunks are encoded by ")


def test_deep_or_large_roots_are_refused(path: Path) -> None:
    (path / "zarr.json").write_text(DEEP)
    refused(path, "or a damaged one")
    with (path / "zarr.json").open("r+b") as file:
        # The file is sparse: 1 TiB that takes no space on the disk.
        file.truncate(2**40)
    refused(path, "of more than 16777216 bytes")


def array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


# A frame gives its length in one byte below 256, and in four beyond 65,791.
@pytest.mark.parametrize("length", [10, 200, 70_000, 10**6])
def test_frame_size_equals_the_length_decoded_by_zstd(length: int) -> None:
    for data in (bytes(length), np.random.default_rng(0).bytes(length)):
        for checksum in (False, True):
            frame = array(numcodecs.zstd.Zstd(1, checksum).encode(data))
            assert frame_size(frame) == length
            assert frame_size(frame[:-1]) is None
            assert frame_size(np.concatenate([frame, frame])) is None
    # RFC 8878 allows a frame without a length.
    assert frame_size(array(b"\x28\xb5\x2f\xfd\x00\x58")) is None
    assert frame_size(array(b"no frame")) is None
    # This frame has 300 empty blocks, of three bytes each, and none is marked as the last.
    assert frame_size(array(b"\x28\xb5\x2f\xfd\x20\x64" + bytes(3 * 300))) is None


@pytest.mark.parametrize(
    ("layer", "lengths"),
    [(0, [2**24]), (slice(None), [2**28]), (0, [132, 2**24])],
    ids=["a part of a shard", "a shard", "a second frame behind the right one"],
)
def test_chunk_that_decodes_to_more_than_allowed(
    path: Path, layer: int | slice, lengths: list[int]
) -> None:
    """Small chunks that decode to far more than a chunk's size, with correct checksums, are refused."""
    frames = [
        numcodecs.zstd.compress(np.zeros(length, np.uint8), 1) for length in lengths
    ]
    bomb = b"".join(frames)
    checksum = CRC32C(location="end")
    chunk = bytes(checksum.encode(bomb))
    index = np.array([[0, len(chunk)]] * 10, "<u8")
    (path / MAP_SHARD).write_bytes(chunk + bytes(checksum.encode(index.tobytes())))
    maps = open_recording(path)[MAPS].saliency
    refused(
        path,
        "compressed from other than 132 bytes",
        lambda _: maps.isel(epoch=0, layer=layer).load(),
    )


# The end of the second kind is 0 in 64 bits.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("place", [(0, 2**40), (2**63, 2**63), (2**63, 64)])
def test_shard_with_ranges_beyond_it(path: Path, place: tuple[int, int]) -> None:
    index = np.array([place] * 10, "<u8")
    (path / MAP_SHARD).write_bytes(
        b"x" * 99 + bytes(CRC32C(location="end").encode(index.tobytes()))
    )
    maps = open_recording(path)[MAPS].saliency
    refused(path, "too large", lambda _: maps.isel(epoch=0, layer=0, head=0).load())


def test_files_larger_than_allowed(path: Path) -> None:
    heads = open_recording(path)["heads"].gate
    maps = open_recording(path)[MAPS].saliency
    for name in ("gate/c/0/0/0", MAP_SHARD):
        with (path / name).open("r+b") as file:
            file.truncate(2**40)
    refused(path, "bytes, expected", lambda _: heads.load())
    refused(path, "checksum", lambda _: maps.isel(epoch=0).load())


@pytest.mark.parametrize(
    ("name", "message"),
    [("zarr.json", "of more than 16777216 bytes"), ("gate/c/0/0/0", "bytes, expected")],
)
def test_zip_files_that_unpack_to_more_than_allowed(
    path: Path, tmp_path: Path, name: str, message: str
) -> None:
    """The file holds 400 MB of zeros in 400 kB."""
    with zipfile.ZipFile(tmp_path / "run.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for file in path.rglob("*"):
            if file.is_file() and file != path / name:
                packed.write(file, file.relative_to(path))
        packed.writestr(name, bytes(4 * 10**8))

    def load(_: Path) -> None:
        open_recording(ZipStore(tmp_path / "run.zip"))["heads"].gate.load()

    refused(path, message, load)


@pytest.mark.parametrize("name", ["zarr.json", "gate/c/0/0/0", "epoch/c/0"])
@pytest.mark.parametrize(
    "kind", ["pipe", "link", "link to a device", "link to a folder"]
)
def test_special_files_are_refused(
    path: Path, tmp_path: Path, name: str, kind: str
) -> None:
    (path / name).rename(tmp_path / "outside")
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "link":
        (path / name).symlink_to(tmp_path / "outside")
    elif kind == "link to a device":
        (path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / "outside").rename(path / name)
        (path / name).parent.rename(tmp_path / "folder")
        (path / name).parent.symlink_to(tmp_path / "folder")
    if (path / name).parent == path and kind == "link to a folder":
        # The whole recording is elsewhere, where users may keep it.
        assert open_recording(path).sizes["epoch"] == 2
        return
    uses = [
        lambda path: open_recording(path)["heads"].gate.load(),
        lambda path: add(create(path), 2),
    ]
    refused(path, "expected a regular file|expected folders", *uses)
    refused(
        path,
        "expected a regular file|expected folders",
        lambda path: repack(path, tmp_path / "packed.zarr"),
    )


@pytest.mark.parametrize(
    ("name", "link"),
    [
        *(
            (name, link)
            for name in (LOCK, ".zarr.json.partial", "gate/c/0/0/.0.partial")
            for link in (os.symlink, os.link)
        ),
        (f"{MAPS}/saliency/c/2", os.symlink),
    ],
)
def test_nothing_outside_is_written(
    path: Path, tmp_path: Path, name: str, link: Callable[..., None]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    link(tmp_path / "outside" / ("" if name.endswith("/c/2") else "file"), path / name)
    before = contents(tmp_path / "outside")
    if "partial" in name:  # the link is deleted like a leftover of a killed run
        add(create(path), 2)
        assert_holds(path, [0, 1, 2])
    else:
        refused(
            path,
            "a link|hard link to another file",
            lambda path: add(create(path), 2),
        )
        assert_holds(path, [0, 1])
    assert contents(tmp_path / "outside") == before


def test_limits_of_reading_apply_to_writing(path: Path) -> None:
    """A root that could not be read again is refused when it is to be written."""
    store = create(path)
    for scalars, attributes in (
        ({f"name{n}": 0.5 for n in range(4000)}, {}),
        ({}, {"text": "x" * 2**24}),
    ):
        with pytest.raises(
            ValueError,
            match="expected at most 4000 arrays and 16777216 bytes of metadata",
        ):
            store.append(2, values(2), scalars, attrs=attributes)
    assert_holds(path, [0, 1])
    assert zarr.open_group(path, mode="r")["gate"].shape[0] == 2
