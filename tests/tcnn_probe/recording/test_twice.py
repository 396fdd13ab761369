"""A script that is run again: continued, replaced or refused, alone and with a checkpoint of the training."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
import zarr
from torch.utils.data import DataLoader, TensorDataset
from zarr.storage import MemoryStore

import tcnn_model
import tcnn_probe
from tests.tcnn_probe.contracts.helpers import images, vit


def script(store: Any, *epochs: int, **options: Any) -> list[int]:
    model = vit()
    with torch.no_grad(), tcnn_probe.record(model, store, **options) as recorder:
        for epoch in epochs:
            model(images())
            recorder.mark(epoch=epoch, top1=epoch / 2)
        return list(recorder.epochs)


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_modes(kind: str, tmp_path: Path) -> None:
    store = tmp_path / "run.zarr" if kind == "directory" else MemoryStore()
    assert script(store, 0, 1, mode="x") == [0, 1]
    with pytest.raises(
        tcnn_probe.StoreError,
        match=r"already exists: mode='a' continues it, mode='w' replaces it",
    ):
        script(store, 0, mode="x")
    assert script(store, 2) == [0, 1, 2]
    assert script(store, mode="w") == []  # which marks nothing, and so deletes nothing
    assert xr.open_zarr(store).top1.values.tolist() == [0, 0.5, 1]
    assert script(store, 1, 3, mode="w", layers="blocks.1") == [1, 3]
    assert xr.open_zarr(store).entropy.sizes == {"epoch": 2, "layer": 1, "head": 3}


def test_replacing_what_is_no_recording_or_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    zarr.open_group(path, mode="w")
    with pytest.raises(tcnn_probe.StoreError, match="something else than a recording"):
        script(path, 0, mode="w")
    (path / "zarr.json").write_text(
        '{"attributes": {"tcnn_probe_schema": "0"}}'
    )  # of another version
    assert script(path, 0, mode="w") == [0]
    model = vit()
    with tcnn_probe.record(model, path) as recorder:
        with pytest.raises(tcnn_probe.StoreError, match="is being written by process"):
            script(path, 0, mode="w")
        model(images())
        recorder.mark(epoch=1)
    assert xr.open_zarr(path).epoch.values.tolist() == [0, 1]


def test_replacing_deletes_nothing_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    assert script(path, 0) == [0]
    (path / "ckpt").mkdir()
    (path / "ckpt" / "model.pt.partial").write_text("mine")
    with pytest.raises(
        tcnn_probe.StoreError,
        match=r"more than a recording, and is not replaced: 'ckpt",
    ):
        script(path, 0, mode="w")
    assert (path / "ckpt" / "model.pt.partial").read_text() == "mine"
    assert xr.open_zarr(path).epoch.values.tolist() == [0]


def test_replacing_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "run.zarr", tmp_path / "link.zarr"
    assert script(path, 0) == [0]
    link.symlink_to(path)
    assert script(link, 3, mode="w") == [3]
    assert link.is_symlink()
    assert xr.open_zarr(path).epoch.values.tolist() == [3]


def test_open_gives_no_advice_for_writing(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "foreign.zarr", mode="w")
    with pytest.raises(
        tcnn_probe.StoreError,
        match=r"foreign\.zarr holds something else .*: tcnn_probe\.open reads what",
    ):
        tcnn_probe.open(tmp_path / "foreign.zarr")


@pytest.mark.parametrize("lost", ["nothing", "mark", "checkpoint"])
def test_resuming_with_a_checkpoint(lost: str, tmp_path: Path) -> None:
    """The recipe of docs/recording.md: stopped after two epochs, in the middle of the second mark, or begun anew."""
    checkpoint, store = tmp_path / "run.pth", tmp_path / "run.zarr"
    data = DataLoader(TensorDataset(images(4), torch.arange(4)), batch_size=4)

    def train(stop: int) -> list[float]:
        model = vit()
        with tcnn_probe.record(
            model, store, mode="a" if checkpoint.exists() else "w"
        ) as recorder:
            results = tcnn_model.finetune(
                model,
                data,
                data,
                epochs=2,
                warmup_epochs=0,
                seed=0,
                checkpoint=checkpoint,
                progress=False,
            )
            for result in itertools.islice(results, stop):
                if lost == "mark" and stop == 2 and result.epoch == 1:
                    break
                recorder.mark(
                    epoch=result.epoch,
                    top1=result.top1,
                    loss=result.val_loss,
                    if_marked="skip",
                )
        return xr.open_zarr(store).loss.values.tolist()

    uninterrupted = train(9)
    for path in (checkpoint, store):
        path.rename(path.with_name(f"whole {path.name}"))
    with (
        pytest.warns(RuntimeWarning, match="4 images measured since")
        if lost == "mark"
        else nullcontext()
    ):
        stopped = train(2)
    assert stopped == uninterrupted[: 1 if lost == "mark" else 2]
    if lost == "checkpoint":
        checkpoint.unlink()
    assert train(9) == uninterrupted
    assert train(9) == uninterrupted
