"""Ablations of our own layers: every mode equals the paper's equations, written out in float64."""

import copy
import math
from typing import Any

import pytest
import torch
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

import tcnn_probe
from tcnn_model import GPSA, gpsa_layers, reparameterize
from tcnn_model.gpsa.functional import attend
from tests.tcnn_model.equations import gpsa_attention_reference, gpsa_reference
from tests.tcnn_model.numerics import assert_rounding
from tests.tcnn_probe.networks import Chain, scatter

pytestmark = pytest.mark.numerical


def layer(**options: object) -> GPSA:
    """Return a layer of six heads with stride (2, 1): (B, 4, H, W) -> (B, 6, H', W')."""
    torch.manual_seed(0)
    # No size but the padding equals another one with which it could be exchanged.
    gpsa = GPSA(4, 6, (2, 3), (2, 1), (1, 1), groups=2, **options)  # type: ignore[arg-type]
    nn.init.normal_(gpsa.value)
    return scatter(gpsa, seed=3)


@torch.no_grad()
def by_hand(
    gpsa: GPSA,
    x: Tensor,
    *,
    bias: bool = True,
    heads: list[int] | None = None,
    **changed: Tensor,
) -> Tensor:
    """Compute Eqs. (5) and (7) in float64 with changed parameters, for all or some heads.

    Returns:
        The output and the sums of its absolute terms, shape (2, B, C_out, N_query).
    """
    wide = copy.deepcopy(gpsa).double()
    weight = wide.weight.clone()
    for head in range(wide.heads):
        if heads is not None and head not in heads:
            # Each head is a tap of the 2 x 3 kernel.
            weight[:, :, head // 3, head % 3] = 0
    offset = wide.bias if bias else None
    exact = gpsa_reference(wide, x.double(), weight=weight, bias=offset, **changed)
    attention = gpsa_attention_reference(wide, x.double(), **changed)
    value = changed.get("value", wide.value)
    top, left = wide.padding
    padded = nn.functional.pad(x.double().abs(), (left, left, top, top))
    mixed = attention @ padded.flatten(2).mT[:, None] @ value.abs().mT
    terms = torch.einsum(
        "bhqgi,goih->bgoq",
        mixed.unflatten(-1, (wide.groups, -1)),
        weight.abs().flatten(2).unflatten(0, (wide.groups, -1)),
    ).flatten(1, 2)
    if offset is not None:
        terms = terms + offset.abs()[:, None]
    return torch.stack([exact, terms])


def images(count: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, 4, 5, 7, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare a float32 output with what :func:`by_hand` returns.

    Logits of a few units and four nested sums round to at most 8 eps of the terms; 1.6 was seen.
    """
    exact, terms = expected
    assert_rounding(actual.flatten(2), exact, terms, 8, torch.float32, "output")


@pytest.mark.parametrize("backend", ["auto", "dense", "blocks"])
@pytest.mark.parametrize(("mode", "gate"), [("positional", math.inf), ("content", -math.inf)])
def test_forced_gates_equal_the_equations(mode: str, gate: float, backend: str) -> None:
    """Forced heads equal the computation by hand;
    if all heads are forced, nothing is left of the other part.
    """
    model = layer(backend=backend)
    x = images()
    gating = model.gating.detach().double()
    gating[[1, 4]] = gate
    with torch.no_grad():
        with tcnn_probe.ablate(model, {"": [1, 4]}, mode):  # type: ignore[arg-type]
            close(model(x), by_hand(model, x, gating=gating))
            # Between forwards, the gate is the model's own.
            assert torch.equal(model.gate, torch.sigmoid(model.gating))
        close(model(x), by_hand(model, x))
        with tcnn_probe.ablate(model, mode=mode):  # type: ignore[arg-type]
            expected = model(x)
            # Not a single bit of the output may depend on a parameter of the part that is left out.
            (model.query if mode == "positional" else model.center).mul_(-3)
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_forced_gates_in_other_dtypes(dtype: torch.dtype) -> None:
    model = layer(dtype=dtype)
    x = images().to(dtype)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        # The sigmoid of infinity is exactly 1.
        twin.gating[[1, 4]] = math.inf
        with tcnn_probe.ablate(model, {"": [1, 4]}, "positional"):
            assert torch.equal(model(x), twin(x))


def test_all_gates_at_one_restore_the_convnet() -> None:
    torch.manual_seed(1)
    options = {
        "channels": (4, 4, 6, 8),
        "in_chans": 2,
        "num_classes": 5,
        "zero_init_last": False,
    }
    cnn = ResNet(BasicBlock, [1, 1, 1, 2], **options).eval()
    # The stride is that of the convnet, which is the oracle.
    model = reparameterize(cnn, stride="keep", locality_strength=20.0, input_size=(2, 71, 103))
    for gpsa in gpsa_layers(model).values():
        nn.init.normal_(gpsa.gating, std=2)
        # Content attention is not uniform, so that it would show.
        nn.init.normal_(gpsa.query)
    x = torch.randn(2, 2, 71, 103)
    with torch.no_grad():
        expected = cnn(x)
        # The content part has an effect before it is removed.
        assert (model(x) - expected).abs().max() > 1e-2
        with tcnn_probe.ablate(model, mode="positional") as ablation:
            # alpha is large but finite, and rounding in float32 goes through a whole network.
            torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)
    assert ablation.heads == {name: tuple(range(9)) for name in gpsa_layers(model)}


@torch.no_grad()
def test_zeroed_and_averaged_heads() -> None:
    model, x = layer(), images()
    for heads in ([0], [2, 5]):
        with tcnn_probe.ablate(model, {"": heads}):
            close(
                model(x),
                by_hand(model, x, heads=[head for head in range(6) if head not in heads]),
            )
    with tcnn_probe.ablate(model, {"": [1, 3]}, "mean"):
        output = model(x)
    mean = by_hand(model, x, heads=[1, 3], bias=False).mean(-1, keepdim=True)
    close(output, by_hand(model, x, heads=[0, 2, 4, 5]) + mean)
    assert model.bias is not None
    with tcnn_probe.ablate(model):  # exactly the bias is left
        assert torch.equal(model(x), model.bias[:, None, None].expand_as(model(x)))
    # Multiplication by zero would not do, as 0 times NaN is NaN.
    model.center[2] = math.nan
    with tcnn_probe.ablate(model, {"": 2}):
        assert model(x).isfinite().all()


@torch.no_grad()
def test_mean_over_images() -> None:
    """The mean is over any number of batches, each read once,
    and of heads as outer ablations leave them.
    """
    model = nn.Sequential(layer())
    x = images()
    references = images(5, seed=1)
    gpsa = model[0]
    calls = []
    handle = model.register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    ablation = tcnn_probe.ablate(
        model,
        {"0": [1, 3]},
        "mean",
        images=iter([(references[:2], torch.arange(2)), references[2:]]),
    )
    mean = by_hand(gpsa, references, heads=[1, 3], bias=False).mean(1, keepdim=True)
    for _ in range(2):
        with ablation:
            close(model(x), by_hand(gpsa, x, heads=[0, 2, 4, 5]) + mean)
            close(model(x[1:2]), by_hand(gpsa, x[1:2], heads=[0, 2, 4, 5]) + mean)
    handle.remove()
    # The two batches of references run once, and then the model's own forwards.
    assert calls == [2, 3, 3, 1, 3, 1]
    gating = torch.full((6,), math.inf, dtype=torch.float64)
    mean = by_hand(gpsa, references, heads=[1], bias=False, gating=gating).mean(1, keepdim=True)
    with (
        tcnn_probe.ablate(model, "0", "positional"),
        tcnn_probe.ablate(model, {"0": [0, 1]}, "mean", images=references),
        tcnn_probe.ablate(model, {"0": 0}),
    ):
        close(model(x), by_hand(gpsa, x, heads=[2, 3, 4, 5], gating=gating) + mean)


@torch.no_grad()
def test_heads_replaced_by_those_of_another_layer() -> None:
    model = nn.Sequential(layer(), nn.ReLU())
    x = images()
    source = copy.deepcopy(model)
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    with tcnn_probe.ablate(model, {"0": slice(1, 3)}, "replaced", source=source) as ablation:
        output = model(x)
    terms = by_hand(source[0], x, heads=[1, 2], bias=False)
    close(output, (by_hand(model[0], x, heads=[0, 3, 4, 5]) + terms).clamp_min(0))
    assert ablation.heads == {"0": (1, 2)}


@pytest.mark.parametrize("same", [True, False])
def test_heads_replaced_by_themselves_change_nothing(same: bool) -> None:
    """The layer's heads keep their own gates,
    so that nothing changes under forced gates, either.
    """
    model = Chain()
    x = torch.randn(2, 2, 7, 11)
    source = model if same else copy.deepcopy(model)
    with torch.no_grad():
        expected = model(x)
        with (
            tcnn_probe.ablate(model, {"near": [1, 5], "far": [7]}, "replaced", source=source),
            tcnn_probe.ablate(model, "near", "positional"),
        ):
            gated = model(x)
        # These are the same gates, computed in another way with other rounding errors.
        with tcnn_probe.ablate(model, {"near": [0, 2, 3, 4, 6, 7, 8]}, "positional"):
            torch.testing.assert_close(model(x), gated, rtol=1e-4, atol=1e-4)
        with tcnn_probe.ablate(model, ["near", "far"], "replaced", source=source):
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    # The gates had an effect.
    assert (gated - expected).abs().max() > 1e-3


def test_gradients_are_those_of_the_ablated_model() -> None:
    """Gradients of the input and of every parameter equal those
    with zeroed taps and fixed gates, in float64.
    """
    model = layer(dtype=torch.float64)
    x = images().double().requires_grad_()
    with (
        tcnn_probe.ablate(model, {"": [0, 2]}),
        tcnn_probe.ablate(model, {"": [2, 3]}, "positional"),
    ):
        model(x).pow(2).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert model.gating.grad is not None
    assert model.gating.grad[[0, 2, 3]].tolist() == [0, 0, 0]
    assert model.gating.grad[[1, 4, 5]].abs().min() > 0
    twin = copy.deepcopy(model)
    y = x.detach().clone().requires_grad_()
    taps = torch.ones(6, dtype=torch.float64)
    taps[[0, 2]] = 0
    twin.zero_grad()
    mask = torch.tensor([False, False, True, True, False, False])
    changed = {
        "weight": twin.weight * taps.view(2, 3),
        # The sigmoid of 40 is 1 in float64, and has a gradient of almost 0.
        "gating": torch.where(mask, 40.0, twin.gating),
    }
    torch.func.functional_call(twin, changed, y).pow(2).sum().backward()
    expected = [y.grad, *(parameter.grad for parameter in twin.parameters())]
    torch.testing.assert_close(gradients, expected, rtol=1e-8, atol=1e-8)


class OwnForward(GPSA):
    """GPSA whose forward lets neither queries nor keys pass where hooks of the class read them."""

    def forward(self, x: Tensor) -> Tensor:
        attention = self.gated_attention(x)
        return self.combine(attend(attention, self.values(x)), attention)


@pytest.mark.parametrize("mode", ["zero", "positional"])
def test_a_subclass_with_a_forward_of_its_own_is_ablated(mode: Any) -> None:
    layer, own = (scatter(kind(3, 4, 3, padding=1)).eval() for kind in (GPSA, OwnForward))
    own.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    outputs = []
    for model in (layer, own):
        with torch.no_grad(), tcnn_probe.ablate(model, {"*": [1, 4]}, mode):
            outputs.append(model(x))
    torch.testing.assert_close(outputs[1], outputs[0])
    with torch.no_grad():
        assert (outputs[1] - own(x)).abs().max() > 1e-3
