"""An object that no checkpoint may hold."""

from collections.abc import Callable
from pathlib import Path

__all__ = ["Crafted"]


class Crafted:
    """Object that runs code when it is unpickled: harmless code, which makes a file.

    Args:
        path: Path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)
