"""See, while a vision model trains, which of its heads convolve and which attend to content.

Every public name is listed in ``__init__.pyi``, beside this file, and imported when it is first used, so that reading a
recording needs neither torch nor timm.
"""

from typing import Any

import lazy_loader

__version__ = "0.1.0"
_TORCH_EXTRA = ("captum", "timm", "torch", "tqdm")

_get, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name; errors suggest the nearest name, or how to install torch for a name that needs it.

    Raises:
        AttributeError: There is no such name.
        ModuleNotFoundError: The name needs the extra ``torch``, and a package of it is not installed.
    """
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name not in _TORCH_EXTRA:
            raise
        message = (
            f"tcnn_probe.{name} needs {error.name}: pip install 'tcnn-probe[torch]'"
        )
        raise ModuleNotFoundError(message, name=error.name) from error
    except AttributeError:
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"tcnn_probe has no {name!r}{hint}"
        raise AttributeError(message) from None
