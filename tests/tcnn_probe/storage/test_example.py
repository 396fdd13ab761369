"""The recording that comes with the package, as documents and users draw it."""

import numpy as np
import pytest
from matplotlib.figure import Figure

import tcnn_probe


def test_it_is_a_whole_recording() -> None:
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


def test_it_can_be_drawn() -> None:
    tree = tcnn_probe.load_example()
    assert tcnn_probe.plot.evolution(tree["heads"].gate).lines
    types = tcnn_probe.head_types(tree["heads"].dataset)
    assert (types.isel(epoch=0) == "convolutional").sum() > 50
    maps = tree["maps/25x8x8"].dataset.isel(epoch=-1, image=0)
    assert isinstance(tcnn_probe.plot.attention_grid(maps.center_attention), Figure)
