"""What the gradient probe leaves out, when it can be marked, and that it leaves nothing behind."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.recording.accumulator import Found
from tests.tcnn_probe.probes.helpers import VIT, images, small, step


@pytest.mark.parametrize("name", ["levit_128s", "nest_tiny_jx", "tiny_vit_5m_224"])
def test_layouts_that_are_not_known_are_left_out_and_named(name: str) -> None:
    """LeViT and TinyViT interleave queries, keys and values head by head, Nest the heads in each channel."""
    model = timm.create_model(name)
    with pytest.raises(ValueError, match=r"no layer for the probes \['gradient'\]: .*heads of Attention"):
        tcnn_probe.record(model, probes="gradient")
    model.head_of_ours = nn.MultiheadAttention(15, 5)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        assert recorder.layers == ("head_of_ours",)
        attention = {n for n, m in model.named_modules() if type(m).__name__.startswith("Attention")}
        assert set(recorder.missing["gradient_norm"]) == attention


def test_layers_that_are_known_and_were_changed_are_left_out() -> None:
    model = small("vit_tiny_patch16_224", **VIT | {"depth": 5})
    attention = [block.attn for block in model.blocks]
    attention[0].qkv = nn.Sequential(attention[0].qkv)
    nn.utils.parametrizations.weight_norm(attention[1].qkv)
    attention[2].forward = lambda x, **rest: x
    attention[3].num_heads = 5
    with tcnn_probe.record(model, probes="gradient") as recorder:
        reasons = recorder.missing["gradient_norm"]
        assert recorder.layers == ("blocks.4.attn",)
    assert "qkv is Sequential" in reasons["blocks.0.attn"]
    assert "computed from other parameters" in reasons["blocks.1.attn"]
    assert "is not known" in reasons["blocks.2.attn"]
    assert "63 rows of qkv are not 3 x 5 heads" in reasons["blocks.3.attn"]


def test_training_alone_can_be_marked() -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT).train(), images(2)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        with pytest.raises(RuntimeError, match=r"no gradient reached \['blocks.0.attn', 'blocks.1.attn'\] since"):
            recorder.mark(epoch=0)
        step(model, batch)
        recorder.mark(epoch=0)
        with pytest.raises(RuntimeError, match="no gradient reached"):
            recorder.mark(epoch=1)
        with torch.no_grad():
            model.eval()(batch)
        step(model.train(), batch)
        recorder.mark(epoch=1)
    assert recorder.epochs == (0, 1)


def test_beside_attention() -> None:
    """Before the first training gradients are NaN, without a warning; without evaluation a mark is refused."""
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    with tcnn_probe.record(model, probes=["softmax", "gradient"]) as recorder:
        step(model.train(), batch)
        with pytest.raises(RuntimeError, match=r"no forward in eval mode .* leave the probes of attention out"):
            recorder.mark(epoch=0)
    with tcnn_probe.record(model, probes=["softmax", "gradient"]) as recorder:
        for epoch in range(3):
            if epoch > 0:
                step(model.train(), batch)
            with torch.no_grad():
                model.eval()(batch)
            if epoch == 2:
                step(model, batch)  # in eval mode, and in the same forward: a gradient all the same
            recorder.mark(epoch=epoch)
        step(model.train(), batch)
        with pytest.raises(RuntimeError, match=r"no image in eval mode reached"):
            recorder.mark(epoch=3)
    norms = recorder.tree["gradient"].to_dataset().gradient_norm
    assert norms.isnull().all(["layer", "head"]).values.tolist() == [True, False, False]
    assert list(recorder.dataset["layer"].values) == list(norms["layer"].values)
    assert recorder.dataset.entropy.notnull().all()


def test_parameters_are_followed_from_when_they_are_trained() -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    model.blocks[0].attn.requires_grad_(False)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        for epoch in range(2):
            step(model, batch)
            recorder.mark(epoch=epoch)
            model.blocks[0].attn.requires_grad_(True)
    norms = recorder.tree["gradient"].to_dataset().gradient_norm.sel(layer="blocks.0.attn")
    assert norms.isnull().all("head").values.tolist() == [True, False]


def test_nothing_is_left_on_parameters() -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    seen: list[Tensor] = []
    other = model.blocks[0].attn.qkv.weight
    before = {name: set(vars(p)) for name, p in model.named_parameters()}
    mine = other.register_hook(lambda gradient: seen.append(gradient.clone()))
    model.zero_grad()
    step(model, batch)
    truth = other.grad.clone()
    recorder = tcnn_probe.record(model, probes="gradient")
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    model.zero_grad()
    step(model, batch)
    torch.testing.assert_close(other.grad, truth, rtol=0, atol=0)
    for model_of_ours in copies:
        assert not any(p._backward_hooks for p in model_of_ours.parameters())
    with pytest.raises(RuntimeError, match="of the user"), recorder:
        raise RuntimeError("of the user")
    assert [n for n, p in model.named_parameters() if p._backward_hooks is not None] == ["blocks.0.attn.qkv.weight"]
    assert list(other._backward_hooks) == [mine.id]
    step(model, batch)
    assert len(seen) == 3
    mine.remove()
    assert {name: set(vars(p)) for name, p in model.named_parameters()} == before
    for parameter in model.parameters():  # and hooks can be added as ever
        count: list[int] = []
        handle = parameter.register_hook(lambda gradient, count=count: count.append(1))
        step(model, batch)
        assert count == [1]
        handle.remove()
        break


def test_ranks_are_averaged() -> None:
    """Each process sees the gradient of its own images, before they are averaged."""
    ranks = [Found(squares={"x": np.array([float(n)])}, passes={"x": 2}) for n in (2, 6)]
    assert Found.together(ranks).means() == {"x": np.sqrt(2.0)}


def test_attributes_layers_and_resuming(tmp_path: Path) -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    for epoch in range(2):
        with tcnn_probe.record(model, tmp_path / "run.zarr", probes="gradient", layers="blocks.1.*") as recorder:
            step(model, batch)
            recorder.mark(epoch=epoch)
    ds = tcnn_probe.open(tmp_path / "run.zarr")["gradient"].to_dataset()
    assert list(ds["layer"].values) == ["blocks.1.attn"]
    assert list(ds["epoch"].values) == [0, 1]
    np.testing.assert_array_equal(ds.gradient_norm[0], ds.gradient_norm[1])
    assert "Root mean square over the backward passes" in ds.gradient_norm.attrs["description"]
    other = small("vit_tiny_patch16_224", **VIT | {"num_heads": 7})
    with pytest.raises(tcnn_probe.StoreError, match="recording of"):
        tcnn_probe.record(other, tmp_path / "run.zarr", probes="gradient", layers="blocks.1.*")
    assert not any(p._backward_hooks for p in other.parameters())
