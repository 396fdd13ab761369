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
        self._parts: dict[int, list[Tensor]] = {}  # (images, or 1 for their sum, windows, heads, N_query, N_key) each
        self._counts: dict[int, int] = {}
        self._attention: dict[int, Tensor] = {}
        self._order = torch.zeros(1, dtype=torch.int64)

    def take(self, number: int, heads: Sequence[int], weights: Tensor, layer: str) -> None:
        """Attention of the batch that is running, (images * windows, all heads, N_query, N_key)."""
        some = self.rows_by_image(weights[:, list(heads)].to(at_least_float32(weights.dtype)), layer)
        self._heads[number], parts = heads, self._parts.setdefault(number, [])
        if not self._shuffled:
            some = some.sum(0, keepdim=True) + (parts.pop() if parts else 0)
        parts.append(some)
        self._counts[number] = self._counts.get(number, 0) + self.images

    def finish(self, size: torch.Size | None) -> None:
        """Take the mean, or decide on the order."""
        super().finish(size)
        for number, parts in self._parts.items():
            self._attention[number] = torch.cat(parts) / (1 if self._shuffled else self._counts[number])
        self._parts = {}
        if self._shuffled and self._counts:
            images = next(iter(self._counts.values()))
            self._order = torch.arange(images)
            if self._seed is not None:
                cycle = torch.randperm(images, generator=torch.Generator().manual_seed(self._seed))
                self._order[cycle] = cycle.roll(1)

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
        donors = self._order[torch.arange(rows // windows if self._shuffled else 1) % len(self._order)]
        place = [self._heads[number].index(head) for head in heads]
        return taken[donors.to(taken.device)][:, :, place]


def weigh(attention: Tensor, values: Tensor) -> Tensor:
    """Weigh values, (rows, heads or 1, N_key, d), by attention, (images or 1, windows, heads, N_query, N_key).

    Returns:
        shape (rows, heads, N_query, d).
    """
    by_image = values.unflatten(0, (-1, attention.shape[1]))
    return torch.einsum("bwhqk,bwhkd->bwhqd", attention.to(values.dtype), by_image).flatten(0, 1)
