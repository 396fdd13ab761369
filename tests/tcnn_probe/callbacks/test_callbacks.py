"""The real Trainer of Hugging Face and Lightning,
for a few steps: each validation is a mark with the right numbers.
"""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tcnn_probe.callbacks.scalars import float_metrics
from tcnn_probe.recording.recorder import Recorder
from tests.extras import need
from tests.tcnn_probe.contracts.helpers import Trace, entropies, images, vit

# These packages may warn, but our own warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")


def data(count: int) -> TensorDataset:
    return TensorDataset(images(count), torch.arange(count) % 5)


def classifier(metric: str) -> Any:
    """Return a LightningModule that logs its loss,
    and keeps its entropies and losses at each validation.
    """
    pl = need("lightning.pytorch")

    class Classifier(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit()
            self.truth: list[Tensor] = []
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.vit(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            loss = F.cross_entropy(self.vit(batch[0]), batch[1])
            self.losses.append(float(loss))
            self.log(metric, loss)

        def on_validation_epoch_end(self) -> None:
            twin = vit()
            twin.load_state_dict(self.vit.state_dict())
            self.truth.append(entropies(twin, images(7)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.vit.parameters(), 0.1)

    return Classifier()


def lightning_trainer(callback: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(
        (
            "logger",
            "enable_checkpointing",
            "enable_progress_bar",
            "enable_model_summary",
        ),
        False,
    )
    return need("lightning.pytorch").Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        **quiet,
        **options,
    )


def test_lightning_marks_each_validation(tmp_path: Path) -> None:
    need("lightning.pytorch")
    from tcnn_probe.callbacks.lightning import RecordCallback

    marked: list[tuple[int | float, ...]] = []
    model = classifier("val/loss")
    recording = RecordCallback(
        tmp_path / "run.zarr",
        health=True,
        on_mark=lambda recorder: marked.append(recorder.epochs),
    )
    before = Trace(model.vit).hooks
    trainer = lightning_trainer(recording)
    # Seven images in batches of four: neither the number of batches nor that of full batches times
    # four is 7.
    trainer.fit(model, DataLoader(data(5), 5), DataLoader(data(7), 4))
    # A validation outside of fit() must not be marked.
    trainer.validate(model, DataLoader(data(3), 3), verbose=False)
    assert Trace(model.vit).hooks == before
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.epoch.values.tolist() == [0, 1]
    assert ds.images.values.tolist() == [[7, 7], [7, 7]]
    assert ds["layer"].values.tolist() == ["vit.blocks.0.attn", "vit.blocks.1.attn"]
    assert ds.val_loss.notnull().all()
    assert ds.sink.notnull().all()
    assert marked == [(0,), (0, 1)]
    assert "epochs: 2 (0, 1)" in repr(recording.recorder)
    # The first forwards belong to the sanity check.
    for recorded, expected in zip(ds.entropy.values, model.truth[1:3], strict=True):
        torch.testing.assert_close(torch.as_tensor(recorded), expected, rtol=1e-5, atol=1e-6)


class Pixels(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "pixel_values": images(6)[index, :, :16, :16],
            "labels": torch.tensor(index % 3),
        }


def hugging_face_trainer(folder: Path, steps: int, callbacks: list[Any], **options: Any) -> Any:
    """Return a trainer that evaluates after every ``steps // 2`` steps."""
    need("accelerate")
    transformers = need("transformers")
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        num_channels=2,
        num_labels=3,
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=8,
    )
    return transformers.Trainer(
        transformers.ViTForImageClassification(config),
        transformers.TrainingArguments(
            str(folder / "out"),
            max_steps=steps,
            eval_steps=steps // 2,
            disable_tqdm=True,
            report_to="none",
            eval_strategy="steps",
            save_strategy="no",
            use_cpu=True,
        ),
        train_dataset=Pixels(),
        callbacks=callbacks,
        **options,
    )


def test_hugging_face_marks_each_evaluation(tmp_path: Path) -> None:
    transformers = need("transformers")
    from tcnn_probe.callbacks.huggingface import RecordCallback

    class Interruption(transformers.TrainerCallback):  # type: ignore[misc]
        """Callback that raises Ctrl-C after the first evaluation."""

        pressed = False

        def on_evaluate(self, *_: Any, **__: Any) -> None:
            if not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt

    torch.manual_seed(0)
    marked: list[tuple[int | float, ...]] = []
    record = RecordCallback(
        tmp_path / "run.zarr",
        health=True,
        on_mark=lambda recorder: marked.append(recorder.epochs),
    )
    # Evaluations are after steps 2 and 4: one run is interrupted after the first, and the other has
    # both.
    trainer = hugging_face_trainer(tmp_path, 4, [record, Interruption()], eval_dataset=Pixels())
    model = trainer.model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # These are the names in transformers 4 and 5.
            if name.endswith(("query.weight", "q_proj.weight")):
                # Logits far above the limit of health raise an alarm, which must be passed on.
                parameter *= 1e5
    before = Trace(model).hooks
    with pytest.raises(KeyboardInterrupt), pytest.warns(RuntimeWarning):
        trainer.train()
    with pytest.warns(RuntimeWarning) as alarms:
        trainer.train()
    assert any("large logits in " in str(alarm.message) for alarm in alarms)
    trainer.evaluate()
    assert Trace(model).hooks == before
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.step.values.tolist() == [2, 4]
    assert marked == [(2,), (2,), (2, 4)]
    assert ds.sink.notnull().all()
    assert ds.images.values.tolist() == [[6, 6], [6, 6]]
    assert ds.eval_loss.notnull().all()
    assert ds.entropy.notnull().all()


def test_names_of_metrics() -> None:
    metrics = {
        "val/acc": 0.5,
        "val_acc": torch.tensor(0.25),
        "val acc": np.float32(0.75),
        "entropy": 1,
        "images": torch.tensor([3]),
        "if_marked": True,
        "top-1": 2,
        "5": 3.0,
        "": 8,
        "epoch": 7,
        "per_class": np.array([0.1, 0.2]),
        "matrix": torch.eye(2),
        "name": "a",
        "nothing": None,
    }
    with pytest.warns(RuntimeWarning) as warned:
        numbers = float_metrics(metrics)
    assert numbers == {
        "val_acc": 0.25,
        "val_acc_2": 0.75,
        "val_acc_3": 0.5,
        "metric_entropy": 1,
        "metric_images": 3,
        "metric_if_marked": 1,
        "top_1": 2,
        "metric_5": 3,
        "metric_": 8,
    }
    texts = [str(warning.message) for warning in warned]
    assert "'entropy' as 'metric_entropy'" in texts[0]
    assert "'val/acc' as 'val_acc_3'" in texts[0]
    assert "left out: matrix, name, nothing, per_class" in texts[1]


@pytest.mark.parametrize("trainer", ["lightning", "huggingface"])
def test_training_without_a_validation_is_told(trainer: str) -> None:
    """Hugging Face's Trainer evaluates only if it is asked to."""
    need({"huggingface": "transformers"}.get(trainer, trainer))
    module = import_module(f"tcnn_probe.callbacks.{trainer}")
    recording = module.RecordCallback()
    if trainer == "lightning":
        recording.on_exception()  # which has ended it before its first validation
    else:
        recording.on_train_begin(None, None, None, model=vit())
    with pytest.warns(RuntimeWarning, match="ran no validation"):
        recording.on_train_end(None, None, None)


def test_a_validation_without_a_training_is_told() -> None:
    need("lightning")
    callback = import_module("tcnn_probe.callbacks.lightning").RecordCallback()
    trainer = SimpleNamespace(state=SimpleNamespace(fn="validate"))
    with pytest.warns(RuntimeWarning, match=r"validations of fit\(\).*tcnn_probe.record"):
        callback.on_validation_start(trainer, vit())


def test_hugging_face_marks_no_epochs() -> None:
    need("transformers")
    callbacks = import_module("tcnn_probe.callbacks.huggingface")
    with pytest.raises(ValueError, match="marks are global steps"):
        callbacks.RecordCallback(along="epoch")


@pytest.mark.parametrize("options", [{}, {"along": "epoch"}])
def test_lightning_records_every_validation_of_an_epoch(
    options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two validations an epoch are marked by their steps,
    with the loss of each; a failing mark is left out.
    """
    need("lightning.pytorch")
    from tcnn_probe.callbacks.lightning import RecordCallback

    # The name is that of a recorded variable.
    model = classifier("entropy")
    callback = RecordCallback(tmp_path / "run.zarr", **options)
    trainer = lightning_trainer(callback, num_sanity_val_steps=0, val_check_interval=0.5)
    mark = Recorder.mark

    def fail_once(self: Recorder, **values: Any) -> None:
        if values.get("step") == 2:
            raise OSError("disk full")
        mark(self, **values)

    monkeypatch.setattr(Recorder, "mark", fail_once)
    with pytest.warns(RuntimeWarning) as warned:
        trainer.fit(model, DataLoader(data(6), 3), DataLoader(data(7), 7))
    texts = " ".join(str(warning.message) for warning in warned)
    assert ("only its first validation is recorded" in texts) == bool(options)
    assert ("step 2 is not recorded: OSError: disk full" in texts) != bool(options)
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert len(model.losses) == 4
    if options:
        # An epoch is one mark: that of its first validation, as a warning says.
        assert ds.epoch.values.tolist() == [0, 1]
        numbers = [0, 2]
    else:
        assert ds.step.values.tolist() == [1, 3, 4]
        numbers = [0, 2, 3]
    losses = [model.losses[number] for number in numbers]
    np.testing.assert_allclose(ds.metric_entropy, losses, rtol=1e-6)
    # The images of a mark are those of its own validation.
    assert (ds.images == 7).all()


def test_hugging_face_keeps_all_evaluation_sets(tmp_path: Path) -> None:
    need("transformers")
    from tcnn_probe.callbacks.huggingface import RecordCallback

    marked: list[tuple[int | float, ...]] = []
    record = RecordCallback(
        tmp_path / "run.zarr", on_mark=lambda recorder: marked.append(recorder.epochs)
    )
    trainer = hugging_face_trainer(
        tmp_path,
        3,
        [record],
        eval_dataset={"a": Pixels(), "b": Pixels()},
        compute_metrics=lambda _: {"per_class": np.array([0.4, 0.6]), "max_logit": 2},
    )
    with pytest.warns(RuntimeWarning, match="left out: eval_a_per_class, eval_b_per"):
        trainer.train()
    ds = xr.open_zarr(tmp_path / "run.zarr")
    assert ds.step.values.tolist() == [1, 2, 3]
    assert marked == [(1,), (1, 2), (1, 2, 3)]
    # Both sets have the same six images.
    assert (ds.images == 12).all()
    np.testing.assert_allclose(ds.eval_a_loss, ds.eval_b_loss, rtol=1e-6)
    assert (ds.eval_b_max_logit == 2).all()
