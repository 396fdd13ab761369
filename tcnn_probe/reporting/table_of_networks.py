"""A page with a row for each of many finished networks, which leads to the page of each."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from tcnn_probe.heads import TYPES
from tcnn_probe.reporting.report import Report

__all__ = ["table_of_networks"]

_TEMPLATE = Path(__file__).with_name("browser") / "networks.html"


def table_of_networks(
    facts: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]
) -> Report:
    """Make a page with a row for each network:
    its heads by type, and how many answer each question.

    Args:
        facts: What the page of each network says (:attr:`Report.facts`), by the address of this
            page.
        failures: Reasons why there is no page, by name of the model.

    Returns:
        The page, with the rows as its facts.
    """
    rows = [_row(address, page["networks"][0]) for address, page in facts.items()]
    rows += [{"model": name, "failed": reason} for name, reason in failures.items()]
    titles = list(dict.fromkeys(title for row in rows for title in row if title != "page"))
    lines = ["".join(_cell(row, title) for title in titles) for row in rows]
    text = {
        "{titles}": "".join(f'<th scope="col">{escape(title)}</th>' for title in titles),
        "{rows}": "".join(f"<tr>{line}</tr>\n" for line in lines),
    }
    page = _TEMPLATE.read_text(encoding="utf-8")
    for place, content in text.items():
        page = page.replace(place, content, 1)
    return Report(page, facts={"networks": rows})


def _row(address: str, network: Mapping[str, Any]) -> dict[str, Any]:
    counts = {entry["type"]: entry["count"] for entry in network["types"]}
    # A question such as "Which heads are local?" becomes the title "are local".
    answers = {
        answer["question"].removeprefix("Which heads ").rstrip("?"): len(answer["heads"])
        for answer in network["answers"]
        if answer["question"].startswith("Which heads ")
    }
    return {
        "model": network["name"],
        "page": address,
        "layers": len(network["layers"]),
        "heads": len(network["heads"]),
        **{name: counts.get(name, 0) for name in TYPES},
        **answers,
    }


def _cell(row: Mapping[str, Any], title: str) -> str:
    text = escape(str(row.get(title, "")))
    if title == "model" and "page" in row:
        text = f'<a href="{escape(row["page"], quote=True)}">{text}</a>'
    return f"<td>{text}</td>"
