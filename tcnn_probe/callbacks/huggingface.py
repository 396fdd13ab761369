"""Recording in Hugging Face's Trainer: ``pip install "tcnn-probe[huggingface]"``."""

from typing import Any

from transformers import TrainerCallback

from tcnn_probe.callbacks.scalars import float_metrics
from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that records each evaluation and marks its step: ``Trainer(callbacks=[RecordCallback(...)])``.

    Args:
        store, options: Arguments of :func:`tcnn_probe.record`; marks are global steps.
    """

    def __init__(self, store: Any = None, **options: Any) -> None:
        self._options = {"store": store, "along": "step", **options}
        self.recorder: Recorder | None = None
        self._training = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any
    ) -> None:
        """Attach the recorder."""
        self.recorder, self._training = Recorder(model, **self._options), True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, *, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Mark the step."""
        if (
            self.recorder is not None and self._training
        ):  # Trainer.evaluate is also called after a training
            self.recorder.mark(
                if_marked="skip", step=state.global_step, **float_metrics(metrics or {})
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the recorder."""
        self._training = False
        if self.recorder is not None:
            self.recorder.remove()
