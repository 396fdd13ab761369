"""What is refused, what is stored and continued, and what is left behind."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_probe.probes.class_attention import CLASS_ATTENTION
from tcnn_probe.recording.collector import Collector
from tests.tcnn_probe.contracts.helpers import Trace, clean, images, vit
from tests.tcnn_probe.probes.class_attention_models import LAYER, classes_of, network, pictures


@pytest.mark.parametrize(
    ("classes", "error", "message"),
    [
        (0, ValueError, r"expected classes of 1 or more, or None for no maps of classes; got 0"),
        (-2, ValueError, r"expected classes of 1 or more, .*got -2"),
        ([], ValueError, r"expected the indices of classes, from 0, for classes; got \[\]"),
        ([3, -1], ValueError, r"expected the indices of classes, from 0, for classes; got \[3, -1\]"),
        (1.5, TypeError, r"expected a number of classes, or the indices of some, got 1.5"),
        (True, TypeError, r"expected a number of classes, or the indices of some, got True"),
        ([True], TypeError, r"expected a number of classes, or the indices of some, got \[True\]"),
        ([1, 2.0], TypeError, r"expected a number of classes, or the indices of some, got \[1, 2.0\]"),
        ("3", TypeError, r"expected a number of classes, or the indices of some, got '3'"),
        ([2, 11], ValueError, r"expected indices of classes below 11, for 'pool', got 11"),
    ],
)
def test_classes_that_cannot_be(classes: Any, error: type[Exception], message: str) -> None:
    model = network()
    before = Trace(model)
    with pytest.raises(error, match=message):
        tcnn_probe.record(model, images=2, classes=classes)
    assert before == Trace(model)
    assert clean()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (vit, {"images": 1}, r"classes=\[1\] chooses maps, and no layer or probe has one for each class"),
        (network, {"images": 1, "probes": "softmax"}, r"classes=\[1\] chooses maps, and no layer or probe has one"),
        (network, {"images": 1, "layers": "stem"}, r"classes=\[1\] chooses maps, and no layer or probe has one"),
        (network, {}, r"classes=\[1\] chooses maps, and there are none without images="),
    ],
)
def test_named_classes_of_nothing(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.record(model(), classes=[1], **options)
    assert clean()


def test_classes_that_went_while_recording() -> None:
    model, x = network(), pictures()
    with torch.no_grad(), tcnn_probe.record(model, images=2, classes=[1, 9]) as recorder:
        model(x)
        recorder.mark(epoch=0)
        model.reset_classifier(5)
        with pytest.raises(ValueError, match=r"expected indices of classes below 5, for 'pool.block.attn', got 9"):
            model.eval()(x)
        with pytest.raises(RuntimeError, match="nothing to mark: no image in eval mode reached"):
            recorder.mark(epoch=1)
    assert clean()


def test_numpy_integers() -> None:
    with tcnn_probe.record(network(), images=2, classes=np.array([4, 1])):
        pass
    with tcnn_probe.record(network(), images=2, classes={4, 1}):
        pass


def test_sets_are_sorted() -> None:
    assert classes_of(record(network(), None, 0, classes={10, 1, 8}))["class"].values.tolist() == [1, 8, 10]


def record(model: nn.Module, store: Any, epoch: int, **options: Any) -> xr.DataTree:
    with torch.no_grad(), tcnn_probe.record(model, store, **{"images": 2} | options) as recorder:
        model(pictures())
        recorder.mark(epoch=epoch)
        return recorder.tree.load()


@pytest.mark.parametrize("classes", [2, [9, 4]], ids=str)
def test_round_trip_resume_and_compaction(tmp_path: Path, classes: Any) -> None:
    path, model = tmp_path / "run.zarr", network()
    memory = []
    for epoch in range(3):
        with torch.no_grad():
            model.head.bias.normal_(std=3.0, generator=torch.Generator().manual_seed(epoch))
        record(model, path, epoch, classes=classes)
        memory.append(classes_of(record(model, None, epoch, classes=classes)))
    expected = xr.concat(memory, "epoch")
    for prepare in (lambda: None, lambda: tcnn_probe.compact(path)):
        prepare()
        tree = tcnn_probe.open(path).load()
        xr.testing.assert_identical(classes_of(tree).drop_attrs(), expected.drop_attrs())
        assert classes_of(tree).class_index.attrs["long_name"] == "class"
    record(model, path, 3, classes=classes)
    assert classes_of(tcnn_probe.open(path)).epoch.values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("there", "here"), [(3, 2), (3, [0, 1, 2]), ([0, 1, 2], 3), ([0, 1], [0, 2]), ([0, 1], [1, 0])], ids=str
)
def test_a_store_of_other_classes_is_refused(tmp_path: Path, there: Any, here: Any) -> None:
    path, model = tmp_path / "run.zarr", network()
    record(model, path, 0, classes=there)
    before = Trace(model)
    with pytest.raises(tcnn_probe.StoreError) as raised:
        tcnn_probe.record(model, path, images=2, classes=here)
    assert str(raised.value) == f"the store has maps of {LAYER!r} with classes={there}, got classes={here}"
    assert before == Trace(model)
    with pytest.raises(tcnn_probe.StoreError, match="classes=None"):
        tcnn_probe.record(model, path, images=2, classes=None)


def test_a_store_without_maps_of_classes_is_no_other(tmp_path: Path) -> None:
    path, model = tmp_path / "run.zarr", network()
    record(model, path, 0, classes=None)
    with pytest.raises(tcnn_probe.StoreError, match=r"group 'maps/classes/3x5': absent there, 3 variables here"):
        record(model, path, 1)
    record(model, path, 1, classes=None)


def test_a_store_of_an_older_version_keeps_its_width_and_its_variables(tmp_path: Path) -> None:
    """It had maps in float16, and nothing beside them."""
    path, model, new = tmp_path / "run.zarr", vit(), ("self_attention", "token_attention")
    narrow = {name: about for name, about in CLASS_ATTENTION.variables.items() if name not in new}
    about = narrow["class_attention"]
    narrow["class_attention"] = tcnn_probe.Variable(
        about.dims, about.units, about.long_name, about.description, "float16"
    )
    assert CLASS_ATTENTION.maps is not None
    old = tcnn_probe.Probe(
        "class-attention",
        narrow,
        group="",
        attention=CLASS_ATTENTION.attention,
        maps=lambda call, which: {"class_attention": CLASS_ATTENTION.maps(call, which)["class_attention"]},
    )
    with torch.no_grad(), tcnn_probe.record(model, path, images=2, probes=["softmax", old]) as recorder:
        model(images())
        recorder.mark(epoch=0)
    with torch.no_grad(), tcnn_probe.record(model, path, images=2) as recorder:
        model(images())
        with pytest.warns(RuntimeWarning, match=r"began without them: \['self_attention', 'token_attention'\]"):
            recorder.mark(epoch=1)
    maps = tcnn_probe.open(path)["maps/3x5x7"].to_dataset()
    assert maps.class_attention.dtype == np.float16
    np.testing.assert_array_equal(maps.class_attention[0], maps.class_attention[1])
    assert set(maps.data_vars) == {"attention_received", "center_attention", "class_attention"}


def test_nothing_is_left_of_a_forward_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are maps of images that nobody chose ever made."""
    asked: list[int] = []
    weights = tcnn_probe.AttentionCall.weights

    def counted(self: tcnn_probe.AttentionCall, queries: slice, image: int | None = None) -> torch.Tensor:
        asked.append(-1 if image is None else image)
        return weights(self, queries, image)

    monkeypatch.setattr(tcnn_probe.AttentionCall, "weights", counted)
    model, x = network(), pictures()
    before, output = Trace(model), model(x)
    with torch.no_grad(), tcnn_probe.record(model, images=[2, 5], probes="attention-by-class") as recorder:
        handle = model.head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        assert asked == [2, 5]
        collector: Collector = recorder._collector
        assert not collector._pending
        assert torch.equal(model(x), output)
        assert not collector._pending
        recorder.mark(epoch=0)
        ds = classes_of(recorder.tree)
    assert ds.attention_by_class.notnull().all()
    model.head._forward_pre_hooks.clear()
    assert before == Trace(model)
    assert clean()
