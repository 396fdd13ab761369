"""Two processes train like one: with the same images and the same loss,
and each validation image once.
"""

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor  # imported before processes are forked
import xarray as xr

from tcnn_model.training import command, loop
from tcnn_model.training.config import Config
from tcnn_model.training.data import Images
from tcnn_model.training.distributed import Processes, joined
from tcnn_model.training.evaluation import evaluate
from tcnn_model.training.session import RunFolder
from tests.tcnn_model.training.runs import (
    assert_same_weights,
    config,
    finish,
    fork,
    last_checkpoint,
)

# The model has layer norms only, as batch norms would see other batches. The 27 validation images
# divide into 14 and 13.
PLAIN: dict[str, Any] = {
    "model": "deit_tiny_patch16_224",
    "limit": 27,
    "epochs": 2,
    "lr": 1e-3,
    # The augmentation draws random numbers, which have to depend on the image and not on the
    # process.
    "random_erasing": 0.5,
}
PLAIN |= {
    "model_options": {"embed_dim": 24, "depth": 1, "num_heads": 3},
    # The two copies of an image may be in different processes.
    "repeated_augmentation": 2,
    "ema": 0.5,
}
PLAIN |= {"watcher": Config.watcher, "clip_grad": 1.0}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """Return the last checkpoint and the folder of a training in one process."""
    folder = tmp_path_factory.mktemp("one")
    return finish(config(folder, **PLAIN, batch_size=8)), folder


