"""What the site takes from the documents: examples for the reference, first paragraphs for llms.txt."""

import ast
import re
from collections import defaultdict
from pathlib import Path

__all__ = ["documents", "examples", "first_paragraph", "listed_names"]


def listed_names(path: Path) -> list[str]:
    """Return the names that the reference lists, in its order."""
    return re.findall(r"^   (tcnn_[\w.]+)$", path.read_text(), flags=re.MULTILINE)


def documents(root: Path) -> list[Path]:
    """Return the documents whose examples are run: the README, the guide and the notebooks."""
    return [
        root / "README.md",
        *sorted(root.glob("docs/*.md")),
        *sorted(root.glob("docs/notebooks/*.md")),
    ]


def examples(root: Path, names: list[str]) -> dict[str, tuple[str, str]]:
    """Find an example of each name in the documents.

    Of the pages that use a name, the one with the most such blocks is taken to be about it.

    Args:
        root: Root of the repository.
        names: Full names, such as ``tcnn_probe.plot.health``.

    Returns:
        For each name that a document uses, the page without its suffix and the first block of code there.
    """
    blocks: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for page in documents(root):
        place = page.relative_to(root).with_suffix("").as_posix()
        imported: dict[str, str] = {}
        for block in code_blocks(page.read_text()):
            tree = ast.parse(block)
            imported |= imported_names(tree)
            for name in sorted(used_names(tree, imported) & set(names)):
                blocks[name][place].append(block)
    first_blocks = {}
    for name, pages in blocks.items():
        page_of_name = max(pages, key=lambda place: len(pages[place]))
        first_blocks[name] = (page_of_name, pages[page_of_name][0])
    return first_blocks


def code_blocks(text: str) -> list[str]:
    """Return the Python code of a document or notebook, without what only IPython understands."""
    blocks = re.findall(
        r"^```(?:python|\{code-cell\} ipython3)\n(.*?)^```",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    return [block for block in blocks if not re.search(r"^\s*%", block, re.MULTILINE)]


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return the full names of what code imports by ``from``."""
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


def first_paragraph(text: str) -> str:
    """Return the first paragraph of a document, on one line and without links."""
    _, _, body = text.partition("\n# ") if text.startswith("---") else ("", "", text)
    paragraphs = body.split("\n\n")[1:]
    prose = next(words for words in paragraphs if re.match(r"[\w`]", words))
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(prose.split()))
