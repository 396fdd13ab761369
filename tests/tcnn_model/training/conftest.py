import os

import pytest


@pytest.fixture(autouse=True)
def _disk_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test cuts the power: when the disk is waited for is recorded. What a killed process wrote, the system has."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
