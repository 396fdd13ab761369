"""docs/papers.md has every numbered figure and table of the papers, and the names in it exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import timm

from tcnn_model.training.config import parse

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text()


def numbered(kind: str, last: int, chapter: str = "") -> list[str]:
    """Return the names of the items 1 to ``last`` of a paper, or of its chapter: "Fig. 3.1", ..."""
    return [f"{kind} {chapter}{number}" for number in range(1, last + 1)]


TCNN = [f"Fig. {part}" for part in ("4A", "4B", "4C")]
TCNN += [item for item in numbered("Fig.", 7) if item != "Fig. 4"]
# The items were counted in the papers by their captions.
ITEMS = {
    "T-CNN, arXiv": [*TCNN, "Fig. 8", *numbered("Table", 5)],
    "T-CNN, ICLR submission": [*TCNN, *numbered("Table", 5)],
    "PatchConvNet": [
        *numbered("Fig.", 8),
        *numbered("Table", 5),
        *numbered("Table", 3, "B."),
        *numbered("Table", 1, "C."),
        *numbered("Table", 2, "D."),
    ],
}
FIGURES_AND_TABLES = {
    "Chapter 1, introduction": (5, 0),
    "Chapter 2, Grafit": (9, 16),
    "Chapter 3, DeiT and CaiT": (10, 22),
    "Chapter 4, ResMLP": (4, 6),
    "Chapter 5, PatchConvNet": (8, 8),
    "Chapter 6, DeiT III": (11, 15),
    "Chapter 7, outlook": (2, 3),
}
for chapter, (title, counts) in enumerate(FIGURES_AND_TABLES.items(), 1):
    figures, tables = counts
    ITEMS[title] = [
        *numbered("Fig.", figures, f"{chapter}."),
        *numbered("Table", tables, f"{chapter}."),
    ]


def rows(section: str) -> list[list[str]]:
    """Return the cells of the rows of a section's table."""
    text = re.split(r"\n##+ ", PAGE.split(f"# {section}\n")[1])[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines[1:]]


def expand(cell: str) -> list[str]:
    """Return the items that a cell names: "Figs. 1.1 to 1.3, Table 2" are four."""
    items = []
    kind = ""
    for part in cell.split(", "):
        match = re.fullmatch(r"(?:(Fig|Table)s?\.? )?(.*)", part)
        kind = {"Fig": "Fig.", "Table": "Table"}.get(match[1], kind)
        first, _, last = match[2].partition(" to ")
        prefix, _, number = first.rpartition(".")
        prefix = f"{prefix}." if prefix else ""
        if last:
            numbers = range(int(number), int(last.removeprefix(prefix)) + 1)
            items += [f"{kind} {prefix}{number}" for number in numbers]
        else:
            items.append(f"{kind} {first}")
    return items


def test_ranges_of_items_are_expanded() -> None:
    assert expand("Figs. 1.1 to 1.3, Table 2") == [
        "Fig. 1.1",
        "Fig. 1.2",
        "Fig. 1.3",
        "Table 2",
    ]
    assert expand("Tables B.1, B.3") == ["Table B.1", "Table B.3"]


@pytest.mark.parametrize("section", ITEMS)
def test_every_numbered_item_has_one_row(section: str) -> None:
    items = [item for cells in rows(section) for item in expand(cells[0])]
    assert sorted(items) == sorted(ITEMS[section])


@pytest.mark.parametrize("section", ["Systems", *ITEMS])
def test_each_row_gives_the_place_of_the_item_or_a_reason(section: str) -> None:
    assert rows(section)
    for cells in rows(section):
        assert len(cells) == 3, cells
        names = re.search(r"`(python|tcnn)|\]\(", cells[2])
        assert names or cells[2].startswith("Not here: "), cells


def named(pattern: str) -> list[str]:
    """Return the texts between backquotes that match a pattern."""
    spans = set(re.findall(r"`([^`]+)`", PAGE))
    return sorted(span for span in spans if re.fullmatch(pattern, span))


def test_commands_of_studies_exist() -> None:
    commands = named("python studies/.*")
    # Without this, an expression that matches no command would pass; the same holds below.
    assert len(commands) > 12
    common = [path.read_text() for path in ROOT.glob("studies/common/*.py")]
    for command in commands:
        script, *options = shlex.split(command)[1:]
        texts = "".join([(ROOT / script).read_text(), *common])
        for option in options:
            assert not option.startswith("--") or f'"{option}"' in texts, command


def test_models_of_studies_have_weights() -> None:
    """Models of DINO have weights besides the supervised ones (Table 4.2); a tag names them."""
    names = set()
    for command in named("python studies/.*"):
        values = re.search(r"--models? ([^-]+)", command)
        names |= set(values[1].split() if values else [])
    assert {"resmlp_24_224.fb_dino", "resmlp_24_224.fb_in1k", "resnetrs101"} <= names
    for name in names:
        assert timm.models.is_model_pretrained(name), name


def test_trainings_are_understood_by_the_command() -> None:
    commands = named("tcnn-finetune .*")
    assert len(commands) > 40
    for command in commands:
        config, _ = parse(shlex.split(command)[1:])
        assert timm.is_model(config.model), command
        assert config.teacher is None or timm.is_model(config.teacher), command
        # No paper trains on the command's default.
        assert config.data != "digits", command


def test_functions_exist() -> None:
    names = named(r"tcnn_(model|probe)\.[\w.]+")
    assert len(names) > 15
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
