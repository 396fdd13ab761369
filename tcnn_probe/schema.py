"""The schema of a recording: groups of labelled arrays, all of which grow along the marks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

__all__ = [
    "COORDINATES",
    "COUNTS",
    "SCHEMA_VERSION",
    "Group",
    "StoreError",
    "Variable",
    "missing_value",
]

SCHEMA_VERSION = 3


class StoreError(ValueError):
    """A store holds something else, is damaged, or is being written by another recorder."""


def missing_value(dtype: DTypeLike) -> float:
    """Return what stands for a missing value: NaN, or -1 for integers, which have no NaN."""
    return np.nan if np.dtype(dtype).kind == "f" else -1


@dataclass(frozen=True)
class Variable:
    """A recorded variable.

    Args:
        dims: Names of its dimensions without that of the marks, which is "epoch" unless the user
            gives another name: ("layer", "head") for a number for each head, () for a number for
            the whole model.
        units: "1", "nat", "pixel", "cell" (of the layer's token grid) or powers of these.
        long_name: Short label, for plots.
        description: Meaning, with its source.
        dtype: Type as stored: "float64" or, for maps, "float16" or "float32"; integers are -1 where
            there is no value.
        nan_reason: Reason why values may be NaN, such as "alpha is not positive", where that is no
            sign of an error; "" if they are always defined.
        over_images: Summary over the images of an epoch: the "mean", the "largest" value, or
            "shares": the mean divided by its sum along the last dimension, NaN where this sum is 0.
        is_coordinate: Whether it is a coordinate of datasets, which their arrays keep.
    """

    dims: tuple[str, ...]
    units: str
    long_name: str
    description: str
    dtype: str = "float64"
    over_images: str = "mean"
    nan_reason: str = ""
    is_coordinate: bool = False

    @property
    def may_be_nan(self) -> bool:
        """Whether NaN is no sign of an error: with a reason, and as the shares of a total of 0."""
        return bool(self.nan_reason) or self.over_images == "shares"

    @property
    def attrs(self) -> dict[str, str]:
        """Attributes of the stored array."""
        return {
            "units": self.units,
            "long_name": self.long_name,
            "description": self.description,
        }


@dataclass(frozen=True)
class Group:
    """Variables that share their layers and sizes;
    the root group, "", holds the numbers of attention heads.

    The layer table has the facts about each module in plain JSON, by its name, in the order of the
    dimension "layer".
    """

    variables: Mapping[str, Variable]
    layers: Mapping[str, Mapping[str, Any]]
    # Length of each further dimension, such as {"head": 6}.
    sizes: Mapping[str, int] = field(default_factory=dict)
    # Labels along some dimensions; others count from 0.
    coords: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def maps(self) -> bool:
        """Whether the variables are maps of single images, much larger than numbers."""
        return any("image" in variable.dims for variable in self.variables.values())

    def shape(self, variable: str) -> tuple[int, ...]:
        """Return the lengths of a variable's dimensions, except that of the marks."""
        lengths = {"layer": len(self.layers), **self.sizes}
        return tuple(lengths[dim] for dim in self.variables[variable].dims)

    @classmethod
    def together(cls, groups: "Iterable[Group]") -> "Group":
        """Return the group that holds the layers of all groups, in their order."""
        variables: dict[str, Variable] = {}
        layers: dict[str, Mapping[str, Any]] = {}
        sizes: dict[str, int] = {}
        coords: dict[str, Sequence[Any]] = {}
        for group in groups:
            variables |= group.variables
            for layer, table in group.layers.items():
                layers[layer] = {**table, **layers.get(layer, {})}
            for dim, size in group.sizes.items():
                sizes[dim] = max(size, sizes.get(dim, 0))
            # The labels of the layer with more of them begin with those of the others.
            for dim, labels in group.coords.items():
                coords[dim] = max(coords.get(dim, ()), labels, key=len)
        return cls(variables, layers, sizes, coords)


COUNTS: dict[str, Variable] = {
    "images": Variable(
        ("layer",), "1", "images", "Images that the layer saw since the previous mark."
    ),
    "nonfinite_images": Variable(
        ("layer",),
        "1",
        "images with non-finite measurements",
        "Images for which a measurement was NaN or infinite; it is left out of the mean.",
    ),
}

COORDINATES: dict[str, dict[str, str]] = {
    "layer": {"long_name": "layer", "description": "Name of the module in the model."},
    "head": {
        "long_name": "head",
        "description": "Index of the head; for a reparameterized convolution its kernel tap, "
        "row-major. NaN beyond a layer's own number of heads.",
    },
    "channel": {
        "long_name": "channel",
        "description": "Index of the channel. NaN beyond a layer's own number of channels.",
    },
    "image": {
        "long_name": "image",
        "description": "Number of the image among the measured images of the epoch, counted from "
        "0.",
    },
    "class": {
        "long_name": "class",
        "description": "Index of the class if classes= names classes; else its rank in the model's "
        "output, from 0.",
    },
    "window": {
        "long_name": "window",
        "description": "Index of the window of the image, in the layer's own order.",
    },
    "entropy_bin": {
        "long_name": "bin of entropies",
        "description": "Index k of the bin, from k / 20 to (k + 1) / 20 of the entropy of uniform "
        "attention.",
    },
    "token_kind": {
        "long_name": "kind of token",
        "description": "Class (or distillation) token, register, patch at the border of the grid, "
        "inner patch, word.",
    },
    "query_segment": {
        "long_name": "segment of queries",
        "description": "Class (or distillation) tokens, registers, patches, words, or others: "
        "latents, object queries.",
    },
    "key_segment": {
        "long_name": "segment of keys",
        "description": "Class (or distillation) tokens, registers, patches, words, or others: "
        "prompts, object queries.",
    },
    "y": {"long_name": "row", "description": "Row of the grid of keys."},
    "x": {"long_name": "column", "description": "Column of the grid of keys."},
}
