import os

import pytest


@pytest.fixture(autouse=True)
def _disk_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk: no test cuts the power, and the system has all that a killed process wrote."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
