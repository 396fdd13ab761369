"""Several recordings opened as one, compared with xarray's own concatenation in memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from tcnn_probe.schema import Group, Variable

# open is the public name.
from tcnn_probe.storage import EpochStore, StoreError, open, open_recording  # noqa: A004
from tests.extras import need

MAPS = "maps/3x2x5"


def _record(
    path: Path, layers: Sequence[str], heads: int, marks: Sequence[float], about: dict[str, Any]
) -> Path:
    """Record numbers of every head, a class index, the rate, and maps of a layer of three heads."""
    groups = {
        "": Group(
            {
                "gate": Variable(("layer", "head"), "1", "gate", "The gate."),
                "best": Variable(("layer",), "1", "best", "A class.", dtype="int64"),
            },
            {name: {"kind": "gpsa", "heads": heads} for name in layers},
            {"head": heads},
        )
    }
    if heads == 3:
        look = Variable(("layer", "head", "y", "x"), "1", "look", "A map.", dtype="float16")
        groups[MAPS] = Group({"look": look}, {layers[0]: {}}, {"head": 3, "y": 2, "x": 5})
    store = EpochStore(path)
    rng = np.random.default_rng(len(layers) + heads)
    for mark in marks:
        values = {
            place: {
                name: (100 * rng.random(group.shape(name))).astype(variable.dtype)
                for name, variable in group.variables.items()
            }
            for place, group in groups.items()
        }
        store.append(mark, groups, values, {"lr": mark / 7}, attrs=about)
    store.close()
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two recordings that agree and one with other layers, heads and marks."""
    root = tmp_path_factory.mktemp("runs")
    alike = [{"seed": seed, "lr": 0.1, "missing": "{}"} for seed in (0, 1)]
    missing = json.dumps({"gate": {"c": "why"}})
    other = {"seed": 5, "lr": 0.2, "recipe": "deit", "missing": missing, "classes": [1]}
    paths = [root / f"seed{seed}/recording.zarr" for seed in (0, 1, 5)]
    for path, about in zip(paths[:2], alike, strict=True):
        _record(path, ["a", "b"], 3, range(4), about)
    # The other recordings have two of these marks, but not the third.
    _record(paths[2], ["c", "b"], 2, [1, 3, 5], other)
    return paths


def _in_memory(paths: Sequence[Path], group: str) -> xr.Dataset:
    members = [open_recording(path)[group].to_dataset().load() for path in paths]
    names = xr.DataArray([path.parent.name for path in paths], dims="run", name="run")
    fill = {"best": -1} if "best" in members[0] else {}
    options = {"join": "outer", "combine_attrs": "drop", "coords": "minimal", "compat": "override"}
    return xr.concat(members, names, fill_value=fill or np.nan, **options)  # type: ignore[call-overload]


def test_runs_are_joined(three: list[Path]) -> None:
    tree = open(path for path in three)
    heads = tree["heads"].dataset
    maps = tree[MAPS].dataset
    root = tree.dataset
    assert heads.run.values.tolist() == ["seed0", "seed1", "seed5"]
    assert dict(heads.sizes) == {"run": 3, "epoch": 5, "layer": 3, "head": 3}
    for joined, expected in (
        (heads, _in_memory(three, "heads")),
        (root, _in_memory(three, "/")),
        (maps, _in_memory(three[:2], MAPS).reindex(run=heads.run, epoch=heads.epoch)),
    ):
        for name in expected.data_vars:
            aligned = expected[name].reindex_like(joined).transpose(*joined[name].dims)
            np.testing.assert_array_equal(joined[name], aligned)
            assert joined[name].dtype == aligned.dtype
            # xarray has no public way to ask whether an array was read.
            assert not joined[name]._in_memory
    assert heads.best.sel(run="seed0", layer="c").values.tolist() == [-1] * 5
    assert maps.look.attrs["description"] == "A map."


@pytest.mark.parametrize(
    "key",
    [
        {"run": 2, "layer": 2},
        {"run": [2, 0], "epoch": [4, 1, 1], "head": slice(None, None, -1)},
        {"run": slice(1, None), "epoch": slice(1, 4, 2), "layer": [2, 1]},
        {"epoch": [], "head": -1},
    ],
)
def test_parts_read_lazily_equal_parts_of_the_whole(three: list[Path], key: dict[str, Any]) -> None:
    # Parts are read lazily from the stores and compared with numpy's indexing of the whole.
    complete = open(three)["heads"].gate
    np.testing.assert_array_equal(complete.isel(key), complete.load().isel(key))


