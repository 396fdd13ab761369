"""Costs of single heads: to first order against derivatives,
and exact ones against one ablation after the other.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from timm.layers import Attention
from torch import Tensor, nn

import tcnn_probe
from tcnn_probe.interventions.shared_forward import SharedForward
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit
from tests.tcnn_probe.interventions.ablations import State
from tests.tcnn_probe.interventions.softmax_models import MODELS, wide
from tests.tcnn_probe.interventions.test_given_attention import LayerCall, of_softmax
from tests.tcnn_probe.networks import small_resnet

MODES = ("uniform", "convolutional", "static", "salient", "zero", "mean", "local")
ROUNDINGS = 1e3 * torch.finfo(torch.float64).eps


class OfHeads(nn.Module):
    """Model whose output is linear in the outputs of its attention's heads, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.patch_embed = nn.Conv2d(3, 15, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 15))
        self.attn = Attention(15, 3, qkv_bias=True)
        self.head = nn.Linear(15, 5)
        with torch.no_grad():
            self.attn.qkv.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1)
        # Tokens differ in weight, as the mean over queries would else change nothing.
        weights = torch.linspace(-1, 2, tokens.shape[1]).to(x)
        return weights @ self.head(self.attn(tokens))


class UncountedAttention(Attention):
    """Attention with 3 heads, a number that no attribute states."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LogitsOf(nn.Module):
    """Model whose output has its scores as ``logits``, as in transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.model(x))


def total(output: Any, target: Any) -> Tensor:
    """Return a number for each image that is linear in the output."""
    return (output * torch.arange(1.0, output.shape[1] + 1)).sum(1)


@pytest.mark.study(but=["True-patches"])
@pytest.mark.parametrize("queries", ["patches", None])
@pytest.mark.parametrize("fused", [True, False], indirect=True)
def test_first_order_is_exact_where_the_model_is_linear(fused: bool, queries: Any) -> None:
    model = OfHeads().double().eval()
    x, references = (
        torch.randn(5, 3, 24, 40).double(),
        torch.randn(3, 3, 24, 40).double(),
    )
    options: Any = {"reference": references, "radius": 1, "queries": queries}
    costs = [
        function(model, x, total, modes=MODES, batch_size=3, **options)
        for function in (tcnn_probe.head_importance, tcnn_probe.head_costs)
    ]
    size = float(total(model(x), None).detach().abs().max())
    assert abs(costs[0] - costs[1]).max() < ROUNDINGS * size
    assert (abs(costs[1]).max(("head", "image")) > 1e-3).all()


@pytest.mark.parametrize("function", [tcnn_probe.head_costs, tcnn_probe.head_importance])
def test_heads_of_an_unstated_number_are_counted(function: Any) -> None:
    """The layer shows it when it runs, which modes without given images would not let it do."""
    model, x = OfHeads().double().eval(), torch.randn(5, 3, 24, 40).double()
    choices: list[dict[str, Any]] = [
        {"modes": ["zero"]},
        {"modes": ["uniform"], "heads": {"attn": [2]}},
        {"modes": ["static", "uniform", "zero"]},
    ]
    expected = [function(model, x, total, **choice) for choice in choices]
    model.attn.__class__ = UncountedAttention
    del model.attn.num_heads
    for choice, costs in zip(choices, expected, strict=True):
        xr.testing.assert_allclose(function(model, x, total, **choice), costs, rtol=1e-9)
    with pytest.raises(ValueError, match="'attn' has 3 heads, from 0 to 2; got head 3"):
        function(model, x, total, modes=["zero"], heads={"attn": 3})
    with pytest.raises(ValueError, match=r"got \['head'\], which computed none"):
        function(model, x, total, heads="head")


def test_random_directions_estimate_the_norm_of_the_change() -> None:
    model, x = OfHeads().double().eval(), torch.randn(5, 3, 24, 40).double()
    modes = ["uniform", "zero", "local"]
    estimate = tcnn_probe.head_importance(model, x, modes=modes, directions=100, radius=1)
    exact = tcnn_probe.head_costs(model, x, modes=modes, radius=1)
    # The estimate of one image has a standard error of 1 / sqrt(2 * 100).
    np.testing.assert_allclose(estimate, exact, rtol=5 / 200**0.5, atol=1e-9)


def test_first_order_is_the_derivative() -> None:
    """The loss changes at this rate as attention goes from the head's own to the static one."""
    make, shape, path, _ = MODELS["vit"]
    model = wide(make())
    path = path.replace("1", "0")
    layer: Any = model.get_submodule(path)
    x, references = torch.randn(4, *shape).double(), torch.randn(3, *shape).double()
    classes = torch.tensor([1, 4, 0, 2])
    mean = of_softmax(layer, LayerCall(model, layer, references))[0].mean(0)
    own = of_softmax(layer, LayerCall(model, layer, x))[0]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    cost = tcnn_probe.head_importance(
        model, x, classes, modes=["static"], reference=references, queries=None
    )
    losses = []
    for share in (-1e-4, 1e-4):
        moved = (own + share * (mean - own))[:, None, [2]]

        def edit(attention: Any, moved: Tensor = moved) -> Any:
            is_layer = attention.name == path
            return tcnn_probe.HeadEdit([2], attention=moved) if is_layer else None

        with tcnn_probe.attention_stream(model, edit):
            losses.append(F.cross_entropy(model(x), classes, reduction="none"))
    derivative = (losses[1] - losses[0]) / 2e-4
    of_head = torch.from_numpy(cost.sel(mode="static", layer=path, head=2).values)
    # The error of a central difference is a third derivative times 1e-8 / 6.
    torch.testing.assert_close(of_head, derivative, rtol=1e-5, atol=1e-7)
    assert derivative.abs().max() > 1e-3


