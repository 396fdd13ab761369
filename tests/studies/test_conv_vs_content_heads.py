"""Conclusions of the study from answers made by hand:
they claim nothing that the intervals do not support.
"""

from typing import Any

import numpy as np
import pytest
import xarray as xr

import conv_vs_content_heads as study

CONDITIONS = ["clean", "blur", "PGD"]
SOME = {"content": [0.1, 0.4, 0.1], "random": [0.1, 0.1, 0.3]}


def answers(
    content: list[float], random: list[float], *, convolutional: float = 0.3
) -> xr.DataTree:
    """Return two trainings of 200 images: accuracy is 0.9 minus the loss
    of a condition when its heads are removed.
    """
    # All conditions share one draw, so that an image lost at a smaller loss is lost at a larger
    # one, too.
    draw = np.random.default_rng(0).random((2, 1, 1, 1, 200))
    losses = {
        "nothing": [0.0] * 3,
        "convolutional": [convolutional] * 3,
        "content": content,
        "random for convolutional": random,
        "random for content": random,
    }
    chance = 0.9 - np.array(list(losses.values()))[None, :, None, :, None]
    right = xr.DataArray(
        (draw < chance).astype(float),
        {
            "training": [0, 1],
            "ablation": list(losses),
            "draw": [0],
            "condition": CONDITIONS,
        },
        ("training", "ablation", "draw", "condition", "image"),
    )
    types = xr.DataArray(
        [[["convolutional", "content", ""]], [["mixed", "content", ""]]],
        {"training": [0, 1], "layer": ["a"], "head": [0, 1, 2]},
        ("training", "layer", "head"),
    )
    singles = xr.concat(
        [
            right.sel(ablation="nothing"),
            right.sel(ablation="convolutional"),
            right.sel(ablation="nothing"),
        ],
        xr.DataArray(["nothing", "a:0", "a:1"], dims="ablation", name="ablation"),
    )
    # The third head is missing, as in models whose layers differ in their number of heads.
    gate = xr.DataArray([[[0.9, 0.1, np.nan]]] * 2, types.coords, types.dims)
    modes = xr.DataArray(["zero", "static"], dims="mode", name="mode")
    right = xr.concat(
        [
            right,
            # Static attention costs nothing.
            right.sel(ablation=["nothing"] * 5).assign_coords(ablation=right.ablation),
        ],
        modes,
    )
    heads = xr.Dataset({"right": singles, "head_type": types, "gate": gate})
    of_types = xr.Dataset(
        {
            "right": right,
            "head_type": types,
            "top1": ("training", [0.9, 0.8]),
            "top1_images": 100,
        }
    )
    return xr.DataTree.from_dict({"types": of_types, "heads": heads})


@pytest.mark.parametrize(
    ("content", "random", "beside_random", "beside_clean"),
    [
        (
            [0.2] * 3,
            [0.2] * 3,
            "not distinguishable on clean, blur, PGD.",
            "not distinguishable on blur, PGD.",
        ),
        (
            [0.1, 0.4, 0.1],
            [0.1, 0.1, 0.3],
            "more on blur; less on PGD; not distinguishable on clean.",
            "larger on blur; smaller on PGD.",
        ),
        (
            [0.1, 0.3, 0.1],
            [0.4] * 3,
            "less on clean, blur, PGD.",
            "larger on blur; not distinguishable on PGD.",
        ),
        (
            [0.4] * 3,
            [0.1] * 3,
            "more on clean, blur, PGD.",
            "not distinguishable on blur, PGD.",
        ),
    ],
    ids=["none", "either side", "less everywhere", "on clean images alike"],
)
def test_sentence_claims_what_the_intervals_support(
    content: list[float], random: list[float], beside_random: str, beside_clean: str
) -> None:
    sentence = study.sentence(answers(content, random))
    sentence, static = sentence.strip().split("\n\n")
    assert (
        "In these 2 trainings of one CNN, zeroing the outputs of the content heads costs, compared "
        "with" in sentence
    )
    assert (
        "replacing by its mean the attention of the content heads costs, compared with as many "
        "random" in static
    )
    assert "random heads: not distinguishable on clean, blur, PGD. Compared" in static
    assert f"as many random heads: {beside_random} Compared" in sentence
    assert f"Compared with clean images, that difference is: {beside_clean} (95 %" in sentence
    assert (
        "over sets of random heads (1 in each) and 200 images, not corrected for looking at 3 "
        "conditions" in sentence
    )
    assert content != random or sentence.endswith("support no difference on any condition.")


