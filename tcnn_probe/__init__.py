"""See, while a vision model trains, which of its heads convolve and which attend to content.

Every public name is listed in ``__init__.pyi``, beside this file, and imported when it is first
used, so that reading a recording needs neither torch nor timm.
"""

from typing import Any

from tcnn_probe.extras import attach_stub

__version__ = "0.1.0"

_get, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Import a public name; errors suggest the nearest name,
    or how to install a package that it needs.

    Raises:
        AttributeError: There is no such name.
        ModuleNotFoundError: The name needs a package, such as torch, that is not installed.
    """
    try:
        return _get(name)
    except AttributeError:
        import difflib

        near = difflib.get_close_matches(name, __all__, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"tcnn_probe has no {name!r}{hint}"
        raise AttributeError(message) from None
