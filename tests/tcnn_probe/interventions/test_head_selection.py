"""Which heads are meant, and what is refused before anything is changed."""

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
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.networks import Branches, Chain

NEAR, FAR = tuple(range(9)), tuple(range(25))


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (None, {"near": NEAR, "far": FAR}),
        ("near", {"near": NEAR}),
        ("*ea*", {"near": NEAR}),
        ("", {"near": NEAR, "far": FAR}),
        (["near", "f*"], {"near": NEAR, "far": FAR}),
        (("near", "far"), {"near": NEAR, "far": FAR}),
        ({"near": [4, 1, 4], "far": slice(20, None)}, {"near": (1, 4), "far": (20, 21, 22, 23, 24)}),
        ({"*": slice(None, 7, 3)}, {"near": (0, 3, 6), "far": (0, 3, 6)}),
        ({"near": range(2, 4), "far": None}, {"near": (2, 3), "far": FAR}),
        ({"near": np.array([0, 2])}, {"near": (0, 2)}),
        ({"near": torch.tensor([0, 2])}, {"near": (0, 2)}),
        ({"near": []}, {}),
        ({}, {}),
        ([], {}),
    ],
)
def test_by_name_and_index(heads: Any, expected: dict[str, tuple[int, ...]]) -> None:
    model = Chain()
    with torch.no_grad(), tcnn_probe.ablate(model, heads) as ablation:
        model(torch.ones(2, 2, 7, 11))
    assert ablation.heads == expected


def wanted(layers: list[str] | None = None, **true: list[int]) -> xr.DataArray:
    layers = layers or ["near", "far"]
    array = xr.DataArray(
        np.zeros((len(layers), 25), bool), {"layer": layers, "head": range(25)}, ("layer", "head"), name="wanted"
    )
    for layer, heads in true.items():
        array.loc[{"layer": layer, "head": heads}] = True
    return array


def test_by_array_equals_by_hand() -> None:
    model, x = Chain(), torch.randn(2, 2, 7, 11)
    with torch.no_grad():
        with tcnn_probe.record(model) as recorder:
            model(x)
            recorder.mark(epoch=0)
            model.near.gating.neg_()
            model(x)
            recorder.mark(epoch=1)
        content = recorder.dataset.gate < 0.5
        by_hand = {"near": torch.nonzero(model.near.gating < 0)[:, 0], "far": torch.nonzero(model.far.gating < 0)[:, 0]}
        with tcnn_probe.ablate(model, content) as array:
            found = model(x)
        with tcnn_probe.ablate(model, by_hand) as hand:
            assert torch.equal(model(x), found)
        kinds = tcnn_probe.head_types(recorder.dataset)
        turned = {
            n: [h for h in range(25) if kinds.sel(epoch=1, layer=n, head=h) == "content"] for n in ("near", "far")
        }
        with tcnn_probe.ablate(model, kinds == "content") as typed:
            found = model(x)
        with tcnn_probe.ablate(model, turned):
            assert torch.equal(model(x), found)
    assert array.heads == hand.heads
    assert 0 < len(array.heads["near"]) < 9
    assert typed.heads == {layer: tuple(heads) for layer, heads in turned.items() if heads}
    assert typed.heads


def test_arrays_of_any_order_and_of_parts() -> None:
    model = Chain()
    array = wanted(near=[1, 8], far=[24])

    def heads(given: xr.DataArray) -> dict[str, tuple[int, ...]]:
        return tcnn_probe.ablate(model, given).heads

    expected = {"near": (1, 8), "far": (24,)}
    assert heads(array) == heads(array.transpose()) == heads(array.isel(layer=[1, 0])) == expected
    assert heads(array.isel(head=slice(None, None, -1))) == expected
    marks = xr.concat([~array, ~array, array], xr.Variable("step", [1, 5, 9]))
    assert heads(marks) == heads(marks.transpose("head", "step", "layer")) == expected  # the last mark
    assert heads(array.sel(layer="near")) == {"near": (1, 8)}
    assert heads(array.sel(head=24)) == {"far": (24,)}
    assert heads(array.sel(layer="far", head=24)) == {"far": (24,)}
    assert heads(array.any("head")) == {"near": NEAR, "far": FAR}
    assert heads(array.drop_vars("head")) == expected
    assert heads(array & False) == {}


