"""Output folders: overwriting deletes only what a run wrote, and runs are not mixed."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from common.output import InputError, RunOutput


def test_overwriting_deletes_only_the_files_of_the_run(tmp_path: Path) -> None:
    output = RunOutput(tmp_path, "study", {"seed": 1})
    for path in (
        output.figure,
        output.beside("_maps.png"),
        # These are named like the study's own files, but do not belong to the run.
        tmp_path / "study_notes.txt",
        tmp_path / "study.py",
    ):
        path.write_text("here")
    output.beside("_run.zarr").mkdir()
    again = RunOutput(tmp_path, "study", {"seed": 2}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "study.py",
        "study_checkpoints",
        "study_notes.txt",
    ]
    again.beside("_maps.png").write_text("new")
    RunOutput(tmp_path, "study", {"seed": 2}, resume=True).beside("_other.png").write_text("more")
    RunOutput(tmp_path, "study", {}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "study.py",
        "study_checkpoints",
        "study_notes.txt",
    ]


def test_other_files_with_the_name_of_the_study_are_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "study_notes.txt").write_text("mine")
    RunOutput(tmp_path, "study", {})
    with pytest.raises(InputError, match="already holds study_checkpoints"):
        RunOutput(tmp_path, "study", {})


def test_a_run_with_other_options_is_not_resumed(tmp_path: Path) -> None:
    RunOutput(tmp_path, "study", {"lr": 0.1, "seed": 1})
    with pytest.raises(InputError, match=r"had other options \(lr was 0.1, is 0.2\)"):
        RunOutput(tmp_path, "study", {"lr": 0.2, "seed": 1}, resume=True)


def test_finished_seeds_are_not_measured_again(tmp_path: Path) -> None:
    """A run that was killed in its third seed resumes with that seed and keeps its attributes."""
    output, args = RunOutput(tmp_path, "study", {}), Namespace(seed=3, seeds=3)
    measured: list[int] = []

    def measure(seed: int) -> xr.Dataset:
        if len(measured) == 2:
            measured.append(0)
            raise KeyboardInterrupt
        measured.append(seed)
        values = {"top1": (("seed", "model"), [[seed / 8, 0.5]])}
        names = {"seed": [seed], "model": np.array(["cnn", "vit"])}
        return xr.Dataset(values, names, {"classes": 10})

    with pytest.raises(KeyboardInterrupt):
        output.by_seed(args, measure)
    again = RunOutput(tmp_path, "study", {}, resume=True)
    results = again.by_seed(args, measure)
    assert measured == [3, 4, 0, 5]
    assert results.top1.values.tolist() == [[3 / 8, 0.5], [4 / 8, 0.5], [5 / 8, 0.5]]
    assert results.seed.values.tolist() == [3, 4, 5]
    assert results.attrs == {"classes": 10}
