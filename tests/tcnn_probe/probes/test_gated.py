"""Recorded statistics of gated layers, ours and timm's ConViT,
against brute force on each layer's own input.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from timm.models.convit import GPSA as ConViTLayer
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA, gpsa_layers
from tests.tcnn_model.numerics import default_dtype
from tests.tcnn_probe.contracts.helpers import recorded
from tests.tcnn_probe.networks import Chain, inputs_of, scatter
from tests.tcnn_probe.oracle import (
    gpsa_statistics,
    gpsa_statistics_of_qk,
    over_images,
    summarise,
)

pytestmark = pytest.mark.numerical

MEASURED = ("entropy", "content_entropy", "positional_entropy", "attention_distance")


def images(count: int = 7, channels: int = 2) -> Tensor:
    # 5 x 11 pixels are not square, and both sides are prime.
    return torch.randn(count, channels, 5, 11, generator=torch.Generator().manual_seed(3))


def record_epoch(model: nn.Module, x: Tensor, split: Sequence[int] = (7,)) -> xr.Dataset:
    return recorded(model, *x.split(list(split))).dataset.load()


def assert_layer(
    ds: xr.Dataset, layer: str, expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Assert that the last epoch has the means over images of ``expected``,
    and NaN for heads that the layer lacks.

    Rounding of 1e-5 nat or pixel is that of float32 sums over some hundred pixels, with logits of
    up to about ten.
    """
    for name in expected:
        got = ds[name].sel(layer=layer).values[-1]
        mean = over_images(name, expected[name]).numpy()
        np.testing.assert_allclose(
            got[: len(mean)], mean, rtol=tolerance, atol=tolerance, err_msg=name
        )
        assert np.isnan(got[len(mean) :]).all()


@pytest.mark.parametrize(
    # In float64 the tolerance is 1e-11, because float32's rounding could hide that a small term is
    # missing.
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float64, 1e-11)],
    ids=str,
)
def test_means_over_images_equal_brute_force_for_any_batches(
    dtype: torch.dtype, tolerance: float
) -> None:
    model, x = Chain().to(dtype), images().to(dtype)
    # An empty batch comes first, as from a loader of a split data set, and then an uneven split.
    ds = record_epoch(model, x, (0, 3, 4))
    for name, layer_input in inputs_of(model, ["near", "far"], x).items():
        assert_layer(ds, name, gpsa_statistics(model.get_submodule(name), layer_input), tolerance)
    assert ds.images.values.tolist() == [[7, 7]]
    assert ds.nonfinite_images.values.tolist() == [[0, 0]]


def test_parameters_are_recorded_at_the_mark() -> None:
    model = Chain()
    with tcnn_probe.record(model) as recorder:
        for epoch in range(2):
            model(images())
            model.far.gating.data += 1
            # The parameters change after the forward, as by an optimizer's step, and those at the
            # mark are recorded. The factor of 1.5 moves heads with different centres differently.
            model.near.center.data *= 1.5
            recorder.mark(epoch=epoch)
            for name, layer in gpsa_layers(model).items():
                row = recorder.dataset.sel(layer=name, epoch=epoch, head=slice(0, layer.heads - 1))
                alpha = layer.locality_strength.detach()
                np.testing.assert_allclose(
                    row.gate, torch.sigmoid(layer.gating.detach()), rtol=1e-6
                )
                np.testing.assert_allclose(row.locality_strength, alpha, rtol=1e-6)
                np.testing.assert_allclose(row.attention_span, 1 / alpha, rtol=1e-6)
                np.testing.assert_array_equal(row.center_y, layer.center[:, 0].detach())
                np.testing.assert_array_equal(row.center_x, layer.center[:, 1].detach())
    ds = recorder.dataset
    # 25 heads of a 5 x 5 kernel join 9 heads of a 3 x 3 kernel, so that rows are padded with NaN.
    assert ds.sizes == {"epoch": 2, "layer": 2, "head": 25}
    assert (
        ds[["gate", "attention_span", "center_y"]]
        .sel(layer="near", head=slice(9, None))
        .to_array()
        .isnull()
        .all()
    )


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_recording_changes_neither_outputs_nor_gradients_nor_random_numbers() -> None:
    def run(model: nn.Module, x: Tensor) -> list[Tensor]:
        # Random numbers drawn at the end show whether recording draws any.
        torch.manual_seed(5)
        output = model(x)
        output.square().sum().backward()
        return [
            output,
            *(p.grad for p in model.parameters() if p.grad is not None),
            torch.rand(3),
        ]

    for make, x in ((Chain, images()), (convit, tokens())):
        watched = make()
        # Maps of two images are recorded as well, which needs copies.
        with tcnn_probe.record(watched, images=2):
            for expected, got in zip(run(make(), x), run(watched, x), strict=True):
                assert torch.equal(expected, got)


