"""Packages that not every installation has;
an error names the one that is missing, and the line that installs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needed_for"]

# Packages that are called otherwise where they are installed from.
_PACKAGES = {"sklearn": "scikit-learn"}


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Import packages inside the ``with``; an error says what needs one that is missing,
    and what to type.

    Raises:
        ModuleNotFoundError: A package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        package = _PACKAGES.get(name, name)
        raise ModuleNotFoundError(
            f"{purpose} needs {package}: pip install {package}", name=error.name
        ) from error
