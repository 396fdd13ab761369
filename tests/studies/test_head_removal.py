"""Sets of heads to ablate, and mean accuracies by condition."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
import xarray as xr

from common.head_removal import (
    mean_by_condition,
    random_heads,
    single_heads,
    type_sets,
)
from conv_vs_content_heads import without
from tcnn_model import GPSA

TYPES = xr.DataArray(
    [["content", "convolutional", ""], ["mixed", "content", "content"]],
    {"layer": ["a", "b"], "head": [0, 1, 2]},
    ("layer", "head"),
)


def heads_by_name(
    sets: Mapping[str, xr.DataArray | None],
) -> dict[str, list[tuple[str, int]]]:
    """Return the heads of each set, by its name."""
    heads_of_model = [(layer, head) for layer in "ab" for head in range(3)]
    return {
        name: []
        if mask is None
        else [at for at in heads_of_model if bool(mask.sel(layer=at[0], head=at[1]))]
        for name, mask in sets.items()
    }


def test_sets_of_heads_by_type_and_of_single_heads() -> None:
    assert heads_by_name(type_sets(TYPES)) == {
        "nothing": [],
        "convolutional": [("a", 1)],
        "content": [("a", 0), ("b", 1), ("b", 2)],
    }
    assert list(type_sets(TYPES.where(TYPES != "content", "mixed"))) == [
        "nothing",
        "convolutional",
    ]
    existing = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2)]  # one head is missing
    assert heads_by_name(single_heads(TYPES)) == {
        f"{layer}:{head}": [(layer, head)] for layer, head in existing
    }


def test_random_sets_match_in_size_and_can_hold_any_head() -> None:
    # In 40 draws of 1 and of 3 out of five heads, every head that can be drawn is drawn.
    sets = heads_by_name(random_heads(TYPES, 40, np.random.default_rng(0)))
    counts = {"convolutional": 1, "content": 3}
    sizes = {name: len(heads) for name, heads in sets.items()}
    assert sizes == {
        f"random for {kind}#{draw}": count for kind, count in counts.items() for draw in range(40)
    }
    drawn = {head for heads in sets.values() for head in heads}
    existing = heads_by_name({"": TYPES != ""})[""]
    assert drawn == set(existing)
    assert random_heads(TYPES.where(TYPES == "mixed", ""), 3, np.random.default_rng(0)) == {}


@pytest.mark.filterwarnings("ignore:.*among images=")
def test_without_removes_heads_for_one_call() -> None:
    # Without a bias, a layer whose heads are all removed outputs exact zeros.
    model = torch.nn.Sequential(GPSA(3, 5, 3, padding=1, bias=False)).eval()
    heads = xr.DataArray(
        np.ones((1, 9), bool), {"layer": ["0"], "head": range(9)}, ("layer", "head")
    )
    images = torch.randn(2, 3, 7, 11)
    with torch.no_grad():
        assert not without(model, None, "zero")(images).eq(0).any()
        assert without(model, heads, "zero")(images).eq(0).all()
        averaged = without(model, heads, "mean", [images[:1], images[1:]])(torch.randn(3, 3, 7, 11))
        torch.testing.assert_close(averaged, model(images).mean(0).expand(3, -1, -1, -1))
        # The mean over one image is its own attention.
        for mode in ("static", "shuffled"):
            torch.testing.assert_close(
                without(model, heads, mode, [images[:1]])(images[:1]), model(images[:1])
            )
        assert not model(images).eq(0).any()


def test_means_by_condition_against_a_loop() -> None:
    random = np.random.default_rng(1)
    models = ["nothing", "random for x#0", "random for x#1", "x"]
    corruptions = {
        "shot_noise": "noise",
        "contrast": "digital",
        "fog": "weather",
        "pixelate": "digital",
    }
    sizes = {"model": 4, "corruption": 4, "severity": 2, "seed": 1, "image": 7}
    results = xr.Dataset(
        {
            "correct": (tuple(sizes), random.random(tuple(sizes.values())) < 0.5),
            "clean_correct": (("model", "image"), random.random((4, 7)) < 0.5),
            "adversarial_correct": (
                ("model", "attack", "seed", "image"),
                random.random((4, 1, 1, 7)) < 0.5,
            ),
        },
        {
            "model": models,
            "corruption": list(corruptions),
            "group": ("corruption", list(corruptions.values())),
            "attack": ["pgd"],
        },
    )
    right = mean_by_condition(results).right
    assert right.dims == ("ablation", "draw", "condition", "image")
    assert right.draw.values.tolist() == [0, 1]
    assert right.ablation.values.tolist() == ["nothing", "random for x", "x"]
    assert right.condition.values.tolist() == [
        "clean",
        "noise",
        "digital",
        "weather",
        "contrast",
        "PGD",
    ]
    raw = results.correct.values.astype(float)[:, :, :, 0]
    for row, members in ((0, [0, 0]), (1, [1, 2]), (2, [3, 3])):
        for draw, m in enumerate(members):
            for image in range(7):
                # Contrast and pixelate are the second and fourth corruption.
                digital = np.mean([raw[m, c, s, image] for c in (1, 3) for s in (0, 1)])
                contrast = np.mean([raw[m, 1, s, image] for s in (0, 1)])
                clean = float(results.clean_correct.values[m, image])
                pgd = float(results.adversarial_correct.values[m, 0, 0, image])
                answers = right[row, draw, :, image].sel(
                    condition=["digital", "contrast", "clean", "PGD"]
                )
                assert answers.values == pytest.approx([digital, contrast, clean, pgd])
