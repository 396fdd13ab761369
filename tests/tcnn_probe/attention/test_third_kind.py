"""A third kind of attention in one file,
as described by the docstring of ``Attention``: linear attention.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.attention import stream
from tcnn_probe.attention.attention import Attention, WholeLayers
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.reconstruction import relative_difference, tolerance

# Sizes differ, so that exchanged axes would have other shapes.
IMAGES, HEADS, WIDTH, GRID = 2, 3, 5, (5, 7)


class KernelMixer(nn.Module):
    """Linear attention A_ij = phi(q_i) . phi(k_j) / sum_j',
    phi = elu + 1 (Katharopoulos et al. 2020).
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        # elu + 1 is positive, so that rows can be normalised.
        return nn.functional.elu(q) + 1, nn.functional.elu(k) + 1, v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        summary = k.mT @ v
        total = k.sum(2)[..., None]
        return ((q @ summary) / (q @ total)).transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class KernelAttention(Attention):
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def shape(self) -> tuple[int, int, int, int]:
        images, heads, queries, _ = self.query.shape
        return images, heads, queries, self.key.shape[2]

    @property
    def source(self) -> Tensor:
        return self.query

    def weights(self, queries: slice = slice(None), image: int | None = None) -> Tensor:
        which = slice(None) if image is None else slice(image, image + 1)
        products = self.query[which, :, queries] @ self.key[which].mT
        return (products / products.sum(-1, keepdim=True)).unsqueeze(1)

    def statistics(self) -> Mapping[str, Any]:
        entropy = torch.special.entr(self.content()).sum(-1).mean(-1)
        return {"entropy": entropy, **self.uniform_scales()}

    def discrepancy(self, output: Any) -> tuple[Tensor, float]:
        rebuilt = (self.content() @ self.value).transpose(1, 2).flatten(2)
        # The first image suffices, as the check is on the form of the attention.
        return relative_difference(rebuilt[:1], output[:1]), tolerance(output.dtype)


def describe(
    layer: KernelMixer, x: Tensor, formed: object, name: str, running: Sequence[Any]
) -> KernelAttention:
    query, key, value = layer.parts(x)
    layout = Layout(Tokens(0, *GRID), Tokens(0, *GRID))
    return KernelAttention(
        module=layer,
        name=name,
        images=len(x),
        layout=layout,
        query=query,
        key=key,
        value=value,
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, HEADS * WIDTH, 4, 4)
        self.mixer = KernelMixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.stem(x).flatten(2).mT)


def feature(x: Tensor) -> Tensor:
    # The function is written without torch's elu.
    return torch.where(x > 0, x + 1, x.exp())


def brute_force(model: Model, x: Tensor) -> Tensor:
    tokens = model.stem(x).flatten(2).mT
    projected = tokens @ model.mixer.qkv.weight.T + model.mixer.qkv.bias
    q, k, _ = projected.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
    # The layer itself never forms this matrix.
    products = torch.einsum("bihd,bjhd->bhij", feature(q), feature(k))
    return products / products.sum(-1, keepdim=True)


@torch.no_grad()
def test_a_new_kind_is_streamed_recorded_and_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A kind is registered by an entry in this table, which the test adds and removes.
    monkeypatch.setattr(
        stream,
        "WHOLE_LAYERS",
        (*stream.WHOLE_LAYERS, WholeLayers((KernelMixer,), describe)),
    )
    torch.manual_seed(0)
    model = Model().double().eval()
    x = torch.randn(IMAGES, 2, 20, 28).double()
    expected = brute_force(model, x)
    shown = {}
    with (
        tcnn_probe.record(model) as recorder,
        tcnn_probe.attention_stream(
            model, lambda attention: shown.update({attention.name: attention.weights()})
        ) as attended,
    ):
        model(x)
        recorder.mark(epoch=0)
    assert [*shown] == [*attended.layers] == [*recorder.layers] == ["mixer"]
    assert recorder.unsupported == {}
    torch.testing.assert_close(shown["mixer"][:, 0], expected, rtol=1e-9, atol=1e-12)
    entropy = -(expected * expected.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    statistics = recorder.dataset.sel(layer="mixer", epoch=0)
    np.testing.assert_allclose(statistics.entropy, entropy, rtol=1e-9)
    assert float(statistics.uniform_entropy) == pytest.approx(np.log(35), rel=1e-12)
    maps = tcnn_probe.attention_maps(model, x)["3x5x7"].attention.sel(layer="mixer")
    drawn = expected.view(IMAGES, HEADS, *GRID, *GRID)
    np.testing.assert_allclose(maps, drawn, rtol=1e-6, atol=1e-9)
    with (
        # The edit is refused, as this class does not say how to edit its heads.
        tcnn_probe.attention_stream(model, lambda _: tcnn_probe.HeadEdit([0])),
        pytest.raises(TypeError, match="KernelAttention cannot be edited"),
    ):
        model(x)
