"""Matrix products that a model asks for, and whether a softmax weighs the values of tokens in them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["SeenCopy", "SeenOperand", "SeenProduct", "Weighed"]

Key = TypeVar("Key")


@dataclass(frozen=True)
class SeenOperand:
    """A tensor, by its shape and where it is stored: it is not kept.

    Args:
        shape: of the tensor.
        place: where it is stored.
        shared: whether all images have the same, as they have a weight.
    """

    shape: torch.Size
    place: int
    shared: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "SeenOperand":
        """The operand that a tensor is."""
        shared = tensor.ndim < 3 or (tensor.shape[0] > 1 and tensor.stride(0) == 0)
        return cls(tensor.shape, tensor.data_ptr(), shared)

    def is_in(self, operand: "SeenOperand", *, heads: bool) -> bool:
        """Whether an operand is this softmax or, if it has heads, may be made of it by dropout or by mixing them."""
        same = self.shape[-2:] == operand.shape[-2:] and self.shape.numel() == operand.shape.numel()
        return same and (heads or self.place == operand.place)


@dataclass(frozen=True)
class SeenProduct:
    """A matrix product.

    Args:
        pairs: each operand that could be attention in it, and what it would weigh.
        output: which lives as long as the model keeps it.
    """

    pairs: Sequence[tuple[SeenOperand, SeenOperand]]
    output: weakref.ref[Tensor]


@dataclass(frozen=True)
class SeenCopy:
    """A tensor that is another one, scaled or repeated: ``output``, of ``sources``."""

    sources: Sequence[SeenOperand]
    output: weakref.ref[Tensor]


class Weighed:
    """Tells, in one forward, whether a softmax weighs the values of tokens.

    It does not if what it weighs is the same for all images (a codebook, the classes' embeddings), or a product of keys
    and values: then its last axis is one of channels, as in linear attention.
    """

    def __init__(self) -> None:
        self._summaries: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []
        self._shared: list[tuple[SeenOperand, weakref.ref[Tensor]]] = []

    def copied(self, copy: SeenCopy) -> None:
        """What holds of a tensor holds of its copy."""
        if (output := copy.output()) is None:
            return
        made = SeenOperand.of(output), copy.output
        if all(source.shared for source in copy.sources):
            self._shared.append(made)
        if any(_is_among(self._summaries, source) for source in copy.sources):
            self._summaries.append(made)

    def by(self, product: SeenProduct, softmaxes: Mapping[Key, tuple[SeenOperand, bool]]) -> dict[Key, str]:
        """Which of the softmaxes weigh something in a product: "" if it is values of tokens, else why it is none.

        Args:
            product: that was seen.
            softmaxes: of which it is not known yet, and whether each has heads.
        """
        found = {}
        for key, (softmax, heads) in softmaxes.items():
            values = next((values for operand, values in product.pairs if softmax.is_in(operand, heads=heads)), None)
            if values is not None:
                found[key] = self._objection(values)
        output = product.output()
        if not found and output is not None and not any(x.shared for pair in product.pairs for x in pair):
            self._summaries.append((SeenOperand.of(output), product.output))
        return found

    def _objection(self, values: SeenOperand) -> str:
        if values.shared or _is_among(self._shared, values):
            return "a softmax over what is the same for all images, not over tokens"
        if _is_among(self._summaries, values):
            return "a softmax over channels, which weighs products of keys and values (linear attention)"
        return ""


def _is_among(made: list[tuple[SeenOperand, weakref.ref[Tensor]]], operand: SeenOperand) -> bool:
    """Whether an operand is one of these tensors, in another order of axes perhaps."""
    return any(
        one.place == operand.place and one.shape.numel() == operand.shape.numel() and alive() is not None
        for one, alive in made
    )
