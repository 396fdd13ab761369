"""Packages that the extra test-all installs, and test does not."""

import importlib
import os
from typing import Any

import pytest

ABSENT = "packages are not installed: pip install -e '.[test-all]'"


def need(module: str) -> Any:
    """Return a module, or skip the test or file that needs it;
    with ``TEST_ALL=1``, as in the gate, fail instead.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        if os.environ.get("TEST_ALL"):
            raise
        pytest.skip(ABSENT, allow_module_level=True)
