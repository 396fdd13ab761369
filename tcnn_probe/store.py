"""A recording in zarr, to which whole epochs are added: the only file that knows zarr.

Every chunk of an epoch is written first. Then the root ``zarr.json``, whose consolidated metadata states the length of
every array, is replaced in one step, and that replacement is the commit: a run killed at any moment leaves a store
that opens and holds every epoch committed before, and a reader never sees half an epoch. This needs a store whose
objects appear whole, which zarr's ``LocalStore`` gives since 3.1.3 (temporary name, then rename).
"""

import json
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import xarray as xr
import zarr
from zarr.errors import ZarrUserWarning
from zarr.storage import LocalStore, MemoryStore

from tcnn_probe.schema import COORDINATES, SCHEMA_VERSION, VARIABLES, Variable

__all__ = ["EpochStore", "StoreError"]

_EPOCHS_PER_CHUNK = 256
_SCHEMA = "tcnn_probe_schema"
_LAYERS = "layers"


class StoreError(ValueError):
    """A path that holds something else, or a recording of something else."""


class EpochStore:
    """Epochs of one recording.

    Args:
        path: directory ending where the user likes, ``.zarr`` by custom; None keeps everything in memory. If it holds
            a recording of the same layers, epochs are added to it.
        layers: for each layer's name its "kind" and number of "heads".
        variables: names of the variables of :mod:`tcnn_probe.schema` to be recorded.
        provenance: attributes of a new recording.

    Raises:
        StoreError: the path holds something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        layers: Mapping[str, Mapping[str, Any]],
        variables: list[str],
        provenance: Mapping[str, str],
    ) -> None:
        self._layers = {name: dict(about) for name, about in layers.items()}
        self._shape = (len(layers), max(about["heads"] for about in layers.values()))
        attrs = {**provenance, _SCHEMA: SCHEMA_VERSION, _LAYERS: json.dumps(self._layers)}
        if path is None:
            self._store: MemoryStore | LocalStore = MemoryStore()
            self._create(self._store, variables, attrs)
        else:
            target = _local_directory(path)
            if not _is_vacant(target):
                self._check(target)
                for leftover in target.rglob("*.partial"):  # of a write that a killed run had begun
                    leftover.unlink()
            else:
                self._create_directory(target, variables, attrs)
            self._store = LocalStore(target)
        self._epochs: list[int] = self.dataset()["epoch"].values.tolist()

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs committed so far, ascending."""
        return tuple(self._epochs)

    def append(self, epoch: int, values: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> None:
        """Commit one epoch; durable when it returns.

        Args:
            epoch: later than every one there.
            values: for each variable of the store, shape (layer, head) or (layer,).
            scalars: further values of the epoch. One that is new is NaN for the epochs before; one that is missing
                is NaN for this epoch.
        """
        n = len(self._epochs)
        group = zarr.open_group(self._store, mode="r+", use_consolidated=False)
        root = zarr.open_group(self._store, mode="r", use_consolidated=True)
        committed = set(root.array_keys())
        if (there := cast("zarr.Array[Any]", root["epoch"]).shape[0]) != n:
            raise StoreError(f"another recorder writes to this store: expected {n} epochs in it, found {there}")
        for name in set(group.array_keys()) - committed:  # scalars of an epoch that was never committed
            del group[name]
        for name in scalars.keys() - committed:
            _create_array(group, name, Variable(("epoch",), "", name, "As given to mark()."), (n,))
        row: dict[str, Any] = {"epoch": epoch, **values, **scalars}
        for name, array in group.arrays():
            if _follows_epochs(array):
                array.resize((n + 1, *array.shape[1:]))
                array[n] = row.get(name, np.nan)
        _commit(self._store)
        self._epochs.append(epoch)

    def dataset(self) -> xr.Dataset:
        """The committed epochs, read when looked at."""
        return xr.open_zarr(self._store, chunks=None, consolidated=True)

    def _create(self, store: MemoryStore | LocalStore, variables: list[str], attrs: Mapping[str, Any]) -> None:
        layers, heads = self._shape
        coords = {
            "layer": ("layer", np.array(list(self._layers), dtype=object), COORDINATES["layer"]),
            "head": ("head", np.arange(heads), COORDINATES["head"]),
        }
        xr.Dataset(coords=coords, attrs=dict(attrs)).to_zarr(store, zarr_format=3, consolidated=False, mode="w")
        group = zarr.open_group(store, mode="r+", use_consolidated=False)
        epoch = Variable(("epoch",), "", **COORDINATES["epoch"])
        _create_array(group, "epoch", epoch, (0,), dtype="int64", fill_value=-1)
        for name in variables:
            about = VARIABLES[name]
            _create_array(group, name, about, (0, layers, heads)[: len(about.dims)])
        _commit(store)

    def _create_directory(self, target: Path, variables: list[str], attrs: Mapping[str, Any]) -> None:
        """Under another name first: a run killed meanwhile leaves nothing at ``target``."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"{target} cannot be made: a file stands in its way") from error
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.init")
        try:
            self._create(LocalStore(partial), variables, attrs)
            os.replace(partial, target)
        except BaseException:
            for pause in (0, 0.01, 0.1):  # zarr writes several objects at once: some may land after one has failed
                time.sleep(pause)
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _check(self, target: Path) -> None:
        """Refuse a path that holds no recording, or one of other layers."""
        try:
            root = json.loads((target / "zarr.json").read_text())
            attrs = root["attributes"]
            version = attrs[_SCHEMA]
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = sorted(p.name for p in target.iterdir())[:3] if target.is_dir() else "a file"
            raise StoreError(f"{target} holds something else than a recording ({what}): choose another path") from error
        if version != SCHEMA_VERSION:
            raise StoreError(f"{target} has schema version {version}, expected {SCHEMA_VERSION}: choose another path")
        there, here = json.loads(attrs[_LAYERS]), self._layers
        differing = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if differing or list(there) != list(here):
            name = differing[0] if differing else next(iter(here))
            raise StoreError(
                f"{target} is a recording of other layers ({name!r}: {there.get(name, 'absent')} there, "
                f"{here.get(name, 'absent')} in this model): choose another path"
            )


def _commit(store: MemoryStore | LocalStore) -> None:
    """Replace the root metadata by one that states the arrays as they now are."""
    with warnings.catch_warnings():
        # zarr says that other implementations may not know consolidated metadata; xarray, which reads this, does.
        warnings.filterwarnings("ignore", message="Consolidated metadata", category=ZarrUserWarning)
        zarr.consolidate_metadata(store)


def _create_array(
    group: zarr.Group,
    name: str,
    about: Variable,
    shape: tuple[int, ...],
    *,
    dtype: str = "float64",
    fill_value: float = np.nan,
) -> None:
    attrs: dict[str, Any] = {key: value for key, value in about.attrs.items() if value}
    group.create_array(
        name,
        shape=shape,
        chunks=(_EPOCHS_PER_CHUNK, *shape[1:]),
        dtype=dtype,
        fill_value=fill_value,
        dimension_names=about.dims,
        attributes=dict(attrs),
    )


def _follows_epochs(array: "zarr.Array[Any]") -> bool:
    return (array.metadata.dimension_names or ("",))[0] == "epoch"  # type: ignore[union-attr]


def _local_directory(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise StoreError(f"expected the path of a local directory, got the URL {os.fspath(path)!r}")
    if not os.fspath(path):
        raise StoreError("expected the path of a directory, got an empty one; None keeps the recording in memory")
    return Path(path).expanduser().resolve()  # the working directory may change while recording


def _is_vacant(target: Path) -> bool:
    return not target.exists() or (target.is_dir() and not any(target.iterdir()))
