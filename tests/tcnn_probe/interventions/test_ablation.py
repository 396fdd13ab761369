"""How an ablation behaves: what is left of it, what is inside of what, what others see of it."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import tcnn_probe
from tcnn_model import GPSA
from tests.tcnn_probe.contracts.helpers import Trace, clean, vit
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.networks import Chain, scatter


def chain_images(count: int = 3) -> Tensor:
    return torch.randn(count, 2, 7, 11, generator=torch.Generator().manual_seed(1))


CHAIN_MODES: list[dict[str, Any]] = [
    {"heads": {"near": [1, 3]}, "mode": "zero"},
    {"heads": {"near": [1, 3], "far": 7}, "mode": "mean"},
    {"heads": "far", "mode": "mean", "images": chain_images(5)},
    {"mode": "positional"},
    {"heads": {"*": slice(2, 5)}, "mode": "content"},
    {"heads": {"near": [1]}, "mode": "replaced", "source": vit()},  # exchanged below
]
VIT_MODES: list[dict[str, Any]] = [
    {"mode": "zero"},
    {"heads": {"blocks.*": [0, 2]}, "mode": "mean"},
    {"heads": "blocks.1.attn", "mode": "mean", "images": vit_images(5)},
    {"heads": {"blocks.1.attn": 1}, "mode": "replaced", "source": vit(seed=3)},
]


def other_chain() -> Chain:
    source = Chain()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(1.2)
    return source


CHAIN_MODES[-1]["source"] = other_chain()
CASES = [(Chain, chain_images, options) for options in CHAIN_MODES] + [(vit, vit_images, o) for o in VIT_MODES]
IDS = [f"{make.__name__}-{options.get('mode')}-{'images' in options}" for make, _, options in CASES]
every_mode = pytest.mark.parametrize(("make", "given", "options"), CASES, ids=IDS)


class State:
    """The model as it is, to the very parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.trace = Trace(model)
        self.parameters = [
            (name, key, id(p)) for name, m in model.named_modules() for key, p in m._parameters.items() if p is not None
        ]
        self.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.random = torch.random.get_rng_state()

    def check(self, model: nn.Module) -> None:
        now = State(model)
        assert now.trace == self.trace
        assert now.parameters == self.parameters
        torch.testing.assert_close(now.gradients, self.gradients, rtol=0, atol=0)
        assert torch.equal(now.random, self.random)
        assert not _global_optimizer_post_hooks
        assert clean()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert clean()


@every_mode
def test_nothing_is_left(make: Callable[[], nn.Module], given: Callable[[], Tensor], options: dict[str, Any]) -> None:
    model, x = make(), given()
    model(x).sum().backward()
    plain, before = model(x).detach(), State(model)
    with tcnn_probe.ablate(model, **options):
        assert not torch.allclose(model(x), plain, atol=1e-4)
        parameters = [id(p) for p in model.parameters()]
        assert parameters == [key for *_, key in before.parameters]
        torch.testing.assert_close(dict(model.state_dict()), before.trace.state, rtol=0, atol=0)
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    before.check(model)
    assert torch.equal(model(x), plain)


