"""The recording that comes with the package, as documents and users draw it."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import tcnn_probe


def test_example_is_a_whole_recording() -> None:
    tree = tcnn_probe.load_example()
    assert tree.attrs["model"] == "tf_efficientnet_lite0"
    heads = tree["heads"].dataset
    assert tree.top1.sizes == {"epoch": 6}
    assert heads.gate.dims == ("epoch", "layer", "head")
    present = heads.gate[0].notnull()
    assert present.sum("head").values.tolist() == [25, 25, 25, 25, 9]
    assert heads.gate[0].where(present).mean() == pytest.approx(1 / (1 + np.exp(-1)))
    assert set(heads.images.values.ravel().tolist()) == {401}
    for name in (
        "entropy",
        "attention_distance",
        "content_information",
        "attention_span",
    ):
        np.testing.assert_array_equal(
            np.isfinite(heads[name].load()), present.broadcast_like(heads[name]), name
        )


def test_example_can_be_drawn() -> None:
    tree = tcnn_probe.load_example()
    assert tcnn_probe.plot.evolution(tree["heads"].gate).lines
    with pytest.warns(FutureWarning, match="record it anew"):
        types = tcnn_probe.head_types(tree["heads"].dataset)
    # These are of 109 heads, as the recording starts at the papers' initialization.
    assert (types.isel(epoch=0) == "convolutional").sum() > 50
    maps = tree["maps/25x8x8"].dataset.isel(epoch=-1, image=0)
    assert isinstance(tcnn_probe.plot.attention_grid(maps.center_attention), Figure)


@pytest.mark.parametrize("name", ["tcnn", "vit"])
def test_its_heads_are_checked_without_a_path(name: str) -> None:
    tree = tcnn_probe.load_example(name)
    heads = tree["heads"].dataset
    assert tcnn_probe.health(heads).along == "epoch"
    entropy = f"entropy/{heads.layer.values[0]}"
    assert tcnn_probe.scalars(heads)[entropy] > 0
    assert tcnn_probe.health(tree) == tcnn_probe.health(heads)


def test_the_vision_transformer_is_trained_and_has_content_heads() -> None:
    tree = tcnn_probe.load_example("vit")
    heads = tree["heads"].dataset
    assert heads.sizes == {"epoch": tree.sizes["epoch"], "layer": 4, "head": 4}
    assert set(heads.images.values.ravel().tolist()) == {360}
    first, last = tree.top1.values[[0, -1]]
    # Chance is one digit in ten; the page on attention maps says 96 %.
    assert first < 0.2
    assert last > 0.9
    types = tcnn_probe.head_types(heads)
    assert (types.isel(epoch=0) == "averaging").all()
    assert (types.isel(epoch=-1) == "content").sum() >= 4


def test_maps_of_the_vision_transformer_are_of_available_digits() -> None:
    tree = tcnn_probe.load_example("vit")
    maps = tree["maps/4x4x4"].dataset
    assert maps.sizes["image"] == len(tree.attrs["digits"]) == 3
    of_class = maps.class_attention.sum(["y", "x"]) + maps.self_attention
    np.testing.assert_allclose(of_class, 1, atol=1e-5)
    digits = load_digits().images[tree.attrs["digits"]]
    assert digits.shape == (3, 8, 8)


def test_an_unknown_example_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of \['tcnn', 'vit'\], got 'x'"):
        tcnn_probe.load_example("x")
