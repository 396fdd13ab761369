"""Allowed imports between the parts, read from the sources,
and imports without optional dependencies.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tcnn_probe

ROOT = Path(__file__).parents[1]

# The table lists the parts of tcnn_probe that each part may import, in an order of imported before
# importing parts.
PARTS: dict[str, set[str]] = {
    "schema": set(),
    "free_memory": set(),
    "extras": set(),
    "representation": {"extras"},
    "hooks": set(),
    "models": {"hooks"},
    "images": {"models"},
    "provenance": {"models"},
    "architectures": set(),
    "attention": {
        "architectures",
        "free_memory",
        "hooks",
        "images",
        "models",
        "provenance",
    },
    "storage": {"schema"},
    "heads": {"architectures", "extras", "models", "schema"},
    "diagnosis": set(),
    "probes": {
        "architectures",
        "attention",
        "heads",
        "hooks",
        "models",
        "representation",
        "schema",
    },
    "recording": {
        *(
            "architectures",
            "attention",
            "diagnosis",
            "heads",
            "hooks",
            "images",
            "models",
            "probes",
            "provenance",
            "schema",
            "storage",
        )
    },
    "callbacks": {"extras", "probes", "recording", "schema", "storage"},
    "interventions": {
        *("architectures", "attention", "heads", "hooks", "images", "models"),
        *("probes", "provenance", "schema"),
    },
    "attribution": {
        *("architectures", "attention", "extras", "hooks", "images", "models"),
        "provenance",
    },
    "evaluation": {"extras", "hooks", "images", "models", "provenance"},
    "plot": {"diagnosis", "evaluation", "heads", "images", "schema"},
    "loggers": {"diagnosis", "plot", "recording"},
    "reporting": {"diagnosis", "extras", "heads", "plot", "storage"},
    "looking": {
        "attention",
        "attribution",
        "extras",
        "images",
        "interventions",
        "models",
        "probes",
        "provenance",
        "recording",
        "reporting",
        "schema",
        "storage",
    },
    "command_options": set(),
    "commands": {"extras", "looking", "plot", "reporting", "storage"},
    "command_line": {"command_options", "commands"},
}

# These are the fine-tuning loop and its names in the root of tcnn_model.
LOOP = {
    "tcnn_model.training",
    "tcnn_model.finetune",
    "tcnn_model.EpochResult",
    "tcnn_model.parameter_groups",
}
# studies/ is a folder of scripts, whose modules are also imported by their own names.
STUDIES = {
    "studies",
    *(p.stem for p in (ROOT / "studies").glob("*") if p.suffix == ".py" or p.is_dir()),
}


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the dotted names that a file imports: modules,
    and ``module.name`` for each name imported from one.
    """
    return tuple(_names(path))


