"""Hashes of the images that maps are kept of, by which a later epoch with other images is noticed."""

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

__all__ = ["ImageHashes"]


class ImageHashes:
    """Hashes of chosen images, by number in the epoch: of some of their values, which are copied as they pass.

    Args:
        numbers: Numbers of the images.
    """

    SAMPLES = 512
    """Number of values of each image: few enough to copy in each forward, and enough to tell images apart."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = sorted(numbers)
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._passed = 0
        self._samples: dict[int, Tensor] = {}
        self._pending: tuple[int, dict[int, Tensor]] = (0, {})

    def begins(self, inputs: Sequence[Any]) -> None:
        """Copy values of the chosen images among the inputs of a forward that is measured."""
        # Images have more than two axes; masks and labels that come with them have not.
        batch = next((x for x in inputs if isinstance(x, Tensor) and x.ndim > 2), None)
        if batch is None:
            self._pending = (0, {})
            return
        samples = {}
        step = max(1, batch[0].numel() // self.SAMPLES)
        for number in self._numbers:
            row = number - self._passed
            if 0 <= row < len(batch):
                # A copy: a view would keep the whole batch.
                samples[number] = batch[row].detach().flatten()[::step].clone()
        self._pending = len(batch), samples

    def ends(self) -> None:
        """Count the images of the forward that began last."""
        count, samples = self._pending
        self._passed += count
        self._samples |= samples

    def read(self) -> dict[str, str]:
        """Return the hashes of the images that came, by number."""
        hashes = {}
        for number, sample in self._samples.items():
            # In float32, so that a later epoch under autocast has the same hash where its images are the same.
            values = sample.cpu().float().numpy()
            hashes[str(number)] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        return hashes
