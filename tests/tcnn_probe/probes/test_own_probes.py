"""A user's own probes, of ten lines, and what is said of badly written ones."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack

import tcnn_probe
from tests.tcnn_probe.probes.helpers import VIT, attention_probe, images, recorded, small, step

ZEROS = tcnn_probe.Probe(
    kind="zeros",
    variables={"share": tcnn_probe.Variable(("layer",), "1", "zeros", "Share of zeros after a ReLU.")},
    module_type=nn.ReLU,
    measure=lambda call: {"share": (call.output == 0).flatten(1).double().mean(1)},
)

LARGEST = attention_probe("largest", lambda call: {"largest": call.weights(slice(None)).amax((1, 3, 4))}, "largest")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True)).eval()


def test_share_of_zeros_after_relu(tmp_path: Path) -> None:
    model, x = network(), torch.randn(7, 2, 11, 13)
    with tcnn_probe.record(model, tmp_path / "run.zarr", probes=ZEROS) as recorder, torch.no_grad():
        model(x[:2])
        model(x[2:])
        recorder.mark(epoch=0, top1=0.5)
    ds = tcnn_probe.open(tmp_path / "run.zarr")["zeros"].to_dataset()
    with torch.no_grad():
        truth = [(model[: n + 1](x) == 0).double().mean() for n in (1, 3)]
    np.testing.assert_allclose(ds.share.sel(epoch=0), truth, rtol=1e-12)
    assert list(ds["layer"].values) == ["1", "3"]
    assert ds.share.attrs == {"units": "1", "long_name": "zeros", "description": "Share of zeros after a ReLU."}


def test_a_variable_is_averaged_over_the_images_that_gave_it() -> None:
    given = {"always": torch.ones(2), "at_times": torch.full((2,), 3.0)}
    about = tcnn_probe.Variable(("layer",), "1", "a", "a")
    probe = tcnn_probe.Probe("given", dict.fromkeys(given, about), nn.ReLU, measure=lambda call: given)
    model, x = network(), torch.randn(2, 2, 11, 13)
    with tcnn_probe.record(model, probes=probe) as recorder, torch.no_grad():
        model(x)
        del given["at_times"]
        model(x)
        recorder.mark(epoch=0)
        model(x)
        recorder.mark(epoch=1)
    ds = recorder.tree["given"].dataset
    np.testing.assert_array_equal(ds.always, [[1, 1], [1, 1]])
    np.testing.assert_array_equal(ds.at_times, [[3, 3], [np.nan, np.nan]])


def test_largest_weight_of_each_head() -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(5)
    ds = recorded(model, LARGEST, batch[:2], batch[2:])
    weights: dict[str, Tensor] = {}
    for name, block in model.named_modules():
        if name.endswith("attn"):
            block.fused_attn = False
            keep = lambda m, x, y, name=name: weights.__setitem__(name, y)  # noqa: E731
            block.attn_drop.register_forward_hook(keep)
    with torch.no_grad():
        model(batch)
    for name, attention in weights.items():
        np.testing.assert_allclose(ds.largest.sel(layer=name), attention.amax((2, 3)).mean(0), rtol=1e-5)


def test_beside_the_built_in_ones_and_by_name() -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    tcnn_probe.register(LARGEST)
    try:
        tcnn_probe.register(LARGEST)
        with pytest.raises(ValueError, match="there is a probe of the kind 'largest' already"):
            tcnn_probe.register(attention_probe("largest", lambda call: {}))
        with tcnn_probe.record(model, probes=[*tcnn_probe.DEFAULT, "largest"]) as recorder, torch.no_grad():
            model(batch)
            recorder.mark(epoch=0)
    finally:
        del tcnn_probe.PROBES["largest"]
    assert recorder.tree["largest"].to_dataset().sizes == {"epoch": 1, "layer": 2, "head": 3}
    assert recorder.dataset.entropy.notnull().all()


def test_two_probes_may_want_the_same_submodules() -> None:
    def probe(kind: str) -> tcnn_probe.Probe:
        return tcnn_probe.Probe(
            kind,
            {"mean": tcnn_probe.Variable(("layer",), "1", "mean", "Of what the second convolution gets and gives.")},
            lambda module: isinstance(module, nn.Sequential),
            measure=lambda call: {"mean": (call.parts["2"].inputs[0].mean() + call.parts["2"].output.mean()).expand(7)},
            parts=["2"],
        )

    model, x = network(), torch.randn(7, 2, 11, 13)
    model[3].inplace = False  # which would overwrite what the convolution gave
    with tcnn_probe.record(model, probes=[probe("one"), probe("two")]) as recorder, torch.no_grad():
        model(x)
        recorder.mark(epoch=0)
        truth = model[:2](x).mean() + model[:3](x).mean()
    for kind in ("one", "two"):
        np.testing.assert_allclose(recorder.tree[kind].to_dataset()["mean"], [[truth]], rtol=1e-5)


def test_variable_that_only_some_layers_have() -> None:
    def measure(call: Any) -> Mapping[str, Tensor]:
        mean = call.output.mean((2, 3))
        return {"mean": mean} if call.name == "0" else {"mean": mean, "last": mean[:, :2]}

    about = {
        name: tcnn_probe.Variable(("layer", dim), "1", name, name) for name, dim in (("mean", "channel"), ("last", "k"))
    }
    about["never"] = tcnn_probe.Variable(("layer", "other"), "1", "never", "Of no layer, so that its size is unknown.")
    ds = recorded(network(), tcnn_probe.Probe("own", about, nn.Conv2d, measure=measure), torch.randn(3, 2, 7, 11))
    assert set(ds.data_vars) == {"mean", "last", "images", "nonfinite_images"}
    assert np.isfinite(ds["mean"].values).sum(1).tolist() == [3, 5]
    assert np.isfinite(ds["last"].values).tolist() == [[False, False], [True, True]]


def test_variable_that_comes_later_is_dropped_with_a_warning() -> None:
    late: list[bool] = []

    def measure(call: Any) -> Mapping[str, Tensor]:
        return {"mean": call.output.mean((1, 2, 3)), **({"late": call.output.mean((2, 3))} if late else {})}

    about = {"mean": ("layer",), "late": ("layer", "channel")}
    variables = {name: tcnn_probe.Variable(dims, "1", name, name) for name, dims in about.items()}
    model = network()
    with tcnn_probe.record(model, probes=tcnn_probe.Probe("own", variables, nn.Conv2d, measure=measure)) as recorder:
        for epoch in range(2):
            with torch.no_grad():
                model(torch.randn(3, 2, 7, 11))
            if late:
                with pytest.warns(RuntimeWarning, match=r"the recording began without them: \['late'\]"):
                    recorder.mark(epoch=epoch)
            else:
                recorder.mark(epoch=epoch)
            late.append(True)
    ds = recorder.tree["own"].to_dataset()
    assert ds["mean"].notnull().all()
    assert "late" not in ds


def share(*dims: str) -> dict[str, tcnn_probe.Variable]:
    return {"share": tcnn_probe.Variable(dims, "1", "share", "A number.")}


@pytest.mark.parametrize(
    ("about", "error", "message"),
    [
        ({"variables": share("layer"), "measure": None}, ValueError, "'own' measures nothing: give it state, measure"),
        ({"variables": share("layer"), "module_type": "ReLU"}, TypeError, "predicate for module_type, got 'ReLU'"),
        ({"variables": share("layer"), "kind": "heads"}, ValueError, "under 'heads', as others are"),
        ({"variables": share("layer"), "group": "maps/1x2x3"}, ValueError, "under 'maps/1x2x3', as others are"),
        (
            {"variables": share()},
            ValueError,
            r"'share' of the probe 'own' to have the dimensions \('layer', ...\), got",
        ),
        ({"variables": share("head")}, ValueError, r"the dimensions \('layer', ...\), got \('head',\)"),
        ({"variables": {"share": tcnn_probe.Variable("layer", "1", "", "")}}, ValueError, "got 'layer'"),  # type: ignore[arg-type]
        (
            {"variables": {"images": ZEROS.variables["share"]}},
            ValueError,
            "'images' of the probe 'own' is recorded for",
        ),
        ({"variables": {"head": ZEROS.variables["share"]}}, ValueError, "'head' of the probe 'own' is recorded for"),
    ],
)
def test_what_could_not_be_recorded_is_refused_at_once(
    about: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tcnn_probe.Probe(**{"kind": "own", "module_type": nn.ReLU, "measure": ZEROS.measure} | about)


def bad(**functions: Callable[..., Any]) -> tcnn_probe.Probe:
    share = tcnn_probe.Variable(("layer",), "1", "share", "A number.")
    of_module = {} if "attention" in functions else {"module_type": nn.ReLU}
    return tcnn_probe.Probe("bad", {"share": share}, **of_module, **functions)


def oops(*args: Any) -> Any:
    raise ZeroDivisionError("oops")


def assert_clean(model: nn.Module) -> None:
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            assert not hooks
    assert all(parameter._backward_hooks is None for parameter in model.parameters())
    assert not global_hooks._global_forward_hooks
    assert not global_hooks._global_forward_pre_hooks
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize(
    ("probe", "error", "message"),
    [
        (bad(measure=oops), ZeroDivisionError, "oops"),
        (bad(state=oops), ZeroDivisionError, "oops"),
        (
            bad(measure=lambda call: {"shar": call.output.mean((1, 2, 3))}),
            ValueError,
            "'bad' measures 'shar', which",
        ),
        (bad(state=lambda m: {"shar": torch.zeros(())}), ValueError, "'bad' measures 'shar', which"),
        (
            bad(measure=lambda call: {"share": call.output.mean((2, 3))}),
            ValueError,
            r"'share' with the dimensions \('image',\), got the shape \(3, 3\)",
        ),
        (
            bad(measure=lambda call: {"share": call.output.mean()}),
            ValueError,
            r"'share' with the dimensions \('image',\), got the shape \(\)",
        ),
        (bad(state=lambda m: {"share": torch.zeros(1)}), ValueError, r"with the dimensions \(\), got the shape \(1,\)"),
        (bad(measure=lambda call: call.output.mean((1, 2, 3))), TypeError, r"'bad' to give \{variable: tensor\}"),
        (bad(measure=lambda call: {"share": 0.5}), TypeError, "a tensor for 'share', got 0.5"),
    ],
)
def test_badly_written_ones_name_the_layer_and_leave_the_model_clean(
    probe: tcnn_probe.Probe, error: type[Exception], message: str
) -> None:
    model, x = network(), torch.randn(3, 2, 7, 11)
    with pytest.raises(error, match=message) as caught:
        recorded(model, probe, x)
    told = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert re.search("'[13]'", told), told
    assert_clean(model)
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize(
    ("probe", "error", "message"),
    [
        (bad(attention=oops), ZeroDivisionError, "oops"),
        (
            bad(attention=lambda call: {"share": call.weights(slice(0, 1))}),
            ValueError,
            r"with the dimensions \('image',\)",
        ),
        (bad(attention=lambda call: {"nothing": torch.zeros(2)}), ValueError, "'bad' measures 'nothing', which"),
    ],
)
def test_badly_written_ones_of_attention(probe: tcnn_probe.Probe, error: type[Exception], message: str) -> None:
    model, batch = small("vit_tiny_patch16_224", **VIT), images(2)
    with pytest.raises(error, match=message) as caught:
        recorded(model, probe, batch)
    assert re.search(r"'blocks\.[01]\.attn'", f"{caught.value} {getattr(caught.value, '__notes__', '')}")
    assert_clean(model)


def test_badly_written_gradient() -> None:
    model = network()
    probe = tcnn_probe.Probe(
        "bad",
        {"share": tcnn_probe.Variable(("layer",), "1", "share", "A number.")},
        nn.Conv2d,
        gradients=lambda module: {"share": [(module.weight, oops)]},
    )
    with pytest.raises(ZeroDivisionError, match="oops") as caught, tcnn_probe.record(model, probes=probe):
        model(torch.randn(3, 2, 7, 11)).sum().backward()
    assert re.search("'[02]'", str(caught.value.__notes__))
    assert_clean(model)


def test_after_an_error_the_next_epoch_is_right() -> None:
    fail: list[bool] = [True]

    def measure(call: Any) -> Mapping[str, Tensor]:
        return oops() if fail and call.name == "3" else ZEROS.measure(call)

    model, x = network(), torch.randn(3, 2, 7, 11)
    probe = tcnn_probe.Probe("own", ZEROS.variables, nn.ReLU, measure=measure)
    with tcnn_probe.record(model, probes=probe) as recorder, torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(5, 2, 7, 11))
        fail.clear()
        model(x)
        recorder.mark(epoch=0)
    ds = recorder.tree["own"].to_dataset()
    np.testing.assert_array_equal(
        ds.images, [[3, 3]]
    )  # nothing of the forward that failed, not even of the first layer
    np.testing.assert_array_equal(ds.share[0], recorded(network(), ZEROS, x).share)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ("convolutions", ValueError, "did you mean 'convolution'"),
        ([ZEROS, attention_probe("zeros", oops)], ValueError, "two probes of one kind: zeros"),
        ([nn.ReLU], TypeError, "expected a tcnn_probe.Probe or the name of one"),
        (
            ["softmax", tcnn_probe.Probe("own", {"entropy": ZEROS.variables["share"]}, nn.ReLU, "", measure=oops)],
            ValueError,
            "two probes have 'entropy' in one group, along other dimensions",
        ),
        ([], ValueError, "probes is empty"),
        (tcnn_probe.Probe("dropout", {}, nn.Dropout, state=oops), ValueError, "Sequential has no layer for the probes"),
    ],
)
def test_probes_that_cannot_be_used(wanted: Any, error: type[Exception], message: str) -> None:
    model = network()
    with pytest.raises(error, match=message):
        tcnn_probe.record(model, probes=wanted)
    assert_clean(model)


def test_probe_that_finds_no_layer_is_told() -> None:
    """Once; those of other attention than the model has, which are there by default, are not."""
    model = network()
    with tcnn_probe.record(model, probes=[*tcnn_probe.DEFAULT, "layer-scale", ZEROS]) as recorder:
        model(torch.randn(3, 2, 7, 11))
        with pytest.warns(RuntimeWarning, match=r"no layer was found for the probes \['gpsa', .*, 'layer-scale'\]"):
            recorder.mark(epoch=0)
        model(torch.randn(3, 2, 7, 11))
        recorder.mark(epoch=1)
    model = small("vit_tiny_patch16_224", **VIT)
    with tcnn_probe.record(model, probes=[*tcnn_probe.DEFAULT, "gradient"]) as recorder:
        step(model, images(2))
        recorder.mark(epoch=0)
