"""Options that decide which forwards are measured:
every=, max_images=, when=, layers=, images= and along=.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import check_entropies, entropies, images, recorded, vit


def test_every_counts_forwards_from_the_start_of_an_epoch() -> None:
    """Each epoch's first forward and every n-th one after it are measured;
    forwards in the other mode do not count.
    """
    model = vit()
    batches = [images(2, seed) for seed in range(5)]
    with tcnn_probe.record(model, every=3) as recorder:
        for epoch in range(2):
            for x in batches:
                model.train()(x)
                model.eval()(x)
            recorder.mark(epoch=epoch)
    # Forwards 0 and 3 of five are measured; if the count went on, the second epoch would have 1 and
    # 4.
    measured = torch.cat(batches[::3])
    for mark in range(2):
        check_entropies(recorder, entropies(vit(), measured), mark, images=len(measured))


# 5 ends within a batch of two; 100 is more than there are images.
@pytest.mark.parametrize("max_images", [5, 100])
def test_max_images_stops_within_a_batch(max_images: int) -> None:
    model, x = vit(), images(9)
    with tcnn_probe.record(model, max_images=max_images) as recorder:
        for epoch in range(2):
            for batch in x.split(2):
                model(batch)
            recorder.mark(epoch=epoch)
    for mark in range(2):
        check_entropies(recorder, entropies(vit(), x[:max_images]), mark, images=min(max_images, 9))
    ds = recorder.dataset
    alone = recorded(vit(), x[:max_images]).dataset
    for name in ("content_information", "class_content_information", "translation_equivariance"):
        # Other batches of the same images have float32 sums in another order.
        np.testing.assert_allclose(
            ds[name], alone[name].isel(epoch=[0, 0]), atol=1e-5, err_msg=name
        )


def test_max_images_for_layers_that_see_different_numbers_of_images() -> None:
    """A layer that is called twice reaches the limit earlier than the other one,
    even by a whole forward.
    """
    model = vit()
    model.blocks[0].attn = model.blocks[1].attn
    # The third block is called once per forward.
    model.blocks.append(vit(seed=1).blocks[0])
    recorder = recorded(model, images(3), images(2), max_images=5)
    assert recorder.dataset.images.values.tolist() == [[5, 5]]


@pytest.mark.parametrize(("when", "count"), [("eval", 3), ("train", 5), ("always", 8)])
def test_when_selects_the_mode_that_is_measured(when: Any, count: int) -> None:
    model = vit()
    with tcnn_probe.record(model, when=when) as recorder:
        model.eval()(images(3))
        model.train()(images(5))
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[count] * 2]


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("*.0.attn", [0]),
        (["blocks.1.attn", "blocks.0"], [0, 1]),
        (lambda name, module: name.startswith("blocks.0"), [0]),
    ],
    ids=["glob", "several", "predicate"],
)
def test_layers_selects_by_name(layers: Any, numbers: list[int]) -> None:
    recorder = recorded(vit(), images(), layers=layers)
    assert list(recorder.layers) == [f"blocks.{number}.attn" for number in numbers]
    check_entropies(recorder, entropies(vit(), images())[numbers])


def maps_of(recorder: tcnn_probe.Recorder) -> xr.DataArray:
    (group,) = recorder.tree["maps"].children.values()
    return group.to_dataset().class_attention.load()


@pytest.mark.parametrize(
    ("selection", "numbers"),
    # The selection is unsorted and repeats a number.
    [(2, [0, 1]), (np.array([5, 0, 2, 2]), [0, 2, 5])],
    ids=["count", "numbers"],
)
def test_images_are_numbered_in_the_order_of_the_forwards(
    selection: Any, numbers: list[int]
) -> None:
    model, x = vit(), images(6)
    with (
        tcnn_probe.record(model, images=6) as complete,
        tcnn_probe.record(model, images=selection) as recorder,
    ):
        for epoch, split in enumerate(((6,), (1, 3, 2))):
            for batch in x.split(split):
                model(batch)
            recorder.mark(epoch=epoch)
            complete.mark(epoch=epoch)
    maps = maps_of(recorder)
    assert maps.image.values.tolist() == numbers
    expected = maps_of(complete).sel(epoch=0, image=numbers)
    # One batch and three batches agree to the precision of float32.
    for mark in range(2):
        np.testing.assert_allclose(maps[mark], expected, rtol=1e-5, atol=1e-6)


def test_images_that_never_came_are_nan_and_one_must_come_by_the_first_mark() -> None:
    """The first mark fixes the size of the maps;
    it raises an error if there are none yet, and loses nothing.
    """
    model = vit()
    with tcnn_probe.record(model, images=[4, 7]) as recorder:
        model(images(3))
        with pytest.raises(
            RuntimeError, match=r"of the images asked for, \[4, 7\], none was among the 3 seen"
        ):
            recorder.mark(epoch=0)
        model(images(2))
        recorder.mark(epoch=0)
        model(images(3))
        recorder.mark(epoch=1)
    missing = maps_of(recorder).isnull().all(("layer", "head", "y", "x"))
    assert missing.values.tolist() == [[False, True], [True, True]]


@pytest.mark.filterwarnings("ignore:the images:RuntimeWarning")
@pytest.mark.parametrize("resumed", [False, True])
def test_maps_of_another_size_than_in_the_first_epoch(tmp_path: Path, resumed: bool) -> None:
    """Maps of another size are left out with a warning,
    also after resuming; the epoch's numbers are kept.
    """
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=True
    ).eval()
    recorder = tcnn_probe.record(model, tmp_path / "run.zarr", images=1)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
        recorder.mark(epoch=0)
        if resumed:
            recorder.remove()
            recorder = tcnn_probe.record(model, tmp_path / "run.zarr", images=1)
        # These images have 2 x 3 patches instead of 2 x 2.
        model(torch.randn(1, 3, 32, 48))
        with pytest.warns(
            RuntimeWarning, match=r"began without them: \['blocks\.0\.attn in maps/3x2x3'\]"
        ) as warnings:
            recorder.mark(epoch=1)
        assert warnings[0].filename == __file__
        model(torch.randn(1, 3, 32, 32))
        recorder.mark(epoch=2)
    recorder.remove()
    assert recorder.dataset.entropy.notnull().all()
    assert maps_of(recorder).notnull().all(
        ("layer", "image", "head", "y", "x")
    ).values.tolist() == [True, False, True]


@pytest.mark.parametrize(
    # Marks are far apart, or fractions, as they are values and not positions.
    ("along", "marks"),
    [("step", [10, 25, 1000]), ("images_seen", [0.5, 1.25, 3e5])],
)
def test_along_names_the_dimension_of_marks(along: str, marks: list[float], tmp_path: Path) -> None:
    model = vit()
    with tcnn_probe.record(model, tmp_path / "run.zarr", along=along) as recorder:
        for mark in marks:
            model(images())
            recorder.mark(**{along: mark})
        with pytest.raises(ValueError, match="later than the last"):
            recorder.mark(**{along: 1})
    coordinate = xr.open_zarr(tmp_path / "run.zarr")[along]
    assert coordinate.values.tolist() == marks
    assert coordinate.dtype == ("int64" if along == "step" else "float64")
