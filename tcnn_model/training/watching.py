"""Who watches a run from outside: tcnn_probe's recorder, and TensorBoard."""

import pkgutil
from typing import Any

from tcnn_model.training.config import Config
from tcnn_model.training.loop import Training
from tcnn_model.training.session import Folder, say

__all__ = ["Watching"]


class Watching:
    """Shows each epoch's scalars to whoever is asked for; to nobody where it is not installed.

    Args:
        training: whose model is watched.
        config, folder: of the run.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(self, training: Training, config: Config, folder: Folder) -> None:
        self._training, self._config, self._folder = training, config, folder
        self._make: Any = None
        self._watch: Any = None
        if config.watcher not in (None, "none"):
            try:
                self._make = pkgutil.resolve_name(config.watcher)
            except ImportError as error:
                say(f"nobody watches this run ({error}): epochs.csv has what it comes to", folder.ranks)
        self._board = _board(folder) if config.tensorboard and folder.ranks.first else None
        self.attach()

    def attach(self) -> None:
        """Look at the model as it now is."""
        self._leave()
        if self._make is not None:
            self._watch = self._make(self._training.model, self._folder.path, self._config.as_dict())

    def __call__(self, scalars: dict[str, float]) -> None:
        """Show an epoch."""
        if self._watch is not None:
            self._watch(scalars)
        if self._board is not None:
            for name in [name for name, value in scalars.items() if value == value]:  # not NaN
                self._board.add_scalar(name, scalars[name], scalars["epoch"])
            self._board.flush()

    def close(self) -> None:
        """Leave the model."""
        self._leave()
        if self._board is not None:
            self._board.close()

    def _leave(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None


def _board(folder: Folder) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"--tensorboard needs the package tensorboard: pip install tensorboard ({error})") from error
    return SummaryWriter(str(folder.path / "tensorboard"), purge_step=0)  # a resumed run shows all of its epochs again
