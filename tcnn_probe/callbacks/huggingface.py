"""Recording in Hugging Face's Trainer: ``pip install "tcnn-probe[huggingface]"``."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from tcnn_probe.callbacks.scalars import float_metrics
from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that records each evaluation and marks its step: ``Trainer(callbacks=[RecordCallback(...)])``.

    The Trainer does not inform callbacks of exceptions: after an exception or Ctrl-C, the recorder stays attached until
    the next training.

    Args:
        store, options: Arguments of :func:`tcnn_probe.record`; marks are global steps.
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
        self._options = {"store": store, "along": "step", **options}
        self.recorder: Recorder | None = None
        self._training = False

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any
    ) -> None:
        """Attach the recorder."""
        # A training that ended in an exception did not call on_train_end, and its recorder still holds the store.
        self.on_train_end(args, state, control)
        self.recorder = Recorder(model, **self._options)
        self._training = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, *, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Mark the step."""
        # Trainer.evaluate is also called after a training.
        if self.recorder is not None and self._training:
            self.recorder.mark(
                if_marked="skip", step=state.global_step, **float_metrics(metrics or {})
            )
            if self._on_mark is not None and state.is_world_process_zero:
                self._on_mark(self.recorder)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the recorder."""
        self._training = False
        if self.recorder is not None:
            self.recorder.remove()
