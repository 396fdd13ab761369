"""What the study concludes from made answers: nothing that its intervals do not support."""

import numpy as np
import pytest
import xarray as xr

import conv_vs_content_heads as study
from tests.studies.conftest import Refusal

CONDITIONS = ["clean", "blur", "PGD"]


def made(content: list[float], random: list[float], *, convolutional: float = 0.3, seed: int = 0) -> xr.DataTree:
    """Two trainings of 200 images: 0.9 right, less by what is given for each condition when heads are zeroed."""
    draw = np.random.default_rng(seed).random((2, 1, 1, 1, 200))
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
        {"training": [0, 1], "ablation": list(losses), "draw": [0], "condition": CONDITIONS},
        ("training", "ablation", "draw", "condition", "image"),
    )
    types = xr.DataArray(
        [[["convolutional", "content", ""]], [["mixed", "content", ""]]],
        {"training": [0, 1], "layer": ["a"], "head": [0, 1, 2]},
        ("training", "layer", "head"),
    )
    singles = xr.concat(
        [right.sel(ablation="nothing"), right.sel(ablation="convolutional"), right.sel(ablation="nothing")],
        xr.DataArray(["nothing", "a:0", "a:1"], dims="ablation", name="ablation"),
    )
    gate = xr.DataArray([[[0.9, 0.1, np.nan]]] * 2, types.coords, types.dims)
    heads = xr.Dataset({"right": singles, "head_type": types, "gate": gate})
    return xr.DataTree.from_dict({"types": xr.Dataset({"right": right, "head_type": types}), "heads": heads})


def test_no_difference_is_said_to_be_none() -> None:
    said = study.sentence(made([0.2] * 3, [0.2] * 3))
    assert "worth not distinguishably more or less than as many random heads on clean, blur, PGD." in said
    assert "is not distinguishable from that on clean images on blur, PGD." in said
    assert "over sets of random heads (1 in each) and 200 images, not corrected for looking at 3 conditions" in said
    assert said.endswith("support no difference on any condition.")


def test_what_is_beyond_zero_is_said_by_condition() -> None:
    said = study.sentence(made([0.1, 0.4, 0.1], [0.1, 0.1, 0.3]))
    assert "In these 2 trainings" in said
    assert "worth more than as many random heads on blur; less than as many random heads on PGD;" in said
    assert "not distinguishably more or less than as many random heads on clean" in said
    assert "higher than that on clean images on blur; lower than that on clean images on PGD" in said


def test_worth_less_everywhere_and_least_so_on_blur() -> None:
    said = study.sentence(made([0.1, 0.3, 0.1], [0.4, 0.4, 0.4]))
    assert "worth less than as many random heads on clean, blur, PGD." in said
    assert "higher than that on clean images on blur; not distinguishable from that on clean images on PGD." in said


def test_a_difference_on_clean_images_alike_is_not_one_of_robustness() -> None:
    said = study.sentence(made([0.4] * 3, [0.1] * 3))
    assert "worth more than as many random heads on clean, blur, PGD. Their" in said
    assert "is not distinguishable from that on clean images on blur, PGD." in said


def test_trainings_without_content_heads_are_not_counted() -> None:
    tree = made([0.4] * 3, [0.1] * 3)
    right = tree["types"].right
    of_content = right.ablation.isin(["content", "random for content"])
    tree["types"]["right"] = right.where((right.training == 0) | ~of_content)
    said = study.sentence(tree)
    assert "In one training of one CNN" in said
    assert "support no difference" in said  # one training says nothing of others


def test_table_has_the_means() -> None:
    tree = made([0.1, 0.4, 0.1], [0.1, 0.1, 0.3])
    lines = study.table(tree).splitlines()
    assert "  seed 0: convolutional 1, content 1, mixed 0" in lines
    blur = next(
        line for line in lines[lines.index("  seed 1: convolutional 0, content 1, mixed 1") :] if "blur" in line
    )
    right = tree["types"].right.sel(condition="blur")
    lost = float((right.sel(ablation="nothing") - right.sel(ablation="convolutional")).mean())
    assert f"{lost:+.3f} [" in blur
    singles = lines[next(n for n, line in enumerate(lines) if "without one head" in line) :]
    row = next(line for line in singles if "clean" in line).split()
    first = tree["types"].right.sel(condition="clean")[0]  # the one training with a convolutional head
    assert row[1] == f"{float((first.sel(ablation='nothing') - first.sel(ablation='convolutional')).mean()):+.3f}"
    assert row[4] == "+0.000"


def test_figure_shows_each_set_and_head() -> None:
    tree = made([0.1, 0.4, 0.1], [0.1, 0.1, 0.3])
    figure = study.draw(tree)
    bars, points = figure.axes
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in bars.containers if hasattr(c, "patches")}
    right = tree["types"].right
    lost = (right.sel(ablation="nothing") - right.sel(ablation="content")).mean(["training", "draw", "image"])
    np.testing.assert_allclose(heights["content heads"], lost)
    assert sum(len(dots.get_offsets()) for dots in points.collections) == 4  # two heads, twice; not the one missing


@pytest.mark.parametrize("kind", study.PAIR)
def test_a_type_that_no_training_has(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    tree = made([0.1, 0.4, 0.1], [0.1, 0.1, 0.3])
    types = tree["types"].head_type
    right = tree["types"].right.drop_sel(ablation=[kind, f"random for {kind}"]).reindex(ablation=study.SETS)
    tree["types"]["right"] = right
    tree["types"]["head_type"] = tree["heads"]["head_type"] = types.where(types != kind, "mixed")
    assert " none " in study.table(tree)
    assert study.draw(tree).axes
    assert study.check(tree, 10) == 1
    assert f"NO {kind} heads" in capsys.readouterr().out
    assert ("nothing can be said" in study.sentence(tree)) == (kind == "content")


def test_the_check_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    tree = made([0.1] * 3, [0.1] * 3)
    assert study.check(tree, 10) == 0
    assert study.check(made([0.1] * 3, [0.1] * 3, convolutional=0.0), 10) == 1
    assert "does NOT hurt" in capsys.readouterr().out
    assert study.check(tree, 2) == 1
    one_is_bad = tree.copy(deep=True)
    one_is_bad["types"]["right"] = tree["types"].right.where(tree["types"].right.training == 0, 0)
    assert study.check(one_is_bad, 10) == 1
    assert "did NOT learn" in capsys.readouterr().out
    types = tree["types"].head_type
    tree["types"]["head_type"] = types.where(types != "content", "mixed")
    assert study.check(tree, 10) == 1
    assert "NO content heads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "at least 1"),
        (["--severities", "6"], "invalid choice"),
        (["--mode", "swap"], "invalid choice"),
        (["--images", "1"], "--images and --head-images 2"),
        (["--data", "."], "need --model"),
    ],
)
def test_wrong_options_say_so_and_write_nothing(refusal: Refusal, options: list[str], message: str) -> None:
    assert message in refusal(study, options)