class Stop(nn.Module):
    """Raises in the middle of the layer before it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.armed = error, True

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise self.error
        return x


def with_stop(model: nn.Module, error: BaseException) -> Stop:
    """A model that stops inside of its last attention layer, or right after what is there before it."""
    stop = Stop(error)
    if isinstance(model, Chain):
        layer = model.far
        values = layer.values
        layer.__dict__["values"] = lambda x: values(stop(x))
    else:
        model.blocks[1].attn.proj_drop = stop  # type: ignore[union-attr, index]
    return stop


@every_mode
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("caught", ["inside", "outside"])
def test_nothing_is_left_by_an_exception_in_a_forward(
    make: Callable[[], nn.Module],
    given: Callable[[], Tensor],
    options: dict[str, Any],
    error: BaseException,
    caught: str,
) -> None:
    model, x = make(), given()
    stop = with_stop(model, error)
    if "images" in options or "source" in options:
        stop.armed = False
    expected = None
    if caught == "inside":
        stop.armed = False
        with tcnn_probe.ablate(model, **options):
            expected = model(x)
    before = State(model)
    if caught == "outside":
        with pytest.raises(type(error)), tcnn_probe.ablate(model, **options):  # noqa: PT012
            stop.armed = True
            model(x)
    else:
        with tcnn_probe.ablate(model, **options):
            stop.armed = True
            with pytest.raises(type(error)):
                model(x)
            stop.armed = False
            torch.testing.assert_close(model(x), expected)
    before.check(model)


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_nothing_is_left_by_an_exception_in_the_body(error: BaseException) -> None:
    model = Chain()
    before = State(model)
    with pytest.raises(type(error)), tcnn_probe.ablate(model, mode="positional"):  # noqa: PT012
        model(chain_images())
        raise error
    before.check(model)


def test_nothing_is_left_if_taking_means_fails() -> None:
    model = Chain()
    before = State(model)
    for bad, error in (
        ([chain_images(), "no images"], TypeError),
        ([chain_images(), torch.ones(1, 2, 5, 5)], ValueError),
    ):
        with pytest.raises(error), tcnn_probe.ablate(model, mode="mean", images=bad):
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
        ([chain_images(), torch.ones(3)], r"of a pair .* give the first: got torch.float32 of shape \(3,\)"),
        (chain_images().byte(), r"floating point; .* got torch.uint8 of shape \(3, 2, 7, 11\)"),
        (
            TensorDataset(chain_images()),
            "expected batches of images, got single ones: TensorDataset; give a DataLoader",
        ),
        ([()], "as the model takes them, got tuple"),
        (torch.ones(0, 2, 7, 11), "as the model takes them, got Tensor"),
    ],
)
def test_images_that_are_no_batches(images: Any, message: str) -> None:
    """Refused before the model has seen any."""
    model = Chain()
    model.register_forward_pre_hook(lambda module, args: pytest.fail("ran"))
    with pytest.raises(TypeError, match=message):
        tcnn_probe.ablate(model, "near", "mean", images=images)


def test_pairs_of_a_loader() -> None:
    model, x = Chain(), chain_images()
    with torch.no_grad():
        with tcnn_probe.ablate(model, "near", "mean", images=[(x[:2], torch.arange(2)), [x[2:], torch.arange(1)]]):
            found = model(x)
        with tcnn_probe.ablate(model, "near", "mean", images=x):
            torch.testing.assert_close(model(x), found)


def test_others_hooks_stay_where_they_are() -> None:
    model, seen = Chain(), []
    model.near.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    model.near.register_forward_hook(lambda module, args, output: seen.append(float(output.detach().abs().amax())))
    before = State(model)
    with tcnn_probe.ablate(model, "near"), model.near.register_forward_hook(lambda *args: seen.append("late")):
        model(chain_images())
    before.check(model)
    assert model.near.bias is not None
    assert seen == ["pre", float(model.near.bias.detach().abs().amax()), "late"]  # they see what is ablated


def test_nested() -> None:
    """Of one head's output the last entered decides; gates and outputs are apart."""
    model, x, source = Chain(), chain_images(), other_chain()
    with torch.no_grad():
        with tcnn_probe.ablate(model, {"near": [0, 1]}):
            zero = model(x)
            with tcnn_probe.ablate(model, {"near": [0, 1]}):
                assert torch.equal(model(x), zero)
            with tcnn_probe.ablate(model, {"near": [0, 1]}, "mean"):
                mean = model(x)
                with tcnn_probe.ablate(model, {"near": [0, 1]}, "replaced", source=source):
                    replaced = model(x)
                    with tcnn_probe.ablate(model, {"near": [0, 1]}):
                        assert torch.equal(model(x), zero)
                    with tcnn_probe.ablate(model, {"near": [1]}):
                        mixed = model(x)
            assert torch.equal(model(x), zero)
        for mode, options, expected in (("mean", {}, mean), ("replaced", {"source": source}, replaced)):
            with tcnn_probe.ablate(model, {"near": [0, 1]}, mode, **options):  # type: ignore[arg-type]
                torch.testing.assert_close(model(x), expected)
        with (
            tcnn_probe.ablate(model, {"near": 0}, "replaced", source=source),
            tcnn_probe.ablate(model, {"near": 1}, "zero"),
        ):
            torch.testing.assert_close(model(x), mixed)
        with tcnn_probe.ablate(model, "near", "content"), tcnn_probe.ablate(model, {"near": 2}, "positional"):
            model.near.gating.data[:] = torch.tensor([-40.0, -40, 40, *[-40] * 6])
            gated = model(x)
        torch.testing.assert_close(model(x), gated)


