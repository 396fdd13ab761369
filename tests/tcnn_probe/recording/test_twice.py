"""A script that runs again continues, replaces or is refused,
alone and with a checkpoint of the training.
"""

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import xarray as xr
from torch import nn
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
def test_modes_continue_replace_or_refuse(kind: str, tmp_path: Path) -> None:
    store = tmp_path / "run.zarr" if kind == "directory" else MemoryStore()
    assert script(store, 0, 1, mode="x") == [0, 1]
    with pytest.raises(
        tcnn_probe.StoreError, match=r"already exists: mode='a' continues it, mode='w' replaces it"
    ):
        script(store, 0, mode="x")
    assert script(store, 2) == [0, 1, 2]
    assert script(store, mode="w") == []  # without a mark nothing is deleted
    assert xr.open_zarr(store).top1.values.tolist() == [0, 0.5, 1]
    assert script(store, 1, 3, mode="w", layers="blocks.1") == [1, 3]
    # Nothing is left of the old recording, which had two layers.
    assert xr.open_zarr(store).entropy.sizes == {"epoch": 2, "layer": 1, "head": 3}


def test_misspelled_arguments_are_answered_with_suggestions() -> None:
    model = vit()
    with (
        tcnn_probe.record(model) as recorder,
        pytest.raises(TypeError, match=r"takes the epoch by name: mark\(epoch=0\)"),
    ):
        recorder.mark(0)
    with pytest.raises(TypeError, match=r"names or globs of layers.*got -1.*'blocks.1.attn'"):
        tcnn_probe.attention_maps(model, images(), layers=-1)


def test_logging_reports_silent_decisions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tcnn_probe")
    script(tmp_path / "run.zarr", 0)
    assert caplog.messages == ["recording 2 layers: blocks.0.attn, blocks.1.attn"]
    caplog.clear()
    model = vit()
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        model(images())
        recorder.mark(epoch=0, if_marked="skip")
    assert caplog.messages[0].endswith("run.zarr holds 1 epoch: continuing")
    assert caplog.messages[1] == "epoch 0 is marked already: skipped"


def test_replacing_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    link = tmp_path / "link.zarr"
    assert script(path, 0) == [0]
    link.symlink_to(path)
    assert script(link, 3, mode="w") == [3]
    assert link.is_symlink()
    assert xr.open_zarr(path).epoch.values.tolist() == [3]


def one_epoch(model: nn.Module, recorder: tcnn_probe.Recorder, epoch: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()(images()).sum().backward()
    optimizer.step()
    model.eval()(images())
    recorder.mark(epoch=epoch)


@pytest.mark.parametrize("part", ["none", "seed", "one bias"])
def test_a_training_that_continues_with_other_weights_is_warned_about(
    part: str, tmp_path: Path
) -> None:
    """The warning comes before the first step;
    weights of the checkpoint and models of other shapes cause none.
    """
    model = vit()
    store = tmp_path / "run.zarr"
    with tcnn_probe.record(model, store) as recorder:
        one_epoch(model, recorder, 0)
        one_epoch(model, recorder, 1)
    resumed = vit(seed=part == "seed")
    if part != "seed":
        resumed.load_state_dict(model.state_dict())
    if part == "one bias":
        # The change is far smaller than that of a training step.
        resumed.blocks[1].mlp.fc2.bias.data += 1e-6
    caught = pytest.warns(RuntimeWarning, match="continues from weights other")
    with tcnn_probe.record(resumed, store) as recorder:
        with caught if part != "none" else nullcontext():
            resumed.train()(images())
        one_epoch(resumed, recorder, 2)
    # The number of heads is the same, so the store accepts the model, but its weights have another
    # shape.
    with tcnn_probe.record(vit(mlp_ratio=3), store) as recorder:
        one_epoch(recorder._model, recorder, 3)


def test_weights_swapped_in_for_validation_cause_no_warning(tmp_path: Path) -> None:
    model = vit()
    store = tmp_path / "run.zarr"
    trained = {}
    with tcnn_probe.record(model, store) as recorder:
        for epoch in range(2):
            model.load_state_dict(trained or model.state_dict())
            model.train()(images())
            trained = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                model.head.bias += 1  # stands for averaged weights
            model.eval()(images())
            recorder.mark(epoch=epoch)
    model.load_state_dict(trained)
    with tcnn_probe.record(model, store) as recorder:
        one_epoch(model, recorder, 2)


@pytest.mark.study
@pytest.mark.parametrize("lost", ["nothing", "mark", "checkpoint"])
def test_resuming_with_a_checkpoint(lost: str, tmp_path: Path) -> None:
    """The recipe of docs/recording.md works
    for trainings stopped between marks or in a mark, or begun anew.
    """
    checkpoint = tmp_path / "run.pth"
    store = tmp_path / "run.zarr"
    data = DataLoader(TensorDataset(images(4), torch.arange(4)), batch_size=4)

    def train(stop: int) -> list[float]:
        model = vit()
        with tcnn_probe.record(model, store, mode="a" if checkpoint.exists() else "w") as recorder:
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
                # The checkpoint is written and the mark is not.
                if lost == "mark" and stop == 2 and result.epoch == 1:
                    break
                recorder.mark(
                    epoch=result.epoch, top1=result.top1, loss=result.val_loss, if_marked="skip"
                )
        return xr.open_zarr(store).loss.values.tolist()

    # This is more than there are epochs.
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