def test_fused_attention_stays_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward, and attention to which only one layer's matrix is formed at a time."""
    model, calls = vit(), []
    fused = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    model(vit_images(3))
    layers = len(calls)
    tcnn_probe.head_importance(model, vit_images(3), [0, 1, 2], modes=["zero"])
    # Another forward, of a copy, shows the grids.
    assert len(calls) == 3 * layers


CASES: dict[str, Any] = {
    "vit": (vit, lambda: vit_images(5)),
    "resnet": (small_resnet, lambda: torch.randn(5, 1, 71, 103)),
    **{name: (MODELS[name][0], name) for name in ("swin", "cait", "convit")},
}


@pytest.mark.study(but=["vit", "swin"])
@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_costs_are_those_of_single_ablations(name: str) -> None:
    """Neither shared forwards nor shared statistics change a cost, or the model."""
    make, make_images = CASES[name]
    model: nn.Module = make()
    shape = MODELS[name][1] if name in MODELS and name != "vit" else None
    x = make_images() if shape is None else torch.randn(5, *shape)
    images, references = x[:2], x[2:]
    state = State(model)
    modes: Any = ["static", "salient"]
    costs = tcnn_probe.head_costs(model, images, total, modes=modes, reference=references)
    estimates = tcnn_probe.head_importance(model, images, total, modes=modes, reference=references)
    state.check(model)
    assert costs.dims == ("mode", "layer", "head", "image")
    assert (costs.isnull() == estimates.isnull()).all()
    plain = total(model(images), None)
    layers = costs.layer.values
    for layer in {layers[0], layers[-1]}:
        for mode in modes:
            cost = costs.sel(mode=mode, layer=layer, head=1)
            if cost.isnull().all():
                assert "token_only" in layer
                continue
            with tcnn_probe.ablate(model, {layer: 1}, mode, images=references, queries="patches"):
                change = total(model(images), None) - plain
            # Images run in the same batch, so that only sums of later layers may differ in order.
            tolerance = 1e-6 * max(1, float(plain.abs().max()))
            np.testing.assert_allclose(cost, change, rtol=0, atol=tolerance)


@pytest.mark.parametrize("has_graph", [False, True])  # as of models that enable gradients
def test_what_comes_before_a_layer_runs_once(has_graph: bool) -> None:
    model: Any = vit()
    x, ran = vit_images(3), []
    with torch.set_grad_enabled(has_graph):
        forward = SharedForward(model, x)
        assert forward.in_order({"b": model.blocks[1].attn, "a": model.blocks[0].attn}) == [
            "a",
            "b",
        ]
        handle = model.blocks[0].mlp.register_forward_hook(lambda *_: ran.append(0))
        with forward.until(model.blocks[1].attn):
            ran.clear()
            assert torch.equal(model(x), forward.output)
            assert not ran
        handle.remove()
        assert "forward" not in vars(model.blocks[0])
        assert torch.equal(model(x), forward.output)


def test_an_interrupted_call_continues(tmp_path: Path) -> None:
    model, x = vit(), vit_images(4)
    options: Any = {"modes": ["uniform", "zero"], "batch_size": 3}
    expected = tcnn_probe.head_costs(model, x, **options)
    path = tmp_path / "costs.npz"
    calls = []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 25:
            raise KeyboardInterrupt

    handle = model.blocks[1].attn.proj.register_forward_hook(interrupted)
    state = State(model)
    with pytest.raises(KeyboardInterrupt):
        tcnn_probe.head_costs(model, x, path=path, **options)
    state.check(model)
    calls.clear()
    again = tcnn_probe.head_costs(model, x, path=path, **options)
    assert again.equals(expected)
    first = len(calls)
    handle.remove()
    calls.clear()
    assert 0 < first < 25 + 25
    with pytest.raises(ValueError, match="costs of another model, other images"):
        tcnn_probe.head_costs(model, x.flip(0), path=path, **options)


