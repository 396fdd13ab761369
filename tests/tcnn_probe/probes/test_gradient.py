"""Gradients of the parameters of single heads, collected row by row and column by column."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import xarray as xr
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.volo import VOLO
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA
from tcnn_probe.recording.sums import EpochSums, Terms
from tests.tcnn_probe.contracts.helpers import Trace
from tests.tcnn_probe.networks import Chain
from tests.tcnn_probe.probes.scattered_models import VIT, images, scattered, small, step

pytestmark = pytest.mark.numerical


def squares(gradients: list[np.ndarray]) -> float:
    return float(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients))


def grad(parameter: nn.Parameter) -> np.ndarray:
    return parameter.grad.double().numpy()


def of_linear(layer: Any, head: int) -> float:
    """Return the sum of squares for one head: its rows of queries,
    keys and values, and columns of the projection.
    """
    # Layers have one matrix for queries, keys and values, one for each, or one for two of them.
    size = layer.proj.in_features // layer.num_heads
    grads = []
    for name in ("qkv", "q", "k", "v", "qk"):
        for parameter in getattr(getattr(layer, name, None), "_parameters", {}).values():
            if parameter is not None:
                starts = range(head * size, len(parameter), size * layer.num_heads)
                grads += [grad(parameter)[start : start + size] for start in starts]
    grads.append(grad(layer.proj.weight)[:, head * size : (head + 1) * size])
    biases = [getattr(layer, name, None) for name in ("q_bias", "v_bias")]
    grads += [grad(bias)[head * size : (head + 1) * size] for bias in biases if bias is not None]
    if hasattr(layer, "pos_proj"):
        grads += [grad(layer.pos_proj.weight)[head], grad(layer.pos_proj.bias)[head]]
        grads.append(grad(layer.gating_param)[head])
    return squares(grads)


def of_multihead(layer: nn.MultiheadAttention, head: int) -> float:
    size = layer.embed_dim // layer.num_heads
    grads = []
    rows = slice(head * size, (head + 1) * size)
    if layer.in_proj_weight is not None:
        grads += [part[rows].numpy() for part in layer.in_proj_weight.grad.chunk(3)]
    else:
        grads += [getattr(layer, f"{x}_proj_weight").grad[rows].numpy() for x in "qkv"]
    grads += [part[rows].numpy() for part in layer.in_proj_bias.grad.chunk(3)]
    grads += [
        bias.grad[0, 0, rows].numpy() for bias in (layer.bias_k, layer.bias_v) if bias is not None
    ]
    return squares([*grads, layer.out_proj.weight.grad[:, rows].numpy()])


def of_gpsa(layer: GPSA, head: int) -> float:
    rows = slice(head * layer.qk_dim, (head + 1) * layer.qk_dim)
    _, width = layer.kernel_size
    grads = [
        layer.query.grad[rows],
        layer.key.grad[rows],
        layer.weight.grad[:, :, head // width, head % width],
    ]
    return squares(
        [
            x.numpy()
            for x in (
                *grads,
                *(p.grad[head] for p in (layer.raw_locality, layer.center, layer.gating)),
            )
        ]
    )


def compare(
    model: nn.Module, batch: Tensor, oracle: Callable[..., float], *, rtol: float = 1e-5
) -> None:
    """Compare three backward passes in two epochs;
    norms are root mean squares over those of an epoch.
    """
    # Factors differ in sign and size, as squares are averaged, and not gradients.
    weights = (1.0, -3.0)
    truth = {}
    with tcnn_probe.record(model, probes="gradient") as recorder:
        layers = recorder.layers
        heads = {name: getattr(model.get_submodule(name), "num_heads", None) for name in layers}
        heads = {name: count or model.get_submodule(name).heads for name, count in heads.items()}
        for epoch, times in enumerate([weights, (2.0,)]):
            for factor in times:
                model.zero_grad()
                step(model, batch, factor)
                for name, count in heads.items():
                    head_norms = [oracle(model.get_submodule(name), head) for head in range(count)]
                    truth.setdefault((epoch, name), []).append(head_norms)
            recorder.mark(epoch=epoch)
    ds = recorder.tree["gradient"].to_dataset().load()
    assert list(ds["layer"].values) == list(layers)
    assert ds.gradient_norm.dims == ("epoch", "layer", "head")
    for (epoch, name), rows in truth.items():
        expected = np.sqrt(np.mean(rows, 0))
        recorded_norms = ds.gradient_norm.sel(epoch=epoch, layer=name).values
        # All heads differ.
        assert len(set(np.round(expected / expected.max(), 6))) == len(expected)
        np.testing.assert_allclose(recorded_norms[: len(expected)], expected, rtol=rtol)
        assert np.isnan(recorded_norms[len(expected) :]).all()


@pytest.mark.parametrize(
    ("name", "about"),
    # Queries, keys and values have a matrix each, or one with separate biases, or two with
    # positions and gates.
    [
        ("cait_xxs24_224", {}),
        ("beitv2_base_patch16_224", {}),
        ("convit_tiny", {"img_size": (32, 32), "local_up_to_layer": 1}),
    ],
)
def test_gradients_of_timm_models(name: str, about: dict[str, Any]) -> None:
    model = small(name, **VIT | about)
    layers = {
        name
        for name, module in model.named_modules()
        if hasattr(module, "num_heads") and hasattr(module, "proj")
    }
    compare(model, images(3, *(VIT | about)["img_size"]), of_linear)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        assert set(recorder.layers) == layers
        assert recorder.missing == {}


class Multihead(nn.Module):
    def __init__(self, **about: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = nn.MultiheadAttention(15, 5, batch_first=True, **about)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_()
        self.other = nn.Linear(15, about.get("kdim", 15))

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.other(x), self.other(x))[0]


@pytest.mark.parametrize(
    "about",
    # The first has parameters outside the matrices, and the second separate matrices for queries,
    # keys and values.
    [{"add_bias_kv": True}, {"kdim": 7, "vdim": 7}],
    ids=["bias", "other sizes"],
)
def test_gradients_of_torchs_multihead_attention(about: dict[str, Any]) -> None:
    compare(
        Multihead(**about),
        torch.randn(2, 11, 15, generator=torch.Generator().manual_seed(0)),
        of_multihead,
    )


def test_gradients_of_gpsa_layers() -> None:
    """The layers have 9 and 25 heads."""
    compare(
        Chain(),
        torch.randn(2, 2, 7, 11, generator=torch.Generator().manual_seed(0)),
        of_gpsa,
    )


class Silence:
    """Patch that zeroes all heads but one, so that parameters
    of the other heads get no gradient in any layout.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = 0
        for place, name in ((F, "scaled_dot_product_attention"), (Tensor, "softmax")):
            monkeypatch.setattr(place, name, self.silenced(getattr(place, name)))

    def silenced(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: self.of(function(*args, **kwargs))

    def of(self, output: Tensor) -> Tensor:
        mask = torch.zeros(output.shape[-3], 1, 1)
        # Layers with fewer heads start again from their first head.
        mask[self.alive % len(mask)] = 1
        return output * mask


def multiscale() -> nn.Module:
    # A residual would use the queries of zeroed heads.
    about = {"residual_pooling": False}
    cfg = MultiScaleVitCfg(
        depths=(1, 1),
        embed_dim=(9, 18),
        num_heads=(3, 6),
        stride_q=((1, 1), (2, 2)),
        **about,
    )
    return MultiScaleVit(cfg, img_size=(64, 64), num_classes=3)  # square only


def volo() -> nn.Module:
    about = {
        "downsamples": (True, False),
        "outlook_attention": (True, False),
        "num_classes": 3,
    }
    return VOLO([1, 1], 64, embed_dims=[12, 15], num_heads=[3, 5], stem_hidden_dim=4, **about)


# Each family lays out heads differently in its matrices; zeroed heads show which rows belong to
# which head.
LAYOUTS = {
    "swin_tiny_patch4_window7_224": (
        {"embed_dim": 12, "depths": (1, 1), "num_heads": (3, 6)},
        (224, 224),
    ),
    "swinv2_tiny_window8_256": (
        {"embed_dim": 12, "depths": (1, 1), "num_heads": (3, 6)},
        (256, 256),
    ),
    "pvt_v2_b0": (
        {"depths": (1,) * 4, "embed_dims": (6, 10, 12, 20), "num_heads": (1, 2, 3, 5)},
        (64, 96),
    ),
    "twins_svt_small": (
        {"embed_dims": (6, 9, 15, 21), "num_heads": (3,) * 4, "depths": (2, 1, 1, 2)},
        (224, 224),
    ),
    "mvitv2": (multiscale, (64, 64)),
    "volo": (volo, (64, 64)),
    "vit_relpos_small_patch16_224": (VIT, (32, 48)),
    "eva02_tiny_patch14_224": (VIT | {"img_size": (28, 42), "embed_dim": 24}, (28, 42)),
    "vit_base_patch16_siglip_224": (VIT, (32, 48)),
    "samvit_base_patch16": (
        VIT | {"window_size": 2, "global_attn_indexes": (1,)},
        (32, 48),
    ),
    "fastvit_sa12": ({"layers": (1,) * 4, "embed_dims": (8, 16, 32, 96)}, (64, 96)),
    "davit_tiny": (
        {"embed_dims": (6, 12), "num_heads": (3, 3), "depths": (1, 1)},
        (64, 96),
    ),
    "tnt_s_legacy_patch16_224": (
        {
            "img_size": 32,
            "embed_dim": 18,
            "num_heads_inner": 2,
            "num_heads_outer": 3,
            "depth": 1,
        },
        (32, 32),
    ),
}


@pytest.mark.study(but=["pvt_v2_b0", "swin_tiny_patch4_window7_224", "volo"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_heads_agree_with_what_heads_compute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, size = LAYOUTS[name]
    torch.manual_seed(0)
    model = (
        scattered(about()).eval() if callable(about) else small(name, **{"num_classes": 3} | about)
    )
    silence = Silence(monkeypatch)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        heads = {name: model.get_submodule(name).num_heads for name in recorder.layers}
        # In epoch n, only head n is not zeroed.
        for silence.alive in range(max(heads.values())):
            step(model, images(1, *size))
            recorder.mark(epoch=silence.alive)
    gradient_norms = norms(recorder)
    assert max(heads.values()) > 1
    for layer, count in heads.items():
        for epoch in range(len(gradient_norms)):
            heard = np.flatnonzero(gradient_norms.sel(layer=layer, epoch=epoch).values[:count])
            assert list(heard) == [epoch % count], (layer, epoch)


def norms(recorder: tcnn_probe.Recorder) -> xr.DataArray:
    return recorder.tree["gradient"].to_dataset().gradient_norm.load()


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.bfloat16, 1e-5), (torch.float64, 1e-12)], ids=str
)
def test_gradients_in_any_dtype(dtype: torch.dtype, rtol: float) -> None:
    """Gradients in half precision are not changed, and their norm is computed in float32."""
    compare(
        small("vit_tiny_patch16_224", **VIT).to(dtype),
        images(2).to(dtype),
        of_linear,
        rtol=rtol,
    )


