"""Errors of record() and mark() name the expected and the given value,
and a refused call changes nothing.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import nn

import tcnn_probe
from tcnn_probe.recording.checks import check_resumed
from tcnn_probe.schema import Group
from tests.tcnn_probe.contracts.helpers import Trace, clean, images, vit
from tests.tcnn_probe.networks import Branches
from tests.tcnn_probe.oracle import gpsa_statistics, over_images
from tests.tcnn_probe.probes.class_attention_models import network
from tests.tcnn_probe.storage.tables import GROUPS, LAYERS, MAPS

# Each message part is the expected or given value, which a user needs to correct the call.
RECORD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": "block"}, ValueError, "match 'block'; did you mean 'blocks'"),
    ({"layers": ["blocks", "layer4.*"]}, ValueError, r"match 'layer4\.\*'"),
    ({"probes": "softmacks"}, ValueError, "'softmacks'; did you mean 'softmax'"),
    ({"probes": "entropy"}, ValueError, r"'entropy'; there are \['gpsa', .*'softmax'"),
    ({"probes": [3]}, TypeError, "a tcnn_probe.Probe or the name of one, got 3"),
    ({"probes": "layer-scale", "layers": "head"}, ValueError, "has no layer among those asked for"),
    ({"mode": "r"}, ValueError, "expected mode='a', 'w' or 'x', got 'r'"),
    ({"when": "test"}, ValueError, "when='eval', 'train' or 'always', got 'test'"),
    ({"every": 0}, ValueError, "expected an integer from 1 for every, got 0"),
    ({"max_images": 0.5}, TypeError, "an integer from 1 for max_images, got 0.5"),
    ({"prefix_tokens": -1}, ValueError, "integer from 0 for prefix_tokens, got -1"),
    ({"images": "all"}, TypeError, "or a list of their numbers, got 'all'"),
    ({"images": [3, -1]}, ValueError, "from 0 for each of images, got -1"),
    ({"images": 1, "probes": "gradient"}, ValueError, r"\['gradient'\] has any"),
    ({"attrs": {"seed": {1}}}, TypeError, "of plain JSON, got .*: Object of type set"),
    (
        {"attrs": {"seed": 1, "layers": 12, "coords": 1}},
        ValueError,
        r"has attributes \['coords', 'layers'\] of its own",
    ),
    # "layer" is a valid variable name but clashes with the dataset's own dimension.
    ({"along": "layer"}, ValueError, "'epoch' or 'step', for along; got 'layer'"),
    ({"distributed": True}, RuntimeError, "init_process_group"),
    ({"classes": 0}, ValueError, "an integer from 1 for classes, .* got 0"),
    # True is an int in Python and would record class 1.
    ({"classes": [True]}, TypeError, "from 0 for each of classes, got True"),
    # The network has 11 classes, counted from 0, so 11 is the first class that is too large.
    ({"images": 2, "classes": [2, 11]}, ValueError, "classes below 11, got 11"),
    ({"classes": [1]}, ValueError, "expected images=, and a layer with a token"),
]


@pytest.mark.parametrize(("options", "error", "message"), RECORD, ids=str)
def test_bad_arguments_of_record_are_refused(
    options: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    model = network() if "classes" in options else vit()
    before = Trace(model)
    with pytest.raises(error, match=message):
        tcnn_probe.record(model, tmp_path / "run.zarr", **options)
    # Hooks, buffers and attributes are compared in addition to outputs: a refusal must leave no
    # handle behind.
    assert before == Trace(model)
    assert clean()
    # A store left behind would turn the next call, with the right values, into a continuation.
    assert not list(tmp_path.iterdir())


class NotANumber:
    def __float__(self) -> float:
        # The error comes from the value's own conversion, not from a check of the package.
        raise ValueError("no")


MARK: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "marked already": (
        {"epoch": 3},
        ValueError,
        "epoch 3 is already marked: .*mode='w'.* recorder.epochs, or .*if_marked='skip'",
    ),
    "going back": (
        {"epoch": 2},
        ValueError,
        "expected epoch to be later than the last one marked, 3, got 2",
    ),
    # The value equals an integer but is refused: after 4.5 on an axis of floats, 4 could not select
    # it.
    "float epoch": ({"epoch": 4.0}, TypeError, "expected an integer for epoch, got 4.0"),
    "no epoch": ({"top1": 0.5}, TypeError, r"needs the epoch: mark\(epoch=\.\.\., top1=\.\.\.\)$"),
    "step": (
        {"step": 1},
        TypeError,
        r"needs the epoch: .*; to mark steps, record\(model, along='step'\)",
    ),
    # float() accepts numerals and bytes, but an unparsed number is a mistake in the caller's log.
    "numeral": ({"epoch": 4, "top1": "0.5"}, TypeError, "number for 'top1', got '0.5'"),
    "bytes": ({"epoch": 4, "top1": b"1.5"}, TypeError, "number for 'top1', got b'1.5'"),
    "vector": (
        {"epoch": 4, "top1": torch.ones(2)},
        TypeError,
        r"number for 'top1', got tensor\(\[1., 1.\]\)",
    ),
    # "fresh" comes before the value that fails, and must not be stored by then.
    "failing": ({"epoch": 4, "fresh": 1.0, "top1": NotANumber()}, TypeError, "number for 'top1'"),
    "variable": (
        {"epoch": 4, "gate": 1.0},
        ValueError,
        "'gate' is the name of something else in the recording",
    ),
    "coordinate": ({"epoch": 4, "layer": 1.0}, ValueError, "'layer' is the name of something else"),
    "group": (
        {"epoch": 4, "heads": 1.0},
        ValueError,
        "'heads' is the name of something else in the recording",
    ),
    "no name": (
        {"epoch": 4, "val/top1": 1.0},
        ValueError,
        "'val/top1' is the name of something else in the recording, or a path",
    ),
    "otherwise": (
        {"epoch": 4, "if_marked": "drop"},
        ValueError,
        "if_marked='error' or 'skip', got 'drop'",
    ),
}


def files(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


# The two sets of images differ, so that mixed-up sums are wrong.
NEAR, FAR = torch.randn(2, 3, 2, 5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("first", [True, False])
def test_bad_arguments_of_mark_are_refused(first: bool, tmp_path: Path) -> None:
    """A refused mark keeps the sums for another try;
    a refused first mark makes no store and fixes no layers.
    """
    model = Branches()
    with torch.no_grad(), tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        if not first:
            model(near=NEAR, far=FAR)
            recorder.mark(epoch=3, top1=0.25)
        before = files(tmp_path)
        model(near=2 * NEAR, far=FAR)
        for case, (values, error, message) in MARK.items():
            # Before the first mark there is no epoch to collide with.
            if not (first and case in ("marked already", "going back")):
                with pytest.raises(error, match=message):
                    recorder.mark(**values)
                # Files are compared byte by byte, which reveals a mark that writes and takes back.
                assert files(tmp_path) == before
                assert recorder.epochs == (() if first else (3,))
        # Each forward has another scale, so that sums reveal which forwards they hold.
        model(near=3 * NEAR, far=FAR)
        recorder.mark(epoch=4, top1=0.5)
        ds = recorder.dataset.load()
    assert ds.top1.values.tolist() == [0.25, 0.5][first:]
    assert "fresh" not in ds
    # Both forwards since the refused marks count, so the images are 3 + 3.
    assert ds.images.values.tolist() == [[3, 3], [6, 6]][first:]
    for name, expected in gpsa_statistics(model.near, torch.cat([2 * NEAR, 3 * NEAR])).items():
        got = ds[name].sel(layer="near", epoch=4)[:9]
        np.testing.assert_allclose(
            # Float32 sums over some hundred pixels have an error of 1e-5 for logits up to ten.
            got,
            over_images(name, expected),
            rtol=1e-5,
            atol=1e-5,
            err_msg=name,
        )


def test_a_mark_without_measurements_is_refused(tmp_path: Path) -> None:
    """The error names the likeliest mistake, on the first epoch too."""
    model = vit().train()
    with tcnn_probe.record(model) as recorder:
        # The model is in training mode on purpose: a forgotten eval() is the mistake that the
        # message names.
        model(images())
        with pytest.raises(
            RuntimeError, match=r"no forward in eval mode .*; forwards in training mode: 1; run"
        ):
            recorder.mark(epoch=0)
        model.eval()(images())
        recorder.mark(epoch=0)
        model.train()(images())
        with pytest.raises(
            RuntimeError,
            match=r"reached \['blocks\.0\.attn', .* since .*; forwards in training mode: 1",
        ):
            recorder.mark(epoch=1)
    with pytest.raises(
        RuntimeError, match=r"was removed: mark\(\) works only inside the with block"
    ):
        recorder.mark(epoch=1)


NO_ATTENTION: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "a convolution": (
        lambda: nn.Conv2d(2, 1, 3),
        {},
        # Its forward was in eval mode, so nothing is said of modes.
        r"no attention was seen in Conv2d since the previous mark; tcnn_model.reparameterize",
    ),
    "no attention": (
        vit,
        {"layers": "blocks.0.mlp"},
        r"asked for, 'blocks.0.mlp'.* \['blocks.0.attn', 'blocks.1.attn'\]",
    ),
    "not there": (
        vit,
        {"layers": ["blocks.1", "norm"]},
        "nothing was recorded of the layers asked for, 'norm': no attention was seen there",
    ),
}


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_mark_names_parts_that_were_called_and_copies() -> None:
    """A copy is another model; a part that is compiled
    in place shows nothing but the calls of its neighbours.
    """
    model = vit()
    model.blocks.compile(backend="eager")
    with torch.no_grad(), tcnn_probe.record(model) as recorder:
        copy.deepcopy(model)(images())
        with pytest.raises(RuntimeError, match=r"a copy.*record that copy.*'blocks'"):
            recorder.mark(epoch=0)
        model.norm(model.patch_embed(images()))
        with pytest.raises(
            RuntimeError,
            match=r"called: \['patch_embed', 'norm'\]; the parts \['blocks'\] are compiled",
        ):
            recorder.mark(epoch=0)


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
@pytest.mark.parametrize("case", NO_ATTENTION)
def test_mark_explains_that_nothing_was_found(case: str, tmp_path: Path) -> None:
    make, options, message = NO_ATTENTION[case]
    model = make().eval()
    with tcnn_probe.record(model, tmp_path / "run.zarr", **options) as recorder:
        model(images())
        with pytest.raises(RuntimeError, match=message):
            recorder.mark(epoch=0)
        with pytest.raises(
            RuntimeError,
            # Without a mark there is no dataset either; both messages name the next step.
            match=r"nothing is recorded yet: run a forward, then mark\(epoch=\.\.\.\)",
        ):
            recorder.dataset  # noqa: B018
    assert not list(tmp_path.iterdir())


def marked(model: nn.Module, path: Path, epoch: int, x: torch.Tensor, **options: Any) -> None:
    with torch.no_grad(), tcnn_probe.record(model, path, **options) as recorder:
        model(x)
        recorder.mark(epoch=epoch)


@pytest.mark.parametrize(("images_before", "images_now"), [(None, 1), ([0, 2], [0, 1])], ids=str)
def test_a_store_of_other_images_is_refused_by_record(
    images_before: Any, images_now: Any, tmp_path: Path
) -> None:
    model = vit()
    # [0, 2] has as many images as [0, 1]: the numbers must be compared, not their count.
    marked(model, tmp_path / "run.zarr", 0, images(), images=images_before)
    before = Trace(model)
    stored = files(tmp_path)
    with pytest.raises(
        tcnn_probe.StoreError, match=r"keeps maps of the images .*, and images= asks for"
    ):
        tcnn_probe.record(model, tmp_path / "run.zarr", images=images_now)
    assert before == Trace(model)
    assert files(tmp_path) == stored
    # After the refusal the store still accepts its own images.
    marked(model, tmp_path / "run.zarr", 1, images(), images=images_before)


def test_a_store_of_other_layers_or_heads_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.zarr"
    marked(vit(), path, 0, images())
    with pytest.raises(tcnn_probe.StoreError, match="another model"):
        tcnn_probe.record(Branches(), path)
    with pytest.raises(
        tcnn_probe.StoreError, match=r"'blocks\.0\.attn': softmax there, absent here"
    ):
        tcnn_probe.record(vit(), path, probes="health")
    shallow = vit()
    # This is the store's model without one block, so only the names differ.
    del shallow.blocks[1]
    with pytest.raises(
        tcnn_probe.StoreError, match=r"'blocks\.1\.attn': a layer there, absent in this model"
    ):
        tcnn_probe.record(shallow, path)
    two_heads = vit()
    for block in two_heads.blocks:
        # There are still 12 channels, so the weights of the store's model fit.
        block.attn.num_heads, block.attn.head_dim = 2, 6
    with pytest.raises(tcnn_probe.StoreError, match=r"something else \(layer 'blocks\.0\.attn'"):
        marked(two_heads, path, 1, images())
    # The store holds the epochs before the refusal and no more.
    assert tcnn_probe.open(path).epoch.values.tolist() == [0]


def changed(path: str = "", **changes: object) -> dict[str, Group]:
    return {**GROUPS, path: replace(GROUPS[path], **changes)}  # type: ignore[arg-type]


GATE = GROUPS[""].variables["gate"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            changed(layers={**LAYERS, "層": {"kind": "gpsa", "heads": 7}}),
            "'heads': 5} there, {'kind': 'gpsa', 'heads': 7} here",
        ),
        (changed("layer_scale", sizes={"channel": 5}), "'channel': 7 there, 5"),
        (
            changed("layer_scale", coords={"channel": list("abcdefh")}),
            "labels along 'channel': .*'g'] there, .*'h'] here",
        ),
        (
            changed(variables={"gate": replace(GATE, dims=("layer",))}),
            "'gate': .*'head'\\)\\) there, .*\\('layer',\\)\\) here",
        ),
        (changed(variables={}), "variable 'entropy': .* there, absent here"),
        # Between versions, a unit may get another name, and a probe lose variables.
        (changed(variables={"gate": replace(GATE, units="cell")}), None),
        # The order of a layer's attributes is JSON's; maps may have other sizes, and layers may
        # join or be absent.
        (changed(layers={n: dict(reversed(a.items())) for n, a in LAYERS.items()}), None),
        (changed(MAPS, sizes={**GROUPS[MAPS].sizes, "x": 13}), None),
        (changed(layers={"a.conv": LAYERS["a.conv"], "d": {}}), None),
    ],
)
def test_what_a_resumed_recording_must_share(groups: dict[str, Group], message: str | None) -> None:
    refused = pytest.raises(tcnn_probe.StoreError, match=message)
    with refused if message else nullcontext():
        check_resumed(GROUPS, groups)


def test_layers_that_join_a_continued_recording_are_named(tmp_path: Path) -> None:
    for epoch, depth in enumerate((2, 3, 3)):
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, embed_dim=24
        )
        with tcnn_probe.record(model.eval(), tmp_path / "rec.zarr") as recorder:
            recorder.trust_weights()
            model(torch.randn(2, 3, 32, 32))
            joins = pytest.warns(RuntimeWarning, match=r"now join its 2: blocks\.2\.attn\. If")
            with joins if epoch == 1 else nullcontext():
                recorder.mark(epoch=epoch)
