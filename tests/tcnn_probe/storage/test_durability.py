"""Order in which files reach the disk before a mark returns,
so that all survive a loss of power.
"""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tcnn_probe.storage.tables import add, contents, create, steps


def durable(done: list[str], changed: Iterable[Path], folders: Iterable[Path]) -> int:
    """Return the step at which the last file and new folder was on the disk,
    a file being synced before it is named.
    """
    times = []
    for path in changed:
        written = done.index(f"fsync {path.parent}/.{path.name}.partial")
        named = done.index(f"replace {path}")
        assert written < named
        times.append(done.index(f"fsync {path.parent}", named))
    return max(times + [done.index(f"fsync {folder.parent}") for folder in folders])


@pytest.mark.parametrize("mark", ["the first", "same scalars", "new scalar"])
def test_chunks_reach_the_disk_before_the_root(tmp_path: Path, mark: str) -> None:
    """The first mark fills a folder of another name,
    and its last step brings its own name to the disk.
    """
    path = tmp_path / "a" / "b" / "run.zarr"
    store, before, folder = create(path), {}, path
    if mark == "the first":
        folder = path.with_name(".run.zarr.tcnn_probe.init")
    else:
        add(store, 0, top1=0.25)
        before = contents(path)
    with steps() as done:
        add(store, 1, **({"fresh": 0.5} if mark == "new scalar" else {}))
    new = {name: data for name, data in contents(path).items() if before.get(name, 0) != data}
    files = [folder / name for name, data in new.items() if data is not None]
    if mark != "the first":
        # These are the root, and the lengths and chunks of marks and variables; of top1, which has
        # no value, the length.
        assert len(files) == 1 + 2 * (3 + 5 + (mark == "new scalar")) + 1
    files.remove(folder / "zarr.json")
    last = durable(done, files, [folder / name for name, data in new.items() if data is None])
    commit = [
        f"fsync {folder}/.zarr.json.partial",
        f"replace {folder}/zarr.json",
        f"fsync {folder}",
    ]
    assert last < done.index(commit[0])
    if mark == "the first":
        commit += [f"replace {path}", f"fsync {path.parent}"]
        assert done[:2] == [f"fsync {tmp_path}", f"fsync {tmp_path / 'a'}"]
    assert done[-len(commit) :] == commit