def test_accumulated_passes_count_separately_and_overflows_not_at_all() -> None:
    """The second pass before a step adds to .grad,
    but is measured alone; after infinities a scaler makes no step.
    """
    model = Chain().train()
    x = torch.randn(3, 2, 5, 11, generator=torch.Generator().manual_seed(0))
    recordings = []
    # Three equal passes have the norm of one, because norms are averaged and not added up.
    for factors in ([1.0], [1.0, 1.0, 1.0], [1.0, float("inf")]):
        with tcnn_probe.record(model, probes="gradient") as recorder:
            for factor in factors:
                step(model, x, factor)
            recorder.mark(epoch=0)
        recordings.append(norms(recorder))
        model.zero_grad()
    for recording in recordings[1:]:
        np.testing.assert_allclose(recording, recordings[0], rtol=1e-6)


def test_ranks_are_averaged() -> None:
    """Each process sees the gradient of its own images, before gradients are averaged."""
    # Sums of squares are 2 and 6, each over two passes: 8 / 4 = 2.
    ranks = [EpochSums(squares={"x": Terms(np.array([float(n)]), 2)}) for n in (2, 6)]
    assert EpochSums.together(ranks).finish({}) == {"x": np.sqrt(2.0)}


@pytest.mark.parametrize("name", ["levit_128s", "nest_tiny_jx"])
def test_layouts_that_are_not_known_are_left_out_and_named(name: str) -> None:
    """LeViT interleaves queries, keys and values of each head,
    and NesT the heads in each channel.
    """
    # Values are not needed, as only the layout is examined.
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(
        ValueError,
        match=r"no layer for the probes \['gradient'\]: .*heads of Attention",
    ):
        tcnn_probe.record(model, probes="gradient")
    model.head_of_ours = nn.MultiheadAttention(15, 5)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        assert recorder.layers == ("head_of_ours",)
        attention = {
            n for n, m in model.named_modules() if type(m).__name__.startswith("Attention")
        }
        assert set(recorder.missing["gradient_norm"]) == attention


