"""Fine-tuning runs that are killed at any moment, resumed,
read meanwhile and recorded anew, and then compared.

    python -m tests.tcnn_probe.callbacks.training_soak --minutes 60

Each round trains each kind of run to its end, with as many kills and resumptions as it takes. The
checkpoint, the best weights, the table of epochs and the recording must equal those of an
uninterrupted run. Then a process that may be killed replaces the finished recording with
``mode="w"``: either the old or the new one must remain.
"""

import csv
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import tcnn_probe
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tests.tcnn_model.training.runs import TINY, assert_same_weights, last_checkpoint
from tests.tcnn_probe.storage.soak import Child, Tell, main

KINDS: dict[str, dict[str, Any]] = {
    "converted from the first step": {"reparameterize_at": 0},
    "converted after an epoch, with averaged weights": {
        "reparameterize_at": 1,
        "ema": 0.9,
    },
    "augmented": {"reparameterize_at": 0, "mixup": 0.8, "random_erasing": 0.5},
}
LAST_EPOCH = 3


def settings_of(kind: str, out: Path) -> Config:
    """Return the settings of a run of four epochs of three steps each,
    with a checkpoint after each step.
    """
    return Config(
        model="resnet18",
        model_options=TINY,
        out=str(out),
        # Three steps of eight images.
        limit=24,
        batch_size=8,
        epochs=LAST_EPOCH,
        warmup_epochs=1,
        img_size=64,
        lr=1e-2,
        checkpoint_steps=1,
        **KINDS[kind],
    )


def run_to_the_end(settings: Config, tell: Tell) -> None:
    """Start or resume a run, and report each epoch once it is recorded."""
    resume = (Path(settings.out) / "config.toml").exists()
    for result in train(settings, resume=resume, progress=False):
        tell(result.epoch)


def assert_recorded(out: Path, uninterrupted: Path, recorded: int, tell: Tell) -> None:
    """Compare a recording with that of the uninterrupted run, and report its number of epochs."""
    expected = xr.open_datatree(uninterrupted / "recording.zarr", engine="zarr")
    actual = tcnn_probe.open(out / "recording.zarr")
    marks = actual.sizes["epoch"]
    assert recorded <= marks <= LAST_EPOCH + 1
    tell(marks)
    values = 0
    for name, variable in actual.variables.items():
        reference = expected.to_dataset()[name] if name in expected else None
        assert reference is not None, name
        if "epoch" in variable.dims:
            reference = reference.isel(epoch=slice(marks))
        np.testing.assert_array_equal(variable.values, reference.values, str(name))
        values += variable.size
    tell(values)


def assert_complete(settings: Config, uninterrupted: Path, tell: Tell) -> None:
    """Compare the files of a finished run with those of the uninterrupted one."""
    out = Path(settings.out)
    files = [{path.relative_to(run) for path in run.rglob("*.pt")} for run in (out, uninterrupted)]
    assert files[0] == files[1]
    assert not [*out.rglob("*.partial")]
    expected = last_checkpoint(settings_of("augmented", uninterrupted))
    assert_same_weights(last_checkpoint(settings), expected)
    best, expected_best = (
        torch.load(run / "best.pt", weights_only=True) for run in (out, uninterrupted)
    )
    assert best["epoch"] == expected_best["epoch"]
    for name, value in expected_best["state_dict"].items():
        assert torch.equal(best["state_dict"][name], value), name
    tables = [
        list(csv.DictReader((run / "epochs.csv").read_text().splitlines()))
        for run in (out, uninterrupted)
    ]
    assert tables[0] == tables[1]


def record_anew(store: Path, tell: Tell) -> None:
    """Replace a recording by a new one, which has a single mark of an untrained transformer."""
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3).eval()
    with tcnn_probe.record(model, store, mode="w") as recorder:
        tell(0)
        with torch.no_grad():
            model(torch.rand(2, 3, 32, 32))
        recorder.mark(epoch=0, top1=-1.0)


def accuracies(store: Path, tell: Tell) -> None:
    """Report the number of marks of a recording, and whether it is the new one."""
    top1 = tcnn_probe.open(store).top1.values
    tell(top1.size)
    tell(int(top1[0] == -1.0))


class Soak:
    """Runs of each kind, one after the other, with ``counts`` of events."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        # Kills come within the time that each kind takes without interruption, so that they fall
        # anywhere in it.
        self.seconds: dict[str, float] = {}
        for number, kind in enumerate(KINDS):
            begun = time.monotonic()
            Child(run_to_the_end, settings_of(kind, self._uninterrupted(number))).end()
            self.seconds[kind] = time.monotonic() - begun

    def round(self) -> None:
        """Run each kind once."""
        for number, kind in enumerate(KINDS):
            out = self.folder / "run"
            self.run(kind, out, self._uninterrupted(number))
            self.replace(out / "recording.zarr")
            shutil.rmtree(out)
            self.counts["runs"] += 1
            print(f"{dict(self.counts)}", flush=True)

    def run(self, kind: str, out: Path, uninterrupted: Path) -> None:
        """Train, kill, read and resume until the run is complete."""
        settings = settings_of(kind, out)
        patience = self.seconds[kind]
        marks = 0
        announced = set[int]()
        while marks <= LAST_EPOCH:
            trainer = Child(run_to_the_end, settings)
            time.sleep(self.chance.uniform(0, patience))
            # On a machine that has become slower, a run would otherwise never finish an epoch.
            patience *= 1.1
            if marks and self.chance.random() < 0.5:  # a reader runs beside the trainer
                Child(assert_recorded, out, uninterrupted, marks).end()
                self.counts["reads beside a training"] += 1
            announced |= {*trainer.end(kill=True)}
            self.counts["kills"] += 1
            if (out / "recording.zarr" / "zarr.json").exists():
                present, values = Child(assert_recorded, out, uninterrupted, len(announced)).end()
                assert present >= marks
                self.counts["marks"] += present - marks
                self.counts["values"] += values
                marks = present
            else:
                assert not announced
        # Completes what the last kill left undone.
        Child(run_to_the_end, settings).end()
        Child(assert_complete, settings, uninterrupted).end()

    def replace(self, store: Path) -> None:
        """Replace a recording in its store, and sometimes kill the process meanwhile."""
        recorder = Child(record_anew, store)
        recorder.numbers(1)
        time.sleep(self.chance.uniform(0, 0.3))
        # Some processes may finish, so that both outcomes occur.
        recorder.end(kill=self.chance.random() < 0.7)
        marks, is_new = Child(accuracies, store).end()
        assert marks == (1 if is_new else LAST_EPOCH + 1)
        self.counts["replaced" if is_new else "kept"] += 1

    def _uninterrupted(self, number: int) -> Path:
        return self.folder / f"uninterrupted-{number}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Soak, __doc__)
