"""Recording in Lightning: ``pip install "tcnn-probe[lightning]"``."""

import warnings
from collections.abc import Callable
from typing import Any

from tcnn_probe.extras import needed_for

with needed_for(__name__):
    import lightning.pytorch as pl

    from tcnn_probe.callbacks.scalars import mark_validation, warn_of_no_validation
    from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(pl.Callback):  # type: ignore[misc]
    """Callback that records each validation and marks its end:
    ``Trainer(callbacks=[RecordCallback(...)])``.

    A mark that fails is left out with a warning, and the training goes on.

    Args:
        store, options: Arguments of :func:`tcnn_probe.record`. Marks are epochs, or with
            ``along="step"`` global steps; the default is "step" if the trainer validates several
            times in an epoch.
        on_mark: Function of the recorder that is called after each mark, on the first process, such
            as one that calls :func:`tcnn_probe.log_to_wandb`.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        on_mark: Callable[[Recorder], object] | None = None,
        **options: Any,
    ) -> None:
        self._on_mark = on_mark
        self._options = {"store": store, **options}
        self._along = "epoch"
        self._validated = False
        self.recorder: Recorder | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Attach the recorder, after the sanity check."""
        # The number of batches between validations is None if they are at times of the clock.
        batches = getattr(trainer, "val_check_batch", None)
        several = batches is None or batches < trainer.num_training_batches
        self._along = self._options.get("along", "step" if several else "epoch")
        if several and self._along == "epoch":
            warnings.warn(
                "the trainer validates several times in an epoch, and an epoch is one mark: only "
                "its first validation is recorded; leave out along='epoch' to record all, by their "
                "steps",
                RuntimeWarning,
                stacklevel=2,
            )
        options = {**self._options, "along": self._along}
        self.recorder = Recorder(pl_module, **options)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of a validation without a training, which is not recorded."""
        if trainer.state.fn == "validate" and self.recorder is None:
            warnings.warn(
                "RecordCallback records the validations of fit(): to record this one, use "
                "tcnn_probe.record on the module",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Mark the epoch or step."""
        if self.recorder is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = True
            in_steps = self._along == "step"
            mark_validation(
                self.recorder,
                self._along,
                trainer.global_step if in_steps else trainer.current_epoch,
                trainer.callback_metrics,
                self._on_mark if trainer.is_global_zero else None,
            )

    def on_train_end(self, *_: Any) -> None:
        """Detach the recorder."""
        if not self._validated:
            warn_of_no_validation("give fit() validation data, and a validation_step")
        self.on_exception()

    def on_exception(self, *_: Any) -> None:
        """Detach the recorder."""
        if self.recorder is not None:
            self.recorder.remove()