def test_known_layers_that_were_changed_are_left_out() -> None:
    model = small("vit_tiny_patch16_224", **VIT | {"depth": 5})
    attention = [block.attn for block in model.blocks]
    attention[0].qkv = nn.Sequential(attention[0].qkv)
    nn.utils.parametrizations.weight_norm(attention[1].qkv)
    attention[2].forward = lambda x, **rest: x
    # Five heads do not divide the 3 x 21 rows.
    attention[3].num_heads = 5
    with tcnn_probe.record(model, probes="gradient") as recorder:
        reasons = recorder.missing["gradient_norm"]
        assert recorder.layers == ("blocks.4.attn",)
    said = (
        "qkv is Sequential",
        "computed from other parameters",
        "is not known",
        "63 rows of qkv are not 3 x 5 heads",
    )
    for number, words in enumerate(said):
        assert words in reasons[f"blocks.{number}.attn"]


def test_an_epoch_of_training_only_can_be_marked_once_parameters_are_trained() -> None:
    model = small("vit_tiny_patch16_224", **VIT).train()
    batch = images(2)
    model.blocks[0].attn.requires_grad_(False)
    with tcnn_probe.record(model, probes="gradient") as recorder:
        with pytest.raises(
            RuntimeError,
            match=r"no gradient reached \['blocks.0.attn', 'blocks.1.attn'\]",
        ):
            recorder.mark(epoch=0)
        for epoch in range(2):
            step(model, batch)
            recorder.mark(epoch=epoch)
            model.blocks[0].attn.requires_grad_(True)
        with torch.no_grad():
            model.eval()(batch)
        with pytest.raises(RuntimeError, match="no gradient reached"):
            recorder.mark(epoch=2)
    missing = norms(recorder).isnull().all("head")
    assert missing.sel(layer="blocks.0.attn").values.tolist() == [True, False]
    assert not missing.sel(layer="blocks.1.attn").any()


