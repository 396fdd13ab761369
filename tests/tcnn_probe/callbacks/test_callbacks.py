"""The real Trainer of Hugging Face and Lightning, for a few steps: each validation is a mark with the right numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.tcnn_probe.contracts.helpers import Trace, entropies, images, vit

# These packages may warn, but our own warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")


def data(count: int) -> TensorDataset:
    return TensorDataset(images(count), torch.arange(count) % 5)


def test_lightning_marks_each_validation(tmp_path: Path) -> None:
    pl = pytest.importorskip(
        "lightning.pytorch",
        reason="Lightning is not installed: pip install 'lightning>=2.4'",
    )
    from tcnn_probe.callbacks.lightning import RecordCallback

    class Classifier(pl.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.vit = vit()
            self.truth = []

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.vit(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val/loss", F.cross_entropy(self.vit(batch[0]), batch[1]))

        def on_validation_epoch_end(self) -> None:
            twin = vit()
            twin.load_state_dict(self.vit.state_dict())
            self.truth.append(entropies(twin, images(7)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.vit.parameters(), 1e-2)

    marked: list[tuple[int | float, ...]] = []
    model = Classifier()
    recording = RecordCallback(
        tmp_path / "run.zarr",
        health=True,
        on_mark=lambda recorder: marked.append(recorder.epochs),
    )
    before = Trace(model.vit).hooks
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, callbacks=[recording], **quiet
    )
    # Seven images in batches of four: neither the number of batches nor that of full batches times four is 7.
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
        torch.testing.assert_close(
            torch.as_tensor(recorded), expected, rtol=1e-5, atol=1e-6
        )


class Pixels(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "pixel_values": images(6)[index, :, :16, :16],
            "labels": torch.tensor(index % 3),
        }


def test_hugging_face_marks_each_evaluation(tmp_path: Path) -> None:
    pytest.importorskip(
        "accelerate",
        reason="accelerate is not installed, which Hugging Face's Trainer needs",
    )
    transformers = pytest.importorskip("transformers")
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
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 8,
    }
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, num_channels=2, num_labels=3, **sizes
    )
    model = transformers.ViTForImageClassification(config)
    # Evaluations are after steps 2 and 4: one run is interrupted after the first, and the other has both.
    about = {
        "report_to": "none",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
    }
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=4, disable_tqdm=True, **about
        ),
        train_dataset=Pixels(),
        eval_dataset=Pixels(),
        callbacks=[
            RecordCallback(
                tmp_path / "run.zarr",
                health=True,
                on_mark=lambda recorder: marked.append(recorder.epochs),
            ),
            Interruption(),
        ],
    )
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