def test_differences_are_coordinates_and_absences_are_reported(three: list[Path]) -> None:
    tree = open(three)
    assert tree.seed.values.tolist() == [0, 1, 5]
    assert tree.recipe.values.tolist() == ["", "", "deit"]
    assert tree.classes.values.tolist() == ["", "", "[1]"]
    # This coordinate is next to the scalar of that name.
    assert tree.run_lr.values.tolist() == [0.1, 0.1, 0.2]
    assert tree["heads"].lr.values.tolist() == [0.1, 0.1, 0.2]
    assert tree["heads"].gate.groupby("seed").mean(...).sizes == {"seed": 3}
    assert json.loads(tree.attrs["absent"]) == {
        "seed0": {"epoch": [5], "heads/layer": ["c"]},
        "seed1": {"epoch": [5], "heads/layer": ["c"]},
        "seed5": {"epoch": [0, 2], "heads/layer": ["a"], "heads/head": [2], "groups": [MAPS]},
    }
    assert json.loads(tree.attrs["missing"]) == {
        "seed0": {},
        "seed1": {},
        "seed5": {"gate": {"c": "why"}},
    }
    layers = json.loads(tree["heads"].attrs["layers"])
    assert layers == {
        "a": {"kind": "gpsa", "heads": 3},
        "b": {"kind": "gpsa"},
        "c": {"kind": "gpsa", "heads": 2},
    }


def test_attributes_with_the_name_of_a_group(tmp_path: Path) -> None:
    """A coordinate and a group cannot have the same name, and no name can be a path."""
    names = ("heads", "maps", "run", "epoch", "gate", "optimizer/lr")
    about = [dict.fromkeys(names, run) for run in range(2)]
    paths = [_record(tmp_path / f"{run}.zarr", ["a"], 3, range(2), about[run]) for run in range(2)]
    tree = open(paths)
    assert {*tree.groups} == {"/", "/heads", "/maps", f"/{MAPS}"}
    for group in (tree, tree["heads"], tree[MAPS]):
        for name in ("run_heads", "run_maps", "run_run", "run_epoch", "optimizer.lr"):
            assert group[name].values.tolist() == [0, 1]
    assert tree["heads"].run_gate.values.tolist() == tree.gate.values.tolist() == [0, 1]


def test_names_of_runs(three: list[Path]) -> None:
    assert open({"one": three[0], "two": three[0]}).run.values.tolist() == ["one", "two"]
    assert open([three[0]]).run.values.tolist() == ["recording"]
    with pytest.raises(
        ValueError, match=r"expected different recordings, got .*a mapping gives them names"
    ):
        open([three[0], three[0]])
    with pytest.raises(ValueError, match="expected at least one recording"):
        open([])
    with pytest.raises(StoreError, match="holds no recording"):
        open([three[0], three[0].parent / "nothing.zarr"])


def test_a_scalar_has_the_name_of_the_dimension(tmp_path: Path) -> None:
    for name, number in (("a", 3), ("b", 5)):
        store = EpochStore(tmp_path / name)
        store.append(0, {"": Group({}, {})}, {"": {}}, {"run": number})
        store.close()
    joined = open([tmp_path / "a", tmp_path / "b"])
    assert joined.run.values.tolist() == ["a", "b"]
    assert joined.run_run.values.tolist() == [[3], [5]]


def test_marks_of_two_kinds_are_refused(three: list[Path], tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "steps.zarr", along="step")
    store.append(0, {"": Group({}, {})}, {"": {}}, {})
    with pytest.raises(
        StoreError, match=r"expected the same marks in all, got marks along \['epoch', 'step'\]"
    ):
        open([three[0], tmp_path / "steps.zarr"])


@pytest.mark.filterwarnings("default")  # these warnings come from dask
def test_reductions_by_dask_equal_those_of_numpy(three: list[Path]) -> None:
    need("dask")
    maps = open(three)[MAPS].look
    by_dask = maps.chunk(run=1, epoch=2, head=2).astype(float)
    assert by_dask.chunks is not None
    expected = np.nanmean(maps.values.astype(float), axis=(0, 1))
    # dask adds float64 numbers chunk by chunk, in another order.
    np.testing.assert_allclose(by_dask.mean(["run", "epoch"]).compute(), expected, rtol=1e-12)
