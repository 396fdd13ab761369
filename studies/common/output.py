"""Output files of a run, which are never mixed with those of another run;
refusals, and the exit code of a study.
"""

import argparse
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import xarray as xr
from matplotlib.figure import Figure

__all__ = [
    "InputError",
    "RunOutput",
    "ended",
    "finish",
    "has_own_images",
    "refused",
    "saved_options",
    "seeds_of",
    "write_whole",
]

REFUSED, NOT_SEEN, INTERRUPTED = 2, 3, 130  # 1 is Python's own, for a crash

NOT_SAVED = ("out", "resume", "overwrite", "device", "workers")
"""Options that do not affect a study's results."""


class InputError(Exception):
    """Input of a user that a study cannot use. The message says what to do."""


@contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these types, which the user's input caused, into refusals."""
    try:
        yield
    except kinds as error:
        raise InputError(str(error) or type(error).__name__) from error


def ended(main: Any, arguments: list[str] | None = None) -> int:
    """Run a study and return the exit code of ``main``,
    or 2 for a refusal, with a message but no traceback.
    """
    try:
        return main(arguments)
    except InputError as error:
        # The message of an error in a loading process begins with its traceback.
        reason = str(error).rpartition("InputError: ")[2].strip()
        print(f"{Path(main.__code__.co_filename).name}: {reason}", file=sys.stderr)
        # argparse exits with the same code for wrong options.
        return REFUSED
    except KeyboardInterrupt:
        print("\ninterrupted; the same command with --resume continues", file=sys.stderr)
        return INTERRUPTED


def finish(passed: bool, args: argparse.Namespace) -> int:
    """Return the exit code after the checks of a study: 3 if they fail on all of the digits.

    There a check that fails is a fault in the code or a matter of chance to look into. On the
    user's own images it is a finding, and the small form trains too little to decide.
    """
    if passed:
        return 0
    if has_own_images(args):
        print(
            "The checks say what the digits show. On your own data they are findings, not errors."
        )
    elif args.small:
        print("The small form shows that the study runs; its checks need the full form.")
    else:
        return NOT_SEEN
    return 0


def has_own_images(args: argparse.Namespace) -> bool:
    """Return whether images are the user's; those of studies of one model come with the model."""
    if "data" in args:
        return args.data not in ("digits", None)
    return bool(getattr(args, "model", None))


def saved_options(folder: str | Path, study: str) -> dict[str, Any]:
    """Return the options of the run in a folder; empty if there is no run.

    Raises:
        InputError: The options cannot be read.
    """
    file = Path(folder) / f"{study}_checkpoints" / "options.json"
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text()))
    except (ValueError, OSError) as error:
        raise InputError(
            f"--resume: cannot read {file} ({error}); --overwrite begins anew"
        ) from None


Results = xr.Dataset | xr.DataTree


def seeds_of(args: argparse.Namespace) -> range:
    """Return the seeds of a command line with ``--seed``, the first one, and ``--seeds``."""
    return range(args.seed, args.seed + args.seeds)


