"""How an ablation behaves: what is left of it, what is inside of what, what others see of it."""

import copy
import io
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import Trace, clean, vit
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.networks import Chain, scatter

OF_VIT = {"heads": {"blocks.1.attn": [0, 2]}}


def chain_images(count: int = 3) -> Tensor:
    return torch.randn(count, 2, 7, 11, generator=torch.Generator().manual_seed(1))


def other_chain() -> Chain:
    source = Chain()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.2)
    return source


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "zero": (Chain, chain_images, {"heads": {"near": [1, 3]}}),
    "mean": (Chain, chain_images, {"heads": {"near": [1, 3], "far": 7}, "mode": "mean"}),
    "images": (Chain, chain_images, {"heads": "far", "mode": "mean", "images": chain_images(5)}),
    "positional": (Chain, chain_images, {"mode": "positional"}),
    "replaced": (Chain, chain_images, {"heads": {"near": [1]}, "mode": "replaced", "source": other_chain()}),
    "zero, vit": (vit, vit_images, {}),
    "images, vit": (vit, vit_images, {"heads": "blocks.1.attn", "mode": "mean", "images": vit_images(5)}),
    "replaced, vit": (vit, vit_images, {**OF_VIT, "mode": "replaced", "source": vit(seed=3)}),
}


class State:
    """The model as it is, to the very parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace(model)
        self.parameters = [(name, id(p)) for name, p in model.named_parameters()]
        self.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.random = torch.random.get_rng_state()

    def check(self, model: nn.Module) -> None:
        now = State(model)
        assert now.trace == self.trace
        assert now.parameters == self.parameters
        torch.testing.assert_close(now.gradients, self.gradients, rtol=0, atol=0)
        assert torch.equal(now.random, self.random)
        assert clean()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert clean()


class Stop(nn.Module):
    """Raises in the middle of a model's last attention layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.error: BaseException | None = None
        if isinstance(model, Chain):
            values = model.far.values
            vars(model.far)["values"] = lambda x: values(self(x))
        else:
            model.blocks[1].attn.proj_drop = self  # type: ignore[union-attr, index]

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left(case: str) -> None:
    """Of the ablation itself, while it is there but for its hooks, and of exceptions in a forward or in the body."""
    make, given, options = CASES[case]
    model, x = make(), given()
    stop = Stop(model)
    model(x).sum().backward()
    plain, before = model(x).detach(), State(model)
    with tcnn_probe.ablate(model, **options):
        expected = model(x)
        assert not torch.allclose(expected, plain, atol=1e-4)
        assert [id(p) for p in model.parameters()] == [key for _, key in before.parameters]
        torch.testing.assert_close(dict(model.state_dict()), before.trace.state, rtol=0, atol=0)
        for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
            stop.error = error
            with pytest.raises(type(error)):
                model(x)
            stop.error = None
            torch.testing.assert_close(model(x), expected)
    before.check(model)
    assert torch.equal(model(x), plain)
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), tcnn_probe.ablate(model, **options):  # noqa: PT012
            stop.error = error
            model(x)
        stop.error = None
        before.check(model)


def test_nothing_is_left_if_taking_means_fails() -> None:
    model = Chain()
    before = State(model)
    for bad, error in (
        ([chain_images(), "no images"], TypeError),
        ([chain_images(), torch.ones(1, 2, 5, 5)], ValueError),
    ):
        with pytest.raises(error), tcnn_probe.ablate(model, mode="mean", images=iter(bad)):
            pass
        before.check(model)
    with tcnn_probe.ablate(model, mode="mean", images=chain_images()):
        with pytest.raises(ValueError, match="expected images of the size of those"):
            model(torch.ones(2, 2, 5, 7))
        model(chain_images())
    before.check(model)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ((chain_images(), torch.arange(3)), r"of a pair .* give the first: got torch.int64 of shape \(3,\)"),
        (chain_images().byte(), r"floating point; .* got torch.uint8 of shape \(3, 2, 7, 11\)"),
        (TensorDataset(chain_images()), "got single ones: TensorDataset; give its DataLoader"),
        ([()], "as the model takes them, got tuple"),
        (torch.ones(0, 2, 7, 11), "as the model takes them, got Tensor"),
    ],
    ids=["labels", "bytes", "dataset", "empty", "none"],
)
def test_images_that_are_no_batches(images: Any, message: str) -> None:
    """Refused before the model has seen any."""
    with pytest.raises(TypeError, match=message):
        tcnn_probe.ablate(Chain(), "near", "mean", images=images)


def test_others_hooks_see_what_is_ablated() -> None:
    model, seen = Chain(), []
    model.near.register_forward_hook(lambda module, args, output: seen.append(output))
    with tcnn_probe.ablate(model, "near"):
        model(chain_images())
    assert torch.equal(seen[0], model.near.bias[:, None, None].expand_as(seen[0]))  # type: ignore[index]


