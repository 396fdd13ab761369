"""Finds the tokens of the residual stream that enter the block around an attention."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from tcnn_probe.hooks.forwards import Running

__all__ = ["residual_tokens"]


def residual_tokens(running: Running, images: int, count: int) -> Tensor | None:
    """Return the tokens that enter the block around an attention, before the block normalises them.

    A block of a transformer hands its attention a normalised copy of its own input. So the modules that are running
    are looked through from the inside out, for an input of as many tokens that is another tensor. The search ends at
    the stack of blocks, whose input is that of the first block. Where there is no such input, as in blocks that
    normalise after the attention, or inside of it, the layer's own input is the residual stream.

    Args:
        running: Modules that are running and their inputs, the attending one last.
        images: Number of images B.
        count: Number of tokens N of each image.

    Returns:
        Shape (B, N, C); None where no input has that many tokens.
    """
    layer, inputs = running[-1]
    own_input = _first_tensor(inputs)
    for module, inputs_of_module in running[-2::-1]:
        if _stacks(module, layer):
            break
        x = _first_tensor(inputs_of_module)
        # A wrapper around the layer hands on the same tensor, which is normalised already.
        tokens = None if x is own_input else _as_tokens(x, images, count)
        if tokens is not None:
            return tokens
    return _as_tokens(own_input, images, count)


def _first_tensor(inputs: Sequence[Any]) -> Tensor | None:
    return next((x for x in inputs if isinstance(x, Tensor)), None)


def _as_tokens(x: Tensor | None, images: int, count: int) -> Tensor | None:
    """Return (B, N, C), (B, H, W, C) or (B, C, H, W) as (B, N, C); None if it is none of these."""
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
    """Return whether a module holds a list of several blocks, with the layer in one of them."""
    return any(
        isinstance(part, (nn.ModuleList, nn.Sequential))
        and len(part) > 1
        and any(inner is layer for inner in part.modules())
        for part in module.modules()
    )
