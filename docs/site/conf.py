"""The documentation as a site: ``python -m sphinx -E -W -c docs/site . build/site``,
without network.

Its pages are the repository's own Markdown at its own paths, so a link that works on GitHub works
here. The examples of docs/*.md are run by tests/test_documents.py; the build runs docs/notebooks,
or with ``-D nb_execution_mode=off`` shows them without their output. Pages of names, the gallery of
studies and llms.txt are generated from docs/site/api.md, the documents and studies/.
"""

import ast
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import jupytext
import sphinx.ext.autosummary
from sphinx.application import Sphinx
from sphinx.ext.autosummary import Autosummary, extract_summary
from sphinx.util.logging import getLogger

import tcnn_probe

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sources import (  # noqa: E402
    documents,
    examples,
    first_paragraph,
    listed_names,
    unlisted_names,
)

ROOT = HERE.parents[1]
GENERATED = HERE / "generated"
STUDIES = sorted((ROOT / "studies").glob("*.py"))

PICTURES = {
    "docs/ablation": (
        "thumbnails/conv_vs_content_heads.png",
        "Accuracy lost without convolutional heads and without content heads",
    ),
    "docs/aggregation": (
        "class_attention.png",
        "Photographs, and the weight of each patch in the decision",
    ),
    "docs/attention_maps": (
        "thumbnails/attention_maps.png",
        "Attention of each head in four layers of a T-CNN, from one pixel",
    ),
    "docs/coming_from": (
        "thumbnails/cait_attention.png",
        "Attention of the heads of CaiT",
    ),
    "docs/comparison": (
        "what_heads_see.png",
        "Attention of four heads in three digits, and their content information by epoch",
    ),
    "docs/dense_tasks": (
        "thumbnails/segmentation_attention.png",
        "Attention of a T-CNN that was trained for segmentation",
    ),
    "docs/examples": (
        "heads_on_photographs.png",
        "Attention of four heads in two photographs, and content information by epoch",
    ),
    "docs/families": (
        "thumbnails/architectures.png",
        "Gain of T-CNNs made from several convnets, and its cost",
    ),
    "docs/health": (
        "thumbnails/training_health.png",
        "Findings of health while a training goes wrong",
    ),
    "docs/heads": (
        "thumbnails/head_entropy.png",
        "Heads of each type by epoch, with their entropies and distances",
    ),
    "docs/installation": (
        "thumbnails/gating_evolution.png",
        "Figure of the README's study: accuracy, attention spans and gates by epoch",
    ),
    "docs/models": (
        "heads_on_photographs.png",
        "Attention of four heads in two photographs, and content information by epoch",
    ),
    "docs/papers": (
        "thumbnails/tcnn_claims.png",
        "Claims of the T-CNN paper, measured",
    ),
    "docs/plots": (
        "plots.png",
        "Gates of the shipped recording by epoch, and the attention maps of a layer",
    ),
    "docs/recipes": (
        "thumbnails/seeds.png",
        "Numbers of several trainings with different seeds",
    ),
    "docs/recording": (
        "what_heads_see.png",
        "Attention of four heads in three digits, and their content information by epoch",
    ),
    "docs/representation": (
        "thumbnails/representations.png",
        "What the features of each layer know, and how similar layers are",
    ),
    "docs/robustness": (
        "thumbnails/robustness.png",
        "Accuracy of two models on corrupted and attacked images",
    ),
    "docs/saliency": (
        "thumbnails/class_attention_saliency.png",
        "Saliency of several methods over photographs",
    ),
    "docs/training": (
        "thumbnails/finetune_length.png",
        "Accuracy of a CNN and a T-CNN by the length of fine-tuning",
    ),
    "docs/transformed_cnns": (
        "thumbnails/gating_evolution.png",
        "Accuracy, attention spans, gates and entropies while a T-CNN is fine-tuned",
    ),
}
"""Pictures beside the first lines of pages, by page: path in docs/, and description."""

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
# The path is absolute, because autosummary resolves it from the sources and Sphinx from this
# folder.
templates_path = [str(HERE / "templates")]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# Notebooks show their figures, wherever the site is built.
os.environ.pop("MPLBACKEND", None)
# The notebooks' models are small, so that more threads mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
nb_execution_raise_on_error = True
nb_output_stderr = "remove"  # such as tqdm's advice to install widgets
nb_execution_timeout = 300  # seconds per cell, on a machine with other work