@torch.no_grad()
def test_nested() -> None:
    """Of one head's output the last entered decides; gates and outputs are apart; the end may come in any order."""
    model, x = Chain(), chain_images()
    before, heads = State(model), {"near": [0, 1]}

    def output(*ablations: Any) -> Tensor:
        with ExitStack() as stack:
            for ablation in ablations:
                stack.enter_context(ablation)
            return model(x)

    def replaced(heads: Any) -> Any:
        return tcnn_probe.ablate(model, heads, "replaced", source=other_chain())

    zero, mean, other = tcnn_probe.ablate(model, heads), tcnn_probe.ablate(model, heads, "mean"), replaced(heads)
    gates = tcnn_probe.ablate(model, {"near": 1}, "positional")
    torch.testing.assert_close(output(zero, mean, other), output(other))
    torch.testing.assert_close(output(zero, other, mean), output(mean))
    torch.testing.assert_close(output(mean, gates, other, zero), output(zero))
    second = tcnn_probe.ablate(model, {"near": 1})
    torch.testing.assert_close(output(other, second), output(replaced({"near": 0}), second))
    gated, content = output(gates), tcnn_probe.ablate(model, "near", "content")
    model.near.gating[:] = torch.tensor([-40.0, 40, *[-40] * 7])
    torch.testing.assert_close(output(content, gates), model(x))
    model.near.load_state_dict(Chain().near.state_dict())
    zero.__enter__()
    gates.__enter__()
    zero.__exit__(None, None, None)
    assert torch.equal(model(x), gated)
    gates.__exit__(None, None, None)
    before.check(model)


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
def test_recorded(inside: bool) -> None:
    """Gates and entropies are those of what runs; what is run besides is not recorded."""
    model, x = Chain(), chain_images()

    def enter(stack: ExitStack) -> None:
        stack.enter_context(tcnn_probe.ablate(model, {"near": [1, 2]}, "positional"))
        stack.enter_context(tcnn_probe.ablate(model, {"near": 5}, "content"))
        stack.enter_context(tcnn_probe.ablate(model, {"near": [2, 4]}, "mean"))
        stack.enter_context(tcnn_probe.ablate(model, {"near": [6]}, "replaced", source=other_chain()))

    with ExitStack() as stack:
        if inside:
            enter(stack)
        recorder = stack.enter_context(tcnn_probe.record(model))
        if not inside:
            enter(stack)
        output = model(x)
        recorder.mark(epoch=0)
        recorder.remove()
        assert torch.equal(model(x), output)
    near = recorder.dataset.sel(epoch=0, layer="near")
    gates = torch.sigmoid(model.near.gating)
    gates[[1, 2, 5]] = torch.tensor([1.0, 1, 0])
    torch.testing.assert_close(torch.tensor(near.gate.values[:9]), gates.double())
    assert near.gate.values[[1, 2, 5]].tolist() == [1, 1, 0]
    assert abs(near.entropy - near.positional_entropy).values[[1, 2]].max() < 1e-6
    assert abs(near.entropy - near.content_entropy).values[5] < 1e-6
    assert near.images == 3


@torch.no_grad()
@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
def test_a_layer_that_is_all_of_the_model_is_recorded_as_it_runs(inside: bool) -> None:
    model = scatter(GPSA(2, 5, 3, padding=1)).eval()
    ablations = [tcnn_probe.ablate(model, mode="positional"), tcnn_probe.ablate(model, {"": [1, 3]})]
    recorder = tcnn_probe.record(model) if not inside else None
    with ablations[0], ablations[1]:
        recorder = recorder or tcnn_probe.record(model)
        model(chain_images())
        recorder.mark(epoch=0)
    recorder.remove()
    assert abs(recorder.dataset.entropy - recorder.dataset.positional_entropy).max() < 1e-6


