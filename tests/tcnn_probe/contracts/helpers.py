"""Small vision transformer, its attention written out in float64,
and everything that a recorder could leave behind.
"""

import sys
from typing import Any

import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tcnn_probe

__all__ = [
    "Trace",
    "check_entropies",
    "clean",
    "entropies",
    "entropy",
    "global_state",
    "images",
    "recorded",
    "vit",
]


def vit(seed: int = 0, *, depth: int = 2, **options: Any) -> VisionTransformer:
    """Return blocks of 3 heads on 1 + 5 x 7 tokens,
    with peaked attention that differs between the heads.
    """
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=(20, 28),
        patch_size=4,
        in_chans=2,
        num_classes=5,
        embed_dim=12,
        depth=depth,
        num_heads=3,
        **options,
    )
    with torch.no_grad():
        for block in model.blocks:
            # With timm's initial weights, attention is so uniform that a wrong entropy would hardly
            # differ.
            block.attn.qkv.weight.normal_(std=0.7)
            block.attn.qkv.bias.normal_()
    return model.eval()


def images(count: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 20, 28, generator=torch.Generator().manual_seed(seed))


def entropy(attention: Attention, tokens: Tensor) -> Tensor:
    """Return entropies (B, heads) of a layer for its input (B, N, C),
    as means over queries, in float64.
    """
    weight = attention.qkv.weight.detach().double()
    bias = attention.qkv.bias.detach().double()
    q, k, _ = (
        (tokens.detach().double() @ weight.T + bias)
        .unflatten(-1, (3, attention.num_heads, -1))
        .unbind(2)
    )
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
    return -(weights * weights.log()).sum(-1).mean(-1)


def entropies(model: nn.Module, x: Tensor) -> Tensor:
    """Return entropies (layers, heads) as means over images and queries,
    for the inputs of the layers in a forward.
    """
    layer_entropies: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    for layer in layers:
        # Forwards are replaced instead of hooked, because the recorder's hooks are under test.
        def forward(tokens: Tensor, *args: Any, layer: Any = layer, **kwargs: Any) -> Tensor:
            layer_entropies.append(entropy(layer, tokens).mean(0))
            return type(layer).forward(layer, tokens, *args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for layer in layers:
            del layer.forward
    return torch.stack(layer_entropies)


def check_entropies(
    recorder: tcnn_probe.Recorder,
    expected: Tensor,
    mark: int = -1,
    images: int | None = None,
) -> None:
    """Check a mark's images and entropies (layers, heads),
    up to the rounding of logits of at most 10 in float32.
    """
    ds = recorder.dataset.isel(epoch=mark)
    torch.testing.assert_close(torch.as_tensor(ds.entropy.values), expected, rtol=1e-5, atol=1e-6)
    if images is not None:
        assert set(ds.images.values.tolist()) == {images}


def recorded(model: nn.Module, *batches: Any, **options: Any) -> tcnn_probe.Recorder:
    """Return a recorder after one epoch; a tuple is a batch of several inputs."""
    with torch.no_grad(), tcnn_probe.record(model, **options) as recorder:
        for batch in batches:
            model(*batch) if isinstance(batch, tuple) else model(batch)
        recorder.mark(epoch=0)
    return recorder


_PLAIN = (dict, set, list, tuple)  # torch.export creates these anew


class Trace:
    """Everything in a model and in torch that a recorder could leave changed,
    with objects by identity.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self.classes = {name: type(module) for name, module in modules.items()}
        self.attributes = {
            name: {
                key: None if isinstance(value, _PLAIN) else id(value)
                for key, value in vars(module).items()
            }
            for name, module in modules.items()
        }
        containers = {
            (name, key): list(value.items()) if isinstance(value, dict) else sorted(map(str, value))
            for name, module in modules.items()
            for key, value in vars(module).items()
            if isinstance(value, _PLAIN) and key not in ("_parameters", "_buffers")
        }
        # Hooks are compared in order.
        self.hooks = {place: value for place, value in containers.items() if "hooks" in place[1]}
        self.containers = {
            place: value for place, value in containers.items() if "hooks" not in place[1]
        }
        # torch has no public list of the hooks of a tensor.
        self.parameters = {
            name: (
                id(p),
                p.requires_grad,
                None if not p._backward_hooks else list(p._backward_hooks.items()),
                [
                    key for key in vars(p) if not key.startswith("_dynamo")
                ],  # torch.compile leaves this mark
            )
            for name, p in model.named_parameters()
        }
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.torch = global_state()

    def __eq__(self, trace: object) -> bool:
        before = dict(vars(self))
        after = dict(vars(trace))
        state_before = before.pop("state")
        state_after = after.pop("state")
        same = list(state_before) == list(state_after) and all(
            torch.equal(value, state_after[name]) for name, value in state_before.items()
        )
        return before == after and same

    __hash__ = None  # type: ignore[assignment]


def global_state() -> dict[str, Any]:
    """Return the hooks on all modules, the modes and the switches of torch in this thread."""
    # torch keeps hooks on all modules in private dicts with such names.
    hooks = {
        name: list(value.items())
        for name, value in vars(global_hooks).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    frames = sys.modules.get("torch._dynamo.eval_frame")
    eager = getattr(frames, "_force_eager_nested_compile", None)
    return {
        **hooks,
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        # While one of these is set, compiled functions run eagerly.
        "eager modes": getattr(eager, "depth", 0),
        "stance": frames is not None and frames._stance.stance,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch function": torch._C._is_torch_function_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


def clean() -> bool:
    """Return whether torch is in the state of a new interpreter."""
    return not any(
        value for name, value in global_state().items() if "hooks" in name or "modes" in name
    )
