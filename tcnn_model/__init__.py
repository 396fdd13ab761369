"""Transformed CNNs: convolutions reparameterized as gated positional self-attention, and their fine-tuning.

Every public name is listed in ``__init__.pyi``, beside this file, and imported when it is first used, so that the
command line answers before torch is imported, and a part that needs no timm works without it.
"""

import sys
from types import ModuleType
from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


class _Package(ModuleType):
    """Package whose attribute ``gpsa`` is the function, although a folder has that name, too."""

    @property
    def gpsa(self) -> Any:
        """The function :func:`tcnn_model.gpsa`."""
        from tcnn_model.gpsa.functional import gpsa

        return gpsa

    @gpsa.setter
    def gpsa(self, folder: ModuleType) -> None:
        """Ignore the folder, which Python assigns when it is imported."""


sys.modules[__name__].__class__ = _Package

# ``import tcnn_model.models`` registers the models of the papers with timm. Whoever has imported timm before gets them
# without it.
if sys.modules.get("timm") is not None:
    from tcnn_model import models as _models  # noqa: F401
