"""Whether the images of which maps are kept are the same ones at each mark."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["ImageIdentity"]

_VALUES = 512  # of each image, spread over it


class ImageIdentity:
    """A hash of each chosen image, by its number in the epoch: of some of its values, which are copied as it passes."""

    def __init__(self, chosen: Sequence[int]) -> None:
        self._chosen = chosen
        self._told = False
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._passed, self._samples = 0, dict[int, Tensor]()
        self._begun: tuple[int, dict[int, Tensor]] = (0, {})

    def begins(self, inputs: Sequence[Any]) -> None:
        """Copy values of the chosen images among the inputs of a forward that is measured."""
        batch = next((x for x in inputs if isinstance(x, Tensor) and x.ndim > 2), None)
        if batch is None:
            self._begun = (0, {})
            return
        rows = {number: number - self._passed for number in self._chosen if 0 <= number - self._passed < len(batch)}
        step = max(1, batch[0].numel() // _VALUES)
        self._begun = len(batch), {n: batch[row].detach().flatten()[::step].clone() for n, row in rows.items()}

    def ends(self) -> None:
        """Count the images of the forward that began last."""
        count, samples = self._begun
        self._passed += count
        self._samples |= samples

    def hashes(self) -> dict[str, str]:
        """Hashes of the images that came, by their number."""
        values = {number: sample.cpu().float().numpy() for number, sample in self._samples.items()}
        return {str(number): hashlib.sha256(value.tobytes()).hexdigest()[:16] for number, value in values.items()}

    def changed(self, before: Mapping[str, str]) -> list[str]:
        """Say once, in words, that other images came than those with these hashes."""
        numbers = [int(n) for n, one in self.hashes().items() if before.get(n, one) != one]
        if not numbers or self._told:
            return []
        self._told = True
        some = numbers if len(numbers) < 5 else [*numbers[:3], "..."]
        return [
            f"the images {some} of this epoch are not those of the epochs before, so their maps cannot be compared: "
            f"give a validation loader with shuffle=False and without random augmentation"
        ]
