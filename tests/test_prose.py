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

FOLDERS = ("benchmarks", "studies", "tcnn_model", "tcnn_probe", "tests")
# These are public parameters, such as those of layer_cka(features, others), and shares that corruptions keep.
PUBLIC = {
    "tcnn_probe/attribution": "others",
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
    # A renamed folder would have no files and therefore no faults.
    assert all((ROOT / name).is_dir() for name in FOLDERS)
    in_folders = [file for name in FOLDERS for file in (ROOT / name).rglob("*.py")]
    return sorted([ROOT / "tcnn_finetune.py", *in_folders])


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
def test_faults_of_prose_are_found(source: str, message: str) -> None:
    (complaint,) = _complaints(source)
    assert complaint.startswith(message)


def test_good_prose_passes() -> None:
    source = 'def rows(image):\n    """Return the rows.\n\n    Args:\n        image: Image, shape (H, W).\n    """'
    assert list(_complaints(source)) == []