def test_trainings_without_content_heads_are_not_counted() -> None:
    tree = answers([0.4] * 3, [0.1] * 3)
    right = tree["types"].right
    of_content = right.ablation.isin(["content", "random for content"])
    tree["types"]["right"] = right.where((right.training == 0) | ~of_content)
    sentence = study.sentence(tree)
    assert "In one training of one CNN" in sentence
    assert sentence.endswith("For other trainings, one training gives no interval.")


def test_table_and_figure_have_the_means() -> None:
    tree = answers(**SOME)
    right = tree["types"].right.sel(mode="zero")
    lines = study.table(tree).splitlines()
    assert "  seed 0: convolutional 1, mixed 0, averaging 0, positional 0, content 1" in (lines)
    lost = float(
        (right.sel(ablation="nothing") - right.sel(ablation="convolutional"))
        .sel(condition="blur")
        .mean()
    )
    assert f"{lost:+.3f} [" in next(line for line in lines if line.startswith("  blur"))
    singles = lines[next(n for n, line in enumerate(lines) if "the outputs of one head" in line) :]
    row = next(line for line in singles if "clean" in line).split()
    # This is the one training with a convolutional head.
    first = right.sel(condition="clean")[0]
    lost = first.sel(ablation="nothing") - first.sel(ablation="convolutional")
    assert row[1] == f"{float(lost.mean()):+.3f}"
    assert row[4] == "+0.000"
    bars, points, static = study.draw(tree).axes
    assert {
        bar.get_height()
        for container in static.containers
        if hasattr(container, "patches")
        for bar in container
    } == {0}
    heights = {
        c.get_label(): [bar.get_height() for bar in c]
        for c in bars.containers
        if hasattr(c, "patches")
    }
    lost = (right.sel(ablation="nothing") - right.sel(ablation="content")).mean(
        ["training", "draw", "image"]
    )
    np.testing.assert_allclose(heights["content heads"], lost)
    # Two heads in two trainings; the missing third head has no dot.
    assert sum(len(dots.get_offsets()) for dots in points.collections) == 4


@pytest.mark.parametrize("kind", study.PAIR)
def test_a_type_that_no_training_has_is_reported(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = answers(**SOME)
    types = tree["types"].head_type
    right = (
        tree["types"]
        .right.drop_sel(ablation=[kind, f"random for {kind}"])
        .reindex(ablation=study.SETS)
    )
    tree["types"]["right"] = right
    tree["types"]["head_type"] = tree["heads"]["head_type"] = types.where(types != kind, "mixed")
    assert " none " in study.table(tree)
    assert study.draw(tree).axes
    assert not study.check(tree, 0.1)
    assert f"NO {kind} heads" in capsys.readouterr().out
    assert ("nothing can be said" in study.sentence(tree)) == (kind == "content")


@pytest.mark.parametrize(
    ("changes", "chance", "message"),
    [
        ({}, 0.1, None),
        ({"convolutional": 0.0}, 0.1, "does NOT hurt"),
        # Chance is above the accuracies made here, 0.9 and 0.8.
        ({}, 0.95, "did NOT learn"),
    ],
    ids=["seen", "no cost", "nothing learned"],
)
def test_the_check_can_fail(
    changes: dict[str, Any],
    chance: float,
    message: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert study.check(answers(**SOME, **changes), chance) == (message is None)
    assert (message or "hurts") in capsys.readouterr().out
