"""The watchers of a run: tcnn_probe's recorder, and TensorBoard."""

import math
import pkgutil
from typing import Any

from tcnn_model.training.config import Config
from tcnn_model.training.loop import Training
from tcnn_model.training.session import RunFolder, say

__all__ = ["Watching"]


class Watching:
    """Pass each epoch's scalars to a watcher, such as tcnn_probe's recorder, and to TensorBoard.

    If the watcher is not installed, a line says so, and the training goes on without it.

    Args:
        training: Training whose model is watched.
        config: Settings of the run.
        folder: Folder of the run.

    Raises:
        ValueError: The settings ask for TensorBoard, which is not installed.
    """

    def __init__(self, training: Training, config: Config, folder: RunFolder) -> None:
        self._training = training
        self._config = config
        self._folder = folder
        self._create: Any = None
        self._watcher: Any = None
        if config.watcher not in (None, "none"):
            try:
                self._create = pkgutil.resolve_name(config.watcher)
            except ImportError as error:
                # The default watcher is in tcnn_probe, without which tcnn_model can be installed.
                say(
                    f"nobody watches this run ({error}): epochs.csv has what it comes to",
                    folder.processes,
                )
        self._board = _board(folder) if config.tensorboard and folder.processes.first else None
        self.attach()

    def attach(self) -> None:
        """Attach a new watcher to the model, whose modules may have been replaced."""
        self._leave()
        if self._create is not None:
            # Rates are those that are used, not those that were given for another batch size.
            facts = {**self._config.as_dict(), **self._folder.rates}
            if self._folder.classes is not None:
                facts["classes"] = self._folder.classes
            self._watcher = self._create(self._training.model, self._folder.path, facts)

    def __call__(self, scalars: dict[str, float]) -> None:
        """Report an epoch."""
        if self._watcher is not None:
            self._watcher(scalars)
        if self._board is not None:
            for name, value in scalars.items():
                if not math.isnan(value):  # epoch 0 has no training loss
                    self._board.add_scalar(name, value, scalars["epoch"])
            self._board.flush()

    def close(self) -> None:
        """Detach the watcher and close TensorBoard."""
        self._leave()
        if self._board is not None:
            self._board.close()

    def _leave(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        self._watcher = None


def _board(folder: RunFolder) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"--tensorboard needs the package tensorboard: pip install tensorboard ({error})"
        ) from error
    # A resumed run reports all of its epochs again.
    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=0)
