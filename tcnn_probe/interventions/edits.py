"""What is to be done to which heads of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32

__all__ = ["Edit", "Heads", "Means", "Mode"]

Mode = Literal["positional", "content", "zero", "mean", "frozen", "replaced"]


@dataclass(frozen=True)
class Heads:
    """Which heads of a layer: indices, a slice of those that there are, or None for all."""

    chosen: tuple[int, ...] | slice | None = None

    def of(self, count: int, layer: str) -> tuple[int, ...]:
        """Their indices in a layer of so many heads.

        Raises:
            ValueError: it does not have them.
        """
        if self.chosen is None or isinstance(self.chosen, slice):
            return tuple(range(count)[self.chosen or slice(None)])
        if beyond := [head for head in self.chosen if head >= count]:
            raise ValueError(f"{layer!r} has {count} heads, from 0 to {count - 1}; got head {beyond[0]}")
        return self.chosen


@dataclass(eq=False)
class Edit:
    """An ablation of heads of one layer.

    Args:
        layer: its name as it is recorded.
        module: itself.
        call: which of the attentions that it asks for in one call, None for all.
        heads: which heads.
        mode: what is done to them.
        strict: whether the user named this layer, so that it must be able to.
        locality_strength: to freeze alpha at, None for where it is.
        source: the layer whose heads are put in.
    """

    layer: str
    module: nn.Module
    call: int | None
    heads: Heads
    mode: Mode
    strict: bool
    locality_strength: float | None = None
    source: nn.Module | None = None
    count: int | None = None
    """How many heads there are, once it is known."""
    ran: bool = False
    attended: bool = False
    additive: bool = False
    """Whether the heads are known to add up."""
    kept: Tensor | None = None
    """Alpha before the softplus, as it was."""
    means: "Means | None" = None
    """Of the heads' terms, if they are taken over given images."""

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the heads, () while their number is not known."""
        return () if self.count is None else self.heads.of(self.count, self.layer)

    @property
    def gives_terms(self) -> bool:
        """Whether something takes the place of the heads' terms in the layer's output."""
        return self.mode == "replaced" or self.means is not None

    @property
    def acts_on_output(self) -> bool:
        """Whether what the heads give is edited now."""
        return self.mode in ("zero", "mean", "replaced") and not (self.means and self.means.images)


class Means:
    """Of the terms of single heads over images, summed up while ``images``, the size of the batch, is not 0."""

    def __init__(self) -> None:
        self.images = 0
        self._sums: dict[int, tuple[Tensor, int]] = {}

    def add(self, number: int, terms: Sequence[Tensor], layer: str) -> None:
        """Terms of each head in one attention of the layer's call, (images * windows, ...) each."""
        rows = terms[0].shape[0]
        if rows % self.images:
            raise ValueError(
                f"{layer!r} gives {rows} rows for {self.images} images: which are one image's is not known"
            )
        sums = torch.stack(
            [term.unflatten(0, (self.images, -1)).sum(0, dtype=at_least_float32(term.dtype)) for term in terms]
        )
        before, count = self._sums.get(number, (torch.zeros_like(sums), 0))
        if before.shape != sums.shape:
            raise ValueError(
                f"means are over images of one size: expected terms of shape {tuple(before.shape[1:])} in {layer!r}, "
                f"got {tuple(sums.shape[1:])}"
            )
        self._sums[number] = before + sums, count + self.images

    def add_to(self, output: Tensor, number: int, which: Sequence[int], layer: str) -> Tensor:
        """The output, (B * windows, ...), and the means of some heads."""
        if number not in self._sums:
            raise ValueError(f"{layer!r} did not run when means were taken over images=")
        sums, count = self._sums[number]
        mean = (sums[list(which)].sum(0) / count).to(output)
        windows = mean.shape[0]
        if output.shape[0] % windows or output.shape[1:] != mean.shape[1:]:
            raise ValueError(
                f"expected images of the size of those that the means are of: {layer!r} gave {tuple(mean.shape)} for "
                f"one of these, and now {tuple(output.shape)} for all"
            )
        return output + mean[0] if windows == 1 else (output.unflatten(0, (-1, windows)) + mean).flatten(0, 1)
