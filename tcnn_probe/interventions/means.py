"""Means over images of what single heads add to the output of their layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.interventions.given_images import TakenOverImages

__all__ = ["Means"]


class Means(TakenOverImages):
    """Means of the terms of single heads."""

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[Tensor, int]] = {}

    def add(self, number: int, terms: Sequence[Tensor], layer: str) -> None:
        """Terms of each head in one attention of the layer's call, (images * windows, ...) each."""
        sums = torch.stack(
            [self.rows_by_image(term, layer).sum(0, dtype=at_least_float32(term.dtype)) for term in terms]
        )
        before, count = self._sums.get(number, (torch.zeros_like(sums), 0))
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
                f"expected images of the size of images=: {layer!r} gave {tuple(mean.shape)} for one of these, and now "
                f"{tuple(output.shape)} for all"
            )
        return output + mean[0] if windows == 1 else (output.unflatten(0, (-1, windows)) + mean).flatten(0, 1)