class Single(nn.Module):
    """One head, which a softmax shows by where its result is stored."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


@torch.no_grad()
def test_a_single_head_is_recorded_while_it_is_ablated() -> None:
    model, x = nn.Sequential(Single()).eval(), torch.randn(2, 5, 7)
    with tcnn_probe.ablate(model, "0"), tcnn_probe.record(model) as recorder:
        assert (model(x) == 0).all()
        recorder.mark(epoch=0)
    assert recorder.layers == ("0",)


def test_explained() -> None:
    model, x = vit(), vit_images(2)
    for method in ("class_attention", "rollout"):
        plain = tcnn_probe.saliency(model, x, target=1, method=method)
        with tcnn_probe.ablate(model, "blocks.0.attn"):
            ablated = tcnn_probe.saliency(model, x, target=1, method=method)
        with tcnn_probe.ablate(model, "blocks.0.attn", "replaced", source=model):
            replaced = tcnn_probe.saliency(model, x, target=1, method=method)
        assert abs(ablated - plain).max() > 1e-3 * abs(plain).max()
        assert abs(replaced - plain).max() < 1e-4 * abs(plain).max()


@torch.no_grad()
@pytest.mark.parametrize("case", ["positional", "zero, vit"])
def test_copies_are_not_ablated(case: str) -> None:
    make, given, options = CASES[case]
    model, x = make(), given()
    plain, file, before = model(x), io.BytesIO(), Trace(model)
    with tcnn_probe.ablate(model, **options):
        ablated = model(x)
        torch.save(model, file)
        file.seek(0)
        copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
        for twin in copies:
            assert torch.equal(twin(x), plain)
        assert torch.equal(model(x), ablated)
    for twin in copies:
        assert torch.equal(twin(x), plain)
        assert Trace(twin).hooks == before.hooks


@pytest.mark.parametrize("case", ["images", "positional", "replaced", "zero, vit", "replaced, vit"])
def test_under_autocast_inference_and_channels_last(case: str) -> None:
    make, given, options = CASES[case]
    model, x = make(), given()
    with tcnn_probe.ablate(model, **options):
        expected = model(x).detach()
        size = float(expected.abs().max())
        with torch.inference_mode():
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4 * size)
        found = model(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * size)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.1 * size)


def test_training_with_dropout() -> None:
    """What is run besides draws no random numbers, and is without dropout."""
    model, x = vit(attn_drop_rate=0.4, proj_drop_rate=0.2), vit_images()
    source = vit(seed=2, attn_drop_rate=0.4).train()
    model.train()
    found = []
    for options in ({}, {"mode": "replaced", "source": source}, {"mode": "replaced", "source": source}):
        torch.manual_seed(0)
        with tcnn_probe.ablate(model, "blocks.1.attn", **options):  # type: ignore[arg-type]
            found.append((model(x), torch.rand(1)))
    assert torch.equal(found[1][0], found[2][0])
    assert found[0][1] == found[1][1]
    found[1][0].sum().backward()
    assert all(parameter.grad is None for parameter in source.parameters())
    assert source.blocks[0].attn.attn_drop.training
    assert model.blocks[0].attn.qkv.weight.grad is not None


def test_a_checkpointed_layer() -> None:
    model, x = vit(), vit_images().requires_grad_()
    with tcnn_probe.ablate(model, **OF_VIT):  # type: ignore[arg-type]
        model(x).sum().backward()
        expected, x.grad = x.grad, None
        model.set_grad_checkpointing()
        model.train()
        checkpoint(model, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, expected)


class Again(nn.Module):
    """Calls its layer twice; the second layer calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = scatter(GPSA(3, 3, (3, 5), padding=(1, 2)))
        self.itself = Itself()

    def forward(self, x: Tensor) -> Tensor:
        return self.itself(self.layer(self.layer(x).tanh()).flatten(2).mT)


class Itself(nn.Module):
    """Three heads of one channel, of the tokens and then of what it makes of them."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        q = x.mT[..., None]
        x = nn.functional.scaled_dot_product_attention(q, q, q)[..., 0].mT
        return self(x, depth - 1) if depth else x


@torch.no_grad()
def test_layers_called_twice_and_by_themselves() -> None:
    model, x = Again(), torch.randn(2, 3, 7, 11)
    hand, plain = copy.deepcopy(model), model.layer(x)
    hand.layer.weight[:, :, 1, 2] = 0
    tokens = hand.layer(hand.layer(x).tanh()).flatten(2).mT.clone()
    once = hand.itself(tokens, 0) * torch.tensor([0, 1, 1])
    with tcnn_probe.ablate(model, {"layer": 7, "itself": 0}):
        torch.testing.assert_close(model(x), hand.itself(once, 0))
        torch.testing.assert_close(model.layer(x), hand.layer(x))
    assert torch.equal(model.layer(x), plain)


@torch.no_grad()
def test_compiled_inside() -> None:
    model, x = vit(), vit_images()
    plain = model(x)
    with tcnn_probe.ablate(model, **OF_VIT):  # type: ignore[arg-type]
        expected = model(x)
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), plain)
    with pytest.raises(TypeError, match="is compiled"):
        tcnn_probe.ablate(compiled)
    torch._dynamo.reset()


@torch.no_grad()
def test_torchs_encoder_has_no_fast_path_meanwhile() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 12)
    twin = copy.deepcopy(model)
    twin.layers[1].self_attn.out_proj.weight.data.unflatten(1, (6, 2))[:, 1] = 0  # type: ignore[union-attr, operator]
    with tcnn_probe.ablate(model, {"layers.1.self_attn": 1}):
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-4)


def test_what_did_not_happen_is_an_error() -> None:
    model, x = Chain(), chain_images()
    model.unused = scatter(GPSA(2, 2, 3, padding=1))
    before = State(model)
    with pytest.raises(RuntimeError, match="the model ran, and 'unused' was not ablated"):  # noqa: SIM117
        with tcnn_probe.ablate(model, ["near", "unused"]):
            model(x)
    before.check(model)
    ablation = tcnn_probe.ablate(model, {"unused": 2})
    assert repr(ablation) == "Ablation(mode='zero', heads={'unused': (2,)})"
    with ablation as entered, pytest.raises(RuntimeError, match="entered already"), ablation:
        pass  # nothing ran
    assert entered is ablation
    with tcnn_probe.ablate(model, "*", "mean") as ablation:
        model(x)
    assert ablation.heads["near"] == tuple(range(9))
    assert ablation.mode == "mean"
    blocks = vit()
    with (
        pytest.raises(RuntimeError, match=r"'patch_embed' ran and asked for no attention"),
        tcnn_probe.ablate(blocks, "patch_embed"),
    ):
        blocks(vit_images())
