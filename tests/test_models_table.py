"""docs/models.py writes the table of recordings of vision models, including layers without a grid."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

DOCS = Path(__file__).parent.parent / "docs"


def test_script_writes_the_table(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    main = runpy.run_path(str(DOCS / "models.py"))["main"]
    out = tmp_path / "models.md"
    main(["--models", "vit_tiny_patch16", "DeiT", "ViTMAE", "--out", str(out)])
    lines = [
        line.strip("| ").split(" | ")
        for line in out.read_text().splitlines()
        if line.startswith("| ")
    ]
    rows = {cells[1]: cells for cells in lines[1:]}
    assert list(rows) == ["vit_tiny_patch16_224", "DeiTModel", "ViTMAEModel"]
    vit = rows["vit_tiny_patch16_224"]
    shuffled = rows["ViTMAEModel"]
    assert vit[2:5] == ["64 x 96", "12", "4 x 6 + 1 (12 times)"]
    right, decided = re.match(r"(\d+) of (\d+)", vit[5]).groups()  # type: ignore[union-attr]
    assert right == decided
    assert int(decided) >= 8
    # Its class token is zero before training and attends uniformly.
    assert rows["DeiTModel"][5] == "2 of 2"
    assert shuffled[3:6] == ["2", "", ""]
    assert "not in the order of the image's rows (2 times)" in shuffled[6]


SQUARES_OF_4_BY_6 = [(0, 2), (1, 5), (2, 0), (3, 4)]


@pytest.mark.parametrize(
    ("peaks", "height", "answer"),
    [
        (SQUARES_OF_4_BY_6, 2.0, True),
        ([(3 - y, 5 - x) for y, x in SQUARES_OF_4_BY_6], 2.0, False),
        ([(y, 5 - x) for y, x in SQUARES_OF_4_BY_6], 2.0, False),
        (SQUARES_OF_4_BY_6, 1.1, None),  # no place stands out
        ([(0, 2)] * 4, 2.0, None),  # the peak is in the same place for every square
    ],
)
def test_squares_are_found_by_their_peaks(
    peaks: list[tuple[int, int]], height: float, answer: bool | None
) -> None:
    script = runpy.run_path(str(DOCS / "models.py"))
    values = np.ones((5, 3, 4, 6))
    signs = (-1.0) ** np.add.outer(np.arange(4), np.arange(6))
    for number, (y, x) in enumerate(peaks):
        changes = signs.copy()
        changes[y, x] *= height
        values[1 + number] = np.exp(changes)
    pixels = {
        f"pixel_{dim}": (dim, 7.5 + 16 * np.arange(n))
        for dim, n in zip("yx", (4, 6), strict=True)
    }
    maps = xr.DataArray(values, pixels, ("image", "head", "y", "x"))
    centres = [(int(64 * y), int(96 * x)) for y, x in script["SQUARES"]]
    finds_squares = script["_finds_squares"](maps, centres, (64, 96))
    assert finds_squares is answer


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(DOCS / "models.py"))["main"]
    with pytest.raises(SystemExit):
        main(["--models", "perceptron"])
    assert "perceptron" in capsys.readouterr().err
