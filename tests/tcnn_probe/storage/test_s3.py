"""A recording on a local S3-compatible server, through s3fs, as a URL, and through obstore."""

import asyncio
import errno
import random
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import xarray as xr
from zarr.storage import ObjectStore

from tcnn_probe.storage import StoreError
from tcnn_probe.storage import commit as module
from tests.tcnn_probe.storage.soak import Child, write
from tests.tcnn_probe.storage.tables import add, assert_holds, create, values


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server; importing it takes seconds, so other processes that collect tests do not."""
    _, _, moto = (
        pytest.importorskip(name) for name in ("s3fs", "obstore", "moto.server")
    )
    # Port 0 selects a free port, as tests run in parallel.
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "ACCESS_KEY_ID": "key",
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(f"AWS_{name}", value)
        urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        ).close()
        yield "s3://bucket"
    server.stop()


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    return f"{server}/{request.node.name}.zarr".replace(" ", "-")


def test_killed_and_resumed(url: str) -> None:
    """Two writers are killed at any moment; then plain xarray reads the recording as documented."""
    chance = random.Random(0)
    seeds = list[int]()
    for first in (100, 200):
        writer = Child(write, url, first, 1000, False)
        announced = writer.numbers(1)
        # The wait is long enough for the kill to fall anywhere in one of the next marks.
        time.sleep(chance.uniform(0, 0.3))
        announced += writer.end(kill=True)
        assert announced == list(range(len(seeds), len(seeds) + len(announced)))
        present = xr.open_zarr(url).sizes["epoch"]
        assert 0 <= present - announced[-1] - 1 <= 1
        # The second writer has other values, so that stale objects are noticed.
        seeds += [first + epoch for epoch in range(len(seeds), present)]
        assert_holds(url, dict(enumerate(seeds)))
    store = create(url)
    add(store, present, 7)
    store.close()
    assert_holds(url, dict(enumerate([*seeds, 7])))
    ds = xr.open_zarr(url)
    np.testing.assert_array_equal(ds.gate[-1], values(7)[""]["gate"])


@pytest.mark.parametrize("through", ["s3fs", "obstore"])
@pytest.mark.parametrize("first", [True, False], ids=["first mark", "next mark"])
def test_another_recorder_writes_in_the_middle_of_a_mark(
    url: str, monkeypatch: pytest.MonkeyPatch, through: str, first: bool
) -> None:
    """The server refuses to replace a root that changed after it was compared."""
    import obstore

    at = obstore.store.from_url(url, client_options={"allow_http": True})
    target = url if through == "s3fs" else ObjectStore(at)
    count = 0 if first else 2
    for mark in range(count):
        add(create(target), mark)
    slow, quick = create(target), create(target)
    original = module.put_if
    came = []

    async def meanwhile(*arguments: Any) -> None:
        # The other recorder comes through here as well, so it runs only once.
        if not came:
            came.append(True)
            await asyncio.to_thread(add, quick, count, 5)
        await original(*arguments)

    monkeypatch.setattr(module, "put_if", meanwhile)
    with pytest.raises(
        StoreError,
        match=r"another recorder writes to .*: it was written to in the meantime",
    ):
        add(slow, count, 7)
    assert slow.marks == tuple(range(count))
    add(quick, count + 1)
    assert_holds(
        target,
        {**{mark: mark for mark in range(count)}, count: 5, count + 1: count + 1},
    )


@pytest.mark.parametrize("what", ["answer lost", "no conditional writes"])
def test_servers_with_lost_answers_or_without_conditional_writes(
    url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    import s3fs

    original = s3fs.S3FileSystem._pipe_file

    async def pipe_file(self: Any, path: str, data: bytes, **only: Any) -> None:
        if what == "answer lost":
            await original(self, path, data, **only)
            # This affects only conditional writes: the object is there, and the client is not told.
            if only:
                raise OSError(errno.EIO, "connection lost")
        elif only:
            raise OSError(
                errno.ENOSYS,
                "A header you provided implies functionality that is not implemented",
            )
        else:
            await original(self, path, data)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", pipe_file)
    store = create(url)
    for mark in range(2):
        add(store, mark)
    assert_holds(url, [0, 1])
