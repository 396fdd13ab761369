"""Transformed CNNs: convolutions reparameterized
as gated positional self-attention, and their fine-tuning.

Every public name is listed in ``__init__.pyi``, beside this file, and imported when it is first
used, so that the command line answers before torch is imported, and a part that needs no timm works
without it.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tcnn_model.extras import needed_for

# The package needs nothing but torch and timm, not even lazy_loader, by which tcnn_probe does the
# same.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {name: module for module, name in re.findall(r"from (\S+) import (\w+)", _STUB)}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    Raises:
        AttributeError: There is no such name.
        ModuleNotFoundError: The name needs a package, such as timm, that is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_for(f"{__name__}.{name}"):
        value = globals()[name] = getattr(import_module(_MODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Package whose attribute ``gpsa`` is the function, although a folder has that name, too."""

    @property
    def gpsa(self) -> Any:
        """The function :func:`tcnn_model.gpsa`."""
        return __getattr__("gpsa")

    @gpsa.setter
    def gpsa(self, folder: ModuleType) -> None:
        """Ignore the folder, which Python assigns when it is imported."""


sys.modules[__name__].__class__ = _Package

# ``import tcnn_model.models`` registers the models of the papers with timm. Whoever has imported
# timm before gets them without it.
if sys.modules.get("timm") is not None:
    from tcnn_model import models as _models  # noqa: F401