def test_an_empty_selection_ablates_nothing() -> None:
    model, x = Chain(), torch.randn(2, 2, 7, 11)
    for mode, options in (("zero", {}), ("mean", {"images": x}), ("replaced", {"source": vit()})):
        with torch.no_grad():
            plain = model(x)
            with tcnn_probe.ablate(model, wanted(), mode, **options) as ablation:  # type: ignore[arg-type]
                assert torch.equal(model(x), plain)
        assert ablation.heads == {}
    with tcnn_probe.ablate(model, {"near": [], "far": ()}):  # of layers that need not even run
        model.near(x)
    with pytest.raises(ValueError, match="no attention layers match 'fra'"):
        tcnn_probe.ablate(model, {"fra": []})


def test_an_empty_selection_of_another_model_is_warned_of() -> None:
    model, other = Chain(), wanted(["blocks.0", "blocks.1"])
    for given in (other, other.any("head"), other.isel(layer=0)):
        with pytest.warns(UserWarning, match=r"Chain has none of its layers \('blocks.0'.*of another model") as caught:
            assert tcnn_probe.ablate(model, given).heads == {}
        assert caught[0].filename == __file__
    for given in (wanted(["blocks.0", "far"]), wanted(["blocks.0", "far#1"]), other.isel(layer=[])):
        assert tcnn_probe.ablate(model, given).heads == {}


def test_all_of_timms_models() -> None:
    model = timm.create_model("cait_xxs24_224", img_size=(24, 40), patch_size=8, embed_dim=24, depth=2, num_heads=3)
    with tcnn_probe.ablate(model) as ablation:
        model(torch.randn(1, 3, 24, 40))
    layers = ["blocks.0.attn", "blocks.1.attn", "blocks_token_only.0.attn", "blocks_token_only.1.attn"]
    assert ablation.heads == dict.fromkeys(layers, (0, 1, 2))
    assert tcnn_probe.ablate(model, "blocks").heads == dict.fromkeys(layers[:2], (0, 1, 2))
    with tcnn_probe.ablate(model, mode="mean") as ablation:  # where there are several queries
        model(torch.randn(1, 3, 24, 40))
    assert [*ablation.heads] == layers[:2]
    with (
        pytest.raises(ValueError, match=r"'blocks_token_only\.0\.attn' has a single query, whose mean is itself"),
        tcnn_probe.ablate(model, "blocks_token_only.0.attn", "mean"),
    ):
        model(torch.randn(1, 3, 24, 40))


class Own(nn.Module):
    """Nothing but what it does says that it attends, with 2 heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)


def test_a_layer_of_ones_own_has_to_be_named() -> None:
    model, x = nn.Sequential(nn.Linear(6, 6), Own()), torch.randn(2, 5, 6)
    with pytest.raises(ValueError, match="a layer that is not called attention has to be named"):
        tcnn_probe.ablate(model)
    for heads, expected in (("1", (0, 1)), ({"1": slice(1, None)}, (1,))):
        ablation = tcnn_probe.ablate(model, heads)
        assert ablation.heads == {}
        with ablation:
            found = model(x)
        assert ablation.heads == {"1": expected}
        assert (found == 0).all(-1).all() == (len(expected) == 2)
    plain = model(x)
    with (
        pytest.raises(ValueError, match="'1' has 2 heads, from 0 to 1; got head 2"),
        tcnn_probe.ablate(model, {"1": [0, 2]}),
    ):
        model(x)
    assert torch.equal(model(x), plain)


class Around(Own):
    """Attends itself, and so does a layer inside of it."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends, self.inner = attends, Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = nn.functional.dropout(self.inner(x), 0.0)
        return inside + super().forward(x) if self.attends else inside