class RunOutput:
    """Files of a study, all under one folder and named after the study.

    Args:
        folder: Output folder of the user.
        study: Name of the study.
        options: Options of the run, saved for ``--resume``.
        later: Options that may change when the run is resumed.
        resume: Whether to continue the run that is there.
        overwrite: Whether to delete the run that is there first.

    Raises:
        InputError: There is output already and neither ``resume`` nor ``overwrite`` is set, or the
            run to resume had other options.
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
        self.folder = Path(folder)
        self.study = study
        self.store = self.folder / f"{study}.zarr"
        self.figure = self.folder / f"{study}.png"
        self.checkpoints = self.folder / f"{study}_checkpoints"
        # Options take the form in which the file returns them: tuples become lists.
        options = json.loads(json.dumps(options))
        options_file = self.checkpoints / "options.json"
        # Names of further files are kept on the disk, since another process may overwrite the run.
        self._list = self.checkpoints / "files.json"
        self._further: list[str] = json.loads(self._list.read_text()) if self._list.exists() else []
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
        # Output may be hours of training, and is deleted only on request.
        elif existing and not resume:
            names = ", ".join(path.name for path in existing)
            raise InputError(
                f"{self.folder} already holds {names}: pass --resume, --overwrite or another --out"
            )
        elif resume and options_file.exists():
            before = saved_options(folder, study)
            fixed = {name: value for name, value in options.items() if name not in later}
            # Otherwise checkpoints of one recipe would be continued with another.
            if differing := [
                f"{k} was {before.get(k)}, is {v}" for k, v in fixed.items() if before.get(k) != v
            ]:
                raise InputError(
                    f"--resume: the run in {self.folder} had other options ({'; '.join(differing)})"
                )
        self._further = self._further if resume else []
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        options_file.write_text(json.dumps(options, indent=1))

    @classmethod
    def from_args(
        cls,
        args: argparse.Namespace,
        study: str,
        *,
        later: Sequence[str] = (),
        unsaved: Sequence[str] = (),
    ) -> "RunOutput":
        """Open the output folder that a command line asks for.

        Args:
            args: Command line of the study.
            study: Name of the study.
            later: Options that may change when the run is resumed.
            unsaved: Options that do not affect the results, besides those of every study.

        Raises:
            InputError: The folder cannot be used; see the class.
        """
        options = {
            name: value for name, value in vars(args).items() if name not in (*NOT_SAVED, *unsaved)
        }
        return cls(
            args.out,
            study,
            options,
            later=later,
            resume=args.resume,
            overwrite=args.overwrite,
        )

    def once(self, name: str, measure: Callable[[], xr.Dataset]) -> xr.Dataset:
        """Return the numbers of a part of the study, from disk if a killed run has measured it.

        Args:
            name: Name of the part, and of its store among the checkpoints.
            measure: Function that returns the numbers.
        """
        path = self.checkpoints / f"{name}.zarr"
        if not path.exists():
            write_whole(measure(), path)
        return xr.open_zarr(path, consolidated=False).load()

    def by_seed(self, args: argparse.Namespace, measure: Callable[[int], xr.Dataset]) -> xr.Dataset:
        """Measure with each seed and return the results along ``seed``;
        seeds of a killed run are read from disk.

        Args:
            args: Command line with ``seed``, the first one, and ``seeds``, their number.
            measure: Function that trains with a seed, and returns a dataset of length 1 along
                ``seed``.
        """
        parts = []
        for seed in seeds_of(args):
            parts.append(self.once(f"seed-{seed:04d}", partial(measure, seed)))
            print(f"seed {seed} is done", flush=True)
        return xr.concat(parts, "seed", combine_attrs="override")

    def save(self, results: Results) -> None:
        """Write the numbers with consolidated metadata,
        without which xarray warns everyone who opens them.
        """
        if isinstance(results, xr.DataTree):
            plain = results.map_over_datasets(_with_plain_text)
        else:
            plain = _with_plain_text(results)
        with warnings.catch_warnings():
            # zarr warns that its format 3 does not specify consolidated metadata yet.
            warnings.filterwarnings("ignore", "Consolidated metadata")
            plain.to_zarr(self.store, mode="w", consolidated=True)

    def show(self, figure: Figure, *texts: str, dpi: int = 200, files: Sequence[Path] = ()) -> None:
        """Write the figure, and print the tables of a study and where its files are.

        Args:
            figure: Figure.
            texts: Tables and sentences to print.
            dpi: Resolution of the figure.
            files: Further files of the study, to be named.
        """
        figure.savefig(self.figure, dpi=dpi)
        for text in texts:
            print(text)
        *first, last = map(str, (self.store, self.figure, *files))
        print(f"wrote {', '.join(first)} and {last}")

    def beside(self, ending: str) -> Path:
        """Return the path of a further file or folder of the run: the study's name with an ending.

        The name is saved, so that ``--overwrite`` can delete the file.
        """
        path = self.folder / f"{self.study}{ending}"
        if path.name not in self._further:
            self._further.append(path.name)
            self._list.write_text(json.dumps(self._further))
        return path


def write_whole(dataset: xr.Dataset, path: Path) -> None:
    """Write a dataset atomically, so that a store
    of this name is complete even if the run is killed.
    """
    partial = path.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    _with_plain_text(dataset).to_zarr(partial, consolidated=False)
    os.replace(partial, path)


def _with_plain_text(dataset: xr.Dataset) -> xr.Dataset:
    """Return the dataset with strings as objects,
    which zarr stores without a warning about fixed widths.
    """
    texts = {
        name: variable.astype(object)
        for name, variable in dataset.variables.items()
        if variable.dtype.kind in "UT"  # NumPy's strings of fixed and variable width
    }
    # Encodings come from the stores that were read, and their chunks may not fit these arrays.
    return dataset.drop_encoding().assign(texts)
