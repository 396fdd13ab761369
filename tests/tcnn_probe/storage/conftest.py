import os

import pytest


@pytest.fixture(autouse=True)
def _disk_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip waiting for the disk: no test cuts the power. The writers that are killed do wait for it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