def _names(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Each dot of a relative import goes up one folder.
            parents = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            # Of a function, or of a module's function.
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", None)
            if name in ("import_module", "__import__"):
                yield from (
                    argument.value
                    for argument in node.args
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                )


def _within(name: str, forbidden: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in forbidden)


def _violations(folder: str, forbidden: set[str]) -> list[str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    # A renamed folder would have no violations.
    assert files, f"no sources in {folder}"
    return [
        f"{f.relative_to(ROOT)}: {name}"
        for f in files
        for name in _imports(f)
        if _within(name, forbidden)
    ]


def _strays(package: Path) -> list[str]:
    """Return imports of one part by another that the table does not allow."""
    parts = {
        path.stem
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - {"__init__"} == PARTS.keys()
    strays = []
    for file in sorted(package.rglob("*.py")):
        part = file.relative_to(package).with_suffix("").parts[0]
        for name in _imports(file) if part != "__init__" else ():
            target = name.split(".")[1] if name.startswith("tcnn_probe.") else part
            if target in PARTS and target not in PARTS[part] | {part}:
                strays.append(f"{file.relative_to(package)}: {name}")
    return strays


def test_parts_import_downwards() -> None:
    assert _strays(ROOT / "tcnn_probe") == []
    below: set[str] = set()
    # In the order of the table, no part imports a later one.
    for part, allowed in PARTS.items():
        assert allowed <= below, part
        below.add(part)


def test_forbidden_imports_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    package = tmp_path / "tcnn_probe"
    for part in PARTS:
        (package / part).mkdir(parents=True)
        (package / part / "__init__.py").write_text("")
    assert _strays(package) == []
    (package / "storage" / "marks.py").write_text("from tcnn_probe.recording import recorder")
    module = "tcnn_probe.recording"
    assert _strays(package) == [
        f"storage/marks.py: {name}" for name in (module, f"{module}.recorder")
    ]


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("tcnn_model", {"tcnn_probe", "tests", *STUDIES}),
        ("tcnn_probe", {"tests", *STUDIES, *LOOP}),
    ],
    ids=["tcnn_model", "tcnn_probe"],
)
def test_dependency_direction(folder: str, forbidden: set[str]) -> None:
    assert _violations(folder, forbidden) == []


def test_studies_use_the_public_surface_only() -> None:
    public = {"tcnn_model", "tcnn_probe"}
    public |= {
        f"tcnn_probe.{name}"
        for name in (
            "attribution",
            "diagnosis",
            "evaluation",
            "heads",
            "images",
            "plot",
            "probes",
        )
    }
    # docs/training.md names these.
    public |= {"tcnn_model.class_folders", "tcnn_model.pictures"}
    public |= {
        f"tcnn_model.training.{name}"
        for name in ("checkpoint", "command", "config", "grafit", "sources")
    }
    names = [(f.name, name) for f in (ROOT / "studies").rglob("*.py") for name in _imports(f)]
    ours = [(file, name) for file, name in names if name.startswith(("tcnn_model.", "tcnn_probe."))]
    assert ours
    assert [
        entry
        for entry in ours
        if entry[1] not in public and entry[1].rpartition(".")[0] not in public
    ] == []


def test_the_root_has_names_of_the_instrument_alone() -> None:
    """Functions that evaluate classifiers without their attention are in a folder of their own."""
    assert not set(tcnn_probe.__all__) & set(tcnn_probe.evaluation.__all__)


def test_a_misspelt_name_is_answered_with_a_suggestion() -> None:
    with pytest.raises(AttributeError, match="did you mean 'attention_maps'"):
        _ = tcnn_probe.atention_maps
    with pytest.raises(AttributeError, match=r"has no 'zzz'$"):
        _ = tcnn_probe.zzz


def test_only_studies_and_their_tests_import_studies() -> None:
    files = [
        f
        for f in ROOT.rglob("*.py")
        if f.relative_to(ROOT).parts[0] in ("benchmarks", "docs", "tests")
    ]
    files = [
        f
        for f in files
        if f.relative_to(ROOT).parts[:2] != ("tests", "studies") and f.parent != ROOT / "tests"
    ]
    # This script makes a recording from a study's training.
    files.remove(ROOT / "docs" / "scripts" / "example.py")
    assert [f"{f}: {name}" for f in files for name in _imports(f) if _within(name, STUDIES)] == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import tcnn_model.training.finetune", True),
        ("from tcnn_model import finetune", True),
        ("from tcnn_model import GPSA, parameter_groups", True),
        ("from ..tcnn_model.training import finetune", True),
        ("def f():\n    import tcnn_model.training.finetune as loop", True),
        (
            "import importlib\nimportlib.import_module('tcnn_model.training.finetune')",
            True,
        ),
        ("from tcnn_model import GPSA", False),
    ],
)
def test_imports_of_all_forms_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: bool
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "tcnn_probe").mkdir()
    (tmp_path / "tcnn_probe" / "module.py").write_text(source)
    assert bool(_violations("tcnn_probe", LOOP)) == expected


NAMES = """
import sys
beside = ("lazy_loader", "zarr", "xarray", "tcnn_probe")
sys.modules.update(dict.fromkeys(beside))
import tcnn_model
for name in beside:
    del sys.modules[name]
import tcnn_probe
heavy = {'torch', 'timm', 'xarray', 'zarr', 'matplotlib', 'bokeh'}
assert not heavy & {*sys.modules}, "importing the probe imports little"

optional = dict.fromkeys(("bokeh", "captum", "scipy", "triton", "matplotlib", "sklearn", "studies"))
sys.modules.update(optional | dict.fromkeys(beside))
for name in tcnn_model.__all__:
    getattr(tcnn_model, name)

for name in beside:
    del sys.modules[name]
# What another of these folders imports comes before it, so that only its own import can bring it.
for name in ("images", "heads", "probes", "attribution"):
    assert getattr(tcnn_probe, name).__name__ == f"tcnn_probe.{name}"
for package in (tcnn_probe, tcnn_probe.evaluation, tcnn_probe.heads):
    for name in package.__all__:
        getattr(package, name)
"""


@pytest.mark.study
def test_public_names_need_no_optional_dependency() -> None:
    """``tcnn_model`` needs only torch and timm,
    the probe's public names need no optional package, and its folders no import.

    None in sys.modules makes an import raise ModuleNotFoundError, and reads as "not installed" to
    find_spec, which is what torch asks about Triton.
    """
    done = subprocess.run(
        [sys.executable, "-c", NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
