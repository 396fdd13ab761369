"""An editable install is a path, which type checkers follow,
instead of a finder, which they do not follow.
"""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Only the files that the build reads are copied, as a build in the checkout would leave files
# behind.
FILES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "tcnn_model/__init__.py",
    "tcnn_probe/__init__.py",
)
BUILD = "from setuptools.build_meta import build_editable; build_editable('wheel')"


def test_an_editable_install_is_a_path(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "wheel").mkdir()
    command = [sys.executable, "-c", BUILD]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if "dist-info" not in name]
        (path,) = modules
        assert path.endswith(".pth")
        assert archive.read(path).decode().strip() == str(tmp_path)
