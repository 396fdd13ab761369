"""The contract between the recorder and a kind of layer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["Probe"]


@dataclass(frozen=True)
class Probe:
    """How to record one kind of layer. Its variables are described in :mod:`tcnn_probe.schema`.

    Args:
        kind: short name, kept in the dataset's layer table.
        module_type: the layers it is for.
        heads: number of heads of a layer.
        state: what is read off the layer's parameters when an epoch is marked: variable -> shape (heads,).
        measure: what is measured in each forward: (layer, input) -> variable -> shape (B, heads), one value for each
            image and head. Runs without gradients, under the autocast that the layer ran in; must not change the layer.
    """

    kind: str
    module_type: type[nn.Module]
    heads: Callable[[Any], int]
    state: Callable[[Any], Mapping[str, Tensor]]
    measure: Callable[[Any, Tensor], Mapping[str, Tensor]]
