"""Recording while the command ``tcnn-finetune`` trains."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcnn_probe.recording.recorder import Recorder

__all__ = ["Recording"]


class Recording:
    """Records each validation of a run into ``recording.zarr`` in its folder, with the run's scalars.

    Args:
        model: that is trained. If it has nothing that can be recorded, as a CNN before it is a T-CNN, nothing is.
        folder: of the run.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self._recorder: Recorder | None = Recorder(model, folder / "recording.zarr")

    def __call__(self, scalars: Mapping[str, float]) -> None:
        """Mark an epoch."""
        if self._recorder is None:
            return
        try:
            self._recorder.mark(if_marked="skip", **scalars)
        except RuntimeError as error:
            if self._recorder.epochs:
                raise
            print(f"no heads are recorded: {error}", file=sys.stderr)
            self.close()

    def close(self) -> None:
        """Detach."""
        if self._recorder is not None:
            self._recorder.remove()
        self._recorder = None
