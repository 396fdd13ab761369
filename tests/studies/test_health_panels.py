"""Figures of the signs of ill health: the limit that is drawn is the one that health() applies."""

import numpy as np
import pytest
import xarray as xr

from common.health_panels import PICTURES, draw_pictures, find_examples, series
from tcnn_probe.diagnosis.signs import SIGNS
from tests.tcnn_probe.diagnosis.test_findings import healthy, make_ill


def made_ill(sign: str) -> xr.Dataset:
    """Return a recording in which the second layer,
    or its head 1, shows the sign from epoch 7, the fourth, on.
    """
    return make_ill(healthy(), sign, slice(3, None))


def test_every_variable_with_a_limit_has_a_picture() -> None:
    # A single image that is not finite is one too many, and the jump of logits shares the figure of
    # large logits.
    assert SIGNS.keys() - PICTURES.keys() == {"not finite", "logits jump"}


@pytest.mark.parametrize("sign", PICTURES)
def test_the_line_crosses_the_limit_where_health_finds_the_sign(sign: str) -> None:
    example = find_examples([("made ill", made_ill(sign), healthy())])[sign]
    assert example.finding.layer == "far"
    assert example.finding.since == 7
    assert example.head == (1 if example.finding.heads else None)
    picture = PICTURES[sign]
    direction = -1 if picture.is_minimum else 1
    for ds, expected in (
        (example.ill, [False, False, False, True, True]),
        (example.healthy, [False] * 5),
    ):
        of_layer = picture.values(ds).sel(layer="far")
        beyond = direction * (of_layer - picture.limit(of_layer)) > 0
        of_head = beyond if example.head is None else beyond.isel(head=example.head)
        assert of_head.values.tolist() == expected
        assert of_head.dims == ("epoch",)


def test_the_first_training_that_shows_a_sign_is_its_example() -> None:
    ill_twice = make_ill(made_ill("sink"), "large logits", slice(1, None))
    trainings = [
        ("first", made_ill("sink"), healthy()),
        ("second", ill_twice, healthy()),
        ("third", made_ill("large logits"), healthy()),
    ]
    examples = find_examples(trainings)
    assert list(examples) == ["large logits", "sink"]
    assert [example.name for example in examples.values()] == ["second", "first"]
    assert examples["large logits"].finding.since == 3


def test_the_head_is_the_one_furthest_beyond_its_limit() -> None:
    ds = made_ill("rank collapse")
    # Head 0 falls less, and has a higher limit: a tenth of the way from 1 to the rank at the start.
    ds.output_rank[:3, 1, 0] = 31.0
    ds.output_rank[3:, 1, 0] = 3.9
    example = find_examples([("made ill", ds, healthy())])["rank collapse"]
    assert example.finding.heads == (0, 1)
    limits = np.array([1 + 0.1 * 30, 1 + 0.1 * 6])
    assert example.head == np.argmin(np.array([3.9, 1.4]) - limits)


def test_panels_show_both_trainings_the_limit_and_the_finding() -> None:
    signs = ["large logits", "queries alike", "tokens alike"]
    trainings = [(sign, made_ill(sign), healthy()) for sign in signs]
    examples = find_examples(trainings)
    panels = draw_pictures(examples).axes
    # A row holds two signs of two panels each: three signs leave the last two panels empty.
    assert len(panels) == 8
    for number, sign in enumerate(signs):
        left, right = panels[2 * number : 2 * number + 2]
        assert left.get_title(loc="left") == f"{sign}: healthy"
        assert right.get_title(loc="left") == sign
        assert left.get_ylim() == right.get_ylim()
        triangles = [line for line in right.lines if line.get_marker() == "v"]
        assert len(triangles) == 1
        assert not [line for line in left.lines if line.get_marker() == "v"]
        example = examples[sign]
        at = series(PICTURES[sign].values(example.ill), example).sel(epoch=7)
        np.testing.assert_equal(triangles[0].get_xydata(), [[7, at]])
        for panel in (left, right):
            dashed = [line for line in panel.lines if line.get_linestyle() == "--"]
            assert len(dashed) == 1
    assert not any(panel.axison for panel in panels[6:])
