"""Panel of health: the findings in all recordings of a page, and what was looked for."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tcnn_probe.diagnosis import Finding
from tcnn_probe.diagnosis.findings import severity
from tcnn_probe.diagnosis.signs import SIGNS
from tcnn_probe.reporting.recordings import Axes, Run
from tcnn_probe.reporting.variables import label

__all__ = ["checks", "finding_rows", "headline"]


def finding_rows(axes: Axes, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Describe the findings in all recordings, worst first, with their places on the page's axes."""
    findings = [
        (name, finding)
        for name, recording in _recordings(runs)
        for finding in recording.findings or ()
    ]
    findings.sort(key=lambda pair: severity(pair[1]))
    return [_describe(axes, name, finding) for name, finding in findings]


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
        "mark": axes.marks.index(finding.since),
        "since": finding.since,
        "until": "" if finding.until is None else finding.until,
        "seen": f"{label(finding.measure)} {finding.value:.3g}",
        "usual": finding.usual,
        "leads_to": f"{finding.leads_to} ({finding.source})",
    }


def headline(rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> str:
    """Count alarms and notices; say so if no recording could be checked."""
    if all(recording.findings is None for _, recording in _recordings(runs)):
        return "not checked"
    alarms = sum(row["kind"] == "ALARM" for row in rows)
    counts = ((alarms, "alarm"), (len(rows) - alarms, "notice"))
    return ", ".join(f"{count} {noun}{'s' * (count != 1)}" for count, noun in counts)


def checks(runs: Sequence[Run]) -> list[str]:
    """Say what was looked for and what was not recorded: once for all recordings of which the same holds."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, recording in _recordings(runs):
        names.setdefault(tuple(_checks_of(recording)), []).append(name)
    if len(names) == 1:
        return list(*names)
    return [f"{', '.join(group)}: {' '.join(lines)}" for lines, group in names.items()]


def _checks_of(run: Run) -> Iterator[str]:
    if run.findings is None:
        yield "Not checked: the recording has no numbers of heads."
        return
    empty = [
        name
        for name, sign in SIGNS.items()
        if sign.variable in run.numbers
        and not np.isfinite(run.numbers[sign.variable]).any()
    ]
    unseen = run.findings.unseen
    looked_for = [name for name in SIGNS if name not in unseen and name not in empty]
    yield f"Looked for: {', '.join(looked_for) or 'nothing'}."
    if empty:
        variables = dict.fromkeys(label(SIGNS[name].variable) for name in empty)
        yield f"Not looked for, as {', '.join(variables)} had no value: {', '.join(empty)}."
    if unseen:
        lacking = dict.fromkeys(
            label(name) for names in unseen.values() for name in names
        )
        yield (
            f"Not looked for, as {', '.join(lacking)} were not recorded: {', '.join(unseen)}. "
            "record(..., health=True) records them."
        )


def _recordings(runs: Sequence[Run]) -> Iterator[tuple[str, Run]]:
    """Yield all recordings with their names; "" for the only run, of seeds with the run's name if there are several."""
    for run in runs:
        for recording in run.recordings:
            names = [run.name] * (len(runs) > 1) + [recording.name] * bool(run.seeds)
            yield ", ".join(names), recording