@pytest.fixture(scope="module")
def written_costs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a file of costs, and the arguments with which it was written."""
    path = tmp_path_factory.mktemp("costs") / "costs.npz"
    options: dict[str, Any] = {"metric": torch.tensor([1, 0, 2, 1]), "batch_size": 3}
    options |= {"modes": ["static", "shuffled"], "reference": vit_images(3)}
    tcnn_probe.head_costs(vit(), vit_images(4), path=path, **options)
    return path, options


@pytest.mark.parametrize(
    "other",
    [
        {"reference": vit_images(5)},
        {"metric": torch.tensor([1, 0, 2, 0])},
        {"metric": None},
        {"heads": {"blocks.0.attn": [0]}},
        {"batch_size": 2},
        {"modes": ["static"]},
        {"modes": ["static", "shuffled"], "seed": 3},
    ],
    ids=lambda other: ", ".join(other),
)
def test_results_of_other_arguments_are_not_taken_up(
    other: dict[str, Any], written_costs: tuple[Path, dict[str, Any]]
) -> None:
    path, options = written_costs
    with pytest.raises(ValueError, match="costs of another model, other images"):
        tcnn_probe.head_costs(vit(), vit_images(4), path=path, **options | other)


def test_forms_of_images_and_targets() -> None:
    model, x, classes = vit(), vit_images(4), torch.tensor([1, 0, 2, 1])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    pairs = [(x[:3], classes[:3]), (x[3:], classes[3:])]
    costs = [
        tcnn_probe.head_importance(model, images, measure, modes=["static"])
        for images, measure in ((x, classes), (pairs, loss), (iter(pairs), loss))
    ]
    with torch.inference_mode():
        costs.append(tcnn_probe.head_importance(model, x.clone(), classes, modes=["static"]))
    as_in_transformers = LogitsOf(model).eval()
    costs.append(tcnn_probe.head_importance(as_in_transformers, x, classes, modes=["static"]))
    for cost in costs[1:]:
        np.testing.assert_allclose(cost, costs[0], rtol=1e-4, atol=1e-7)
    cost = tcnn_probe.head_costs(model, x, classes, modes=["zero"])
    assert cost.attrs == {"long_name": "change of the cross entropy", "units": "nat"}
    for wrong, words in (
        ([0, 1, 2], "each of the 4 images, got 3 classes"),
        ([0, 1, 2, 3, 4], "each of the 4 images, got 5 classes"),
        ([0, 1, 2, 5], "labels from 0 to 4.* got 5"),
    ):
        with pytest.raises(ValueError, match=words):
            tcnn_probe.head_importance(model, x, wrong, modes=["zero"])
    with pytest.raises(ValueError, match=r"a number for each of 4 images.*got \(\)"):
        tcnn_probe.head_costs(model, x, lambda output, _: output.sum(), modes=["zero"])
    with pytest.raises(ValueError, match="expected modes such as"):
        tcnn_probe.head_costs(model, x, modes=["positional"])
    with pytest.raises(ValueError, match="'local' needs radius="):
        tcnn_probe.head_importance(model, x, modes=["local"])
    model.register_forward_hook(lambda *_: "boxes")
    with pytest.raises(TypeError, match="to return tensors with an axis of images, got str"):
        tcnn_probe.head_costs(model, x, modes=["zero"])


def test_heads_that_another_ablation_edits() -> None:
    """The costs are those of the ablated model."""
    model, x = vit(), vit_images(3)
    with tcnn_probe.ablate(model, {"blocks.0.attn": 1}, queries="patches"):
        cost = tcnn_probe.head_importance(model, x, [0, 1, 2], modes=["zero"])
    of_head = cost.sel(mode="zero", layer="blocks.0.attn")
    assert (of_head.sel(head=1) == 0).all()
    assert (abs(of_head.sel(head=[0, 2])) > 0).all()


def test_importance_is_recorded_by_epoch() -> None:
    model, x = vit(), vit_images(5)
    classes = [0, 1, 2, 0, 1]
    options: dict[str, Any] = {"modes": ["static", "zero"], "heads": {"blocks.0.attn": [0, 2]}}
    importance = tcnn_probe.importance_probe(model, x, classes, **options)
    expected = []
    with tcnn_probe.record(model, probes=["softmax", importance]) as recorder:
        for epoch in range(3):
            model.train()
            model(x).square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.eval()
            model(x[:2])
            if epoch == 1:
                # A mark that fails computes its costs anew.
                with pytest.raises(ValueError, match="epoch"):
                    recorder.mark(epoch=0)
            recorder.mark(epoch=epoch)
            after = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(map(torch.equal, after, gradients))
            expected.append(tcnn_probe.head_importance(model, x, classes, **options).mean("image"))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
    recorded = recorder.tree["importance"].dataset.importance
    assert recorded.dims == ("epoch", "layer", "head", "mode")
    for epoch, costs in enumerate(expected):
        values = recorded.sel(epoch=epoch, head=[0, 2]).transpose(*costs.dims)
        np.testing.assert_allclose(values, costs, rtol=1e-12)
        assert (costs != expected[epoch - 1]).all()
    assert recorded.sel(head=1).isnull().all()
    # The images of the probe are not those that are measured.
    assert (recorder.dataset.images == 2).all()


def test_layers_without_gradients_have_no_cost_to_first_order() -> None:
    class Teacher(OfHeads):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = OfHeads()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                known = self.teacher(x)
            return super().forward(x) + known

    cost = tcnn_probe.head_importance(Teacher().eval(), torch.randn(2, 3, 24, 40), modes=["zero"])
    assert (cost.sel(layer="attn") > 0).all()
    assert cost.sel(layer="teacher.attn").isnull().all()
