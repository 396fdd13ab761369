"""What is on the disk, and in which order, when a mark returns: after a loss of power it is all there."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.tcnn_probe.storage.tables import MAPS, add, assert_holds, contents, create, dies, steps


def durable(done: list[str], changed: Iterable[Path], folders: Iterable[Path]) -> int:
    """When the last of these files and new folders was on the disk: itself before its name, its name before that."""
    times = []
    for path in changed:
        written, named = done.index(f"fsync {path.parent}/.{path.name}.partial"), done.index(f"replace {path}")
        assert written < named
        times.append(done.index(f"fsync {path.parent}", named))
    return max(times + [done.index(f"fsync {folder.parent}") for folder in folders])


@pytest.mark.parametrize("fresh", [{}, {"fresh": 0.5}], ids=["same scalars", "new scalar"])
def test_chunks_then_the_root(tmp_path: Path, fresh: dict[str, float]) -> None:
    path = tmp_path / "run.zarr"
    store = create(path)
    add(store, 0, top1=0.25)
    before = contents(path)
    with steps() as done:
        add(store, 1, **fresh)
    new = {name: data for name, data in contents(path).items() if before.get(name, 0) != data}
    files = [path / name for name, data in new.items() if data is not None]
    assert len(files) == 1 + 3 + 6 + 2 * len(fresh)  # root, marks of the groups, variables
    files.remove(path / "zarr.json")
    last = durable(done, files, [path / name for name, data in new.items() if data is None])
    root = [f"fsync {path}/.zarr.json.partial", f"replace {path}/zarr.json", f"fsync {path}"]
    assert (last < done.index(root[0]), done[-3:]) == (True, root)


def test_what_does_not_change_is_not_written(tmp_path: Path) -> None:
    """The third mark writes its map and the root alone; one of the numbers changes with the fifth."""
    store, seeds = create(path := tmp_path / "run.zarr"), {10: 7, 13: 7, 16: 7, 19: 7, 22: 8}
    for mark, seed in seeds.items():
        with steps(on="^replace") as done:
            add(store, mark, seed, top1=0.5)
        written = [step.removeprefix(f"replace {path}/") for step in done]
        if mark in (16, 19):
            assert written == [f"{MAPS}/saliency/c/{[*seeds].index(mark)}/0/0/0/0/0", "zarr.json"]
        else:
            assert len(written) > 4
    assert_holds(path, seeds, {"top1": dict.fromkeys(seeds, 0.5)})
    dies(store)
    add(again := create(path), 23, 8)
    add(again, 30, 8)
    assert_holds(path, seeds | {23: 8, 30: 8}, {"top1": dict.fromkeys(seeds, 0.5)})


def test_first_mark(tmp_path: Path) -> None:
    """A folder of another name is filled; the last step is that its own name is on the disk."""
    path = tmp_path / "a" / "b" / "run.zarr"
    with steps() as done:
        add(create(path), 0)
    filled = Path(next(step for step in done if step.endswith("/zarr.json")).split()[1]).parent
    while filled.suffix != ".init":
        filled = filled.parent
    assert filled.parent == path.parent
    there = {filled / name: data for name, data in contents(path).items() if not name.startswith(".")}
    files = [name for name, data in there.items() if data is not None and name != filled / "zarr.json"]
    last = durable(done, files, [name for name, data in there.items() if data is None])
    root = [f"fsync {filled}/.zarr.json.partial", f"replace {filled}/zarr.json", f"fsync {filled}"]
    parents = [f"fsync {folder}" for folder in (path.parent, path.parent.parent, tmp_path)]
    assert last < done.index(root[0])
    assert done[done.index(root[0]) :] == [*root, f"replace {path}", *parents]
