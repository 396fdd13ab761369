"""docs/models.py writes what is recorded of vision models, and which layers have no grid."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_script_writes_the_table(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    main, out = runpy.run_path(str(DOCS / "models.py"))["main"], tmp_path / "models.md"
    main(["--models", "vit_tiny_patch16", "ViTMAE", "--out", str(out)])
    lines = [
        line.strip("| ").split(" | ")
        for line in out.read_text().splitlines()
        if line.startswith("| ")
    ]
    rows = {cells[1]: cells for cells in lines[1:]}
    assert list(rows) == ["vit_tiny_patch16_224", "ViTMAEModel"]
    assert rows["vit_tiny_patch16_224"][2:5] == [
        "64 x 96",
        "12",
        "4 x 6 + 1 (12 times)",
    ]
    assert rows["ViTMAEModel"][3:5] == ["2", ""]
    assert "not in the order of the image's rows (2 times)" in rows["ViTMAEModel"][5]


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(DOCS / "models.py"))["main"]
    with pytest.raises(SystemExit):
        main(["--models", "perceptron"])
    assert "perceptron" in capsys.readouterr().err
