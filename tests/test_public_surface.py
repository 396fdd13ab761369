"""The public names, their parameters and defaults equal public_surface.txt,
so none changes by accident.

``python -m tests.test_public_surface`` rewrites the file after an intended change.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SURFACE = Path(__file__).with_name("public_surface.txt")
ROOT = Path(__file__).parents[1]


def _surface() -> str:
    """Return a line for each public name: its module,
    its name, its parameters with their defaults.
    """
    lines = [line for module in _modules() for line in _describe_module(module)]
    return "\n".join(lines) + "\n"


def _modules() -> Iterator[str]:
    """Yield both packages and their folders."""
    for package in ("tcnn_model", "tcnn_probe"):
        yield package
        for file in sorted((ROOT / package).glob("*/__init__.py")):
            yield f"{package}.{file.parent.name}"


def _describe_module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for public in sorted(getattr(module, "__all__", ())):
        yield f"{name}.{public}{_parameters(getattr(module, public))}"


def _parameters(value: Any) -> str:
    """Write parameters without annotations and defaults without addresses,
    which differ between processes.
    """
    # Python's version decides if the constructor of an exception, which is Python's own, reveals
    # its parameters.
    is_error = isinstance(value, type) and issubclass(value, BaseException)
    if is_error or not callable(value):
        return ""
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    bare = inspect.Signature(parameters)
    return re.sub(r" at 0x[0-9a-f]+", "", str(bare))


def test_public_surface_is_unchanged() -> None:
    expected = SURFACE.read_text(encoding="utf-8").splitlines()
    actual = _surface().splitlines()
    removed = sorted(set(expected) - set(actual))
    added = sorted(set(actual) - set(expected))
    assert actual == expected, (
        f"no longer there: {removed}; new: {added}. If this is meant, add it to CHANGELOG.md and "
        "run python -m tests.test_public_surface"
    )


if __name__ == "__main__":
    SURFACE.write_text(_surface(), encoding="utf-8")
