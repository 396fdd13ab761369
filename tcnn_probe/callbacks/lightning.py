"""Recording in Lightning: ``pip install "tcnn-probe[lightning]"``."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from tcnn_probe.callbacks.scalars import float_metrics
from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(pl.Callback):  # type: ignore[misc]
    """Callback that records each validation and marks its end: ``Trainer(callbacks=[RecordCallback(...)])``.

    Args:
        store, options: Arguments of :func:`tcnn_probe.record`. Marks are epochs, or with ``along="step"`` global steps.
        on_mark: Function of the recorder that is called after each mark, on the first process, such as one that calls
            :func:`tcnn_probe.log_to_wandb`.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        on_mark: Callable[[Recorder], object] | None = None,
        **options: Any,
    ) -> None:
        self._on_mark = on_mark
        self._options = {"store": store, "along": "epoch", **options}
        self.recorder: Recorder | None = None

    def on_train_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Attach the recorder, after the sanity check."""
        self.recorder = Recorder(pl_module, **self._options)

    def on_validation_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Mark the epoch or step."""
        if (
            self.recorder is not None
            and trainer.state.fn == "fit"
            and not trainer.sanity_checking
        ):
            number = (
                trainer.global_step
                if self._options["along"] == "step"
                else trainer.current_epoch
            )
            values = float_metrics(trainer.callback_metrics) | {
                self._options["along"]: number
            }
            self.recorder.mark(if_marked="skip", **values)
            if self._on_mark is not None and trainer.is_global_zero:
                self._on_mark(self.recorder)

    def on_train_end(self, *_: Any) -> None:
        """Detach the recorder, also after an exception."""
        if self.recorder is not None:
            self.recorder.remove()

    on_exception = on_train_end
