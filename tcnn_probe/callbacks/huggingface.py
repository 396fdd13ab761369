"""Recording while Hugging Face's Trainer trains: ``pip install "tcnn-probe[huggingface]"``."""

from typing import Any

from transformers import TrainerCallback

from tcnn_probe.callbacks.scalars import as_scalars
from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(TrainerCallback):  # type: ignore[misc]
    """Records each evaluation of a training, and marks its step where it ends: ``Trainer(callbacks=[...])``.

    Args:
        store, options: as of :func:`tcnn_probe.record`; marks are global steps.
    """

    def __init__(self, store: Any = None, **options: Any) -> None:
        self._options = {"store": store, "along": "step", **options}
        self.recorder: Recorder | None = None
        self._training = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Attach."""
        self.recorder, self._training = Recorder(model, **self._options), True

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Any = None, **others: Any) -> None:
        """Mark."""
        if self.recorder is not None and self._training:
            self.recorder.mark(if_marked="skip", step=state.global_step, **as_scalars(metrics or {}))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Detach."""
        self._training = False
        if self.recorder is not None:
            self.recorder.remove()
