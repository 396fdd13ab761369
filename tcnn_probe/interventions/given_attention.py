"""Attention taken from given images, and put in the place of what heads would attend to themselves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.interventions.given_images import TakenOverImages

__all__ = ["GivenAttention", "weigh"]


class GivenAttention(TakenOverImages):
    """Attention of some heads of a layer: its mean over the given images, or that of each.

    Args:
        shuffled: whether it is that of each.
        seed: of the order in which images get it: a random cycle, in which nobody keeps its own; None for the order in
            which they were given.
    """

    def __init__(self, *, shuffled: bool, seed: int | None = None) -> None:
        super().__init__()
        self._shuffled, self._seed = shuffled, seed
        self._heads: dict[int, Sequence[int]] = {}  # by number of the attention in the layer's call
        self._attention: dict[int, Tensor] = {}  # (images, or 1 for all, windows, heads, N_query, N_key) each
        self._counts: dict[int, int] = {}

    def take(self, number: int, heads: Sequence[int], weights: Tensor, layer: str) -> None:
        """Attention of the batch that is running, (images * windows, all heads, N_query, N_key)."""
        some = self.rows_by_image(weights[:, list(heads)].to(at_least_float32(weights.dtype)), layer)
        if (before := self._attention.get(number)) is not None:
            some = torch.cat([before, some])
        self._attention[number] = some if self._shuffled else some.sum(0, keepdim=True)
        self._heads[number], self._counts[number] = heads, self._counts.get(number, 0) + self.images
        if self._counts[number] > self.total:
            raise ValueError(
                f"{layer!r} is called several times for the same images: which of its attention is to be exchanged for "
                f"which is not known"
            )

    def finish(self, size: torch.Size | None) -> None:
        """Make means of sums, if it is these."""
        super().finish(size)
        if not self._shuffled:
            self._attention = {number: total / self._counts[number] for number, total in self._attention.items()}

    def of(self, number: int, heads: Sequence[int], layer: str, rows: int, queries: int, keys: int) -> Tensor:
        """What some heads are to attend to, in a batch in which they attend as (rows, heads, queries, keys).

        Returns:
            shape (images, or 1 for all alike, windows, heads, N_query, N_key).
        """
        if number not in self._attention:
            raise ValueError(f"{layer!r} did not attend when attention was taken over images=")
        taken = self._attention[number]
        windows, _, *size = taken.shape[1:]
        if rows % windows or size != [queries, keys]:
            raise ValueError(
                f"expected images of the size of images=: of these {layer!r} has {windows} x {size[0]} queries and "
                f"{size[1]} keys, and now {rows} x {queries} queries in all and {keys} keys"
            )
        place = [self._heads[number].index(head) for head in heads]
        if not self._shuffled:
            return taken[:, :, place]
        donors = self._order(len(taken))[torch.arange(rows // windows) % len(taken)]
        return taken[donors.to(taken.device)][:, :, place]

    def _order(self, images: int) -> Tensor:
        """Whose attention each of so many images gets."""
        order = torch.arange(images)
        if self._seed is not None:
            cycle = torch.randperm(images, generator=torch.Generator().manual_seed(self._seed))
            order[cycle] = cycle.roll(1)
        return order


def weigh(attention: Tensor, values: Tensor) -> Tensor:
    """Weigh values, (rows, heads or 1, N_key, d), by attention, (images or 1, windows, heads, N_query, N_key).

    Returns:
        shape (rows, heads, N_query, d).
    """
    by_image = values.unflatten(0, (-1, attention.shape[1]))
    return torch.einsum("bwhqk,bwhkd->bwhqd", attention.to(values.dtype), by_image).flatten(0, 1)
