"""What the README shows is what runs."""

import re
from pathlib import Path

import matplotlib as mpl
import pytest
import timm
import torch
import xarray as xr
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent


def test_readme_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 5
    images, labels = torch.randn(6, 3, 64, 96), torch.arange(6) % 3
    loader = DataLoader(TensorDataset(images, labels), batch_size=3)
    names = {"train_loader": loader, "val_loader": loader, "torch": torch}
    for block in blocks:
        exec(block.replace("epochs=10, warmup_epochs=2", "epochs=2, warmup_epochs=1, progress=False"), names)
    assert xr.open_zarr("run.zarr").epoch.values.tolist() == [0, 1, 2]
    recorder = names["recorder"]
    assert recorder.epochs == (0, 1)  # type: ignore[attr-defined]


def test_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    assert 'pip install -e ".[test]" && pytest' in readme
    assert (ROOT / "studies" / "gating_evolution.py").exists()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target


def test_registry_names_in_the_readme() -> None:
    for name in ("t_resnetrs50", "t_resnetrs350", "t_resnet50d", "t_resnet200d", "t_resnet50"):
        assert timm.is_model(name)