def test_attention_is_that_of_the_layer_itself() -> None:
    model, x = nn.Sequential(Around(True)), torch.randn(2, 5, 6)
    for outer, inner in (("0", "0.inner"), ("0.inner", "0")):
        with tcnn_probe.ablate(model, outer):
            torch.testing.assert_close(model(x), Own()(x))
        with tcnn_probe.ablate(model, [outer, inner]):
            assert (model(x) == 0).all()
    with (
        pytest.raises(RuntimeError, match="'0' ran and asked for no attention between tokens"),
        tcnn_probe.ablate(model := nn.Sequential(Around(False)), "0"),
    ):
        model(x)


def masks_of_other_kinds() -> list[tuple[Any, str]]:
    """What is no DataArray, and its type's name."""
    mask = wanted(near=[1])
    given = [mask.to_dataset(), mask.values, mask.values[0], torch.ones(2, 25).bool(), mask.to_pandas()]
    return [(one, type(one).__name__) for one in (*given, mask.T.to_pandas(), mask.isel(head=0).to_pandas())]


def bad_arrays() -> list[tuple[xr.DataArray, type[Exception], str]]:
    array = wanted(near=[1])
    twice = array.expand_dims(epoch=[0], run=[1])
    return [
        (array.astype(int), TypeError, "expected a boolean DataArray.*got dtype int64"),
        (twice, ValueError, "over one more dimension at most"),
        (array.drop_vars("layer"), ValueError, "with their names along layer"),
        (array.expand_dims("epoch").isel(epoch=[]), ValueError, "over one more dimension at most"),
        (wanted(near=[9]), ValueError, "'near' has 9 heads, from 0 to 8; got head 9"),
        (wanted(["near", "other"], other=[0]), ValueError, "no attention layers match 'other'"),
    ]


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"heads": "fra"}, ValueError, "no attention layers match 'fra'; did you mean 'far'"),
    ({"heads": "x*"}, ValueError, r"no attention layers match 'x\*'"),
    ({"heads": {"near": 9}}, ValueError, "'near' has 9 heads, from 0 to 8; got head 9"),
    ({"heads": {"*": 9}}, ValueError, "'near' has 9 heads"),
    ({"heads": {"near": -1}}, ValueError, "expected heads of 'near' counted from 0, got -1"),
    ({"heads": {"near": slice(-2, None)}}, ValueError, "counted from 0"),
    ({"heads": {"near": slice(None, None, -1)}}, ValueError, "counted from 0"),
    ({"heads": {"near": "0"}}, TypeError, "as an index, indices or a slice, got '0'"),
    ({"heads": {"near": True}}, TypeError, "as an index, indices or a slice, got True"),
    ({"heads": {"near": [True, False]}}, TypeError, "as an index, indices or a slice"),
    ({"heads": {"near": 1.0}}, TypeError, "as an index, indices or a slice, got 1.0"),
    ({"heads": {"near": np.arange(9) < 3}}, TypeError, r"indices or a slice, got ndarray of shape \(9,\)$"),
    ({"heads": {"near": torch.ones(9).bool()}}, TypeError, r"indices or a slice, got Tensor of shape \(9,\)$"),
    ({"heads": {"near": wanted().sel(layer="near")}}, TypeError, r"a slice, got DataArray of shape \(25,\)$"),
    ({"heads": [np.ones((7, 11))]}, TypeError, r"in heads; got ndarray of shape \(7, 11\)$"),
    ({"heads": {3: 1}}, TypeError, "expected the name of a layer, or a glob, in heads; got 3"),
    ({"heads": 3}, TypeError, "or a boolean DataArray for heads; got int"),
    ({"heads": [3]}, TypeError, r"names of layers, or pairs \(layer, head\), in heads; got 3"),
    ({"heads": "near#1"}, ValueError, "the model has no attention 'near#1': 'near' has one only"),
    ({"mode": "none"}, ValueError, "expected mode to be one of positional, .*; got 'none'"),
    ({"mode": "replaced"}, ValueError, "mode='replaced' needs source="),
    ({"source": Chain()}, ValueError, "source= is for mode='replaced', got it with mode='zero'"),
    *(
        ({"heads": mask}, TypeError, f"boolean DataArray for heads; got {name}: a mask is an xarray.DataArray with .*")
        for mask, name in masks_of_other_kinds()
    ),
    ({"images": torch.ones(1)}, ValueError, "images= is for mode='mean'"),
    ({"mode": "replaced", "source": vit()}, ValueError, "VisionTransformer, has no layer 'near' to take heads from"),
    ({"mode": "replaced", "source": Branches()}, ValueError, "expected 'near' of the source to have the same shapes"),
    ({"mode": "replaced", "source": 3}, TypeError, "expected a torch.nn.Module, got int"),
    *(({"heads": array}, error, match) for array, error, match in bad_arrays()),
]