@pytest.mark.filterwarnings("ignore:no content_information")
def test_layer_called_twice_on_inputs_of_different_sizes_changed_by_a_hook() -> None:
    layer = scatter(GPSA(2, 2, 3, padding=1))
    model = nn.Sequential(layer, nn.Tanh(), layer).eval()
    small = images(3)
    large = torch.randn(2, 2, 13, 7)
    # The hook changes the input of the layer, from which statistics are computed.
    layer.register_forward_pre_hook(lambda module, args: (3 * args[0],))
    with torch.no_grad():
        layer_inputs = [x for batch in (small, large) for x in (3 * batch, 3 * layer(batch).tanh())]
        recorder = recorded(model, small, large)
    parts = [gpsa_statistics(layer, x) for x in layer_inputs]
    assert_layer(
        recorder.dataset,
        "0",
        {name: torch.cat([p[name] for p in parts]) for name in MEASURED},
    )
    # Each forward makes two calls: (3 + 2) x 2 images.
    assert recorder.dataset.images.values.tolist() == [[10]]


def test_statistics_under_autocast() -> None:
    """Statistics are those of the rounded queries and keys."""
    # qk_dim differs from the number of channels, so that scaling by the wrong one would show.
    model = nn.Sequential(scatter(GPSA(2, 3, 3, padding=1, qk_dim=4))).eval()
    x = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ds = record_epoch(model, x, (3, 4))
        attention = model[0].gated_attention(x)
    # This shows that autocast has an effect.
    assert attention.query.dtype == torch.bfloat16
    assert_layer(ds, "0", gpsa_statistics_of_qk(model[0], x, attention.query, attention.key))


LAYERS = ["blocks.0.attn", "blocks.1.attn"]


@torch.no_grad()
def convit(side: int = 5) -> nn.Module:
    """Return a ConViT of two GPSA blocks with 9 heads on side x side tokens,
    and one block with a class token.
    """
    # ConViT's initial heads form a square kernel, here of 9 heads.
    options = {
        "depth": 3,
        "local_up_to_layer": 2,
        "embed_dim": 6,
        # timm multiplies embed_dim by this number: 9 heads have 6 channels each.
        "num_heads": 9,
        "num_classes": 3,
    }
    torch.manual_seed(0)
    model = timm.create_model("convit_tiny", img_size=16 * side, **options).eval()
    for name in LAYERS:
        layer = model.get_submodule(name)
        # Initial content attention is uniform, and would be right for any queries and keys.
        layer.qk.weight.normal_(std=0.5)
        layer.pos_proj.weight.add_(0.5 * torch.randn_like(layer.pos_proj.weight))
        # Localities go from wide to sharp, and are all negative, as others have no Gaussian.
        layer.pos_proj.weight[:, 2] = -torch.logspace(-1.3, 1, 9)[torch.randperm(9)]
        layer.pos_proj.bias.normal_()
        # Gates go from 0.05 to 0.95, permuted, so that heads are not ordered by gate or locality.
        layer.gating_param.copy_(torch.linspace(-3, 3, 9)[torch.randperm(9)])
    return model


