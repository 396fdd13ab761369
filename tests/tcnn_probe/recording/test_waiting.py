"""Layers of one shape that are measured together have the numbers of those measured alone."""

import gc
import json
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe import DEFAULT
from tcnn_probe.attention import softmax
from tcnn_probe.attention.softmax import SoftmaxAttention


def _vit(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 35, "patch_size": 7, "embed_dim": 12, "depth": 3, "num_heads": 3}
    return timm.models.VisionTransformer(**sizes, **options, num_classes=5).double()


class HeadsByLayer(nn.Module):
    """Two layers of two and three heads with queries of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 30, 7, 7)
        self.layers = nn.ModuleList(_Layer(heads) for heads in (2, 3, 2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x)
        return x.mean(1)


class _Layer(nn.Module):
    """Attention that overwrites its queries afterwards."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(30, 3 * 5 * heads)
        self.proj = nn.Linear(5 * heads, 30)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 5)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, mask)
        q.zero_()
        k.zero_()
        return self.proj(heads.transpose(1, 2).flatten(2))


class SharedLayer(nn.Module):
    """A layer that runs twice in a forward, the second time perhaps with a mask."""

    def __init__(self, *, masked: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 30, 7, 7)
        self.layer = _Layer(3)
        self.mask = torch.eye(25, dtype=torch.float64) if masked else None

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        return (x + self.layer(self.layer(x), self.mask)).mean(1)


class TwoScales(nn.Module):
    """A model that sees its images twice, the second time smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = _vit(dynamic_img_size=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.vit(images) + self.vit(images[..., :21, :21])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token": _vit,
    "registers": lambda: _vit(reg_tokens=2),
    "no class token": lambda: _vit(class_token=False, global_pool="avg"),
    "heads by layer": lambda: HeadsByLayer().double(),
    "shared layer": lambda: SharedLayer().double(),
    "mask in the second call": lambda: SharedLayer(masked=True).double(),
    "two scales": TwoScales,
}


def _record(model: nn.Module, **options: Any) -> xr.DataTree:
    model.eval()
    images = torch.randn(7, 3, 35, 35, dtype=torch.float64, generator=torch.manual_seed(1))
    with torch.no_grad(), tcnn_probe.record(model, **options) as recorder:
        for batch in images.split(4):
            model(batch)
        recorder.mark(epoch=0)
    return recorder.tree.load()


@pytest.mark.study(but=["class token", "registers", "heads by layer"])
@pytest.mark.filterwarnings("ignore:no content_information.*images of several sizes")
@pytest.mark.parametrize("name", MODELS)
def test_layers_together_equal_layers_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    # The sixth image is in the middle of the second batch.
    options: dict[str, Any] = {"images": [0, 5], "max_images": 6}
    options["probes"] = [*DEFAULT, "offset-kernel"]
    if name != "two scales":  # images of several sizes have no mean
        options["probes"].append("mean-attention")
    together = _record(model, **options)
    monkeypatch.setattr(SoftmaxAttention, "is_small", False)
    alone = _record(model, **options)
    assert together.attrs["missing"] == alone.attrs["missing"]
    assert together.groups == alone.groups
    for group in together.groups:
        pair = [tree[group].to_dataset() for tree in (together, alone)]
        xr.testing.assert_allclose(*pair, rtol=1e-12, atol=1e-12)
    entropies = together["heads"].entropy.values
    entropies = entropies[np.isfinite(entropies)]
    assert len(set(entropies.round(9))) == entropies.size  # of different heads and layers


class NoGrid(HeadsByLayer):
    """Layers of two, three and two heads whose tokens are in no grid; the last one begins first."""

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)[:, :690].unflatten(1, (23, 30))
        x = x + self.layers[2](x)
        return (x + self.layers[0](x) + self.layers[1](x)).mean(1)


@pytest.mark.parametrize("waiting", [(), (2,), (3,), (2, 3)])
def test_reasons_and_layers_are_in_the_order_of_the_model(
    waiting: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_small = property(lambda attention: attention.heads in waiting)
    monkeypatch.setattr(SoftmaxAttention, "is_small", is_small)
    model, layers = NoGrid().double().eval(), ("layers.0", "layers.1", "layers.2")
    message = rf"maps of {', '.join(layers)}: "
    with torch.no_grad(), tcnn_probe.record(model) as recorder:
        model(torch.randn(2, 3, 35, 35, dtype=torch.float64))
        with pytest.warns(RuntimeWarning, match=message):
            recorder.mark(epoch=0)
    dataset = recorder.dataset
    assert recorder.layers == tuple(dataset.layer.values) == layers
    for missing in (recorder.missing, json.loads(dataset.attrs["missing"])):
        assert "attention_distance" in missing
        assert [*missing] == sorted(missing)
        assert {tuple(reasons) for reasons in missing.values()} == {layers}


# In float64 the layers of a batch of 4 and of 3 images have queries of 10 and 7.5 kB and as many
# keys, and the logits of their class tokens 2.5 and 1.9 kB.
@pytest.mark.parametrize(("device_limit", "passes"), [(1 << 28, 2), (21_000, 5), (1, 6)])
def test_layers_of_one_shape_take_one_pass(
    device_limit: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []
    measure = softmax.measure_softmax
    monkeypatch.setattr(
        softmax, "measure_softmax", lambda attention: measured.append(0) or measure(attention)
    )
    monkeypatch.setattr("tcnn_probe.recording.collector._WAITING", device_limit)
    _record(_vit())
    assert len(measured) == passes


def test_nothing_is_kept_of_a_forward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, keep = [], SoftmaxAttention.kept

    def kept_and_followed(attention: SoftmaxAttention) -> SoftmaxAttention:
        copy = keep(attention)
        kept.append(weakref.ref(copy.source))
        return copy

    monkeypatch.setattr(SoftmaxAttention, "kept", kept_and_followed)
    # The comparison with the model's own attention, which is read when the forward has run, fails.
    monkeypatch.setattr(
        SoftmaxAttention, "discrepancy", lambda attention: (torch.tensor(torch.nan), 0.0)
    )
    model = _vit().eval()
    with tcnn_probe.record(model), torch.no_grad():
        with pytest.raises(tcnn_probe.ReconstructionError):
            model(torch.randn(2, 3, 35, 35, dtype=torch.float64))
        gc.collect()
        assert [reference() for reference in kept] == [None] * 3


def test_no_forward_begins_while_layers_that_waited_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, images = _vit().eval(), torch.randn(2, 3, 35, 35, dtype=torch.float64)
    join = SoftmaxAttention.joined

    def joined_meanwhile(attentions: Any) -> SoftmaxAttention:
        # A forward of another thread, which is not recorded.
        thread = threading.Thread(target=model, args=(images + 1,))
        thread.start()
        thread.join()
        return join(attentions)

    with torch.no_grad(), tcnn_probe.record(model) as recorder:
        model(images)
        recorder.mark(epoch=0)
        monkeypatch.setattr(SoftmaxAttention, "joined", staticmethod(joined_meanwhile))
        model(images)
        recorder.mark(epoch=1)
    alone, disturbed = (recorder.dataset.isel(epoch=epoch, drop=True).load() for epoch in (0, 1))
    assert disturbed.images.max() == 2
    xr.testing.assert_allclose(disturbed, alone, rtol=1e-12, atol=1e-12)
