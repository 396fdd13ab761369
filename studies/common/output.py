"""The files of a run: never two runs mixed in one place."""

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from common.ending import InputError

__all__ = ["RunOutput", "plain_labels", "saved_options"]


def saved_options(folder: str | Path, study: str) -> dict[str, Any]:
    """The options of the run that is in a folder; none if there is no run.

    Raises:
        InputError: they cannot be read.
    """
    kept = Path(folder) / f"{study}_checkpoints" / "options.json"
    if not kept.exists():
        return {}
    try:
        return dict(json.loads(kept.read_text()))
    except (ValueError, OSError) as error:
        raise InputError(
            f"--resume: cannot read {kept} ({error}); --overwrite begins anew"
        ) from None


class RunOutput:
    """Where a study writes, all under one folder and named after the study.

    Args:
        folder: the user's output folder.
        study: name of the study.
        options: of the run, kept for ``--resume``.
        later: those that may change when the run is resumed.
        resume: continue what is there.
        overwrite: delete what is there first.

    Raises:
        InputError: there is output already and neither was asked for, or it is of a run with other options.
    """

    def __init__(
        self,
        folder: str | Path,
        study: str,
        options: dict[str, Any],
        *,
        later: Sequence[str] = (),
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.folder, self.study = Path(folder), study
        self.store = self.folder / f"{study}.zarr"
        self.figure = self.folder / f"{study}.png"
        self.checkpoints = self.folder / f"{study}_checkpoints"
        options = json.loads(json.dumps(options))
        kept = self.checkpoints / "options.json"
        self._list = self.checkpoints / "files.json"
        self._further: list[str] = (
            json.loads(self._list.read_text()) if self._list.exists() else []
        )
        paths = (
            self.store,
            self.figure,
            *(self.folder / name for name in self._further),
            self.checkpoints,
        )
        existing = [path for path in paths if path.exists()]
        if overwrite:
            for path in existing:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif existing and not resume:
            names = ", ".join(path.name for path in existing)
            raise InputError(
                f"{self.folder} already holds {names}: pass --resume, --overwrite or another --out"
            )
        elif resume and kept.exists():
            before = saved_options(folder, study)
            fixed = {
                name: value for name, value in options.items() if name not in later
            }
            if differing := [
                f"{k} was {before.get(k)}, is {v}"
                for k, v in fixed.items()
                if before.get(k) != v
            ]:
                raise InputError(
                    f"--resume: the run in {self.folder} had other options ({'; '.join(differing)})"
                )
        self._further = self._further if resume else []
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(options, indent=1))

    def save(self, results: xr.Dataset | xr.DataTree) -> None:
        """Write the numbers, with consolidated metadata: else xarray warns everyone who opens them."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Consolidated metadata"
            )  # not yet in zarr's format 3
            results.to_zarr(self.store, mode="w", consolidated=True)

    def beside(self, ending: str) -> Path:
        """A further file or folder of the run: its study's name with an ending. Noted, so that it can be deleted."""
        path = self.folder / f"{self.study}{ending}"
        if path.name not in self._further:
            self._further.append(path.name)
            self._list.write_text(json.dumps(self._further))
        return path


def plain_labels(dataset: xr.Dataset, *names: str) -> xr.Dataset:
    """The dataset with these texts as objects, as zarr keeps them without a warning of fixed widths."""
    labels = {name: dataset[name].variable.astype(object) for name in names}
    return dataset.drop_encoding().assign(labels)
