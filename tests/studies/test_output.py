"""Output folders: what a run wrote is deleted when asked, and nothing else; runs are not mixed."""

from pathlib import Path

import pytest

from common.ending import InputError
from common.output import RunOutput


def test_overwriting_deletes_the_runs_files_only(tmp_path: Path) -> None:
    output = RunOutput(tmp_path, "study", {"seed": 1})
    for path in (
        output.figure,
        output.beside("_maps.png"),
        # Named like the study's own files, but none of them.
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
    RunOutput(tmp_path, "study", {"seed": 2}, resume=True).beside(
        "_other.png"
    ).write_text("more")
    RunOutput(tmp_path, "study", {}, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "study.py",
        "study_checkpoints",
        "study_notes.txt",
    ]


def test_other_files_of_that_name_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "study_notes.txt").write_text("mine")
    RunOutput(tmp_path, "study", {})
    with pytest.raises(InputError, match="already holds study_checkpoints"):
        RunOutput(tmp_path, "study", {})


def test_a_run_with_other_options_is_not_resumed(tmp_path: Path) -> None:
    RunOutput(tmp_path, "study", {"lr": 0.1, "seed": 1})
    with pytest.raises(InputError, match=r"had other options \(lr was 0.1, is 0.2\)"):
        RunOutput(tmp_path, "study", {"lr": 0.2, "seed": 1}, resume=True)
