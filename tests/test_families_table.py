"""docs/families.md: it covers what timm has, what it says was computed, and its script writes it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from packaging.version import Version

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
OWN = {"models", "patchconvnet"}  # ours, which timm lists under the names of their modules


def _rows(text: str) -> dict[str, list[str]]:
    """Cells of the table by model."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {cells[1]: cells for cells in lines[1:]}


def test_every_family_of_timm_is_covered() -> None:
    text = (DOCS / "families.md").read_text()
    match = re.search(r"timm (\d[\w.]*\w)", text)
    assert match
    if match.group(1) != timm.__version__:
        pytest.skip(f"the table was made with timm {match.group(1)}, installed is {timm.__version__}")
    covered = {cells[0] for cells in _rows(text).values()}
    without = re.search(r"no convolution to reparameterize.*\n(.*)\.\n", text)
    assert without
    covered |= {entry.partition(" ")[0] for entry in without.group(1).split(", ")}
    assert covered >= set(timm.list_modules()) - OWN


def test_what_is_shown_is_the_same_function() -> None:
    rows = _rows((DOCS / "families.md").read_text())
    errors = [cells[-1] for cells in rows.values() if re.match(r"\de-\d\d", cells[-1])]
    assert len(errors) > 50
    assert all(float(error) < 1e-4 for error in errors)


def _script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(DOCS / "families.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # this checkout, whatever is installed
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(Version(timm.__version__) < Version("1.0.21"), reason="builds models on the meta device")
def test_script_writes_the_table(tmp_path: Path) -> None:
    out = tmp_path / "families.md"
    done = _script("--families", "visformer", "starnet_s050", "convit", "--out", str(out))
    assert done.returncode == 0, done.stderr
    rows = _rows(out.read_text())
    assert list(rows) == ["starnet_s050", "visformer_tiny"]
    kinds = "1 of 3 x 3, 2 of 7 x 7 depthwise"
    assert rows["starnet_s050"][:6] == ["starnet", "starnet_s050", "96 x 96", kinds, "9, 49", "3 x 3 -> 6 x 6"]
    assert rows["visformer_tiny"][5].startswith("7 x 7 -> keep only: with patch_embed3.proj at stride 1")
    assert all(0 < float(cells[-1]) < 1e-4 for cells in rows.values())
    assert "\nconvit (convit_tiny).\n" in out.read_text()
    assert str(tmp_path) not in out.read_text()


def test_unknown_family(tmp_path: Path) -> None:
    done = _script("--families", "resnot", "--out", str(tmp_path / "none.md"))
    assert done.returncode == 2
    assert "neither a module of timm nor a model: resnot" in done.stderr
    assert not (tmp_path / "none.md").exists()
