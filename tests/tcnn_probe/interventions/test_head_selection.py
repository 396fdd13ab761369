"""Selections of heads and what they mean,
and selections that are refused before anything is changed.
"""

from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from torch import nn

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import Trace, vit
from tests.tcnn_probe.networks import Branches, Chain

# The two layers have 9 and 25 heads, so that a head of the second may not exist in the first.
NEAR = tuple(range(9))
FAR = tuple(range(25))


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (None, {"near": NEAR, "far": FAR}),
        ("*ea*", {"near": NEAR}),
        ("", {"near": NEAR, "far": FAR}),
        (("near", "f*"), {"near": NEAR, "far": FAR}),
        (
            # A head that is named twice and out of order counts once, in order.
            {"near": [4, 1, 4], "far": slice(20, None)},
            {"near": (1, 4), "far": (20, 21, 22, 23, 24)},
        ),
        # A glob matches layers with different numbers of heads, and the slice exists in both.
        ({"*": slice(None, 7, 3)}, {"near": (0, 3, 6), "far": (0, 3, 6)}),
        ({"near": range(2, 4), "far": None}, {"near": (2, 3), "far": FAR}),
        # argsort and topk return integers of NumPy and torch like these.
        ({"near": np.array([0, 2]), "far": np.int64(3)}, {"near": (0, 2), "far": (3,)}),
        ({"near": torch.tensor([0, 2])}, {"near": (0, 2)}),
        ({"near": []}, {}),
        ([], {}),
    ],
)
@pytest.mark.filterwarnings("ignore:no head is selected")
def test_heads_by_name_and_index(heads: Any, expected: dict[str, tuple[int, ...]]) -> None:
    model = Chain()
    assert tcnn_probe.ablate(model, heads).heads == expected


def mask(*layers: str, **true: list[int]) -> xr.DataArray:
    layers = layers or ("near", "far")
    array = xr.DataArray(
        np.zeros((len(layers), 25), bool),
        {"layer": [*layers], "head": range(25)},
        ("layer", "head"),
        name="wanted",
    )
    for layer, heads in true.items():
        array.loc[{"layer": layer, "head": heads}] = True
    return array


def test_heads_by_array() -> None:
    model = Chain()
    array = mask(near=[1, 8], far=[24])

    def heads(selection: xr.DataArray) -> dict[str, tuple[int, ...]]:
        return tcnn_probe.ablate(model, selection).heads

    expected = {"near": (1, 8), "far": (24,)}
    assert (
        # Names decide, so that the order of layers, heads and dimensions does not matter.
        heads(array)
        == heads(array.isel(layer=[1, 0]).T)
        # Heads are chosen by their coordinate and not by their position, here in reverse order.
        == heads(array.isel(head=slice(None, None, -1)))
        == expected
    )
    marks = xr.concat([~array, ~array, array], xr.Variable("step", [1, 5, 9]))
    # The last mark counts.
    assert heads(marks) == heads(marks.transpose("head", "step", "layer")) == expected
    assert heads(array.sel(layer="near")) == {"near": (1, 8)}
    assert heads(array.sel(layer="far", head=24)) == {"far": (24,)}
    # A mask over layers means all of their heads.
    assert heads(array.any("head")) == {"near": NEAR, "far": FAR}
    # Without a coordinate, heads count from 0 if there are as many as in the model.
    assert heads(array.drop_vars("head")) == expected


def test_an_empty_selection_has_no_effect_and_warns() -> None:
    model = Chain()
    x = torch.randn(2, 2, 7, 11)
    empty = pytest.warns(RuntimeWarning, match="no head is selected")
    with torch.no_grad():
        plain = model(x)
        # These modes prepare something beforehand, which could fail without heads.
        for mode, options in (("mean", {"images": x}), ("replaced", {"source": vit()})):
            with empty:
                ablation = tcnn_probe.ablate(model, mask(), mode, **options)  # type: ignore[arg-type]
            with ablation:
                assert torch.equal(model(x), plain)
            assert ablation.heads == {}
    with empty:
        ablation = tcnn_probe.ablate(model, {"near": [], "far": ()})
    with ablation:
        model.near(x)  # named layers need not run
    absent = (mask("blocks.0", "far"), mask("blocks.0").isel(layer=[]))
    for selection in absent:  # they need not exist, either
        with empty:
            assert tcnn_probe.ablate(model, selection).heads == {}


def test_a_cnn_without_attention_is_refused() -> None:
    cnn = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match=r"named like attention.*reparameterize"):
        tcnn_probe.ablate(cnn)


