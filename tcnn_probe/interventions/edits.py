"""What is to be done to which heads of one layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from tcnn_probe.interventions.given_attention import GivenAttention
from tcnn_probe.interventions.given_images import TakenOverImages
from tcnn_probe.interventions.means import Means

__all__ = ["Edit", "Heads", "Mode"]

Mode = Literal["positional", "content", "zero", "mean", "static", "shuffled", "replaced"]


Heads = tuple[int, ...] | slice
"""Heads of a layer: indices, or a slice of those that there are."""


@dataclass(eq=False)
class Edit:
    """An ablation of heads of one layer."""

    asked: str  # the name or glob that stands for the layer
    layer: str  # its name as it is recorded
    module: nn.Module
    call: int | None  # which of the attentions that it asks for in one call, None for all
    heads: Heads
    mode: Mode
    strict: bool  # whether the user named this layer, so that it must be able to
    count: int | None = None  # how many heads it has, if that is known
    source: nn.Module | None = None  # the layer whose heads are put in
    means: Means | None = None  # of the heads' terms over given images
    attention: GivenAttention | None = None  # of given images, to be put in
    ran: bool = field(default=False, init=False)
    attended: bool = field(default=False, init=False)
    additive: bool = field(default=False, init=False)  # whether the heads are known to add up

    def among(self, count: int) -> tuple[int, ...]:
        """Indices of the heads, if there are so many; an error if the layer does not have them."""
        if isinstance(self.heads, slice):
            return tuple(range(count)[self.heads])
        if beyond := [head for head in self.heads if head >= count]:
            raise ValueError(f"{self.layer!r} has {count} heads, from 0 to {count - 1}; got head {beyond[0]}")
        return self.heads

    @property
    def indices(self) -> Sequence[int]:
        """The heads, () while their number is not known."""
        return () if self.count is None else self.among(self.count)

    @property
    def gives_terms(self) -> bool:
        """Whether something takes the place of the heads' terms in the layer's output."""
        return self.mode == "replaced" or self.means is not None

    @property
    def taken(self) -> TakenOverImages | None:
        """What is taken over given images."""
        return self.means if self.attention is None else self.attention

    @property
    def acts_on_output(self) -> bool:
        """Whether what the heads give is edited now."""
        return self.mode not in ("positional", "content") and (self.taken is None or self.taken.finished)
