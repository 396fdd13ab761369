"""Ways to run an ablated model: in low precision,
in training, checkpointed, compiled, and with repeated calls.
"""

import copy
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tcnn_probe
from tcnn_model import GPSA
from tests.extras import need
from tests.tcnn_probe.contracts.helpers import images as vit_images
from tests.tcnn_probe.contracts.helpers import vit
from tests.tcnn_probe.interventions.ablations import CASES, OF_VIT
from tests.tcnn_probe.networks import scatter


@pytest.mark.parametrize("case", ["images", "positional", "replaced", "zero, vit", "replaced, vit"])
def test_under_autocast_inference_and_channels_last(case: str) -> None:
    make, make_images, options = CASES[case]
    model = make()
    x = make_images()
    with tcnn_probe.ablate(model, **options):
        expected = model(x).detach()
        size = float(expected.abs().max())
        with torch.inference_mode():
            # Inference mode and channels_last use other kernels, which add up in another order.
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4 * size)
        output = model(x.to(memory_format=torch.channels_last))
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4 * size)
        with torch.autocast("cpu", torch.bfloat16):
            # bfloat16 has 8 significant bits, and is rounded in every layer.
            torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.1 * size)


def test_training_an_ablated_model_with_dropout() -> None:
    """The additional forwards draw no random numbers, and have no dropout."""
    model = vit(attn_drop_rate=0.4, proj_drop_rate=0.2)
    x = vit_images()
    source = vit(seed=2, attn_drop_rate=0.4).train()
    model.train()
    runs = []
    for options in (
        {},
        {"mode": "replaced", "source": source},
        {"mode": "replaced", "source": source},
    ):
        torch.manual_seed(0)
        with tcnn_probe.ablate(model, "blocks.1.attn", **options):  # type: ignore[arg-type]
            # The next random number shows whether the ablation has drawn any.
            runs.append((model(x), torch.rand(1)))
    assert torch.equal(runs[1][0], runs[2][0])
    assert runs[0][1] == runs[1][1]
    runs[1][0].sum().backward()
    assert all(parameter.grad is None for parameter in source.parameters())
    assert source.blocks[0].attn.attn_drop.training
    assert model.blocks[0].attn.qkv.weight.grad is not None


def test_ablation_of_a_checkpointed_layer() -> None:
    model = vit()
    x = vit_images().requires_grad_()
    with tcnn_probe.ablate(model, **OF_VIT):
        model(x).sum().backward()
        expected = x.grad
        x.grad = None
        model.set_grad_checkpointing()
        model.train()
        checkpoint(model, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, expected)


class Again(nn.Module):
    """Model that calls its layer twice, and then a layer that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = scatter(GPSA(3, 3, (3, 5), padding=(1, 2)))
        self.itself = Itself()

    def forward(self, x: Tensor) -> Tensor:
        return self.itself(self.layer(self.layer(x).tanh()).flatten(2).mT)


class Itself(nn.Module):
    """Attention with three heads of one channel, which is applied to its own output as well."""

    def forward(self, x: Tensor, depth: int = 1) -> Tensor:
        q = x.mT[..., None]
        x = nn.functional.scaled_dot_product_attention(q, q, q)[..., 0].mT
        return self(x, depth - 1) if depth else x


@torch.no_grad()
def test_layers_called_twice_or_by_themselves() -> None:
    model = Again()
    x = torch.randn(2, 3, 7, 11)
    hand = copy.deepcopy(model)
    plain = model.layer(x)
    # Head 7 of a 3 x 5 kernel is the tap (1, 2).
    hand.layer.weight[:, :, 1, 2] = 0
    tokens = hand.layer(hand.layer(x).tanh()).flatten(2).mT.clone()
    once = hand.itself(tokens, 0) * torch.tensor([0, 1, 1])
    with tcnn_probe.ablate(model, {"layer": 7, "itself": 0}):
        torch.testing.assert_close(model(x), hand.itself(once, 0))
        torch.testing.assert_close(model.layer(x), hand.layer(x))
    assert torch.equal(model.layer(x), plain)


@pytest.mark.study
@torch.no_grad()
def test_ablated_model_may_be_compiled() -> None:
    model = vit()
    x = vit_images()
    plain = model(x)
    with tcnn_probe.ablate(model, **OF_VIT):
        expected = model(x)
        compiled = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), plain)
    with tcnn_probe.ablate(compiled, **OF_VIT):
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), plain)
    # Remaining graphs would count towards the limit of recompilations in later tests.
    torch._dynamo.reset()


@torch.no_grad()
def test_fast_path_of_torchs_encoder_is_disabled_by_an_ablation() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 12)
    twin = copy.deepcopy(model)
    # Head 1 has these two input channels of the projection.
    twin.layers[1].self_attn.out_proj.weight.data.unflatten(1, (6, 2))[:, 1] = 0  # type: ignore[union-attr, operator]
    with tcnn_probe.ablate(model, {"layers.1.self_attn": 1}):
        torch.testing.assert_close(model(x), twin(x), rtol=1e-4, atol=1e-4)


def offloaded(model: nn.Module) -> nn.Module:
    accelerate = need("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def compiled_in_parts(model: nn.Module) -> nn.Module:
    blocks = model.get_submodule("blocks")
    assert isinstance(blocks, nn.Sequential)
    blocks[0] = torch.compile(blocks[0], backend="eager")
    blocks[1].compile(backend="eager")
    return model


def with_compiled_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    return model


def with_patched_forward(model: nn.Module) -> nn.Module:
    blocks = model.get_submodule("blocks")
    blocks.forward = types.MethodType(type(blocks).forward, blocks)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "prepare",
    [offloaded, compiled_in_parts, with_compiled_forward, with_patched_forward],
)
@torch.no_grad()
def test_grids_are_found_if_forwards_were_replaced(
    prepare: Callable[[nn.Module], nn.Module],
) -> None:
    """The copy that shows the grids must not run the forwards of the original."""
    model, x = vit(), vit_images()
    with tcnn_probe.ablate(model, **OF_VIT, mode="uniform"):
        expected = model(x)
    model = prepare(model)
    with tcnn_probe.ablate(model, **OF_VIT, mode="uniform"):
        torch.testing.assert_close(model(x), expected)
    torch._dynamo.reset()
