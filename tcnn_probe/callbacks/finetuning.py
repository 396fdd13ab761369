"""Recording in the command ``tcnn-finetune``."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcnn_probe.recording.checks import OtherLayersError
from tcnn_probe.recording.recorder import Recorder

__all__ = ["Recording"]


class Recording:
    """Recording of each validation of a run,
    in ``recording.zarr`` in its folder, with its scalars and settings.

    While a model has no heads, as a CNN before its conversion to a T-CNN, only scalars are
    recorded, and heads as soon as there are any. A model whose heads are replaced by others
    continues in a second recording, ``recording-converted.zarr``.

    Args:
        model: Model that is trained.
        folder: Folder of the run.
        settings: Settings of the run, which become attributes, but for files and folders of this
            machine; ``health`` and ``images`` are the recorder's.
    """

    def __init__(self, model: Any, folder: Path, settings: Mapping[str, Any]) -> None:
        self._model = model
        self._store = folder / "recording.zarr"
        # The other settings are meaningless on other machines, or private.
        local = {"data", "weights", "teacher_weights", "out", "watcher", "device"}
        options: dict[str, Any] = {
            name: settings[name] for name in ("health", "images") if settings.get(name)
        }
        self._attrs = {
            name: value for name, value in settings.items() if name not in local | {*options}
        }
        try:
            self._recorder = Recorder(model, self._store, attrs=self._attrs, **options)
        except OtherLayersError:
            self._store = folder / "recording-converted.zarr"
            self._recorder = Recorder(model, self._store, attrs=self._attrs, **options)
        # The command resumes from its own checkpoints, also within an epoch.
        self._recorder.trust_weights()

    def __call__(self, scalars: Mapping[str, float]) -> None:
        """Mark an epoch."""
        try:
            self._recorder.mark(if_marked="skip", **scalars)
        except RuntimeError as error:
            if self._recorder.layers:
                raise
            print(f"no heads are recorded, only scalars: {error}", file=sys.stderr)
            self._recorder.remove()
            self._recorder = Recorder(self._model, self._store, probes=[], attrs=self._attrs)
            self._recorder.mark(if_marked="skip", **scalars)

    def close(self) -> None:
        """Detach the recorder from the model."""
        self._recorder.remove()