def tokens(side: int = 5) -> Tensor:
    # Images are square, as timm's ConViT has no other grids.
    return torch.randn(5, 3, 16 * side, 16 * side, generator=torch.Generator().manual_seed(1))


def offsets(side: int) -> tuple[Tensor, Tensor]:
    """Return offsets of keys from queries, (N, N) along y and x,
    for row-major tokens on a square.
    """
    index = torch.arange(side * side)
    row = (index // side).double()
    column = (index % side).double()
    return row[None] - row[:, None], column[None] - column[:, None]


@torch.no_grad()
def brute_force(layer: ConViTLayer, x: Tensor) -> dict[str, Tensor]:
    """Compute the statistics in float64 from the quantities that timm computes."""
    layer = copy.deepcopy(layer).double()
    x = x.double()
    dy, dx = offsets(math.isqrt(x.shape[1]))
    weight = layer.pos_proj.weight[:, :, None, None]
    squared = dy**2 + dx**2
    linear = weight[:, 0] * dx + weight[:, 1] * dy
    positional = torch.softmax(linear + weight[:, 2] * squared, -1)
    query, key = (x @ w.T for w in layer.qk.weight.chunk(2))
    query, key = (t.unflatten(-1, (9, 6)).transpose(1, 2) for t in (query, key))
    content = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(6), -1)
    # timm computes offsets in the default dtype, which must be float64 while they are recomputed.
    with default_dtype(torch.float64):
        layer.rel_indices = layer.get_rel_indices(x.shape[1])
    return summarise(layer.get_attention(x), content, positional, torch.sqrt(squared))


@pytest.mark.parametrize(("side", "dtype"), [(7, torch.float32), (5, torch.bfloat16)], ids=str)
def test_convit_equals_brute_force_on_each_layers_input(side: int, dtype: torch.dtype) -> None:
    model = convit(side).to(dtype)
    x = tokens(side).to(dtype)
    with default_dtype(dtype):
        ds = record_epoch(model, x, (2, 3))
        inputs = inputs_of(model, LAYERS, x)
    # The last layer has softmax attention.
    assert ds.layer.values.tolist() == [*LAYERS, "blocks.2.attn"]
    assert ds.images.values.tolist() == [[5, 5, 5]]
    for name, layer_input in inputs.items():
        # timm's layer rounds its weights and products to bfloat16, and brute force knows only its
        # inputs.
        assert_layer(
            ds,
            name,
            brute_force(model.get_submodule(name), layer_input),
            1e-5 if dtype == torch.float32 else 0.02,
        )


