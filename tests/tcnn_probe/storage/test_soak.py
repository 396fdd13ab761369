"""One round of the soak: writers killed at any moment, readers, refused recorders and forks."""

import os
import re
import subprocess
import sys
from pathlib import Path


def test_one_round(tmp_path: Path) -> None:
    # At least one round is done, even in no time; longer soaks are started manually.
    options = ("-m", "tests.tcnn_probe.storage.soak", "--minutes", "0", "--seed", "1")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(tmp_path)}
    command = [sys.executable, *options]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert list(tmp_path.rglob("*.zarr")) == []
    assert re.search(r"1 rounds, nothing lost, nothing wrong: .*'marks': [1-9]", run.stdout)
