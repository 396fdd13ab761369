"""Layers that do not run between two marks, and layers that run for the first time later."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.contracts.helpers import entropy, images, vit
from tests.tcnn_probe.networks import Branches

RUNS = [(1, 3), (0, 3), (3,), (0, 1, 2, 3, 4), (4, 0)]


class Skipping(nn.Module):
    """Model that runs the given blocks only, as LayerDrop and training with growing depth do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = vit()
        self.inner.blocks.extend(block for seed in (1, 2) for block in vit(seed=seed).blocks)
        # The last block has more heads than the others.
        attention = self.inner.blocks[4].attn
        attention.num_heads, attention.head_dim, attention.scale = 6, 2, 2**-0.5
        self.run: tuple[int, ...] = ()
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner._pos_embed(self.inner.patch_embed(x))
        for number in self.run:
            x = self.inner.blocks[number](x)
        return x


@torch.no_grad()
def entropies_of(model: Skipping, x: Tensor) -> np.ndarray:
    """Return entropies (5 blocks, 6 heads) for the blocks that run."""
    values = np.full((5, 6), np.nan)
    tokens = model.inner._pos_embed(model.inner.patch_embed(x))
    for number in model.run:
        block = model.inner.blocks[number]
        heads = entropy(block.attn, block.norm1(tokens)).mean(0)
        values[number, : len(heads)] = heads
        tokens = block(tokens)
    return values


@pytest.mark.study
@pytest.mark.filterwarnings("ignore:the recording began without these layers:RuntimeWarning")
@pytest.mark.parametrize("place", ["memory", "resumed"])
def test_layers_that_did_not_run_are_nan_with_the_reason(place: str, tmp_path: Path) -> None:
    """Layers stand in the order in which they ran first;
    earlier marks have no values of them, nor of their maps.
    """
    model, x = Skipping(), images()
    path = None if place == "memory" else tmp_path / "run.zarr"
    truth = []
    for model.run in RUNS:
        truth.append(entropies_of(model, x))
    recorder = tcnn_probe.record(model, path, images=[1])
    for epoch, model.run in enumerate(RUNS):
        if place == "resumed" and epoch:
            recorder.remove()
            recorder = tcnn_probe.record(model, path, images=[1])
        with torch.no_grad():
            model(x)
        recorder.mark(epoch=epoch)
    recorder.remove()
    ds, order = recorder.dataset, [1, 3, 0, 2, 4]
    assert ds.layer.values.tolist() == [f"inner.blocks.{n}.attn" for n in order]
    np.testing.assert_allclose(ds.entropy, np.stack(truth)[:, order], rtol=1e-5, atol=1e-6)
    has_run = {f"inner.blocks.{number}.attn": [number in run for run in RUNS] for number in order}
    np.testing.assert_array_equal(ds.images.fillna(0), 3 * np.transpose([*has_run.values()]))
    maps = recorder.tree["maps"].children
    assert {*maps} == {"3x5x7", "6x5x7"}
    for node in maps.values():
        for layer in node.layer.values:
            drawn = node.class_attention.sel(layer=layer, image=1).notnull()
            assert drawn.all(("head", "y", "x")).values.tolist() == has_run[layer]
    missing = json.loads(recorder.tree.attrs["missing"])
    for variable in ("entropy", "content_information"):
        assert missing[variable] == {
            layer: f"no image reached it before the mark of epoch {4 - ran[::-1].index(False)}"
            for layer, ran in has_run.items()
            if not all(ran)
        }


def test_layers_that_were_replaced_are_named() -> None:
    model = vit()
    with torch.no_grad(), tcnn_probe.record(model) as recorder:
        model(images())
        recorder.mark(epoch=0)
        model.blocks[1].attn = vit(seed=1).blocks[1].attn
        model(images())
        with pytest.warns(RuntimeWarning, match=r"places of \['blocks.1.attn'\] .* are NaN"):
            recorder.mark(epoch=1)
        [reason] = recorder.missing["entropy"].values()
        assert "another module took its place: call record() again" in reason
        model.blocks[0].attn = vit(seed=1).blocks[0].attn
        model(images())
        with pytest.raises(RuntimeError, match="other modules took the places"):
            recorder.mark(epoch=2)


def test_layers_that_the_model_gets_later_are_named() -> None:
    model = vit()
    with torch.no_grad(), tcnn_probe.record(model) as recorder:
        model.blocks[0].attn = vit(seed=1).blocks[0].attn
        model(images())
        with pytest.warns(RuntimeWarning, match=r"got \['blocks.0.attn'\] after record"):
            recorder.mark(epoch=0)
        model(images())
        recorder.mark(epoch=1)  # said once
        model.blocks.append(vit(seed=2).blocks[0])
        model(images())
        with pytest.warns(RuntimeWarning, match=r"'blocks.0.attn', 'blocks.2.attn'"):
            recorder.mark(epoch=2)
    assert recorder.layers == ("blocks.1.attn",)


def test_a_mark_without_any_layer_or_of_other_numbers_is_refused(tmp_path: Path) -> None:
    model = Skipping()
    with tcnn_probe.record(model, tmp_path / "run.zarr") as recorder:
        model.run = (0, 1)
        model(images())
        recorder.mark(epoch=0)
        model.run = ()
        model(images())
        with pytest.raises(RuntimeError, match="no image in eval mode reached"):
            recorder.mark(epoch=1)
    model.run = (1, 2)
    path = tmp_path / "run.zarr"
    for probes in (["health"], ["softmax", "features"]):
        with pytest.raises(tcnn_probe.StoreError, match=r"something else|other layers"):
            mark(model, path, probes=probes)
    # A layer that has run before has another number of heads now.
    attention = model.inner.blocks[1].attn
    attention.num_heads, attention.head_dim, attention.scale = 6, 2, 2**-0.5
    with pytest.raises(tcnn_probe.StoreError, match=r"layer 'inner\.blocks\.1\.attn'"):
        mark(model, path)
    assert tcnn_probe.open(path).epoch.values.tolist() == [0]


def mark(model: nn.Module, path: Path, **options: Any) -> None:
    with torch.no_grad(), tcnn_probe.record(model, path, **options) as recorder:
        model(images())
        recorder.mark(epoch=1)


def test_parameters_are_read_of_layers_that_did_not_run() -> None:
    model = Branches()
    with tcnn_probe.record(model) as recorder:
        model.near(torch.randn(3, 2, 5, 7))
        recorder.mark(epoch=0)
    assert recorder.missing["entropy"].keys() == {"far"}
    assert "far" not in recorder.missing.get("gate", {})
    far = recorder.dataset.sel(layer="far", epoch=0)
    assert far.entropy.isnull().all()
    assert far.gate.notnull().all()
