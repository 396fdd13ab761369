"""Panel of health findings with their places on the page,
and the list of checks if nothing was found.
"""

import html
import re

import numpy as np
import pytest
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.reporting.made import NAUGHTY, recording

LAYERS = {"a": 3, NAUGHTY: 7, "c": 5}
EPOCHS = [1, 3, 4, 7]
ROW = re.compile(r'<tr><td class="(alarm|notice)">.*?</tr>', re.DOTALL)
LINK = re.compile(r'data-mark="(\d+)" data-row="(\d+)" data-column="(\d+)">(.*?)</button>')


def with_logits(seed: int = 0) -> xr.DataTree:
    """Return a recording with the largest logits of all heads, all of which are healthy."""
    tree = recording(LAYERS, EPOCHS, seed=seed, grid=None)
    heads = tree["heads"].to_dataset().drop_vars(["entropy", "uniform_entropy"])
    heads["max_logit"] = xr.full_like(heads.gate, 5.0)
    tree["heads"] = heads
    return tree


def rows(page: str) -> list[str]:
    return [match[0] for match in ROW.finditer(page)]


def test_findings_lead_to_their_heads_worst_first() -> None:
    tree = with_logits()
    tree["heads"].max_logit[2:, 1, [4, 6]] = 131.0  # this finding lasts
    tree["heads"].max_logit[1, 2, 3] = 29.0  # a temporary jump
    page = tcnn_probe.report(tree).html
    findings = tcnn_probe.health(tree["heads"].to_dataset().assign_attrs(along="epoch"))
    assert len(findings) == len(rows(page)) == 3
    for row, finding in zip(rows(page), findings, strict=True):
        text = html.unescape(row)
        for words in (finding.sign, finding.layer, finding.usual, finding.leads_to):
            assert words in text
    links = [tuple(map(html.unescape, link)) for link in LINK.findall(rows(page)[0])]
    # The layer's link leads to its first ill head; epoch 4 is the third epoch.
    assert links == [
        ("2", "1", "4", NAUGHTY),
        ("2", "1", "4", "4"),
        ("2", "1", "6", "6"),
    ]
    assert "Health: 3 alarms, 0 notices" in page


def test_runs_are_named_in_findings() -> None:
    ill = with_logits(1)
    ill["heads"].max_logit[:, 0, 2] = 131.0
    page = tcnn_probe.report({"x": ill, "y": with_logits(2)}).html
    (row,) = rows(page)
    assert '<td class="name">x</td>' in row


def test_panel_without_findings_lists_the_checks() -> None:
    page = html.unescape(tcnn_probe.report(with_logits()).html)
    assert "Nothing was found." in page
    assert "Looked for: large logits, logits jump." in page
    assert re.search("Not looked for, as .*sink.* were not recorded: .*sink", page)
    assert "record(..., health=True) records them" in page
    empty = with_logits()
    empty["heads"].max_logit[:] = np.nan
    page = html.unescape(tcnn_probe.report(empty).html)
    assert "Looked for: nothing." in page
    assert "Not looked for, as max logit had no value: large logits, logits" in page


@pytest.mark.parametrize("beside", [False, True])
def test_a_recording_without_heads_is_not_checked(beside: bool) -> None:
    tree = recording({"a": 3}, [1, 2])
    del tree["heads"]
    page = tcnn_probe.report([tree, with_logits()] if beside else tree).html
    named = "Net (A): " if beside else '<p class="name">'
    assert f"{named}Not checked: the recording has no numbers of heads." in page
    assert ("Health: not checked" in page) != beside
