"""Settings made before torch and Triton are imported, and time saved on garbage collection and fsync."""

import gc
import os
from collections.abc import Iterator

import pytest

# pytest runs on all cores, so each of its processes needs one thread: the networks are tiny, and several threads would
# change the order of sums. Threads that spin while they wait make torch ten times slower on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

# Without a GPU, the kernels are tested through Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # during collection: each run would visit half a million objects that stay, and take 0.3 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that the installed timm is too old for."""
    # This import loads timm and with it Triton, so it comes after the settings above.
    from tests.older_packages import skip_what_cannot_pass

    skip_what_cannot_pass(items)


def pytest_collection_finish() -> None:
    """Enable garbage collection again after collection."""
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _disk_without_waiting() -> Iterator[None]:
    """Replace fsync by a no-op: no test cuts the power, and the system keeps everything that a killed process wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield
