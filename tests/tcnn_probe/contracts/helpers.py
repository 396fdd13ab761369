"""A small vision transformer, its attention written out in float64, and all that a recorder could leave behind."""

from typing import Any

import torch
from timm.models.vision_transformer import Attention, VisionTransformer
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import tcnn_probe

__all__ = ["Trace", "attention_inputs", "clean", "entropies", "entropy", "images", "recorded", "vit"]

LAYERS = ["blocks.0.attn", "blocks.1.attn"]
HEADS = 3


def vit(seed: int = 0, **options: Any) -> VisionTransformer:
    """Two blocks of 3 heads on 1 + 5 x 7 tokens, with peaked attention that differs between the heads."""
    torch.manual_seed(seed)
    model = VisionTransformer(
        img_size=(20, 28), patch_size=4, in_chans=2, num_classes=5, embed_dim=12, depth=2, num_heads=HEADS, **options
    )
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.7)
            block.attn.qkv.bias.normal_()
    return model.eval()


def images(count: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 20, 28, generator=torch.Generator().manual_seed(seed))


def entropy(attention: Attention, tokens: Tensor) -> Tensor:
    """Of a layer given its input (B, N, C): mean over queries, (B, heads), in float64 from beginning to end."""
    weight, bias = attention.qkv.weight.detach().double(), attention.qkv.bias.detach().double()
    q, k, _ = (tokens.detach().double() @ weight.T + bias).unflatten(-1, (3, attention.num_heads, -1)).unbind(2)
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
    return -(weights * weights.log()).sum(-1).mean(-1)


def attention_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What reaches each attention layer, seen by replacing its forward for a moment."""
    seen: dict[str, Tensor] = {}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    for name, layer in layers.items():

        def forward(tokens: Tensor, *args: Any, name: str = name, layer: Any = layer, **kwargs: Any) -> Tensor:
            seen[name] = tokens
            return type(layer).forward(layer, tokens, *args, **kwargs)

        layer.forward = forward  # type: ignore[method-assign]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for layer in layers.values():
            del layer.forward
    return seen


def entropies(model: nn.Module, x: Tensor) -> Tensor:
    """(layers, heads), mean over all images and queries; to be called while nothing is recorded."""
    inputs = attention_inputs(model, x)
    return torch.stack([entropy(model.get_submodule(name), given).mean(0) for name, given in inputs.items()])


def recorded(recorder: tcnn_probe.Recorder, mark: int = -1) -> Tensor:
    """The entropies of one mark, (layers, heads)."""
    return torch.as_tensor(recorder.dataset.entropy.values[mark])


class Trace:
    """Everything in a model, and in torch itself, that a recorder could leave changed."""

    def __init__(self, model: nn.Module) -> None:
        self.attributes = {name: set(vars(module)) for name, module in model.named_modules()}
        self.hooks = {
            (name, kind): list(hooks.items())  # in order
            for name, module in model.named_modules()
            for kind, hooks in vars(module).items()
            if "hooks" in kind and isinstance(hooks, dict)
        }
        self.parameter_hooks = {name: list((p._backward_hooks or {}).items()) for name, p in model.named_parameters()}
        self.training = {name: module.training for name, module in model.named_modules()}
        self.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
        self.state = {name: value.clone() for name, value in model.state_dict().items()}
        self.torch = global_state()

    def __eq__(self, other: object) -> bool:
        mine, theirs = dict(vars(self)), dict(vars(other))
        before, after = mine.pop("state"), theirs.pop("state")
        return (
            mine == theirs and list(before) == list(after) and all(torch.equal(v, after[k]) for k, v in before.items())
        )

    __hash__ = None  # type: ignore[assignment]


def global_state() -> dict[str, Any]:
    """Hooks on all modules, modes and switches of torch, as they are in this thread."""
    hooks = {
        name: list(value.items())
        for name, value in vars(global_hooks).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    return {
        **hooks,
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "torch function": torch._C._is_torch_function_enabled(),
        "default dtype": torch.get_default_dtype(),
    }


def clean() -> bool:
    """Whether torch is as a fresh interpreter has it."""
    state = global_state()
    return not any(value for name, value in state.items() if "hooks" in name or "modes" in name)