@torch.no_grad()
def test_all_layers_of_a_timm_model() -> None:
    model = timm.create_model(
        # This model has self-attention and class attention, which must both be found.
        "cait_xxs24_224",
        # 24 x 40 pixels in patches of 8 are not a square grid.
        img_size=(24, 40),
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=3,
    )
    x = torch.randn(1, 3, 24, 40)
    layers = [
        "blocks.0.attn",
        "blocks.1.attn",
        "blocks_token_only.0.attn",
        "blocks_token_only.1.attn",
    ]
    with tcnn_probe.ablate(model) as ablation:
        model(x)
    assert ablation.heads == dict.fromkeys(layers, (0, 1, 2))
    # The mean over queries needs several queries.
    with tcnn_probe.ablate(model, mode="mean") as ablation:
        model(x)
    assert [*ablation.heads] == layers[:2]
    with (
        pytest.raises(
            ValueError,
            match=r"'blocks_token_only\.0\.attn' has a single query, whose mean is itself",
        ),
        tcnn_probe.ablate(model, layers[2], "mean"),
    ):
        model(x)
    convit = timm.create_model(
        # Two layers have gates; mode="content" leaves out the third, which has none.
        "convit_tiny",
        img_size=32,
        patch_size=8,
        embed_dim=8,
        depth=3,
        local_up_to_layer=2,
    )
    assert [*tcnn_probe.ablate(convit, mode="content").heads] == [
        "blocks.0.attn",
        "blocks.1.attn",
    ]


class Own(nn.Module):
    """Attention with 2 heads, for which neither its name nor its attributes show
    that it attends.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


class Around(Own):
    """Layer that attends itself, if asked to, and contains another layer that attends."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.inner = Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # dropout keeps the inner attention's output from being the outer layer's output.
        inside = nn.functional.dropout(self.inner(x), 0.0)
        return inside + super().forward(x) if self.attends else inside


class Channels(nn.Module):
    """Attention between the 3 channels of each of 2 heads, for tokens (B, 5, 6)."""

    num_heads = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 3)).permute(0, 2, 3, 1)
        return ((q @ q.mT).softmax(-1) @ q).flatten(1, 2).mT


def test_a_layer_that_is_not_recognised_has_to_be_named() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Own())
    x = torch.randn(2, 5, 6)
    with pytest.raises(ValueError, match="Other layers are selected by their own names"):
        tcnn_probe.ablate(model)
    plain = model(x)
    ablation = tcnn_probe.ablate(model, {"1": slice(1, None)})
    # Heads of a layer of unknown class are counted when it runs.
    assert ablation.heads == {}
    with ablation:
        # Six channels form two heads, the second of which is zeroed.
        assert torch.equal(model(x), plain * torch.tensor([1, 1, 1, 0, 0, 0]))
    assert ablation.heads == {"1": (1,)}
    with (
        pytest.raises(ValueError, match=r"'1' has 2 heads, .* got head 2"),
        tcnn_probe.ablate(model, {"1": [0, 2]}),
    ):
        model(x)
    assert torch.equal(model(x), plain)


def test_edits_apply_to_the_attention_of_the_named_layer_itself() -> None:
    model = nn.Sequential(Around(True))
    x = torch.randn(2, 5, 6)
    for outer, inner in (("0", "0.inner"), ("0.inner", "0")):
        with tcnn_probe.ablate(model, outer):
            torch.testing.assert_close(model(x), Own()(x))
        with tcnn_probe.ablate(model, [outer, inner]):
            assert (model(x) == 0).all()
    for layer in (Around(False), Channels()):
        model = nn.Sequential(layer)
        with (
            pytest.raises(RuntimeError, match="'0' ran and computed no attention between tokens"),
            tcnn_probe.ablate(model, "0"),
        ):
            model(x)


