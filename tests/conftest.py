"""Settings that must be made before torch, and Triton, are loaded; when garbage is looked for; no waiting for disks."""

import gc
import os
from collections.abc import Iterator

import pytest

# pytest runs on all cores, so each of its processes needs one thread: the networks are tiny, and several threads would
# change the order of sums. Threads that spin while they wait make torch ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# The kernels are then tested through Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until all is imported: half a million objects that stay, 0.3 s a time


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the installed timm is too old for."""
    # Imports timm and so Triton, after the settings above.
    from tests.older_packages import skip_what_cannot_pass

    skip_what_cannot_pass(items)


def pytest_collection_finish() -> None:
    """From here on garbage is looked for as ever."""
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _disk_without_waiting() -> Iterator[None]:
    """Skip waiting for the disk: no test cuts the power, and the system has all that a killed process wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
