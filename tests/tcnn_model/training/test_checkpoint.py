"""Interrupted runs resume as if they had not been interrupted."""

import copy
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tcnn_model import EpochResult, finetune
from tcnn_model.training.checkpoint import load_tensors, write_checkpoint
from tests.tcnn_model.tiny_models import (
    batches,
    tiny_cnn,
    tiny_tcnn,
    validation_batches,
)

SETTINGS: dict[str, Any] = {
    "epochs": 4,
    "warmup_epochs": 1,
    "lr": 1e-3,
    "seed": 5,
    # Stochastic depth draws random numbers in each step, which a resumed run has to draw again.
    "drop_path_rate": 0.2,
}


def _run(
    model: nn.Module, path: Path | None, *, stop: int = 99, **changed: Any
) -> list[EpochResult]:
    """Train until epoch ``stop`` is yielded, then stop like a user who breaks out of the loop."""
    results = []
    settings = {**SETTINGS, **changed}
    for result in finetune(
        model,
        batches(),
        validation_batches(),
        checkpoint=path,
        progress=False,
        **settings,
    ):
        results.append(result)
        if result.epoch == stop:
            break
    return results


def _assert_same(actual: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], value), name


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[nn.Module, list[EpochResult]]:
    model = tiny_tcnn()
    return model, _run(model, None)


@pytest.mark.parametrize("stop", [0, 2, 4])
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, stop: int, uninterrupted: tuple[nn.Module, list[EpochResult]]
) -> None:
    """The last case has only the final validation left to do."""
    expected_model, expected = uninterrupted
    model = tiny_tcnn()
    path = tmp_path / "new" / "run.pt"
    assert len(_run(tiny_tcnn(), path, stop=stop)) == stop + 1
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]
    # Numbers that the new process drew before must not matter.
    torch.manual_seed(stop)
    resumed = _run(model, path)
    # Epoch 0 has NaNs, which are equal only in their printed form.
    assert repr(resumed) == repr(expected)
    _assert_same(model, expected_model)


def test_resumed_epochs_have_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    """The last epoch of the checkpoint is validated again,
    so that a recorder sees the trained weights in eval mode.
    """
    _run(tiny_tcnn(), tmp_path / "run.pt", stop=2)
    model = tiny_tcnn()
    modes = []
    model.register_forward_hook(lambda *_: modes.append(model.training))
    run = finetune(
        model,
        batches(),
        validation_batches(),
        checkpoint=tmp_path / "run.pt",
        progress=False,
        **SETTINGS,
    )
    assert [next(run).epoch for _ in range(3)] == [0, 1, 2]
    assert modes == [False, False]  # two batches of epoch 2, and none of earlier epochs
    assert next(run).epoch == 3
    assert modes[2:] == [True] * 3 + [False] * 2


SETTINGS_OF_ANOTHER_RUN: list[tuple[dict[str, Any], str]] = [
    ({"seed": None}, "seed: 5 there, None now"),
    (
        {"gating_lr": 0.2, "weight_decay": 0.0},
        r"gating_lr: 0\.1 there, 0\.2 now; weight_decay: 0\.05 there, 0\.0",
    ),
    ({"drop_path_rate": 0.1}, r"drop_path_rate: 0\.2 there, 0\.1 now"),
]


def test_checkpoint_with_other_settings_is_refused(tmp_path: Path) -> None:
    _run(tiny_tcnn(), tmp_path / "run.pt", stop=0)
    # A refused run must change neither the file nor the model, of which it would set the stochastic
    # depth.
    written = (tmp_path / "run.pt").read_bytes()
    model = tiny_tcnn()
    before = copy.deepcopy(model.state_dict())
    shown = repr(model)
    for changed, message in SETTINGS_OF_ANOTHER_RUN:
        with pytest.raises(
            ValueError,
            match=r"run\.pt belongs to a run with other settings \(" + message,
        ):
            _run(model, tmp_path / "run.pt", **changed)
    assert (tmp_path / "run.pt").read_bytes() == written
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert repr(model) == shown


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    _run(tiny_cnn(), tmp_path / "run.pt", stop=0)
    with pytest.raises((RuntimeError, ValueError), match=r"layer4\.0\.conv1"):
        _run(tiny_tcnn(), tmp_path / "run.pt")


class Augmented(Dataset[tuple[Tensor, int]]):
    """Data set that changes images with the global generators
    of Python and NumPy, as many augmentations do.
    """

    def __init__(self) -> None:
        self._images = torch.randn(6, 1, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._images[index] * random.random() + float(
            np.random.rand()  # noqa: NPY002
        ), index % 3


def _augmented(**options: Any) -> DataLoader[tuple[Tensor, int]]:
    return DataLoader(Augmented(), 3, shuffle=True, generator=torch.Generator(), **options)


def test_resumed_run_draws_the_same_random_numbers(tmp_path: Path) -> None:
    def train(path: Path | None, stop: int) -> nn.Module:
        random.seed(stop)
        np.random.seed(stop)  # noqa: NPY002
        model = tiny_tcnn()
        loader = _augmented()
        loader.generator.manual_seed(stop)  # type: ignore[union-attr]
        for result in finetune(
            model,
            loader,
            validation_batches(),
            checkpoint=path,
            progress=False,
            **SETTINGS,
        ):
            if result.epoch == stop:
                break
        return model

    expected = train(None, 4)
    train(tmp_path / "run.pt", 1)
    _assert_same(train(tmp_path / "run.pt", 4), expected)


def test_persistent_workers_are_refused() -> None:
    loader = _augmented(num_workers=1, persistent_workers=True)
    with pytest.raises(ValueError, match="persistent_workers=False, or no seed"):
        finetune(tiny_tcnn(), loader, validation_batches(), **SETTINGS)


def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    _run(tiny_tcnn(), path, stop=0)
    written = path.read_bytes()
    torch.save({"settings": {}}, tmp_path / "other.pt")
    for content in (
        b"",
        # A copy that was interrupted leaves such a file.
        written[: len(written) // 2],
        b"not a checkpoint",
        (tmp_path / "other.pt").read_bytes(),
    ):
        path.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"run\.pt is damaged, or is not a checkpoint of tcnn_model: ",
        ):
            _run(tiny_tcnn(), path)


def test_each_flipped_bit_of_a_directory_entry_is_refused_or_harmless(
    tmp_path: Path,
) -> None:
    """Some of these bits make torch take the tensor for a folder,
    and return uninitialised memory.
    """
    path = tmp_path / "tensors.pt"
    values = torch.arange(7.0)
    write_checkpoint(path, {"values": values})
    written = path.read_bytes()
    name = b"archive/data/0"
    end = written.rindex(name) + len(name)
    # The checksums of tensors do not cover the zip's directory, which holds their positions.
    entry = range(8 * written.rindex(b"PK\1\2", 0, end), 8 * end)
    refused = 0
    for bit in entry:
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert torch.equal(load_tensors(path)["values"], values), bit
        except ValueError:
            refused += 1
    # Some bits, such as those of the date, are harmless.
    assert 0 < refused < len(entry)


def test_checkpoint_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("replace"), replace(*names)))
    _run(tiny_tcnn(), tmp_path / "run.pt", stop=0)
    assert done == ["fsync", "replace", "fsync"]
