"""Names and docstrings that can be read: pronouns, relative clauses and fragments do not come back.

A name says what it holds: a pronoun or a participle (``one``, ``found``, ``given``) leaves that to the reader. The
first line of a docstring is a sentence in the imperative or, of a class, property or test, a noun phrase or statement,
and never a relative clause. ruff's D401 checks the verbs of functions; it has no rule for the rest.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Folders and files that hold to these rules; a folder is added here when it has been rewritten.
CLEAN = [
    "tcnn_model/__init__.py",
    "tcnn_model/conversion",
    "tcnn_model/gpsa",
    "tcnn_model/kernels",
    "tcnn_model/models",
    "tcnn_model/pooling",
    "tcnn_model/precision.py",
    "tcnn_model/training",
    "tcnn_finetune.py",
    "tcnn_probe/architectures",
    "tcnn_probe/attention",
    "tcnn_probe/attribution/__init__.py",
    "tcnn_probe/attribution/captum_methods.py",
    "tcnn_probe/attribution/class_attention.py",
    "tcnn_probe/attribution/deletion.py",
    "tcnn_probe/attribution/faithfulness.py",
    "tcnn_probe/attribution/layer_choice.py",
    "tcnn_probe/attribution/perturbation.py",
    "tcnn_probe/attribution/pixels.py",
    "tcnn_probe/attribution/rollout.py",
    "tcnn_probe/attribution/saliency.py",
    "tcnn_probe/callbacks",
    "tcnn_probe/command_line.py",
    "tcnn_probe/diagnosis",
    "tcnn_probe/evaluation",
    "tcnn_probe/heads",
    "tcnn_probe/hooks",
    "tcnn_probe/images.py",
    "tcnn_probe/interventions",
    "tcnn_probe/loggers.py",
    "tcnn_probe/models.py",
    "tcnn_probe/plot",
    "tcnn_probe/probes",
    "tcnn_probe/recording",
    "tcnn_probe/reporting",
    "tcnn_probe/representation",
    "tcnn_probe/schema.py",
    "tcnn_probe/storage",
    "benchmarks",
    "studies",
    "tests/benchmarks",
    "tests/tcnn_model/cases.py",
    "tests/tcnn_model/dense.py",
    "tests/tcnn_model/families.py",
    "tests/tcnn_model/helpers.py",
    "tests/tcnn_model/tiny_models.py",
    "tests/tcnn_model/conversion",
    "tests/tcnn_model/gpsa",
    "tests/tcnn_model/kernels",
    "tests/tcnn_model/models",
    "tests/tcnn_model/pooling",
    "tests/tcnn_probe/callbacks",
    "tests/tcnn_probe/evaluation",
    "tests/tcnn_probe/heads",
    "tests/tcnn_probe/diagnosis",
    "tests/tcnn_probe/oracle.py",
    "tests/tcnn_probe/interventions",
    "tests/test_families_table.py",
    "tests/test_imports.py",
    "tests/test_documents.py",
    "tests/tcnn_probe/networks.py",
    "tests/tcnn_probe/contracts",
    "tests/tcnn_probe/architectures",
    "tests/tcnn_probe/recording",
    "tests/tcnn_probe/probes",
    "tests/tcnn_probe/attribution",
    "tests/tcnn_probe/plot",
    "tests/tcnn_probe/reporting",
    "tests/tcnn_probe/representation",
    "tests/tcnn_probe/test_command_line.py",
    "tests/tcnn_probe/test_images.py",
    "tests/tcnn_probe/test_without_torch.py",
    "tests/tcnn_probe/storage",
    "tests/studies",
    "tests/tcnn_model/training",
    "tests/test_prose.py",
]
# Public parameters, which users write: layer_cka(features, others), and the corruptions' shares that are kept.
PUBLIC = {
    "tcnn_probe/recording": "every",
    "tcnn_probe/representation": "others",
    "tcnn_probe/evaluation/corruptions": "kept",
}

PRONOUN = re.compile(
    "ones?|some|each|found|given|told|there|here|this|these|those|others?|own|both|mine|theirs|made|wanted|chosen|whole|"
    "every|many|much|more|less|alike|such|another|several|asked|taken|kept|seen|least|most"
)
RELATIVE_CLAUSE = re.compile(
    r"(What|Whether|Which|Where|How|Those|That|So|Why|Who|Of|It|They|As|With|If|All|In|Not|None|No|Have)\b"
)
FRAGMENT = re.compile(
    r"(of|for|from|in|to|that|which|whose|where|what|as|how|with|by|on|before|after|until|into|likewise|see)\b",
    re.I,
)


def _files() -> list[Path]:
    paths = [ROOT / name for name in CLEAN]
    return [
        file
        for path in paths
        for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])
    ]


def _complaints(source: str) -> Iterator[str]:
    """Yield the line and the fault of each pronoun, relative clause and fragment in a source."""
    for node in ast.walk(ast.parse(source)):
        name = (
            node.id
            if isinstance(node, ast.Name)
            else node.arg
            if isinstance(node, ast.arg)
            else ""
        )
        if PRONOUN.fullmatch(name):
            yield f"{node.lineno}: {name!r} is a pronoun: say what it holds"
        if not isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
        ):
            continue
        docstring = ast.get_docstring(node) or ""
        first_line = docstring.partition("\n")[0]
        if RELATIVE_CLAUSE.match(first_line.lstrip("`*:")):
            yield f"{node.body[0].lineno}: not a sentence or noun phrase: {first_line!r}"
        section = re.search(r"Args:\n(.*?)(?:\n\S|\Z)", docstring, re.S)
        for entry in (
            re.findall(r"^ {4}[\w*, ]+: (.*)$", section.group(1), re.M)
            if section
            else ()
        ):
            if FRAGMENT.match(entry):
                yield f"{node.body[0].lineno}: fragment of a sentence: {entry!r}"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_names_are_nouns_and_docstrings_sentences(path: Path) -> None:
    public = PUBLIC.get(str(path.parent.relative_to(ROOT)))
    assert [
        complaint
        for complaint in _complaints(path.read_text())
        if f": {public!r} is" not in complaint
    ] == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("for one in layers: pass", "1: 'one' is a pronoun"),
        ("def f(given): pass", "1: 'given' is a pronoun"),
        (
            '"""What runs inside."""',
            "1: not a sentence or noun phrase: 'What runs inside.'",
        ),
        (
            'class A:\n    """Of which images."""',
            "2: not a sentence or noun phrase: 'Of which",
        ),
        (
            'def f(x):\n    """Return x.\n\n    Args:\n        x: of a batch.\n    """',
            "2: fragment of a sentence: 'of a batch.'",
        ),
    ],
)
def test_faults_are_found(source: str, message: str) -> None:
    (complaint,) = _complaints(source)
    assert complaint.startswith(message)


def test_good_prose_passes() -> None:
    source = 'def rows(image):\n    """Return the rows.\n\n    Args:\n        image: Image, shape (H, W).\n    """'
    assert list(_complaints(source)) == []


def test_listed_paths_exist() -> None:
    assert [name for name in CLEAN if not (ROOT / name).exists()] == []
