"""Images of one's own, as the studies take them, and what the studies refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Two classes of four noise images each, no two sides alike, in train/ and val/."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            (tmp_path / "images" / split / label).mkdir(parents=True)
            for n in range(4):
                pixels = rng.integers(0, 255, (71, 83, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / label / f"{n}.png")
    return tmp_path / "images"


Refusal = Callable[[Any, list[str]], str]


@pytest.fixture
def refusal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a study with options that it has to refuse, with nothing written; gives what it says."""

    def of(study: Any, options: list[str]) -> str:
        try:
            code = study.main([*options, "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    return of