@pytest.mark.parametrize(("device", "index"), [(None, 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_is_named_by_its_number(
    device: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.set_device refuses a GPU without a number."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with joined(device) as processes:
        assert [processes.device] == chosen == [torch.device("cuda", index)]


# What the process of a rank does before a step of its training.
Interruption = tuple[int, Callable[[int], None]]


def _killed(rank: int) -> None:
    """Exit like a killed process, which writes nothing any more."""
    os._exit(0)


def _of_rank(
    settings: Config, rank: int, port: int, *, resume: bool, before: Interruption | None
) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    )
    make_step = loop.Training.make_step
    steps = []

    def counted(self: Any, *arguments: Any) -> None:
        if before is not None and len(steps) == before[0]:
            before[1](rank)
        make_step(self, *arguments)
        steps.append(None)

    loop.Training.make_step = (
        counted  # the process ends after this call, so the patch is not undone
    )
    finish(settings, resume=resume)


def _in_two(settings: Config, *, resume: bool = False, before: Interruption | None = None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {"resume": resume, "before": before}
    processes = [fork(partial(_of_rank, settings, rank, port, **options)) for rank in range(2)]
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]


@pytest.mark.study
@pytest.mark.parametrize("distribute", ["ddp", "fsdp"])
def test_two_processes_train_like_one(
    distribute: str, single: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Losses, weights and recorded statistics agree;
    with FSDP, the run is also killed and resumed.
    """
    settings = config(tmp_path, **PLAIN, batch_size=4, distribute=distribute, checkpoint_steps=1)
    if distribute == "fsdp":
        _in_two(settings, before=(4, _killed))
    _in_two(settings, resume=distribute == "fsdp")
    two = last_checkpoint(settings)
    expected, folder = single
    for actual, target in zip(two["history"][1:], expected["history"][1:], strict=True):
        # Two processes add their gradients in another order than one, and training amplifies the
        # rounding.
        assert actual == pytest.approx(target, rel=1e-4)
    # If an image were validated twice, the denominator would differ.
    assert two["history"][0]["top1"] in [n / 27 for n in range(28)]
    for name, value in expected["ema"].items():
        torch.testing.assert_close(two["ema"][name], value, rtol=1e-3, atol=1e-4)
    recorded, alone = (xr.open_zarr(place / "recording.zarr") for place in (tmp_path, folder))
    assert recorded.images.values.tolist() == [[27]] * 3
    for name in alone.data_vars:
        np.testing.assert_allclose(
            recorded[name], alone[name], rtol=1e-5, atol=1e-5, err_msg=str(name)
        )


# A T-CNN has batch norms, whose running statistics differ between processes, and heads to record.
NORMED: dict[str, Any] = {
    "img_size": 64,
    "reparameterize_at": 0,
    "limit": 27,
    "batch_size": 4,
    "lr": 1e-2,
    "ema": 0.5,
}
# One epoch of three steps: test_two_processes_train_like_one resumes in the second of two.
NORMED |= {"watcher": Config.watcher, "epochs": 1, "warmup_epochs": 0}


@pytest.mark.study
@pytest.mark.parametrize("distribute", ["ddp", "fsdp"])
def test_reported_saved_and_resumed_statistics_are_the_same(
    distribute: str, tmp_path: Path
) -> None:
    """Reported losses are those of the saved weights, and a killed run resumes bit for bit."""
    settings = config(tmp_path / "whole", **NORMED, distribute=distribute, checkpoint_steps=1)
    killed = replace(settings, out=str(tmp_path / "killed"))

    def keep(rank: int) -> None:
        """Keep the files that a kill would leave, and go on."""
        if rank == 0:
            shutil.copytree(settings.out, killed.out)

    _in_two(settings, before=(2, keep))
    complete = last_checkpoint(settings)
    processes = Processes(0, 1, torch.device("cpu"))
    alone, images = command._prepare(settings, RunFolder(settings, processes))
    for part, loss, accuracy in (
        ("model", "val_loss", "top1"),
        ("ema", "ema_val_loss", "ema_top1"),
    ):
        alone.model.load_state_dict(complete[part])
        validated = evaluate(alone.model, images.validation(), progress=False)
        reported = complete["history"][-1]
        assert (reported[loss], reported[accuracy]) == pytest.approx(
            validated, rel=8 * torch.finfo(torch.float32).eps
        )

    assert (tmp_path / "killed" / "checkpoints" / "within.pt").exists()
    _in_two(killed, resume=True)
    assert_same_weights(last_checkpoint(killed), complete)
    expected, resumed = (
        xr.open_zarr(Path(run.out) / "recording.zarr") for run in (settings, killed)
    )
    for name in expected.data_vars:
        np.testing.assert_array_equal(resumed[name], expected[name], err_msg=str(name))


class _Numbers:
    classes = ("a", "b")

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> tuple[int, int]:
        return index, index

    def name(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_image_is_in_one_process_only(count: int, tmp_path: Path) -> None:
    settings = config(tmp_path, batch_size=4, limit=None, repeated_augmentation=2)

    def numbers(rank: int) -> Any:
        processes = Processes(rank, count, torch.device("cpu"))
        transform = torch.tensor
        images = Images(
            # Sizes are primes: neither the number of processes nor the batch size divides them.
            _Numbers(31),
            _Numbers(13),
            (transform, transform),
            settings,
            processes,
        )  # type: ignore[arg-type]
        images.begin(3)
        return [images.training(0), images.validation()]

    shares = [numbers(rank) for rank in range(count)]
    validated = sorted(
        index for _, batches in shares for _, labels in batches for index in labels.tolist()
    )
    assert validated == list(range(13))
    trained = [index for batches, _ in shares for _, labels in batches for index in labels.tolist()]
    assert len(trained) == 31 // (4 * count) * 4 * count
    times = [trained.count(index) for index in {*trained}]
    # Each image occurs as often as augmentation is repeated.
    assert max(times) == 2
    assert len({*trained}) == len(trained) // 2
    alone = Images(
        _Numbers(31),
        _Numbers(13),
        (int, int),
        settings,
        Processes(0, 1, torch.device("cpu")),
    )  # type: ignore[arg-type]
    assert {*trained} == {*alone.order(3)[: len(trained)].tolist()}
    assert not torch.equal(alone.order(3), alone.order(4))
