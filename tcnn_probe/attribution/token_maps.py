"""Tokens as feature maps, for methods that know these alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.attribution.layer_choice import MapLayer

__all__ = ["as_feature_map"]


@contextmanager
def as_feature_map(layer: MapLayer) -> Iterator[nn.Module]:
    """A module through which the feature map (B, C, h, w) of a layer passes: a stand-in, if the layer gives tokens.

    Tokens before and after the grid pass beside it.
    """
    if layer.tokens is None:
        yield layer.module
        return
    tokens, stand_in = layer.tokens, nn.Identity()

    def through(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        before, cells, after = output.flatten(1, -2).tensor_split((tokens.prefix, tokens.count), 1)
        passed = stand_in(cells.transpose(1, 2).unflatten(2, (tokens.height, tokens.width)))
        return torch.cat([before, passed.flatten(2).transpose(1, 2), after], 1).view_as(output)

    handle = layer.module.register_forward_hook(through)
    try:
        yield stand_in
    finally:
        handle.remove()
