"""The documentation as a site: ``python -m sphinx -E -W -c docs/site . build/site``, without network.

Its pages are the repository's own Markdown at its own paths, so a link that works on GitHub works here. The examples of
docs/*.md are run by tests/test_documents.py; the build runs docs/notebooks. Pages of names and the gallery of studies
are written into docs/site/generated, from ``__all__`` and from studies/.
"""

import ast
import importlib
import os
from pathlib import Path
from typing import Any

import jupytext
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

import tcnn_probe

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GENERATED = HERE / "generated"
STUDIES = sorted((ROOT / "studies").glob("*.py"))

project = "tcnn-probe"
author = "The tcnn-probe developers"
release = version = tcnn_probe.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autosummary",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
]
root_doc = "README"  # with docs/site/contents.md, see `add_contents`
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/notebooks/*.md",
    "docs/site/**",
    "*/README.md",
    "*/kernels/README.md",
    "studies/pages/*.md",
]
exclude_patterns = [".*", "build", "docs/site/contents.md", "docs/site/templates"]
templates_path = [
    str(HERE / "templates")
]  # absolute: autosummary looks from the sources, Sphinx from here

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
os.environ.pop(
    "MPLBACKEND", None
)  # notebooks show their figures, wherever the site is built
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # their models are small: more threads mostly wait for each other
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # such as tqdm's advice to install widgets
nb_execution_timeout = 300  # seconds a cell, on a machine with other work

autosummary_imported_members = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # docstrings say what is expected; signatures stay short
autodoc_default_options = {"no-value": True}
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape"]
nitpicky = True
suppress_warnings = [
    "ref.python"
]  # one name in two classes: words of docstrings that napoleon takes for types
nitpick_ignore_regex = [
    (r"py:.*", r"(?!tcnn_).*")
]  # the documentation of others is not at hand offline

html_theme = "pydata_sphinx_theme"
html_title = "tcnn-probe"
html_static_path: list[str] = []
html_additional_pages = {"index": "to_readme.html"}
html_theme_options: dict[str, Any] = {
    "secondary_sidebar_items": ["page-toc", "sourcelink"]
}


def modules() -> list[str]:
    """Modules whose ``__all__`` is public, as the page of names lists them."""
    return [
        line.strip()
        for line in (HERE / "api.md").read_text().splitlines()
        if line.startswith("   tcnn_")
    ]


def write_gallery(_: Sphinx) -> None:
    """Write the gallery, a card for each study: its first line and, where docs/ has it, its figure."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    cards = []
    for path in STUDIES:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        title = docstring.partition("\n")[0]
        thumbnail = f"/docs/thumbnails/{path.stem}.png"
        image = f":img-bottom: {thumbnail}" if (ROOT / thumbnail[1:]).exists() else ""
        cards.append(
            f":::{{grid-item-card}} {path.stem}\n:link: /studies/pages/{path.stem}\n:link-type: doc\n"
            f"{image}\n\n{title}\n:::\n"
        )
    pages = sorted(ROOT.glob("studies/pages/*.md"))
    names = "\n".join(f"/studies/pages/{page.stem}" for page in pages)
    (GENERATED / "gallery.md").write_text(
        "# Studies\n\nEach is one command and stands for a figure or table of the papers, or for a question that they "
        f"leave open. [What they found](/studies/README.md).\n\n::::{{grid}} 1 1 2 2\n{''.join(cards)}::::\n\n"
        f"```{{toctree}}\n:hidden:\n\n/studies/README\n{names}\n```\n"
    )


def add_contents(_: Sphinx, docname: str, source: list[str]) -> None:
    """Add the contents to the README, its code to a study's page, and a link to the file of a notebook."""
    name = Path(docname).name
    if docname == root_doc:
        source[0] += "\n" + (HERE / "contents.md").read_text()
    elif (
        docname.startswith("studies/pages/") and (ROOT / f"studies/{name}.py").exists()
    ):
        source[0] += f"\n## Code\n\n```{{literalinclude}} /studies/{name}.py\n```\n"
    elif docname.startswith("docs/notebooks/"):
        first, heading, rest = source[0].partition("\n# ")
        title, _, rest = rest.partition("\n")
        source[0] = (
            f'{first}{heading}{title}\n\n<a href="{name}.ipynb" download>This page as a notebook</a>\n{rest}'
        )


def write_notebooks(app: Sphinx, exception: Exception | None) -> None:
    """Write the notebooks as .ipynb, beside their pages."""
    if exception is not None:
        return
    for path in (ROOT / "docs" / "notebooks").glob("*.md"):
        jupytext.write(
            jupytext.read(path, fmt="md:myst"),
            Path(app.outdir) / "docs/notebooks" / f"{path.stem}.ipynb",
        )


def check_names(app: Sphinx, *_: Any) -> None:
    """Fail, as -W makes it, where a public name has no page."""
    for module in modules():
        for name in importlib.import_module(module).__all__:
            if f"docs/site/generated/{module}.{name}" not in app.env.found_docs:
                getLogger(__name__).warning("%s.%s has no page", module, name)


def describe_constants(
    _: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Describe a constant, all of which hold names, by these names, and not by what a dict is."""
    if what == "data":
        lines[:] = [", ".join(f"``{each}``" for each in value)]


def setup(app: Sphinx) -> None:
    """Connect what is above."""
    app.connect("builder-inited", write_gallery, priority=0)
    app.connect("source-read", add_contents)
    app.connect("env-check-consistency", check_names)
    app.connect("autodoc-process-docstring", describe_constants)
    app.connect("build-finished", write_notebooks)
