"""Tokens of the residual stream that enter the block around an attention."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tcnn_probe.hooks.forwards import Running

__all__ = ["residual_tokens"]


def residual_tokens(running: Running, images: int, count: int) -> Tensor | None:
    """Return the tokens that enter the block around an attention, before the block normalises them.

    A transformer block passes a normalised copy of its input to its attention. The running modules
    are therefore searched from the inside out for an input that has as many tokens and is another
    tensor. The search ends at the stack of blocks, whose input is that of the first block. If there
    is no such input, because the block normalises after or inside the attention, the layer's own
    input is the residual stream.

    Args:
        running: Running modules and their inputs, with the attention layer last.
        images: Number of images B.
        count: Number of tokens N of each image.

    Returns:
        Shape (B, N, C); None if no input has that many tokens.
    """
    layer, inputs = running[-1]
    own_input = _first_tensor(inputs)
    for module, inputs_of_module in running[-2::-1]:
        if _stacks(module, layer):
            break
        x = _first_tensor(inputs_of_module)
        # A wrapper around the layer has the same tensor as its input, which is normalised already.
        tokens = None if x is own_input else _as_tokens(x, images, count)
        if tokens is not None:
            return tokens
    return _as_tokens(own_input, images, count)


def _first_tensor(inputs: Sequence[Any]) -> Tensor | None:
    return next((x for x in inputs if isinstance(x, Tensor)), None)


def _as_tokens(x: Tensor | None, images: int, count: int) -> Tensor | None:
    """Return a tensor (B, N, C), (B, H, W, C) or (B, C, H, W) as (B, N, C);
    None if it has another shape.
    """
    if x is None or len(x) != images:
        return None
    if x.ndim == 3 and x.shape[1] == count:
        return x
    if x.ndim == 4 and x.shape[1] * x.shape[2] == count:
        return x.flatten(1, 2)
    if x.ndim == 4 and x.shape[2] * x.shape[3] == count:
        return x.flatten(2).mT
    return None


def _stacks(module: nn.Module, layer: nn.Module) -> bool:
    """Return whether a module has a list of several blocks, one of which contains the layer."""
    return any(
        isinstance(part, (nn.ModuleList, nn.Sequential))
        and len(part) > 1
        and any(inner is layer for inner in part.modules())
        for part in module.modules()
    )
