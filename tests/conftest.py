"""Settings that must be made before torch, and Triton, are loaded."""

import os

# On a busy machine, threads that spin while they wait make torch ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():  # the kernels are then tested through Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker: they share fixtures. Tests of studies share their runs, across files."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            studies = "studies" in item.path.parts
            item.add_marker(pytest.mark.xdist_group("studies" if studies else item.path.as_posix()))
