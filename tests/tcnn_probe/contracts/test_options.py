"""What is measured, by every=, max_images=, when=, layers=, images= and along=; and what mark() says when it cannot."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import entropies, images, recorded, vit


def entropy_of_each(x: Tensor) -> Tensor:
    """(images, layers, heads)."""
    return torch.stack([entropies(vit(), one[None]) for one in x])


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every(every: int) -> None:
    """The first forward of each epoch, and each one so many after it; a forward in parts is one."""
    model = vit()
    batches = [images(2, seed) for seed in range(5)]
    with tcnn_probe.record(model, every=every) as recorder:
        for epoch in range(2):
            for x in batches:
                model.train()
                model(x)  # not counted
                model.eval()
                model(x)
            recorder.mark(epoch=epoch)
    expected = entropy_of_each(torch.cat(batches[::every])).mean(0)
    for mark in range(2):
        torch.testing.assert_close(recorded(recorder, mark), expected, rtol=1e-5, atol=1e-6)
        assert recorder.dataset.images.values[mark].tolist() == [2 * len(batches[::every])] * 2


@pytest.mark.parametrize("most", [1, 2, 5, 7, 100])
def test_max_images(most: int) -> None:
    model, x = vit(), images(9)
    with tcnn_probe.record(model, max_images=most) as recorder:
        for epoch in range(2):
            for batch in x.split(2):
                model(batch)
            recorder.mark(epoch=epoch)
    count = min(most, 9)
    expected = entropy_of_each(x[:count]).mean(0)
    for mark in range(2):
        torch.testing.assert_close(recorded(recorder, mark), expected, rtol=1e-5, atol=1e-6)
        assert recorder.dataset.images.values[mark].tolist() == [count] * 2


def test_max_images_where_layers_see_different_numbers_of_them() -> None:
    """One layer is called twice; it is full while the other is not, also for a whole forward."""
    model = vit()
    model.blocks[0].attn = model.blocks[1].attn
    model.blocks.append(vit(seed=1).blocks[0])
    with tcnn_probe.record(model, max_images=5) as recorder, torch.no_grad():
        model(images(3))
        model(images(2))
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[5, 5]]


@pytest.mark.parametrize(("when", "count"), [("eval", 3), ("train", 5), ("always", 8)])
def test_when(when: Any, count: int) -> None:
    model = vit()
    with tcnn_probe.record(model, when=when) as recorder:
        model.eval()(images(3))
        model.train()(images(5))
        recorder.mark(epoch=0)
    assert recorder.dataset.images.values.tolist() == [[count] * 2]


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("blocks.1.attn", [1]),
        ("blocks.1", [1]),
        ("blocks", [0, 1]),
        ("blocks.*.attn", [0, 1]),
        ("*.0.attn", [0]),
        (["blocks.1.attn", "blocks.0"], [0, 1]),
        (lambda name, module: name.startswith("blocks.0"), [0]),
    ],
)
def test_layers(layers: Any, found: list[int]) -> None:
    model = vit()
    with tcnn_probe.record(model, layers=layers) as recorder:
        model(images())
        recorder.mark(epoch=0)
    assert list(recorder.layers) == [f"blocks.{number}.attn" for number in found]
    torch.testing.assert_close(recorded(recorder), entropies(vit(), images())[found], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("chosen", "numbers"), [(2, [0, 1]), ([4], [4]), ([5, 0, 2], [0, 2, 5])])
def test_images_are_numbered_in_the_order_in_which_they_pass(chosen: Any, numbers: list[int]) -> None:
    model, x = vit(), images(6)
    with tcnn_probe.record(model, images=chosen) as recorder:
        for epoch in range(2):
            for batch in x.split((1, 3, 2)):
                model(batch)
            recorder.mark(epoch=epoch)
        maps = maps_of(recorder.tree)
        assert maps.image.values.tolist() == numbers
        with tcnn_probe.record(model, images=6) as whole:
            model(x)
            whole.mark(epoch=0)
        for mark in range(2):
            found = maps.class_attention.isel(epoch=mark).values
            wanted = maps_of(whole.tree).class_attention.isel(epoch=0).sel(image=numbers).values
            # One batch or three: float32 to the last digits.
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def maps_of(tree: xr.DataTree) -> xr.Dataset:
    (group,) = tree["maps"].children.values()
    return group.to_dataset()


def test_images_that_never_came_are_nan() -> None:
    model = vit()
    with tcnn_probe.record(model, images=[1, 7]) as recorder:
        model(images(3))
        recorder.mark(epoch=0)
        maps = maps_of(recorder.tree).class_attention
    assert not maps.sel(image=1).isnull().any()
    assert maps.sel(image=7).isnull().all()


def test_no_image_asked_for_by_the_first_mark() -> None:
    """How large maps are is not known then. Said, and nothing lost: later ones would have nowhere to go."""
    model = vit()
    with tcnn_probe.record(model, images=[4, 7]) as recorder:
        model(images(3))
        with pytest.raises(RuntimeError, match=r"of the images asked for, \[4, 7\], none was among the 3 seen"):
            recorder.mark(epoch=0)
        model(images(2))
        recorder.mark(epoch=0)
        model(images(3))
        recorder.mark(epoch=1)
        assert maps_of(recorder.tree).class_attention.isnull().all(("layer", "head", "y", "x")).values.tolist() == [
            [False, True],
            [True, True],
        ]


def test_maps_of_a_size_that_the_first_epoch_had_not() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, dynamic_img_size=True).eval()
    with tcnn_probe.record(model, images=1) as recorder, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
        recorder.mark(epoch=0)
        model(torch.randn(1, 3, 32, 48))
        with pytest.warns(RuntimeWarning, match=r"began without them: \['blocks\.0\.attn in maps/3x2x3'\]"):
            recorder.mark(epoch=1)
    assert recorder.dataset.entropy.notnull().all()


def test_maps_that_no_probe_has() -> None:
    with pytest.raises(ValueError, match=r"images= keeps maps, and none of the probes \['convolution'\] has any"):
        tcnn_probe.record(vit(), images=1, probes="convolution")


@pytest.mark.parametrize("chosen", [np.arange(1, 3), torch.arange(1, 3), range(1, 3), (2, 1, 1)], ids=str)
def test_numbers_of_images_of_any_kind(chosen: Any) -> None:
    model = vit()
    with tcnn_probe.record(model, images=chosen) as recorder:
        model(images(3))
        recorder.mark(epoch=0)
        assert maps_of(recorder.tree).image.values.tolist() == [1, 2]


def test_no_forward_in_eval_mode() -> None:
    """The likeliest mistake is named, on the first epoch too."""
    model = vit().train()
    with tcnn_probe.record(model) as recorder:
        model(images())
        with pytest.raises(RuntimeError, match=r"no forward in eval mode began .*run the validation, with model\.eval"):
            recorder.mark(epoch=0)
        model.eval()(images())
        recorder.mark(epoch=0)
        with pytest.raises(RuntimeError, match=r"reached \['blocks\.0\.attn', 'blocks\.1\.attn'\] since"):
            recorder.mark(epoch=1)


@pytest.mark.parametrize(("along", "marks"), [("step", [10, 25, 1000]), ("images_seen", [0.5, 1.25, 3e5])])
def test_along(along: str, marks: list[float], tmp_path: Path) -> None:
    model = vit()
    with tcnn_probe.record(model, tmp_path / "run.zarr", along=along) as recorder:
        for mark in marks:
            model(images())
            recorder.mark(**{along: mark})
        with pytest.raises(ValueError, match="later than the last"):
            recorder.mark(**{along: marks[0] / 2 if along != "step" else 1})
    found = xr.open_zarr(tmp_path / "run.zarr")[along]
    assert found.values.tolist() == marks
    assert found.dtype == ("int64" if along == "step" else "float64")


def test_not_waiting_and_flush(tmp_path: Path) -> None:
    model = vit()
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        for epoch in range(3):
            model(images(epoch + 1))
            recorder.mark(epoch=epoch, wait=False)
            assert recorder.epochs == tuple(range(epoch + 1))
        recorder.flush()
        assert xr.open_zarr(tmp_path / "run.zarr").images.values[:, 0].tolist() == [1, 2, 3]
        model(images(5))
        recorder.mark(epoch=3, wait=False)
    assert xr.open_zarr(tmp_path / "run.zarr").images.values[:, 0].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "positive integer for every, got 0"),
        ({"every": 1.5}, ValueError, "positive integer for every"),
        ({"max_images": 0}, ValueError, "positive integer for max_images"),
        ({"when": "test"}, ValueError, "expected when='eval', 'train' or 'always', got 'test'"),
        ({"layers": "block"}, ValueError, "no layers match 'block'; did you mean 'blocks'"),
        ({"layers": []}, ValueError, "layers is empty"),
        ({"layers": lambda name, module: False}, ValueError, "the predicate chose none"),
        ({"images": -1}, ValueError, "numbers of images from 0, got -1"),
        ({"images": ["a"]}, TypeError, "numbers of some"),
        ({"along": "layer"}, ValueError, "name of a coordinate"),
        ({"along": "wait"}, ValueError, "name of a coordinate"),
        ({"probes": "entropy"}, ValueError, "no probe 'entropy'"),
        ({"distributed": True}, RuntimeError, "init_process_group"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = vit()
    with pytest.raises(error, match=words):
        tcnn_probe.record(model, **options)
    assert not model._forward_hooks


def test_mark_without_a_forward() -> None:
    model = vit()
    with tcnn_probe.record(model) as recorder:
        with pytest.raises(RuntimeError, match="nothing to mark"):
            recorder.mark(epoch=0)
        model.train()
        model(images()), model(images())
        with pytest.raises(RuntimeError, match=r"nothing to mark.*\b2 forwards in training mode"):
            recorder.mark(epoch=0)
        model.eval()
        model(images())
        recorder.mark(epoch=0)
        model.train()(images())
        with pytest.raises(RuntimeError, match=r"no image in eval mode reached.*\b1 forwards in.*model\.eval\(\)"):
            recorder.mark(epoch=1)


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"top1": 0.5}, TypeError, "mark() needs the epoch"),
        ({"epoch": 1.5}, TypeError, "expected an integer for epoch, got 1.5"),
        ({"epoch": 3}, ValueError, "epoch 3 is already marked"),
        ({"epoch": 2}, ValueError, "expected an epoch later than the last one marked, 3, got 2"),
        ({"epoch": 4, "top1": "high"}, TypeError, "expected a number for 'top1', got 'high'"),
        ({"epoch": 4, "top1": torch.ones(2)}, TypeError, "expected a number for 'top1'"),
        ({"epoch": 4, "entropy": 1.0}, ValueError, "'entropy' is the name of a recorded variable"),
        ({"epoch": 4, "layer": 1.0}, ValueError, "'layer' is the name of a coordinate"),
        ({"epoch": 4, "top-1": 1.0}, ValueError, "letters, digits and underscores"),
        ({"epoch": 4, "if_marked": "drop"}, ValueError, "if_marked='error' or 'skip'"),
    ],
)
def test_mark_refused_and_tried_again(values: dict[str, Any], error: type[Exception], words: str) -> None:
    model = vit()
    with tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=3)
        model(images(5))
        with pytest.raises(error) as caught:
            recorder.mark(**values)
        assert words in str(caught.value)
        recorder.mark(epoch=4, top1=0.5)  # with what was seen before
    assert recorder.dataset.images.values[:, 0].tolist() == [3, 5]
    with pytest.raises(RuntimeError, match="was removed: mark\\(\\) works inside the with block only"):
        recorder.mark(epoch=5)


def test_layer_that_was_asked_for_and_recorded_nothing() -> None:
    model = vit()
    with tcnn_probe.record(model, layers=["blocks.1", "norm"]) as recorder:
        model(images())
        with pytest.raises(RuntimeError, match="layers asked for 'norm', of which nothing was recorded: no attention"):
            recorder.mark(epoch=0)


def test_model_without_attention() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU()).eval()
    with tcnn_probe.record(model) as recorder:
        model(images())
        with pytest.raises(RuntimeError, match=r"no attention was seen in Sequential.*tcnn_model\.reparameterize"):
            recorder.mark(epoch=0)


def test_no_model() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        tcnn_probe.record(lambda x: x)  # type: ignore[arg-type]
