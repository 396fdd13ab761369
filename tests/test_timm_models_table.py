"""docs/timm_models.py writes the table of recordings of timm's models."""

import runpy
from pathlib import Path

import pytest
import timm

DOCS = Path(__file__).parent.parent / "docs"
# Two models are recorded; one is recorded in part, as it also attends between channels; one attends only between
# branches; and one has no attention and gets no row.
SAMPLE = ["convit_tiny", "levit_128s", "xcit_nano_12_p8_224", "skresnet18", "resnet18"]


def rows_of(page: Path) -> dict[str, list[str]]:
    lines = [
        line.strip("|").split("|")
        for line in page.read_text().splitlines()
        if line.startswith("| ")
    ]
    return {
        cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[1:]
    }


def test_script_writes_the_table(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "timm_models.py"))
    out = tmp_path / "table.md"
    rows_file = tmp_path / "rows"
    script["main"](["--models", *SAMPLE, "--out", str(out), "--rows", str(rows_file)])
    rows = rows_of(out)
    assert list(rows) == [name for name in sorted(SAMPLE) if name != "resnet18"]
    for cells in rows.values():
        assert (cells[3] == "") == (cells[2] == "0")
        assert float(cells[3] or 0) < 1e-5
    assert rows["convit_tiny"][:3] == ["ConVit", "224 x 224", "2 (2)"]
    assert "attention between branches" in rows["skresnet18"][4]
    assert script["kinds_of"](
        ["vit_base_patch16_224", "vit_tiny_patch16_224", "vit_base_patch16_siglip_224"]
    ) == [
        ["vit_tiny_patch16_224", "vit_base_patch16_224"],
        ["vit_base_patch16_siglip_224"],
    ]
    # The table equals that in docs/ up to rounding; another version of timm has other models.
    page = DOCS / "timm_models.md"
    if f"timm {timm.__version__} " in page.read_text():
        rows_of_page = rows_of(page)
        for name, cells in rows.items():
            assert rows_of_page[name][:3] == cells[:3]
            assert rows_of_page[name][4] == cells[4]
    # A second run reads the saved rows.
    lines = rows_file.read_text().splitlines()
    rows_file.write_text("\n".join(line.replace("2 (2)", "7 (5)") for line in lines))
    script["main"](["--models", *SAMPLE, "--out", str(out), "--rows", str(rows_file)])
    assert rows_of(out)["convit_tiny"][2] == "7 (5)"


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(DOCS / "timm_models.py"))["main"]
    with pytest.raises(SystemExit):
        main(["--models", "perceptron"])
    assert "perceptron" in capsys.readouterr().err
