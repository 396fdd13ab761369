"""docs/architectures.md equals the output of its script."""

import runpy
from pathlib import Path

from tcnn_probe.architectures.lookup import RECORDS

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    out = tmp_path / "architectures.md"
    runpy.run_path(str(DOCS / "scripts" / "architectures.py"))["main"](
        ["--out", str(out)]
    )
    text = out.read_text()
    assert text == (DOCS / "architectures.md").read_text()
    rows = [
        line.strip("| ").split(" | ")
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    assert sorted(name.strip("`") for name, _ in rows) == sorted(RECORDS)
    assert all(words for _, words in rows)
