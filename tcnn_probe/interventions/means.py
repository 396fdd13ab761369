"""Means over images of what single heads add to the output of their layer."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from tcnn_model.gpsa.precision import at_least_float32

__all__ = ["Means"]


class Means:
    """Means of the terms of single heads, taken by forwards in the thread that makes this, until ``finished``."""

    def __init__(self) -> None:
        self.finished, self.images = False, 0
        """``images`` is the size of the batch that is running."""
        self._thread = threading.get_ident()
        self._sums: dict[int, tuple[Tensor, int]] = {}

    @property
    def taking(self) -> bool:
        """Whether the forward that runs here is one of those that means are taken over."""
        return not self.finished and self._thread == threading.get_ident()

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
