"""Extracts from the documents for the site:
examples for the reference, first paragraphs for llms.txt.
"""

import ast
import builtins
import importlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Example",
    "documents",
    "examples",
    "first_paragraph",
    "listed_names",
    "unlisted_names",
]


def listed_names(path: Path) -> list[str]:
    """Return the names that the reference lists, in its order."""
    return re.findall(r"^   (tcnn_[\w.]+)$", path.read_text(), flags=re.MULTILINE)


def unlisted_names(listed: list[str]) -> list[str]:
    """Return the public names that the reference does not list, under this or another name."""
    members = {}
    for name in listed[listed.index("tcnn_probe") :]:  # modules are listed last
        module = importlib.import_module(name)
        for member in module.__all__:
            members[f"{name}.{member}"] = getattr(module, member)
    described = {id(value) for name, value in members.items() if name in listed}
    return [name for name, value in members.items() if id(value) not in described]


def documents(root: Path) -> list[Path]:
    """Return the documents whose examples are run: the README, the guide and the notebooks."""
    return [
        root / "README.md",
        *sorted(root.glob("docs/*.md")),
        *sorted(root.glob("docs/notebooks/*.md")),
    ]


@dataclass(frozen=True)
class Example:
    """Code of a document.

    Args:
        page: Path of the page from the root, without its suffix.
        code: Block of code.
        alone: Whether the block runs alone, without names from earlier blocks.
    """

    page: str
    code: str
    alone: bool


def examples(root: Path, names: list[str]) -> dict[str, Example]:
    """Find an example of each name in the documents, if possible one that runs alone.

    The page with the most blocks that use a name is taken to be the page about it.

    Args:
        root: Root of the repository.
        names: Full names, such as ``tcnn_probe.plot.health``.

    Returns:
        The first suitable block of code for each name that a document uses.
    """
    uses: dict[str, list[Example]] = defaultdict(list)
    for page in documents(root):
        place = page.relative_to(root).with_suffix("").as_posix()
        imported: dict[str, str] = {}
        for block in code_blocks(page.read_text()):
            tree = ast.parse(block)
            imported |= imported_names(tree)
            example = Example(place, block, not unbound_names(tree))
            for name in sorted(used_names(tree, imported) & set(names)):
                uses[name].append(example)
    chosen = {}
    for name, all_uses in uses.items():
        number = Counter(example.page for example in all_uses)
        alone = [example for example in all_uses if example.alone]
        chosen[name] = max(alone or all_uses, key=lambda example: number[example.page])
    return chosen


def code_blocks(text: str) -> list[str]:
    """Return the blocks of Python code of a document or notebook,
    without blocks of IPython's magics.
    """
    blocks = re.findall(
        r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return [block for block in blocks if not re.search(r"^\s*%", block, re.MULTILINE)]


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full names of the objects that code imports by ``from``."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def used_names(tree: ast.AST, imported: dict[str, str]) -> set[str]:
    """Return the full names that code uses, such as ``tcnn_probe.plot.health``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            names.add(imported.get(first, first) + dot + rest)
    return names


def unbound_names(tree: ast.AST) -> set[str]:
    """Return the names that code uses but does not bind anywhere, whatever the order."""
    bound = set(dir(builtins))
    used = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name):
                bound.add(name)
            case ast.alias(name, alias):
                bound.add(alias or name.partition(".")[0])
            case ast.FunctionDef(name) | ast.ClassDef(name):
                bound.add(name)
    return used - bound


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a document, on one line and without links."""
    _, _, body = text.partition("\n# ") if text.startswith("---") else ("", "", text)
    paragraphs = body.split("\n\n")[1:]
    prose = next(words for words in paragraphs if re.match(r"[\w`]", words))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
