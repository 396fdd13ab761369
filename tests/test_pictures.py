"""Scripts that draw the pictures of the documents."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tcnn_model.training.command import main as finetune

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _scripts_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)


def draw(name: str, out: Path, *arguments: str) -> np.ndarray:
    script = runpy.run_path(str(DOCS / f"{name}.py"))
    script["main"]([*arguments, "--out", str(out)])
    plt.close("all")
    return plt.imread(out)


@pytest.mark.parametrize("name", ["plots", "what_heads_see"])
def test_pictures_of_example_recordings_are_like_the_committed_ones(
    name: str, tmp_path: Path
) -> None:
    picture = draw(name, tmp_path / "out.png")
    committed = plt.imread(DOCS / f"{name}.png")
    # Another version of matplotlib may place text a few pixels off.
    assert np.abs(np.subtract(picture.shape, committed.shape)).max() < 20
    assert picture.std() == pytest.approx(committed.std(), rel=0.1)


def test_heads_on_photographs_are_drawn_from_a_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = ["vit_tiny_r_s16_p8_224", "--img-size", "32", "--model-options"]
    model += ["patch_size=1", "embed_dim=16", "depth=4", "num_heads=4"]
    training = ["--epochs", "1", "--warmup-epochs", "0", "--limit", "32"]
    training += ["--batch-size", "16", "--out", str(run)]
    assert finetune([*model, *training]) == 0
    picture = draw("heads_on_photographs", tmp_path / "out.png", str(run))
    assert picture.std() > 0.1
