"""Panel of health: the findings in all recordings of a page, and what was looked for."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tcnn_probe.diagnosis import Finding
from tcnn_probe.diagnosis.findings import severity, signs_of
from tcnn_probe.reporting.recordings import Axes, Run
from tcnn_probe.reporting.variables import label

__all__ = ["checks", "finding_rows", "headline", "sign_rows"]


def finding_rows(axes: Axes, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Describe the findings in all recordings,
    worst first, with their places on the page's axes.
    """
    findings = [(run, finding) for run in runs for finding in run.findings or ()]
    findings.sort(key=lambda pair: severity(pair[1]))
    return [_describe(axes, _name(run, runs), finding) for run, finding in findings]


def _describe(axes: Axes, name: str, finding: Finding) -> dict[str, Any]:
    columns = [(head, axes.heads.index(head)) for head in finding.heads]
    return {
        "run": name,
        "kind": "ALARM" if finding.is_alarm else "notice",
        "sign": finding.sign,
        "layer": finding.layer,
        "row": list(axes.layers).index(finding.layer),
        "heads": columns,
        "column": columns[0][1] if columns else 0,
        # The next mark, if the page leaves this one out.
        "mark": bisect_left(axes.marks, finding.since),
        "since": finding.since,
        "until": "" if finding.until is None else finding.until,
        "seen": f"{label(finding.measure)} {finding.value:.3g}",
        "usual": finding.usual,
        "leads_to": f"{finding.leads_to} ({finding.source})",
    }


def sign_rows(axes: Axes, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Describe the signs in recordings of finished networks:
    one row for all layers of a network that share a sign.
    """
    rows = []
    for run in runs:
        findings = run.findings or ()
        for sign in dict.fromkeys(finding.sign for finding in findings):
            shared = [finding for finding in findings if finding.sign == sign]
            values = [finding.value for finding in shared]
            low, high = min(values), max(values)
            span = f"{low:.3g}" + (f" to {high:.3g}" if high > low else "")
            everywhere = len(shared) == len(run.heads)
            count = f"{'all ' * everywhere}{len(shared)} layer{'s' * (len(shared) != 1)}"
            heads = sum(len(finding.heads) for finding in shared)
            rows.append(
                _describe(axes, _name(run, runs), shared[0])
                | {
                    "where": f"{heads} head{'s' * (heads != 1)} of {count}" if heads else count,
                    "places": [_describe(axes, _name(run, runs), finding) for finding in shared],
                    "seen": f"{label(shared[0].measure)} {span}",
                }
            )
    return rows


def headline(rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> str:
    """Count alarms and notices; say so if no recording could be checked."""
    if all(run.findings is None for run in runs):
        return "not checked"
    alarms = sum(row["kind"] == "ALARM" for row in rows)
    counts = ((alarms, "alarm"), (len(rows) - alarms, "notice"))
    return ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)


def checks(runs: Sequence[Run]) -> list[str]:
    """Say what was looked for and what was not recorded:
    once for all recordings of which the same holds.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    for run in runs:
        names.setdefault(tuple(_checks_of(run)), []).append(run.name)
    if len(names) == 1:
        return list(*names)
    return [f"{', '.join(group)}: {' '.join(lines)}" for lines, group in names.items()]


def _checks_of(run: Run) -> Iterator[str]:
    if run.findings is None:
        yield "Not checked: the recording has no numbers of heads."
        return
    signs = signs_of(run.attrs)
    empty = [
        name
        for name, sign in signs.items()
        if sign.variable in run.numbers and not np.isfinite(run.numbers[sign.variable]).any()
    ]
    unseen = run.findings.unseen
    looked_for = [name for name in signs if name not in unseen and name not in empty]
    yield f"Looked for: {', '.join(looked_for) or 'nothing'}."
    if empty:
        variables = dict.fromkeys(label(signs[name].variable) for name in empty)
        yield f"Not looked for, as {', '.join(variables)} had no value: {', '.join(empty)}."
    if unseen:
        lacking = dict.fromkeys(label(name) for names in unseen.values() for name in names)
        yield (
            f"Not looked for, as {', '.join(lacking)} were not recorded: {', '.join(unseen)}. "
            "record(..., health=True) records them."
        )


def _name(run: Run, runs: Sequence[Run]) -> str:
    """Return the name of a recording; "" for the only one."""
    return run.name if len(runs) > 1 else ""
