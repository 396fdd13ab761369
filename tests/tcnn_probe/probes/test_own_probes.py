"""Short probes written by users, and the errors about badly written ones."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tcnn_probe
from tests.tcnn_probe.contracts import helpers
from tests.tcnn_probe.contracts.helpers import Trace, clean
from tests.tcnn_probe.probes.scattered_models import VIT, images, small, step


def variable(*dims: str) -> tcnn_probe.Variable:
    return tcnn_probe.Variable(("layer", *dims), "1", "zeros", "Share of zeros after a ReLU.")


ZEROS = tcnn_probe.Probe(
    kind="zeros",
    variables={"share": variable()},
    module_type=nn.ReLU,
    measure=lambda call: {"share": (call.output == 0).flatten(1).double().mean(1)},
)
LARGEST = tcnn_probe.Probe(
    "largest",
    {"largest": variable("head")},
    attention=lambda call: {"largest": call.weights(slice(None)).amax((1, 3, 4))},
)
X = torch.randn(7, 2, 11, 13, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        # The second ReLU overwrites its input, so a probe must read the input before.
        nn.Conv2d(2, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 5, 3),
        nn.ReLU(inplace=True),
    ).eval()


def test_share_of_zeros_after_relu(tmp_path: Path) -> None:
    model = network()
    with (
        tcnn_probe.record(model, tmp_path / "run.zarr", probes=ZEROS) as recorder,
        torch.no_grad(),
    ):
        # Batches are uneven, so the plain mean of the batch means is not the mean over images.
        model(X[:2])
        model(X[2:])
        recorder.mark(epoch=0, top1=0.5)
    ds = tcnn_probe.open(tmp_path / "run.zarr")["zeros"].to_dataset()
    with torch.no_grad():
        outputs = [model[: n + 1](X) for n in (1, 3)]
    truth = [(output == 0).double().mean() for output in outputs]
    # Shares of counts are averaged in float64.
    np.testing.assert_allclose(ds.share.sel(epoch=0), truth, rtol=1e-12)
    assert list(ds["layer"].values) == ["1", "3"]
    assert ds.share.attrs == {
        "units": "1",
        "long_name": "zeros",
        "description": "Share of zeros after a ReLU.",
    }


def test_largest_weight_of_each_head_next_to_built_in_probes_and_by_name() -> None:
    model = small("vit_tiny_patch16_224", **VIT)
    batch = images(5)
    tcnn_probe.register(LARGEST)
    try:
        # A notebook's cell that runs again defines the probe anew, perhaps with a correction.
        corrected = replace(LARGEST, detailed=True)
        assert tcnn_probe.register(corrected) is tcnn_probe.PROBES["largest"]
        with pytest.raises(ValueError, match="there is a probe of the kind 'largest' already"):
            tcnn_probe.register(tcnn_probe.Probe("largest", {}, attention=lambda call: {}))
        recorder = helpers.recorded(
            model, batch[:2], batch[2:], probes=[*tcnn_probe.DEFAULT, "largest"]
        )
    finally:
        # The registry belongs to the process, so other tests would find the probe.
        del tcnn_probe.PROBES["largest"]
    weights: list[Tensor] = []
    for block in model.blocks:
        # The fused kernel never computes the weights.
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda m, x, y: weights.append(y))
    with torch.no_grad():
        model(batch)
    largest = recorder.tree["largest"].to_dataset().largest[0]
    np.testing.assert_allclose(
        largest,
        torch.stack([attention.amax((2, 3)).mean(0) for attention in weights]),
        rtol=1e-5,
    )
    assert recorder.dataset.entropy.notnull().all()


def test_two_probes_may_want_the_same_submodules() -> None:
    def mean(call: Any) -> dict[str, Tensor]:
        return {
            "mean": (call.parts["2"].inputs[0].mean() + call.parts["2"].output.mean()).expand(7)
        }

    model = network()
    # In place, the ReLU would overwrite the convolution's output.
    model[3].inplace = False

    class OfPart(tcnn_probe.Probe):
        def parts(self, module: Any) -> dict[str, nn.Module]:
            return {"2": module[2]}

    about = {"mean": variable()}
    probes = [OfPart(kind, about, nn.Sequential, measure=mean) for kind in ("one", "two")]
    recorder = helpers.recorded(model, X, probes=probes)
    with torch.no_grad():
        truth = model[:2](X).mean() + model[:3](X).mean()
    for kind in ("one", "two"):
        np.testing.assert_allclose(recorder.tree[kind].to_dataset()["mean"], [[truth]], rtol=1e-5)


def test_variables_that_only_some_layers_epochs_or_forwards_have() -> None:
    """Means are over the images that gave a variable;
    one that no layer had at the first mark is dropped, and told.
    """
    late: list[bool] = []

    def measure(call: Any) -> Mapping[str, Tensor]:
        mean = call.output.mean((2, 3))
        last = {"last": mean[:, :2]} if call.name == "2" else {}
        # The variable comes only in the forward of three images, not in that of four.
        at_times = {"at_times": torch.full((len(mean),), 3.0)} if len(mean) == 3 else {}
        return {
            "mean": mean,
            **last,
            **at_times,
            **({"late": mean.mean(1)} if late else {}),
        }

    about = {
        "mean": variable("channel"),
        "last": variable("k"),
        "at_times": variable(),
        "never": variable("other"),
    }
    probe = tcnn_probe.Probe("own", about | {"late": variable("few")}, nn.Conv2d, measure=measure)
    model = network()
    with tcnn_probe.record(model, probes=probe) as recorder, torch.no_grad():
        model(X[:3])
        model(X[3:])
        recorder.mark(epoch=0)
        # The variable has no dimension, as the recording could not add one anyway.
        recorder._collector.layers["0", "own"].probe.variables["late"] = variable()
        # From here on measure() returns one variable more.
        late.append(True)
        model(X[3:])
        with pytest.warns(
            RuntimeWarning, match=r"the recording began without them: \['late'\]"
        ) as warnings:
            recorder.mark(epoch=1)
        assert warnings[0].filename == __file__
    ds = recorder.tree["own"].to_dataset()
    assert set(ds.data_vars) == {
        "mean",
        "last",
        "at_times",
        "images",
        "nonfinite_images",
    }
    assert np.isfinite(ds["mean"].values).sum(2).tolist() == [[3, 5]] * 2
    assert np.isfinite(ds["last"].values[0]).tolist() == [[False, False], [True, True]]
    np.testing.assert_array_equal(ds.at_times, [[3, 3], [np.nan, np.nan]])


OWN = {
    "kind": "own",
    "module_type": nn.ReLU,
    "measure": ZEROS.measure,
    "variables": {"share": variable()},
}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"measure": None}, ValueError, "'own' measures nothing: give it state, measure"),
    ({"module_type": "ReLU"}, TypeError, "predicate for module_type, got 'ReLU'"),
    ({"kind": "heads"}, ValueError, "under 'heads', like another probe"),
    ({"group": "maps/1x2x3"}, ValueError, "under 'maps/1x2x3', like another probe"),
    (
        {"kind": "a.partial"},
        ValueError,
        "names of letters, digits, '_' and '-' .* got 'a.partial'",
    ),
    ({"group": "a/../b"}, ValueError, r"got '\.\.'"),
    (
        {"variables": {"share": tcnn_probe.Variable(("head",), "1", "", "")}},
        ValueError,
        r"got \('head',\)",
    ),
    (
        {"variables": {"images": variable()}},
        ValueError,
        "'images' of the probe 'own' is recorded for",
    ),
]


def test_values_that_cannot_be_recorded_are_refused_at_once() -> None:
    for about, error, message in REFUSED:
        with pytest.raises(error, match=message):
            tcnn_probe.Probe(**OWN | about)


def oops(*args: Any) -> Any:
    raise ZeroDivisionError("oops")


class BadGradients(tcnn_probe.Probe):
    def gradients(self, module: Any) -> Any:
        return {"share": [(module.weight, oops)]}


def bad(**functions: Callable[..., Any]) -> tcnn_probe.Probe:
    # A probe of attention finds its layers by itself.
    of_module = {} if "attention" in functions else {"module_type": nn.Conv2d}
    return tcnn_probe.Probe("bad", {"share": variable()}, **of_module, **functions)


BAD: dict[str, tuple[tcnn_probe.Probe, type[Exception], str]] = {
    "gradient": (
        BadGradients("bad", {"share": variable()}, nn.Conv2d),
        ZeroDivisionError,
        "oops",
    ),
    "name": (
        bad(attention=lambda call: {"shar": torch.zeros(2)}),
        ValueError,
        r"'bad' to return \['share'\], got 'shar'",
    ),
    "shape": (
        bad(measure=lambda call: {"share": call.output.mean((2, 3))}),
        ValueError,
        r"'image',\) of 2 images, got the shape",
    ),
    "shape of state": (
        bad(state=lambda m: {"share": torch.zeros(1)}),
        ValueError,
        r"got the shape \(1,\)",
    ),
    "tensor": (
        bad(measure=lambda call: call.output),
        TypeError,
        r"'bad' to return \{variable: tensor\}",
    ),
    "number": (
        bad(measure=lambda call: {"share": 0.5}),
        TypeError,
        "a tensor for 'share', got 0.5",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_of_bad_probes_name_the_layer_and_leave_the_model_clean(
    case: str,
) -> None:
    probe, error, message = BAD[case]
    model = small("vit_tiny_patch16_224", **VIT)
    batch = images(2)
    before = Trace(model)
    with (  # noqa: PT012
        pytest.raises(error, match=message) as caught,
        tcnn_probe.record(model, probes=probe) as recorder,
    ):
        model(batch).sum().backward()
        recorder.mark(epoch=0)
    assert re.search(
        r"'(blocks\.0\.attn|patch_embed\.proj)'",
        f"{caught.value} {caught.value.__notes__}",
    )
    assert before == Trace(model)
    assert clean()


@pytest.mark.parametrize(
    ("probes", "message"),
    [
        (
            [ZEROS, tcnn_probe.Probe("zeros", {}, nn.ReLU, state=oops)],
            "two probes of one kind: zeros",
        ),
        (
            [
                "softmax",
                tcnn_probe.Probe("own", {"entropy": variable()}, nn.ReLU, "", measure=oops),
            ],
            "other dimensions",
        ),
        (
            tcnn_probe.Probe("dropout", {}, nn.Dropout, state=oops),
            "Sequential has no layer for the probes",
        ),
    ],
    ids=["kinds", "dimensions", "no layer"],
)
def test_unusable_probes_are_refused(probes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tcnn_probe.record(network(), probes=probes)


def test_probe_without_a_layer_is_warned_about() -> None:
    """A probe that finds no layer is warned about once;
    default probes of attention that the model lacks are not.
    """
    model = network()
    with tcnn_probe.record(model, probes=[*tcnn_probe.DEFAULT, "layer-scale", ZEROS]) as recorder:
        model(X)
        with pytest.warns(
            RuntimeWarning,
            match=r"no layer was found for the probes \['gpsa', .*, 'layer-scale'\]",
        ):
            recorder.mark(epoch=0)
        model(X)
        recorder.mark(epoch=1)
    model = small("vit_tiny_patch16_224", **VIT)
    with tcnn_probe.record(model, probes=[*tcnn_probe.DEFAULT, "gradient"]) as recorder:
        step(model, images(2))
        recorder.mark(epoch=0)