@pytest.mark.parametrize(("given", "error", "match"), BAD)
def test_bad_input(given: dict[str, Any], error: type[Exception], match: str) -> None:
    model = Chain()
    before = Trace(model)
    with pytest.raises(error, match=match):
        tcnn_probe.ablate(model, **given)
    assert Trace(model) == before


def test_layers_that_cannot_do_it() -> None:
    model = vit()
    for mode, what in (("positional", "gates"), ("content", "gates")):
        for heads in ("blocks.0.attn", "blocks.*", None, {"blocks.0.attn": 1}):
            with pytest.raises(ValueError, match=f"mode='{mode}' needs {what}"):
                tcnn_probe.ablate(model, heads, mode)  # type: ignore[arg-type]
    convit = timm.create_model("convit_tiny", img_size=32, patch_size=8, embed_dim=8, depth=3, local_up_to_layer=2)
    assert [*tcnn_probe.ablate(convit, mode="content").heads] == ["blocks.0.attn", "blocks.1.attn"]
    xcit = timm.create_model("xcit_nano_12_p16_224", depth=1, cls_attn_layers=1)
    with pytest.raises(ValueError, match="attention between channels"):
        tcnn_probe.ablate(xcit, "blocks.0.attn")
    with pytest.raises(ValueError, match="no layer of this model can do mode='zero'"):
        tcnn_probe.ablate(timm.create_model("resnet10t"))


def test_a_model_that_is_none_and_parametrized_gates() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got str"):
        tcnn_probe.ablate("vit")  # type: ignore[arg-type]
    layer = GPSA(2, 3, 3)
    nn.utils.parametrize.register_parametrization(layer, "gating", nn.Identity())
    with pytest.raises(ValueError, match="its 'gating' is parametrized"):
        tcnn_probe.ablate(layer, "", "positional")


def test_attention_between_channels_is_refused_in_the_forward() -> None:
    class Channels(nn.Module):
        num_heads = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, 5, 6)
            q = x.unflatten(-1, (2, 3)).permute(0, 2, 3, 1)  # (B, heads, 3 channels, 5)
            return ((q @ q.mT).softmax(-1) @ q).flatten(1, 2).mT

    model = nn.Sequential(Channels())
    with pytest.raises(RuntimeError, match="'0' ran and asked for no attention"), tcnn_probe.ablate(model, "0"):
        model(torch.randn(2, 5, 6))


def test_what_is_not_named_is_not_touched() -> None:
    model, x = vit(), vit_images()
    seen: list[torch.Tensor] = []
    model.blocks[0].attn.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    model(x)
    with tcnn_probe.ablate(model, "blocks.1.attn"):
        model(x)
    assert torch.equal(*seen)
