"""Recording while Lightning trains: ``pip install "tcnn-probe[lightning]"``."""

from typing import Any

import lightning.pytorch as pl

from tcnn_probe.callbacks.scalars import as_scalars
from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(pl.Callback):  # type: ignore[misc]
    """Records each validation of a training, and marks it where it ends: ``Trainer(callbacks=[RecordCallback(...)])``.

    Args:
        store, options: as of :func:`tcnn_probe.record`. With ``along="step"`` marks are global steps, else epochs.
    """

    def __init__(self, store: Any = None, **options: Any) -> None:
        self._options = {"store": store, "along": "epoch", **options}
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach, after the sanity check."""
        self.recorder = Recorder(pl_module, **self._options)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark."""
        if self.recorder is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            number = trainer.global_step if self._options["along"] == "step" else trainer.current_epoch
            values = as_scalars(trainer.callback_metrics) | {self._options["along"]: number}
            self.recorder.mark(if_marked="skip", **values)

    def on_train_end(self, *_: Any) -> None:
        """Detach, if it was attached; after an exception too."""
        if self.recorder is not None:
            self.recorder.remove()

    on_exception = on_train_end