def test_means_under_other_ablations_and_of_some_of_the_heads() -> None:
    """Means are of heads as the enclosing ablations have them; of what is zeroed inside nothing is left."""
    model, x, seen = nn.Sequential(scatter(GPSA(2, 5, 3, padding=1))), chain_images(), chain_images(4)
    with torch.no_grad(), tcnn_probe.ablate(model, "0", "positional"):
        with tcnn_probe.ablate(model, {"0": [0, 3, 4, 5, 6, 7, 8]}):
            expected = model(seen).mean(0)  # of 1 and 2, and the bias
        with tcnn_probe.ablate(model, {"0": [0, 1, 2]}):
            expected = expected + model(x) - model[0].bias[:, None, None]
        with (
            tcnn_probe.ablate(model, {"0": [0, 1, 2]}, "mean", images=seen),
            tcnn_probe.ablate(model, {"0": 0}),
        ):
            torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_left_out_of_order() -> None:
    model, x = Chain(), chain_images()
    before = State(model)
    with torch.no_grad():
        plain = model(x)
        with tcnn_probe.ablate(model, {"near": 1}, "positional"):
            alone = model(x)
        first, second = tcnn_probe.ablate(model, {"near": 0}), tcnn_probe.ablate(model, {"near": 1}, "positional")
        first.__enter__()
        second.__enter__()
        model(x)
        first.__exit__(None, None, None)
        assert torch.equal(model(x), alone)
        second.__exit__(None, None, None)
        assert torch.equal(model(x), plain)
    before.check(model)


def test_several_at_once_on_several_models() -> None:
    models, x = [Chain(), other_chain()], chain_images()
    with torch.no_grad(), ExitStack() as stack:
        for model in models:
            stack.enter_context(tcnn_probe.ablate(model, "near"))
            stack.enter_context(tcnn_probe.ablate(model, "far"))
        for model in models:
            assert model.far.bias is not None
            torch.testing.assert_close(model(x), model.far.bias.expand(3, -1))


def test_entered_again() -> None:
    model, x = Chain(), chain_images()
    ablation = tcnn_probe.ablate(model, {"near": 2})
    assert repr(ablation) == "Ablation(mode='zero', heads={'near': (2,)})"
    with torch.no_grad():
        with ablation as entered:
            assert entered is ablation
            once = model(x)
            with pytest.raises(RuntimeError, match="entered already"), ablation:
                pass
            assert torch.equal(model(x), once)
        with ablation:
            assert torch.equal(model(x), once)
        assert not torch.equal(model(x), once)


@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
def test_recorded(inside: bool) -> None:
    """Gates and entropies are those of what runs; what is run besides is not recorded."""
    model, x, source = Chain(), chain_images(), other_chain()

    def ablated() -> Iterator[Any]:
        yield tcnn_probe.ablate(model, {"near": [1, 2]}, "positional")
        yield tcnn_probe.ablate(model, {"near": 5}, "content")
        yield tcnn_probe.ablate(model, {"near": [2, 4]}, "mean")
        yield tcnn_probe.ablate(model, {"near": [6]}, "replaced", source=source)

    with ExitStack() as stack, torch.no_grad():
        if inside:
            for ablation in ablated():
                stack.enter_context(ablation)
        recorder = stack.enter_context(tcnn_probe.record(model))
        if not inside:
            for ablation in ablated():
                stack.enter_context(ablation)
        output = model(x)
        recorder.mark(epoch=0)
        recorder.remove()
        assert torch.equal(model(x), output)
    with torch.no_grad(), tcnn_probe.record(model) as plain:
        model(x)
        plain.mark(epoch=0)
    found, own = recorder.dataset.sel(epoch=0), plain.dataset.sel(epoch=0)
    near, gates = found.sel(layer="near"), own.gate.sel(layer="near").values.copy()
    gates[[1, 2, 5]] = 1, 1, 0
    assert (near.gate.values == gates)[:9].all()
    assert abs(near.entropy - near.positional_entropy).values[[1, 2]].max() < 1e-6
    assert abs(near.entropy - near.content_entropy).values[5] < 1e-6
    assert (found.images == 3).all()
    assert own.gate.sel(layer="near").values[1] < 1


