"""Recording in Hugging Face's Trainer: ``pip install "tcnn-probe[huggingface]"``."""

from collections.abc import Callable
from typing import Any

from tcnn_probe.extras import needed_for

with needed_for(__name__):
    from transformers import TrainerCallback

    from tcnn_probe.callbacks.scalars import mark_validation, warn_of_no_validation
    from tcnn_probe.recording.recorder import Recorder

__all__ = ["RecordCallback"]


class RecordCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that records each evaluation and marks its step:
    ``Trainer(callbacks=[RecordCallback(...)])``.

    Several evaluation sets are one mark: it has the metrics of all, and heads are measured on the
    images of all. A mark that fails is left out with a warning, and the training goes on.

    The Trainer does not inform callbacks of exceptions: after an exception or Ctrl-C, the recorder
    stays attached until the next training.

    Args:
        store, options: Arguments of :func:`tcnn_probe.record`; marks are global steps.
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
        self._options = {"store": store, "along": "step", **options}
        if self._options["along"] == "epoch":
            raise ValueError("marks are global steps, not epochs: leave along='epoch' out")
        self.recorder: Recorder | None = None
        self._training = False
        self._step: int | None = None
        # Numbers of sets: those of an evaluation, and those of this one so far.
        self._sets: int | None = None
        self._evaluated = 0
        self._metrics: dict[str, Any] = {}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any
    ) -> None:
        """Attach the recorder."""
        # A training that ended in an exception did not call on_train_end, and its recorder still
        # holds the store.
        self.on_train_end(args, state, control)
        self.recorder = Recorder(model, **self._options)
        self._training = True

    def on_evaluate(
        self, args: Any, state: Any, control: Any, *, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Mark the step once all sets are evaluated;
        how many there are is known after the first evaluation.
        """
        # Trainer.evaluate is also called after a training.
        if self.recorder is not None and self._training:
            self._step = state.global_step
            self._metrics |= metrics or {}
            self._evaluated += 1
            if self._evaluated == self._sets:
                self.on_step_begin(args, state, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the step that was evaluated, before the weights change."""
        step, metrics = self._step, self._metrics
        self._step, self._metrics = None, {}
        if self.recorder is not None and step is not None:
            self._sets, self._evaluated = self._evaluated, 0
            on_mark = self._on_mark if state.is_world_process_zero else None
            along = str(self._options["along"])
            mark_validation(self.recorder, along, step, metrics, on_mark)

    # Checkpoints are saved after an evaluation. A run that is resumed from one does not evaluate
    # that step again.
    on_save = on_step_begin
    on_epoch_begin = on_step_begin

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the last evaluation, and detach the recorder."""
        self.on_step_begin(args, state, control)
        if self._training and self._sets is None:
            warn_of_no_validation('give the Trainer eval_strategy="epoch" or "steps"')
        self._training = False
        if self.recorder is not None:
            self.recorder.remove()