class CrossCovariance(nn.Module):
    """Attention between the 7 channels of each of 5 heads, as vit-pytorch writes it."""

    def __init__(self, *, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.to_qkv = nn.Linear(24, 3 * 5 * 7)
        self.to_out = nn.Linear(5 * 7, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).flatten(1, -2).unflatten(-1, (3, 5, 7)).permute(2, 0, 3, 4, 1)
        if self.is_fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            out = (q @ k.mT).softmax(-1) @ v
        return x + self.to_out(out.flatten(1, 2).mT).view(x.shape)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("size", [(7,), (1, 7), (5,), (3, 11)])
def test_channels_are_no_tokens_however_many_there_are(
    size: tuple[int, ...], is_fused: bool
) -> None:
    layer, x = CrossCovariance(is_fused=is_fused).eval(), torch.randn(2, *size, 24)
    model = nn.Sequential(layer)
    ablation = tcnn_probe.ablate(model, "0")
    # The second call is not tracked.
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no attention between tokens"):
            model(x)
    ablation.remove()


def test_layers_that_cannot_be_ablated_are_refused() -> None:
    for heads in ("blocks.0.attn", "blocks.*", None):
        with pytest.raises(ValueError, match="mode='positional' needs gates"):
            tcnn_probe.ablate(vit(), heads, "positional")
    with pytest.raises(ValueError, match="attention between channels"):
        tcnn_probe.ablate(
            timm.create_model("xcit_nano_12_p16_224", depth=1, cls_attn_layers=1),
            "blocks.0.attn",
        )
    with pytest.raises(ValueError, match="no layer of this model can do mode='zero'"):
        tcnn_probe.ablate(timm.create_model("resnet10t"))
    layer = GPSA(2, 3, 3)
    # A parametrization computes the gate at each forward, so that setting it would have no effect.
    nn.utils.parametrize.register_parametrization(layer, "gating", nn.Identity())
    with pytest.raises(ValueError, match="its 'gating' is parametrized"):
        tcnn_probe.ablate(layer, "", "positional")


MASK = mask(near=[1])
NO_MASK = "or a boolean DataArray for heads; got {}: a mask is an xarray.DataArray with "
NO_INDEX = (
    r"expected an integer from 0 for heads of 'near' \(an index, indices or a slice\), got {}"
)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"heads": "fra"},
        ValueError,
        "no attention layers match 'fra'; did you mean 'far'",
    ),
    ({"heads": {"fra": []}}, ValueError, "no attention layers match 'fra'"),
    ({"heads": {"*": 9}}, ValueError, "'near' has 9 heads, from 0 to 8; got head 9"),
    ({"heads": {"near": -1}}, ValueError, NO_INDEX.format("-1")),
    # Counted from the end, the slice would mean different heads in each layer.
    ({"heads": {"near": slice(-2, None)}}, ValueError, "counted from 0"),
    ({"heads": {"near": True}}, TypeError, NO_INDEX.format("True")),
    ({"heads": {"near": [1.0]}}, TypeError, NO_INDEX.format("1.0")),
    ({"heads": {"near": torch.ones(9).bool()}}, TypeError, NO_INDEX.format("True")),
    (
        {"heads": {3: 1}},
        TypeError,
        "expected the name of a layer, or a glob, in heads; got 3",
    ),
    ({"heads": 3}, TypeError, NO_MASK.format("int")),
    ({"heads": ("far", 3)}, TypeError, NO_MASK.format(r"\('far', 3\)")),
    ({"heads": MASK.to_dataset()}, TypeError, NO_MASK.format("Dataset")),
    ({"heads": MASK.to_pandas()}, TypeError, NO_MASK.format("DataFrame")),
    (
        {"heads": MASK.astype(int)},
        TypeError,
        "expected a boolean DataArray.*got dtype int64",
    ),
    (
        # With two dimensions there is no last mark.
        {"heads": MASK.expand_dims(epoch=[0], run=[1])},
        ValueError,
        "over one more dimension at most",
    ),
    (
        {"heads": MASK.expand_dims("epoch").isel(epoch=[])},
        ValueError,
        "over one more dimension at most",
    ),
    ({"heads": MASK.drop_vars("layer")}, ValueError, "with their names along layer"),
    (
        {"heads": "near#1"},
        ValueError,
        "the model has no attention 'near#1': 'near' has only one",
    ),
    ({"model": "vit"}, TypeError, r"expected a torch\.nn\.Module, got str"),
    (
        {"mode": "frozen"},
        ValueError,
        "expected mode to be one of zero, mean, .*; got 'frozen'",
    ),
    ({"mode": "replaced"}, ValueError, "mode='replaced' needs source="),
    (
        {"source": Chain()},
        ValueError,
        "source= is for mode='replaced', got it with mode='zero'",
    ),
    ({"images": torch.ones(1)}, ValueError, "images= is for mode='mean'"),
    (
        {"mode": "replaced", "source": vit()},
        ValueError,
        "VisionTransformer, has no layer 'near' to take heads from",
    ),
    (
        {"mode": "replaced", "source": Branches()},
        ValueError,
        "expected 'near' of the source to have the same shapes",
    ),
    (
        {"mode": "replaced", "source": 3},
        TypeError,
        "expected a torch.nn.Module, got int",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    BAD,
    ids=[str(number) for number in range(len(BAD))],
)
def test_bad_selections_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    model = Chain()
    # All checks precede the first change.
    before = Trace(model)
    with pytest.raises(error, match=match):
        tcnn_probe.ablate(**{"model": model, **arguments})
    assert Trace(model) == before
