"""docs/corruptions.md and its figure equal the output of their script."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "docs_corruptions", DOCS / "scripts" / "corruptions.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_equals_the_output_of_the_script(script: ModuleType) -> None:
    assert script.table() in (DOCS / "corruptions.md").read_text()


def test_the_figure_is_drawn(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The layout does not depend on the size of the pictures, but the time does.
    script.main(["--size", "11", "--out", str(tmp_path / "figure.png")])
    assert script.table() in capsys.readouterr().out
    with Image.open(tmp_path / "figure.png") as figure:
        drawn = figure.size

    def size(side: int) -> tuple[int, int]:
        # Fifteen corruptions are side by side, and five severities below each other.
        cell = side + script.GAP
        return script.LEFT + 15 * cell, script.TOP + 5 * cell

    assert drawn == pytest.approx(size(11), abs=1)  # matplotlib 3.10.0 rounds down
    with Image.open(DOCS / "corruptions.png") as shown:
        assert shown.size == size(80)


def test_script_prints_milliseconds(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(["--size", "11", "--milliseconds"])
    assert len(capsys.readouterr().out.splitlines()) == 15