@pytest.mark.filterwarnings("ignore:.*nothing was marked:RuntimeWarning")
def test_gradients_and_attention_in_one_recording() -> None:
    """Before the first training, gradients are NaN without a warning;
    without an evaluation, a mark is refused.
    """
    model = small("vit_tiny_patch16_224", **VIT)
    batch = images(2)
    with tcnn_probe.record(model, probes=["softmax", "gradient"]) as recorder:
        step(model.train(), batch)
        with pytest.raises(
            RuntimeError,
            match=r"no forward in eval mode .* leave the probes of attention out",
        ):
            recorder.mark(epoch=0)
    with tcnn_probe.record(model, probes=["softmax", "gradient"]) as recorder:
        for epoch in range(2):
            with torch.no_grad():
                model.eval()(batch)
            if epoch == 1:
                # The model is in eval mode, but gradients of the same forward count.
                step(model, batch)
            recorder.mark(epoch=epoch)
        step(model.train(), batch)
        with pytest.raises(RuntimeError, match=r"no image in eval mode reached"):
            recorder.mark(epoch=2)
    assert norms(recorder).isnull().all(["layer", "head"]).values.tolist() == [
        True,
        False,
    ]
    assert recorder.dataset.entropy.notnull().all()


def test_recorder_leaves_no_hooks_on_parameters_and_keeps_those_of_others() -> None:
    model = small("vit_tiny_patch16_224", **VIT)
    batch = images(2)
    gradients = list[Tensor]()
    weight = model.blocks[0].attn.qkv.weight
    weight.register_hook(lambda gradient: gradients.append(gradient.clone()))
    before = Trace(model)
    step(model, batch)
    truth = weight.grad.clone()
    model.zero_grad()
    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="of the user"),
        tcnn_probe.record(model, probes="gradient"),
    ):
        assert before != Trace(model)
        step(model, batch)
        assert torch.equal(weight.grad, truth)
        model.zero_grad()
        raise RuntimeError("of the user")
    assert before == Trace(model)
    step(model, batch)
    # Each of three passes calls the user's hook once, so it was neither removed nor doubled.
    assert len(gradients) == 3
