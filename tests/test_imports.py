"""Which package may import which, read from the sources, and that neither needs an optional dependency."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The fine-tuning loop, and what the root of tcnn_model re-exports of it.
LOOP = {
    "tcnn_model.training",
    "tcnn_model.finetune",
    "tcnn_model.EpochResult",
    "tcnn_model.parameter_groups",
}
# studies/ is a folder of scripts: their modules are imported by their own names as well.
STUDIES = {"studies", *(p.stem for p in (ROOT / "studies").glob("*") if p.suffix == ".py" or p.is_dir())}


def _imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports: modules, and ``module.name`` for each name taken from one."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


def _within(name: str, forbidden: set[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in forbidden)


def _violations(folder: str, forbidden: set[str]) -> list[str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no sources in {folder}"
    return [f"{f.relative_to(ROOT)}: {name}" for f in files for name in _imports(f) if _within(name, forbidden)]


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("tcnn_model", {"tcnn_probe", "tests", *STUDIES}),
        ("tcnn_probe", {"tests", *STUDIES, *LOOP}),
    ],
)
def test_dependency_direction(folder: str, forbidden: set[str]) -> None:
    assert _violations(folder, forbidden) == []


def test_only_studies_and_their_tests_import_studies() -> None:
    free = {"studies", "tests"}
    files = [f for f in ROOT.rglob("*.py") if not f.relative_to(ROOT).parts[0].startswith(".")]
    others = [f for f in files if f.relative_to(ROOT).parts[0] not in free]
    others += (ROOT / "tests" / "tcnn_model").rglob("*.py")
    others += (ROOT / "tests" / "tcnn_probe").rglob("*.py")
    assert [f"{f}: {name}" for f in others for name in _imports(f) if _within(name, STUDIES)] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tcnn_model.training.finetune", True),
        ("from tcnn_model import finetune", True),
        ("from tcnn_model import GPSA, parameter_groups", True),
        ("from tcnn_model.training.optimization import set_drop_path", True),
        ("from ..tcnn_model.finetune import evaluate", True),
        ("def f():\n    import tcnn_model.training.finetune as loop", True),
        ("import importlib\nimportlib.import_module('tcnn_model.training.finetune')", True),
        ("from tcnn_model import GPSA", False),
        ("import tcnn_model", False),
    ],
)
def test_the_walk_finds_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: bool) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "tcnn_probe").mkdir()
    (tmp_path / "tcnn_probe" / "module.py").write_text(source)
    assert bool(_violations("tcnn_probe", LOOP)) == expected


@pytest.mark.parametrize(
    ("package", "blocked"),
    [
        (
            "tcnn_model",
            ("zarr", "xarray", "captum", "scipy", "triton", "matplotlib", "sklearn", "tcnn_probe", "studies"),
        ),
        ("tcnn_probe", ("captum", "scipy", "triton", "matplotlib", "sklearn", "studies")),
    ],
)
def test_imports_without_optional_dependencies(package: str, blocked: tuple[str, ...]) -> None:
    # None in sys.modules makes an import raise ModuleNotFoundError, and reads as "not installed" to find_spec: what
    # torch asks about Triton.
    program = f"""
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
import {package}
for name in {package}.__all__:
    getattr({package}, name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
