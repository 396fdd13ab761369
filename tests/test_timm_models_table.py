"""docs/timm_models.py writes what is recorded of timm's models; some rows of the page are written again."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
# Recorded; without a grid or without attention between tokens; and without any.
SAMPLE = ["convit_tiny", "xcit_nano_12_p16_224", "levit_128s", "skresnet18", "resnet18"]


def rows_of(page: Path) -> dict[str, list[str]]:
    lines = [
        line.strip("|").split("|")
        for line in page.read_text().splitlines()
        if line.startswith("| ")
    ]
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[1:]
    }


def test_page_has_the_rows_that_the_script_writes(tmp_path: Path) -> None:
    script, out = runpy.run_path(str(DOCS / "timm_models.py")), tmp_path / "table.md"
    written_before = rows_of(DOCS / "timm_models.md")
    kept = tmp_path / "rows"
    script["main"](["--models", *SAMPLE, "--out", str(out), "--rows", str(kept)])
    rows = rows_of(out)
    assert list(rows) == [name for name in sorted(SAMPLE) if name != "resnet18"]
    for name, (*cells, difference, reasons, _) in rows.items():
        *cells_before, difference_before, reasons_before, others = written_before[name]
        assert (cells, reasons) == (cells_before, reasons_before)
        # It is rounding, which differs between processors.
        for text in (difference, difference_before):
            assert (text == "") == (cells[-1] == "0")
            assert float(text or 0) < 1e-5
        kind = [name, *filter(None, others.split(", "))]
        assert [sorted(names) for names in script["kinds_of"](kind)] == [sorted(kind)]
    assert rows["convit_tiny"][:3] == ["ConVit", "224 x 224", "2 (2)"]
    assert "attention between branches" in rows["skresnet18"][4]
    # A second run reads what is kept.
    lines = kept.read_text().splitlines()
    kept.write_text("\n".join(line.replace("2 (2)", "7 (5)") for line in lines))
    script["main"](["--models", *SAMPLE, "--out", str(out), "--rows", str(kept)])
    assert rows_of(out)["convit_tiny"][2] == "7 (5)"


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(DOCS / "timm_models.py"))["main"]
    with pytest.raises(SystemExit):
        main(["--models", "perceptron"])
    assert "perceptron" in capsys.readouterr().err
