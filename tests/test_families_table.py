"""docs/families.md covers timm's families, states computed results, and is the output of its script."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import timm

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# timm lists our own models under the names of their modules.
OWN = {"t_resnet", "patchconvnet"}


def _rows(text: str) -> dict[str, list[str]]:
    """Return the cells of the table by model."""
    lines = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return {cells[1]: cells for cells in lines[1:]}


def test_every_family_of_timm_is_covered() -> None:
    text = (DOCS / "families.md").read_text()
    match = re.search(r"timm (\d[\w.]*\w)", text)
    assert match
    if match.group(1) != timm.__version__:
        pytest.skip(
            f"the table was made with timm {match.group(1)}, installed is {timm.__version__}"
        )
    covered = {cells[0] for cells in _rows(text).values()}
    without = re.search(r"no convolution to reparameterize.*\n(.*)\.\n", text)
    assert without
    covered |= {entry.partition(" ")[0] for entry in without.group(1).split(", ")}
    # Models registered by tests are left out.
    families = {name for name in timm.list_modules() if not name.startswith("test_")}
    assert covered >= families - OWN


def test_documented_errors_are_those_of_the_same_function() -> None:
    rows = _rows((DOCS / "families.md").read_text())
    errors = [cells[-1] for cells in rows.values() if re.match(r"\de-\d\d", cells[-1])]
    # A table without numbers would pass.
    assert len(errors) > 50
    # Float32 differences are small, while a wrongly converted layer is off by about 1.
    assert all(float(error) < 1e-4 for error in errors)


@pytest.fixture
def write() -> Callable[[list[str]], None]:
    """Return the script's command line."""
    main: Callable[[list[str]], None] = runpy.run_path(
        str(DOCS / "scripts" / "families.py")
    )["main"]
    return main


def test_script_writes_the_table(
    write: Callable[[list[str]], None], tmp_path: Path
) -> None:
    out = tmp_path / "families.md"
    write(["--families", "visformer", "starnet_s050", "convit_tiny", "--out", str(out)])
    rows = _rows(out.read_text())
    assert list(rows) == ["starnet_s050", "visformer_tiny"]
    kinds = "1 of 3 x 3, 2 of 7 x 7 depthwise"
    assert rows["starnet_s050"][:6] == [
        "starnet",
        "starnet_s050",
        "96 x 96",
        kinds,
        "9, 49",
        "3 x 3 -> 6 x 6",
    ]
    assert rows["visformer_tiny"][5].startswith(
        "7 x 7 -> keep only: with patch_embed3.proj at stride 1"
    )
    assert all(0 < float(cells[-1]) < 1e-4 for cells in rows.values())
    assert "\nconvit (convit_tiny).\n" in out.read_text()


def test_unknown_family_is_refused(
    write: Callable[[list[str]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        write(["--families", "resnot"])
    assert "neither a module of timm nor a model: resnot" in capsys.readouterr().err