def test_a_layer_that_is_all_of_the_model_is_recorded_as_it_runs() -> None:
    model, x = scatter(GPSA(2, 5, 3, padding=1)).eval(), chain_images()
    with torch.no_grad(), tcnn_probe.ablate(model, mode="positional"), tcnn_probe.record(model) as recorder:
        model(x)
        recorder.mark(epoch=0)
    assert abs(recorder.dataset.entropy - recorder.dataset.positional_entropy).max() < 1e-6


class Single(nn.Module):
    """One head, which a softmax shows by where its result is stored."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT, -1) @ x


def test_a_single_head_is_recorded_while_it_is_ablated() -> None:
    model, x = nn.Sequential(Single()).eval(), torch.randn(2, 5, 7)
    with torch.no_grad(), tcnn_probe.ablate(model, "0"), tcnn_probe.record(model) as recorder:
        assert (model(x) == 0).all()
        recorder.mark(epoch=0)
    assert recorder.layers == ("0",)


@pytest.mark.parametrize("inside", [True, False], ids=["recorded inside", "ablated inside"])
@pytest.mark.parametrize("fused", [True, False])
def test_softmax_attention_is_recorded_as_it_is(inside: bool, fused: bool) -> None:
    model, x = vit(), vit_images()
    for block in model.blocks:
        block.attn.fused_attn = fused
    linear = tcnn_probe.Probe(
        kind="linear",
        module_type=nn.Linear,
        variables={"size": tcnn_probe.Variable(("layer",), "1", "size", "Of the outputs, by image.")},
        measure=lambda call: {"size": call.output.abs().flatten(1).mean(1)},
    )
    probes = [*tcnn_probe.DEFAULT, linear]
    with torch.no_grad(), tcnn_probe.record(model, probes=probes) as recorder:
        model(x)
        recorder.mark(epoch=0)
    options: dict[str, Any] = {"heads": {"blocks.1.attn": [0, 2]}, "mode": "replaced", "source": vit(seed=4)}
    with torch.no_grad(), ExitStack() as stack:
        if inside:
            stack.enter_context(tcnn_probe.ablate(model, **options))
        again = stack.enter_context(tcnn_probe.record(model, probes=probes))
        if not inside:
            stack.enter_context(tcnn_probe.ablate(model, **options))
        model(x)
        again.mark(epoch=0)
    assert again.layers == recorder.layers
    assert again.dataset.entropy.equals(recorder.dataset.entropy)
    assert (again.tree["linear"].dataset.images == 3).all()
    assert not again.unsupported


def test_explained() -> None:
    model, x = vit(), vit_images(2)
    for method in ("class_attention", "input_x_gradient", "rollout"):
        plain = tcnn_probe.saliency(model, x, target=1, method=method)
        with tcnn_probe.ablate(model, "blocks.0.attn"):
            ablated = tcnn_probe.saliency(model, x, target=1, method=method)
        with tcnn_probe.ablate(model, "blocks.0.attn", "replaced", source=model):
            replaced = tcnn_probe.saliency(model, x, target=1, method=method)
        assert abs(ablated - plain).max() > 1e-3 * abs(plain).max()
        assert abs(replaced - plain).max() < 1e-4 * abs(plain).max()


@pytest.mark.parametrize("make", [Chain, vit])
def test_copies_are_not_ablated(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = vit_images() if make is vit else chain_images()
    with torch.no_grad():
        plain = model(x)
        with tcnn_probe.ablate(model):
            ablated, file = model(x), io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
            for twin in copies:
                assert torch.equal(twin(x), plain)
            assert torch.equal(model(x), ablated)
        for twin in copies:
            assert torch.equal(twin(x), plain)
            assert not any(
                hooks for hooks in Trace(twin).hooks.values() if any("intervening" in repr(h) for h in hooks)
            )


@pytest.mark.parametrize(("make", "given"), [(Chain, chain_images), (vit, vit_images)])
def test_under_autocast_inference_and_channels_last(make: Callable[[], nn.Module], given: Callable[[], Tensor]) -> None:
    model, x = make(), given()
    layer = "near" if make is Chain else "blocks.1.attn"
    for options in ({}, {"mode": "mean"}, {"mode": "replaced", "source": model}, {"mode": "mean", "images": x}):
        with tcnn_probe.ablate(model, {layer: [0, 2]}, **options):  # type: ignore[arg-type]
            expected = model(x).detach()
            with torch.inference_mode():
                torch.testing.assert_close(model(x), expected)
            torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected)
            with torch.autocast("cpu", torch.bfloat16):
                found = model(x)
            torch.testing.assert_close(found.float(), expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


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
    assert source.training
    assert source.blocks[0].attn.attn_drop.training
    assert model.blocks[0].attn.qkv.weight.grad is not None


def test_a_checkpointed_layer() -> None:
    model, x = vit(), vit_images().requires_grad_()

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor | None:
        x.grad = None
        run(x).sum().backward()
        return x.grad

    with tcnn_probe.ablate(model, {"blocks.1.attn": [0, 1]}):
        expected = gradient(model)
        model.set_grad_checkpointing()
        model.train()
        found = gradient(lambda x: checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(found, expected)


def test_a_layer_called_twice() -> None:
    layer = scatter(GPSA(3, 3, (3, 5), padding=(1, 2)))

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())

    x, hand = torch.randn(2, 3, 7, 11), copy.deepcopy(layer)
    with torch.no_grad():
        hand.weight[:, :, 1, 2] = 0
        with tcnn_probe.ablate(Again(), {"layer": 7}):
            torch.testing.assert_close(Again()(x), hand(hand(x).tanh()))


def test_parts_called_by_themselves() -> None:
    model, x = vit(), vit_images()
    with torch.no_grad():
        plain = model.forward_features(x)
        with tcnn_probe.ablate(model, "blocks.1.attn"):
            assert not torch.allclose(model.forward_features(x), plain)
            assert not torch.allclose(
                model.blocks[1].attn(torch.ones(1, 5, 12)), model.blocks[0].attn(torch.ones(1, 5, 12))
            )


def test_compiled_inside() -> None:
    model, x = vit(), vit_images()
    with torch.no_grad():
        plain = model(x)
        with tcnn_probe.ablate(model, {"blocks.1.attn": [0, 1]}):
            expected = model(x)
            compiled = torch.compile(model, backend="eager")
            torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(compiled(x), plain)
        with pytest.raises(TypeError, match="is compiled"):
            tcnn_probe.ablate(compiled)
    torch._dynamo.reset()


def test_torchs_encoder_has_no_fast_path_meanwhile() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 12)
    twin = copy.deepcopy(model)
    twin.layers[1].self_attn.out_proj.weight.data.unflatten(1, (6, 2))[:, 1] = 0  # type: ignore[union-attr, operator]
    with torch.no_grad(), tcnn_probe.ablate(model, {"layers.1.self_attn": 1}):
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-5)


class PassedBy(nn.Module):
    """Has attention that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = scatter(GPSA(2, 2, 3, padding=1)), scatter(GPSA(2, 2, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_what_did_not_happen_is_an_error() -> None:
    model, x = PassedBy(), chain_images()
    before = State(model)
    with pytest.raises(RuntimeError, match="the model ran, and 'unused' was not ablated"):  # noqa: SIM117
        with tcnn_probe.ablate(model, ["used", "unused"]):
            model(x)
    before.check(model)
    with tcnn_probe.ablate(model, "unused"):
        pass  # nothing ran
    with tcnn_probe.ablate(model, "*") as ablation:
        model(x)
    assert ablation.heads["used"] == tuple(range(9))
    with pytest.raises(ZeroDivisionError), tcnn_probe.ablate(model, "unused"):  # noqa: PT012
        model(x)
        raise ZeroDivisionError
    blocks = vit()
    with (
        pytest.raises(RuntimeError, match=r"'patch_embed' ran and asked for no attention"),
        tcnn_probe.ablate(blocks, "patch_embed"),
    ):
        blocks(vit_images())
