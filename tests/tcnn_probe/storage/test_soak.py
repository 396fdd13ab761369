"""One round of the soak: writers killed at any moment, readers, refused recorders and forks."""

import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tcnn_probe.storage import soak


def test_one_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # At least one round is done, even in no time; longer soaks are started manually.
    monkeypatch.setattr(sys, "argv", ["soak", "--minutes", "0", "--seed", "1"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soak.main(soak.Soak, None)
    assert list(tmp_path.rglob("*.zarr")) == []
    output = capsys.readouterr().out
    assert re.search(r"1 rounds, nothing lost, nothing wrong: .*'marks': [1-9]", output)
