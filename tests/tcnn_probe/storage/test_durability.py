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


@pytest.mark.parametrize("fresh", [{}, {"fresh": 0.5}], ids=["same scalars", "new scalar"])
def test_chunks_reach_the_disk_before_the_root(tmp_path: Path, fresh: dict[str, float]) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0, top1=0.25)
    before = contents(path)
    with steps() as done:
        add(store, 1, **fresh)
    new = {name: data for name, data in contents(path).items() if before.get(name, 0) != data}
    files = [path / name for name, data in new.items() if data is not None]
    # These are the root, and the lengths and chunks of marks and variables; of top1, which has no
    # value, the length.
    assert len(files) == 1 + 2 * (3 + 5 + len(fresh)) + 1
    files.remove(path / "zarr.json")
    last = durable(done, files, [path / name for name, data in new.items() if data is None])
    root = [
        f"fsync {path}/.zarr.json.partial",
        f"replace {path}/zarr.json",
        f"fsync {path}",
    ]
    assert last < done.index(root[0])
    assert done[-3:] == root


def test_first_mark_fills_a_folder_and_renames_it(tmp_path: Path) -> None:
    """A folder of another name is filled; the last step brings its own name to the disk."""
    path = tmp_path / "a" / "b" / "run.zarr"
    with steps() as done:
        add(create(path), 0)
    filled = Path(next(step for step in done if step.endswith("/zarr.json")).split()[1]).parent
    while filled.suffix != ".init":
        filled = filled.parent
    assert filled.parent == path.parent
    written_files = {
        filled / name: data for name, data in contents(path).items() if not name.startswith(".")
    }
    files = [
        name
        for name, data in written_files.items()
        if data is not None and name != filled / "zarr.json"
    ]
    last = durable(done, files, [name for name, data in written_files.items() if data is None])
    root = [
        f"fsync {filled}/.zarr.json.partial",
        f"replace {filled}/zarr.json",
        f"fsync {filled}",
    ]
    parents = [f"fsync {folder}" for folder in (path.parent, path.parent.parent, tmp_path)]
    assert last < done.index(root[0])
    assert done[done.index(root[0]) :] == [*root, f"replace {path}", *parents]
