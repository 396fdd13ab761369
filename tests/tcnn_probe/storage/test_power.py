"""Loss of power: the bytes of a mounted disk hold every mark that has returned."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tcnn_probe.storage.tables import assert_holds

WRITER = """
import sys
from tests.tcnn_probe.storage.tables import add, create
store = create(sys.argv[1])
for mark in range(4):
    add(store, mark, top1=mark / 7, **({"fresh": 0.5} if mark == 2 else {}))
    print(mark, flush=True)
    sys.stdin.readline()
"""


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    folder.mkdir()
    run = subprocess.run(
        ["mount", "-o", "loop", image, folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        pytest.skip(f"no loop device can be mounted here: {run.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount a disk"
)
def test_a_disk_copied_after_each_mark_holds_the_mark(tmp_path: Path) -> None:
    """The copy, taken below the file system, holds the data on the disk; its journal is replayed when it is mounted."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(8 * 2**20)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with mounted(image, tmp_path / "disk") as disk:
        command = [sys.executable, "-c", WRITER, disk / "run.zarr"]
        with subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer:
            for mark in range(4):
                assert writer.stdout.readline() == f"{mark}\n"
                shutil.copyfile(image, tmp_path / f"{mark}.img")
                print(file=writer.stdin, flush=True)
    for mark in range(4):
        with mounted(tmp_path / f"{mark}.img", tmp_path / f"disk{mark}") as disk:
            fresh = {"fresh": {2: 0.5}} if mark >= 2 else {}
            assert_holds(
                disk / "run.zarr",
                list(range(mark + 1)),
                {"top1": {n: n / 7 for n in range(mark + 1)}, **fresh},
            )
