"""Small models of every kind of softmax attention,
with peaked attention, and the inputs of their layers.
"""

from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.models.convit import GPSA
from torch import Tensor, nn

import tcnn_model.models  # noqa: F401 (registers patchconvnet_* with timm)

__all__ = ["MODELS", "first", "heads_of", "input_and_output", "wide"]

SMALL = {
    "img_size": (24, 40),
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 2,
    "num_heads": 3,
    "num_classes": 5,
}
WINDOWS = {
    "img_size": (16, 24),
    "patch_size": 4,
    "window_size": 2,
    "embed_dim": 12,
    "depths": (2,),
    "num_heads": (3,),
}
LEVIT = {
    "img_size": 64,
    "embed_dim": (24, 32, 40),
    "depth": (1, 1, 1),
    "num_heads": (3, 5, 2),
    "key_dim": 4,
}
COATNET = {
    "img_size": 64,
    "embed_dim": (32, 32, 32, 64),
    "depths": (1, 1, 1, 1),
    "num_classes": 5,
}


class Torch(nn.Module):
    """torch's own multi-head attention, images first or tokens first, with heads of 5 channels."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 15)
        self.attn = nn.MultiheadAttention(15, 3, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x if self.batch_first else x.transpose(0, 1))
        out, _ = self.attn(tokens, tokens, tokens, need_weights=False)
        return out if self.batch_first else out.transpose(0, 1)


def sharp(model: nn.Module) -> nn.Module:
    """Set weights for attention that differs between heads,
    biases that are not zero, and branches with an effect.
    """
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "gamma_1", "gamma_2")):
                parameter.uniform_(0.5, 1)
            elif parameter.ndim > 1 and not name.startswith(("stem", "patch_embed")):
                # Divided by the root of the number of inputs, weights keep activations of order one
                # through all blocks.
                parameter.normal_(std=1.5 * max(1, parameter[0].numel()) ** -0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def build(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: sharp(timm.create_model(name, **options))


IMAGE, SQUARE = (3, 24, 40), (3, 64, 64)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "vit": (build("vit_tiny_patch16_224", **SMALL), IMAGE, "blocks.1.attn", "proj"),
    "swin": (
        build("swin_tiny_patch4_window7_224", **WINDOWS),
        (3, 16, 24),
        "layers.0.blocks.1.attn",
        "proj",
    ),
    "cait": (
        build("cait_xxs24_224", **SMALL),
        IMAGE,
        "blocks_token_only.0.attn",
        "proj",
    ),
    "convit": (
        build("convit_tiny", **SMALL | {"img_size": 32}),
        (3, 32, 32),
        "blocks.1.attn",
        "proj",
    ),
    "beit": (build("beit_base_patch16_224", **SMALL), IMAGE, "blocks.0.attn", "proj"),
    "levit": (
        build("levit_128s", **LEVIT),
        SQUARE,
        "stages.1.downsample.attn_downsample",
        "proj.ln.linear",
    ),
    "coatnet": (
        build("coatnet_pico_rw_224", **COATNET),
        SQUARE,
        "stages.3.blocks.0.attn",
        "proj",
    ),
    "torch": (lambda: sharp(Torch()), (7, 4), "attn", "out_proj"),
    "tokens first": (
        lambda: sharp(Torch(batch_first=False)),
        (7, 4),
        "attn",
        "out_proj",
    ),
    "pool": (
        build("patchconvnet_s20", embed_dim=24, depth=1, num_classes=5),
        (3, 48, 64),
        "pool.block.attn",
        "proj",
    ),
}


def wide(model: nn.Module) -> nn.Module:
    """Convert a model to float64, with ConViT's offsets,
    which older versions of timm compute in float32.
    """
    for layer in model.double().modules():
        if isinstance(layer, GPSA):
            layer.rel_indices = None
            offsets = layer.get_rel_indices
            layer.get_rel_indices = lambda count, offsets=offsets: offsets(count).double()
    return model


def heads_of(model: nn.Module, layer: str) -> int:
    return int(model.get_submodule(layer).num_heads)  # type: ignore[arg-type]


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def input_and_output(model: nn.Module, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and the output of a layer in a forward of its model."""
    tensors: list[Tensor] = []
    with layer.register_forward_hook(
        lambda module, args, output: tensors.extend((args[0], first(output)))
    ):
        model(x)
    return tensors[0], tensors[1]
