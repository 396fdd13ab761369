"""Public names that are imported when they are first used;
an error names the package that is missing, and the line that installs it.
"""

from collections.abc import Callable
from typing import Any

import lazy_loader

from tcnn_model.extras import needed_for

__all__ = ["attach_stub", "needed_for"]


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package,
    whose names are listed in ``__init__.pyi`` beside its file.
    """
    get, names, public = lazy_loader.attach_stub(package, file)

    def get_or_explain(name: str) -> Any:
        with needed_for(f"{package}.{name}"):
            return get(name)

    return get_or_explain, names, public
