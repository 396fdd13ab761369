"""A recording on a local S3-compatible server, through s3fs, as a URL, and through obstore."""

import random
import time
import urllib.request
from collections.abc import Iterator

import pytest
import xarray as xr
from zarr.storage import ObjectStore

from tests.extras import need
from tests.tcnn_probe.storage.soak import Child, write
from tests.tcnn_probe.storage.tables import add, assert_holds, create


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start a server; importing it takes seconds, so other processes that collect tests do not."""
    need("s3fs")
    need("obstore")
    moto = need("moto.server")
    # Port 0 selects a free port, as tests run in parallel.
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
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
    """A writer is killed at any moment; then plain xarray and zarr read the recording."""
    writer = Child(write, url, 100, 1000, False)
    announced = writer.numbers(1)
    # The wait is long enough for the kill to fall anywhere in one of the next marks.
    time.sleep(random.Random(0).uniform(0, 0.3))
    announced += writer.end(kill=True)
    assert announced == list(range(len(announced)))
    present = xr.open_zarr(url).sizes["epoch"]
    assert 0 <= present - len(announced) <= 1
    seeds = range(100, 100 + present)
    assert_holds(url, dict(enumerate(seeds)))
    # The second writer has other values, so that stale objects are noticed.
    store = create(url)
    add(store, present, 7)
    store.close()
    assert_holds(url, dict(enumerate([*seeds, 7])))


def test_a_store_of_obstore(url: str) -> None:
    import obstore

    at = obstore.store.from_url(url, client_options={"allow_http": True})
    for mark in range(2):
        add(create(ObjectStore(at)), mark)
    assert_holds(url, [0, 1])