# Sphinx ends a summary at a full stop, and does not know these abbreviations.
sphinx.ext.autosummary.WELL_KNOWN_ABBREVIATIONS += (
    "Alg.",
    "Eq.",
    "Eqs.",
    "Fig.",
    "Figs.",
    "Sec.",
)
SUMMARIES: dict[str, str] = {}
"""First paragraphs of docstrings, by full name."""
LISTED = listed_names(HERE / "api.md")
autosummary_context = {"listed": LISTED, "examples": examples(ROOT, LISTED)}
# The callbacks for these packages are described without installing them.
autodoc_mock_imports = ["lightning", "transformers"]
autosummary_imported_members = True
autosummary_ignore_module_all = False
autodoc_typehints = "none"  # docstrings give the types; signatures stay short
autodoc_default_options = {"no-value": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # "Shape (B, H, W): the maps" stays one line
napoleon_custom_sections = ["Shape"]
nitpicky = True
suppress_warnings = [
    # Napoleon takes some words of docstrings for types, and two classes may have such a name.
    "ref.python",
    "myst-nb.lexer",  # without execution the language of the cells is unknown
]
# The documentation of other packages is not available offline.
nitpick_ignore_regex = [(r"py:.*", r"(?!tcnn_).*")]

html_theme = "pydata_sphinx_theme"
html_title = "tcnn-probe"
html_context = {"default_mode": "auto"}  # light or dark as set in the system
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_readme.html"}
html_theme_options: dict[str, Any] = {"secondary_sidebar_items": ["page-toc", "sourcelink"]}


class Table(Autosummary):
    """Names with their summaries; autosummary has none
    for a class under another name, such as ``record``.
    """

    def get_items(self, names: list[str]) -> list[tuple[str, str | None, str, str]]:
        """Return name, signature, summary and full name of each; warn of one without a summary."""
        items = []
        for name, signature, summary, full_name in super().get_items(names):
            if not summary:
                _, value, _, _ = self.import_by_name(full_name, [None])
                lines = (inspect.getdoc(value) or "").splitlines()
                summary = extract_summary(lines, self.state.document.settings)
                SUMMARIES[full_name] = summary
            if not summary:
                getLogger(__name__).warning("%s has no summary", full_name)
            items.append((name, signature, summary, full_name))
        return items


def write_gallery(_: Sphinx) -> None:
    """Write the gallery, a card for each study:
    its first line and, where docs/ has it, its figure.
    """
    GENERATED.mkdir(parents=True, exist_ok=True)
    for page in GENERATED.glob("tcnn_*.rst"):
        if page.stem not in LISTED:  # left by an earlier build
            page.unlink()
    cards = []
    for path in STUDIES:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        title = docstring.partition("\n")[0]
        thumbnail = f"/docs/thumbnails/{path.stem}.png"
        image = f":img-top: {thumbnail}" if (ROOT / thumbnail[1:]).exists() else ""
        cards.append(
            f":::{{grid-item-card}} {path.stem}\n"
            f":link: /studies/pages/{path.stem}\n:link-type: doc\n"
            f"{image}\n\n{title}\n:::\n"
        )
    pages = sorted(ROOT.glob("studies/pages/*.md"))
    names = "\n".join(f"/studies/pages/{page.stem}" for page in pages)
    (GENERATED / "gallery.md").write_text(
        "# Studies\n\n"
        "Each study is one command and stands for a figure or table of the papers, "
        "or for a question that they leave open. [Findings](/studies/README.md).\n\n"
        f"::::{{grid}} 1 1 2 2\n:gutter: 3\n\n{''.join(cards)}::::\n\n"
        f"```{{toctree}}\n:hidden:\n\n/studies/README\n{names}\n```\n"
    )


def add_contents(_: Sphinx, docname: str, source: list[str]) -> None:
    """Add the parts that a page has on the site only:
    contents, a picture, code of a study, a notebook's file.
    """
    name = Path(docname).name
    if docname in PICTURES:
        picture, description = PICTURES[docname]
        heading, _, rest = source[0].partition("\n")
        source[0] = (
            f"{heading}\n\n```{{image}} /docs/{picture}\n"
            f":alt: {description}\n:class: opening\n```\n{rest}"
        )
    if docname == root_doc:
        source[0] += "\n" + (HERE / "contents.md").read_text()
    elif docname.startswith("studies/pages/") and (ROOT / f"studies/{name}.py").exists():
        source[0] += f"\n## Code\n\n```{{literalinclude}} /studies/{name}.py\n```\n"
    elif docname.startswith("docs/notebooks/"):
        first, heading, rest = source[0].partition("\n# ")
        title, _, rest = rest.partition("\n")
        source[0] = (
            f"{first}{heading}{title}\n\n"
            f'<a href="{name}.ipynb" download>This page as a notebook</a>\n{rest}'
        )


def write_llms_txt(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt (llmstxt.org): a list of the pages in plain text,
    with the Markdown source of each.
    """
    if exception is not None:
        return
    readme = (ROOT / "README.md").read_text()
    lines = ["# tcnn-probe", "", f"> {first_paragraph(readme)}", "", "## Documents", ""]
    for page in documents(ROOT):
        text = page.read_text()
        title = re.search(r"^# (.*)$", text, flags=re.MULTILINE)
        assert title is not None, page
        address = f"_sources/{page.relative_to(ROOT)}.txt"
        lines.append(f"- [{title[1]}]({address}): {first_paragraph(text)}")
    lines += ["", "## Reference", ""]
    for name in LISTED:
        address = f"docs/site/generated/{name}.html"
        lines.append(f"- [{name}]({address}): {SUMMARIES.get(name, '')}".rstrip(": "))
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


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
    """Warn of public names that the reference does not list under this or another name;
    with -W the build fails.
    """
    for name in unlisted_names(LISTED):
        getLogger(__name__).warning("%s is not in docs/site/api.md", name)


def describe_constants(
    _: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Describe a constant by the names that it holds, and not by the docstring of its type."""
    if what == "data":
        lines[:] = [", ".join(f"``{member}``" for member in value)]
    paragraph = " ".join(lines).partition("  ")[0]
    SUMMARIES[name] = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", paragraph)


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx's events."""
    app.add_directive("autosummary", Table, override=True)
    app.connect("builder-inited", write_gallery, priority=0)
    app.connect("source-read", add_contents)
    app.connect("env-check-consistency", check_names)
    app.connect("autodoc-process-docstring", describe_constants)
    app.connect("build-finished", write_notebooks)
    app.connect("build-finished", write_llms_txt)
