"""Maps of single classes: they are of the right classes and images, and equal brute force."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import AttentionPool2d
from tcnn_model.pooling.attention_pool import ClassScores
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.probes.anatomy import ANATOMY
from tests.tcnn_probe.attention.bruteforce import entropy
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.probes.class_attention_models import (
    CLASSES,
    LAYER,
    classes_of,
    network,
    pictures,
    truth,
)

# The images are in different batches, and none is the first of its batch.
IMAGES = [1, 3, 6]


def maps_of(recorder: tcnn_probe.Recorder, shape: str = "3x5") -> xr.Dataset:
    return classes_of(recorder.tree, shape).isel(epoch=-1).load()


def check(ds: xr.Dataset, model: nn.Module, x: Tensor, images: Sequence[int], classes: Any) -> None:
    """Compare maps entry by entry; ``classes`` are the expected classes of all images,
    or None for the best three.
    """
    maps, scores = truth(copy.deepcopy(model), x)
    assert ds.attention_by_class.dims == ("image", "class", "y", "x")
    assert ds.attention_by_class.dtype == ds.class_score.dtype == np.float32
    assert ds.class_index.dtype == np.int64
    assert ds.image.values.tolist() == list(images)
    for place, image in enumerate(images):
        best = (
            sorted(range(scores.shape[1]), key=lambda c: -scores[image, c])[:3]
            if classes is None
            else classes
        )
        assert ds.class_index[place].values.tolist() == best
        for rank, c in enumerate(best):
            attention = ds.attention_by_class[place, rank].values
            # Weights are at most 1; maps are in float32, the reference in float64. Scores are not
            # bounded by 1.
            np.testing.assert_allclose(
                attention, maps[image, c].reshape(attention.shape), atol=1e-5
            )
            np.testing.assert_allclose(
                ds.class_score[place, rank], scores[image, c], rtol=1e-4, atol=1e-4
            )


@pytest.mark.numerical
def test_best_classes_are_those_of_the_models_output() -> None:
    model = network()
    x = pictures()
    ds = maps_of(recorded(model, *x.split([2, 3, 2]), images=IMAGES))
    check(ds, model, x, IMAGES, None)
    assert ds["class"].values.tolist() == [0, 1, 2]
    # If all images had the same best classes, exchanged maps would not show.
    assert len({tuple(row) for row in ds.class_index.values}) > 1
    # This is far above uniform attention, 1/15.
    assert float(ds.attention_by_class.max()) > 0.5
    np.testing.assert_allclose(ds.attention_by_class.sum(("y", "x")), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("classes", "expected"),
    # Classes are out of order, with one twice; a set has no order, and is sorted.
    [([9, 0, 4, 9], [9, 0, 4]), (np.array([4, 1]), [4, 1]), ({10, 1, 8}, [1, 8, 10])],
    ids=["list", "array", "set"],
)
def test_maps_of_named_classes(classes: Any, expected: list[int]) -> None:
    model = network()
    x = pictures()
    ds = maps_of(recorded(model, *x.split([2, 5]), images=IMAGES, classes=classes))
    check(ds, model, x, IMAGES, expected)
    assert ds["class"].values.tolist() == expected


@pytest.mark.numerical
def test_statistics_of_a_layer_with_a_token_per_class() -> None:
    """Statistics are means over all tokens, none of which is the class token or has a position."""
    model = network()
    x = pictures()
    expected = entropy(truth(copy.deepcopy(model), x)[0]).mean()
    recorder = recorded(model, x, images=1)
    ds = recorder.dataset.squeeze().load()
    tree = recorder.tree
    missing = recorder.missing
    np.testing.assert_allclose([ds.entropy, ds.class_entropy], expected, atol=1e-4)
    assert not {"attention_distance", "prefix_attention", "class_prefix_attention"} & {
        n for n in ds if ds[n].notnull()
    }
    assert set(tree["maps/1x3x5"].data_vars) == {"attention_received"}
    assert missing.keys() - ANATOMY.keys() == {
        "attention_distance",
        "uniform_distance",
        "cell_pixels",
        "center_attention",
    }
    assert "one for each class" in missing["attention_distance"][LAYER]
    for name in ANATOMY:
        assert name not in ds or ds[name].isnull().all()
        assert "class_content_information" in missing[name][LAYER]
    assert ds.class_content_information > 0
    assert float(ds.class_selectivity) == pytest.approx(
        float(ds.uniform_entropy - ds.class_entropy), abs=1e-12
    )
    recorder = recorded(model, x, images=2, classes=None)
    assert [*recorder.tree["maps"].children] == ["1x3x5"]
    assert "attention_by_class" not in recorder.missing


@pytest.mark.parametrize(
    "classes", [1, 15, 24], ids=["one", "as many as patches", "as many as channels"]
)
def test_number_of_classes_may_equal_other_sizes(classes: int) -> None:
    """A token per class is recognised by its pool,
    not by its number: there are 15 patches and 24 channels.
    """
    model = network(classes)
    x = pictures(3)
    recorder = recorded(model, x, images=2)
    ds = maps_of(recorder)
    assert ds.sizes["class"] == min(classes, 3)
    check(ds, model, x, [0, 1], None)
    assert "class_attention" not in recorder.tree["maps/1x3x5"]
    assert recorder.layers == (LAYER,)
    assert recorder.dataset.get("attention_distance", xr.DataArray(np.nan)).isnull().all()


class Wrapped(nn.Module):
    """Model with a pool deep inside that is called with a keyword, and with any output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 16, 16)
        self.output = output
        self.pools = nn.ModuleList(
            [nn.ModuleDict({"pool": AttentionPool2d(24, CLASSES, init_values=1.0)})]
        )
        self.head = ClassScores(24, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.output(self.head(self.pools[0]["pool"](x=self.stem(x))))


DEEP = "pools.0.pool.block.attn"


def test_a_nested_pool_called_by_keyword() -> None:
    model = Wrapped(lambda scores: scores)
    x = pictures(5)
    ds = recorded(model, x, images=5).tree["maps/classes/2x4"].to_dataset().sel(layer=DEEP, epoch=0)
    check(ds, model, x, range(5), None)


@pytest.mark.parametrize(
    "output",
    [lambda s: {"logits": s}, lambda s: s[:, :5]],
    ids=["no tensor", "too few"],
)
def test_an_output_that_is_not_a_score_per_class(output: Any) -> None:
    model = Wrapped(output)
    x = pictures(2)
    recorder = recorded(model, x, images=2)
    assert "classes" not in recorder.tree["maps"].children
    for name in ("attention_by_class", "class_index", "class_score"):
        assert r"its output does not have the shape (2, 11)" in recorder.missing[name][DEEP]
        assert "classes=[...]" in recorder.missing[name][DEEP]
    ds = recorded(model, x, images=2, classes=[5]).tree["maps/classes/2x4"].to_dataset()
    assert ds.class_score.isnull().all()
    assert ds.attention_by_class.notnull().all()


def test_a_part_of_the_model_called_by_itself_has_no_best_classes() -> None:
    """forward_head() gives features, from which best classes cannot be known;
    maps of named classes are kept.
    """
    model = network()
    x = pictures()
    expected = truth(copy.deepcopy(model), x)[0]
    for classes in (3, [8, 2]):
        with (
            torch.no_grad(),
            tcnn_probe.record(model, images=IMAGES, classes=classes) as recorder,
        ):
            model.forward_head(model.forward_features(x), pre_logits=True)
            recorder.mark(epoch=0)
        if classes == 3:
            assert (
                "the model was not called as a whole"
                in recorder.missing["attention_by_class"][LAYER]
            )
            assert "classes" not in recorder.tree["maps"].children
        else:
            attention = maps_of(recorder).attention_by_class.values.reshape(3, 2, -1)
            np.testing.assert_allclose(attention, expected[IMAGES][:, classes], atol=1e-5)
            assert "attention_by_class" not in recorder.missing


class AttentionPooledViews(nn.Module):
    """Model that pools two views of each image separately, with a name that suggests attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 16, 16)
        self.pool = AttentionPool2d(24, CLASSES, init_values=1.0)
        self.head = ClassScores(24, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        features = self.stem(x)
        views = torch.stack([features, features.flip(3)], 1).flatten(0, 1)
        return self.head(self.pool(views)).unflatten(0, (-1, 2)).mean(1)


def test_several_views_of_an_image_have_no_single_map() -> None:
    recorder = recorded(AttentionPooledViews(), pictures(2), images=2)
    assert "classes" not in recorder.tree["maps"].children
    assert LAYER in recorder.missing["attention_by_class"]
    assert recorder.unsupported == {}


@pytest.mark.filterwarnings("ignore:no content_information")
def test_two_grids_have_two_groups() -> None:
    """Images of another shape have their own group."""
    model = network()
    x = pictures(2)
    tall = pictures(2, (79, 31))
    recorder = recorded(model, x, tall, images=4)
    for shape, batch, images in (("3x5", x, [0, 1]), ("5x2", tall, [2, 3])):
        ds = maps_of(recorder, shape)
        assert ds.image[ds.class_index[:, 0] >= 0].values.tolist() == images
        check(ds.sel(image=images).assign_coords(image=[0, 1]), model, batch, [0, 1], None)


def test_classes_that_disappear_while_recording() -> None:
    model = network()
    x = pictures()
    with (
        torch.no_grad(),
        tcnn_probe.record(model, images=2, classes=[1, 9]) as recorder,
    ):
        model(x)
        recorder.mark(epoch=0)
        # Class 9, which was requested, no longer exists.
        model.reset_classifier(5)
        with pytest.raises(
            ValueError,
            match="expected indices of classes below 5, got 9",
        ):
            model.eval()(x)
        with pytest.raises(RuntimeError, match="nothing to mark: no image in eval mode reached"):
            recorder.mark(epoch=1)


@pytest.mark.parametrize(("stored", "classes"), [(3, None), ([0, 1], [1, 0])], ids=str)
def test_a_store_of_other_classes_is_refused(tmp_path: Path, stored: Any, classes: Any) -> None:
    path = tmp_path / "run.zarr"
    model = network()
    recorded(model, pictures(), store=path, images=2, classes=stored)
    with pytest.raises(tcnn_probe.StoreError) as raised:
        tcnn_probe.record(model, path, images=2, classes=classes)
    assert (
        str(raised.value)
        == f"the store has maps of {LAYER!r} with classes={stored}, got classes={classes}"
    )


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_only_maps_of_selected_images_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[int | None] = []
    weights = SoftmaxAttention.weights

    def counted(self: SoftmaxAttention, queries: slice, image: int | None = None) -> Tensor:
        requests.append(image)
        return weights(self, queries, image)

    monkeypatch.setattr(SoftmaxAttention, "weights", counted)
    with (
        torch.no_grad(),
        tcnn_probe.record(model := network(), images=[2, 5], probes="attention-by-class"),
    ):
        model(pictures())
    # Rows of other images would cost as much, and be discarded.
    assert requests == [2, 5]


def test_selected_images_and_forwards_only() -> None:
    model = network()
    x = pictures()
    ds = maps_of(recorded(model, *x.split(1), images=[0, 2, 3, 5], max_images=3, every=2))
    check(ds.sel(image=[0, 2]).assign_coords(image=[0, 4]), model, x, [0, 4], None)
    assert (ds.class_index.sel(image=[3, 5]) == -1).all()
    maps = maps_of(recorded(model, x, images=[0, 2, 3], max_images=3))
    assert maps.attention_by_class.isnull().all(("class", "y", "x")).values.tolist() == [
        False,
        False,
        True,
    ]