@torch.no_grad()
def test_span_of_attention_that_grows_with_distance_is_missing() -> None:
    """ConViT's strengths are free: a head's may become negative;
    its radius on the grid is still that of its P.
    """
    model = convit()
    layer = model.get_submodule(LAYERS[0])
    layer.pos_proj.weight[1, 2] = 0.7  # alpha = -0.7
    recorder = recorded(model, tokens())
    ds = recorder.dataset.sel(epoch=0)
    span = ds.attention_span.sel(layer=LAYERS[0])
    assert np.isnan(span).values.tolist() == [head == 1 for head in ds["head"].values]
    (reason,) = recorder.missing["attention_span"].values()
    assert "alpha is not positive" in reason
    assert [*recorder.missing["attention_span"]] == [LAYERS[0]]
    # On 5 x 5 tokens, the probabilities of the corners dominate.
    exact = copy.deepcopy(layer).double()
    with default_dtype(torch.float64):
        positional = exact.pos_proj(exact.get_rel_indices(25)).permute(0, 3, 1, 2)
    places = torch.cartesian_prod(*2 * [torch.arange(5.0)]).double()
    weights = positional.softmax(-1)[0, 1]
    squared = torch.cdist(places, places) ** 2
    expected = (weights * (weights @ squared)).sum(-1).mean() / 2
    got = ds.mean_squared_radius.sel(layer=LAYERS[0], head=1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@torch.no_grad()
def test_convits_recorded_parameters_give_its_positional_attention() -> None:
    model = convit()
    ds = record_epoch(model, tokens(), (5,))
    dy, dx = (offset.numpy()[None] for offset in offsets(5))
    for name in LAYERS:
        row = ds.sel(layer=name, epoch=0)
        alpha, y, x = (
            row[v].values[:, None, None] for v in ("locality_strength", "center_y", "center_x")
        )
        logits = -alpha * ((dy - y) ** 2 + (dx - x) ** 2)
        rebuilt = torch.softmax(torch.from_numpy(logits), -1)
        layer = copy.deepcopy(model.get_submodule(name)).double()
        # The layer's own buffer is not used, as it was computed in float32.
        with default_dtype(torch.float64):
            indices = layer.get_rel_indices(25)
        positional = layer.pos_proj(indices).permute(0, 3, 1, 2).softmax(-1)[0]
        # Centres and localities are recorded from float32 parameters.
        torch.testing.assert_close(rebuilt, positional, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(row.attention_span, 1 / row.locality_strength)
        np.testing.assert_allclose(
            row.gate, 1 / (1 + np.exp(-layer.gating_param.numpy())), rtol=1e-6
        )


def test_convits_initial_heads_lie_on_a_kernel_column_by_column() -> None:
    # Nothing is scattered: this is the state of convit_tiny before training.
    model = timm.create_model(
        "convit_tiny", img_size=80, depth=1, embed_dim=6, num_heads=9, num_classes=3
    ).eval()
    row = record_epoch(model, tokens(), (5,)).isel(epoch=0, layer=0)
    # ConViT counts its kernel by columns, but a convolution by rows.
    assert row.center_y.values.tolist() == [-1, 0, 1] * 3
    assert row.center_x.values.tolist() == [-1, -1, -1, 0, 0, 0, 1, 1, 1]
    assert row.locality_strength.values.tolist() == [1] * 9


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_hooks_inside_convit_run_as_often_as_without_recording() -> None:
    model = convit()
    fired = list[Any]()
    # The probe must read the outputs of these parts, and not call them again.
    for part in ("qk", "v", "pos_proj"):
        model.blocks[0].attn.get_submodule(part).register_forward_hook(
            lambda *args, part=part: fired.append(part)
        )
    model(tokens())
    expected = list(fired)
    fired.clear()
    with tcnn_probe.record(model):
        model(tokens())
    assert fired == expected


@pytest.mark.parametrize("of_convit", [False, True])
def test_queries_and_keys_are_not_computed_again(
    of_convit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = (convit(), tokens()) if of_convit else (Chain(), images())
    formed = list[Any]()
    layers = [m for m in model.modules() if isinstance(m, GPSA | ConViTLayer)]
    for layer in layers:
        owner, name = (layer.qk, "forward") if of_convit else (layer, "_queries_and_keys")
        form = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda x, form=form: formed.append(1) or form(x))
    recorded(model, x, x)
    # They are computed once in each of two forwards, which takes a twentieth of the forward.
    assert len(formed) == 2 * len(layers)


def test_a_layer_that_computes_queries_and_keys_in_parts() -> None:
    class InParts(GPSA):
        def forward(self, x: Tensor) -> Tensor:
            output = torch.cat(
                # The images are processed in parts, as memory may require; the last queries and
                # keys are not those of all images.
                [super(InParts, self).forward(part) for part in x.split(2)]
            )
            return output + super().forward(0 * x[:1])

    layer = scatter(InParts(2, 3, 3, padding=1, bias=False))
    x = images(5)
    ds = record_epoch(nn.Sequential(layer).eval(), x, (2, 3))
    assert_layer(ds, "0", gpsa_statistics(layer, x))
