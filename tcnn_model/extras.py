"""Packages that not every installation has;
an error names the one that is missing, and the line that installs it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needed_for"]

# Modules, and the packages that they are installed from. A module of a user's that is missing is
# none of these, and no line would install it.
_PACKAGES = {
    name: name
    for name in (
        *("accelerate", "bokeh", "captum", "distributed", "lightning", "scipy"),
        *("timm", "torch", "torchvision", "transformers"),
    )
} | {"sklearn": "scikit-learn"}


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
        package = _PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs {package}: pip install {package}", name=error.name
        ) from error
