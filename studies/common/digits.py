"""Real handwritten digits in cluttered scenes, with the place of each digit known.

The digits are scikit-learn's ``load_digits`` (1,797 images of 8 x 8 pixels, UCI). Each scene holds
one whole digit somewhere, among fragments of other digits of the same split, and noise. The split
is by digit image, so neither a digit nor a fragment of it is seen both in training and in
validation.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import Dataset

__all__ = [
    "MEAN",
    "STD",
    "ClutteredDigits",
    "Scene",
    "cluttered_digits",
    "plain_digits",
]

MEAN, STD = 0.2, 0.3
"""Mean that is subtracted from pixels in [0, 1],
and standard deviation that they are divided by.
"""


class Scene(NamedTuple):
    """Scene of :meth:`ClutteredDigits.scene`.

    Args:
        image: Image of shape (1, size, size), with zero mean and unit variance roughly.
        box: Box of the digit, (top, left, bottom, right) in pixels, the last two exclusive.
        mask: Strokes of the digit, shape (size, size), bool.
    """

    image: Tensor
    box: tuple[int, int, int, int]
    mask: Tensor


class ClutteredDigits(Dataset[tuple[Tensor, int]]):
    """Scenes around handwritten digits, among fragments of others.

    Args:
        digits: Images of digits, shape (N, 8, 8), values in [0, 1].
        labels: Classes, shape (N,).
        size: Height and width of a scene, in pixels.
        digit_size: Height and width of the digit in it.
        fragments: Number of pieces of other digits strewn over it.
        fixed: Whether a digit has the same scene at each visit (validation) rather than a new one
            (training, drawn from torch's global generator).
    """

    def __init__(
        self,
        digits: Tensor,
        labels: Tensor,
        *,
        size: int = 64,
        digit_size: int = 28,
        fragments: int = 6,
        fixed: bool = False,
    ) -> None:
        enlarged = F.interpolate(
            digits[:, None],
            size=(digit_size, digit_size),
            mode="bilinear",
            antialias=False,
        )
        self.digits = enlarged[:, 0].clamp(0, 1)
        self.labels = labels
        self.size = size
        self.digit_size = digit_size
        self.fragments = fragments
        self.fixed = fixed

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.scene(index).image, int(self.labels[index])

    def scene(self, index: int) -> Scene:
        """Return the scene around a digit."""
        generator = torch.Generator().manual_seed(index) if self.fixed else None

        def draw(high: int, count: int = 1) -> list[int]:
            drawn: list[int] = torch.randint(high, (count,), generator=generator).tolist()
            return drawn

        # Noise of a tenth of the digit's contrast keeps the background from being constant.
        canvas = 0.1 * torch.rand(self.size, self.size, generator=generator)
        piece = self.digit_size // 2
        sources = draw(len(self), self.fragments)
        cuts = draw(self.digit_size - piece, 2 * self.fragments)
        spots = draw(self.size - piece, 2 * self.fragments)
        for n, source in enumerate(sources):
            cut_y, cut_x = cuts[2 * n : 2 * n + 2]
            y, x = spots[2 * n : 2 * n + 2]
            fragment = self.digits[source, cut_y : cut_y + piece, cut_x : cut_x + piece]
            place = canvas[y : y + piece, x : x + piece]
            # Overlapping strokes do not add up to more than a stroke.
            torch.maximum(place, fragment, out=place)
        top, left = draw(self.size - self.digit_size + 1, 2)
        box = (top, left, top + self.digit_size, left + self.digit_size)
        # Fragments behind the digit are dimmed to a fifth, so that it can be read.
        canvas[box[0] : box[2], box[1] : box[3]] = torch.maximum(
            self.digits[index], canvas[box[0] : box[2], box[1] : box[3]] * 0.2
        )
        mask = torch.zeros(self.size, self.size, dtype=torch.bool)
        # The mask is cut at half of full ink, because enlarged digits have soft edges.
        mask[box[0] : box[2], box[1] : box[3]] = self.digits[index] > 0.5
        return Scene((canvas[None] - MEAN) / STD, box, mask)


def cluttered_digits(
    *, size: int = 64, limit: int | None = None, seed: int = 0, fragments: int = 6
) -> tuple[ClutteredDigits, ClutteredDigits]:
    """Return training and validation scenes:
    three quarters and one quarter of the digits, stratified by class.

    Args:
        size: Height and width of the scenes, in pixels.
        limit: Number of the 1,797 digits to use; None for all.
        seed: Seed of the split. The validation scene of a digit depends only on the digit's index
            in the split.
        fragments: Number of pieces of other digits in each scene.
    """
    # The digit itself is enlarged to 28 pixels.
    if size < 28:
        raise ValueError(f"expected scenes of 28 pixels or more, the size of a digit, got {size}")
    if limit is not None and limit < 40:
        raise ValueError(
            f"expected a limit of 40 digits or more, so that both splits have all ten, got {limit}"
        )
    images, labels = _all_digits()
    train, validation = train_test_split(
        range(len(labels))[:limit],
        test_size=0.25,
        random_state=seed,
        stratify=labels[:limit],
    )
    return (
        ClutteredDigits(images[train], labels[train], size=size, fragments=fragments),
        ClutteredDigits(
            images[validation],
            labels[validation],
            size=size,
            fragments=fragments,
            fixed=True,
        ),
    )


def plain_digits(*, training: bool) -> tuple[Tensor, Tensor]:
    """Return four fifths of the digits, without clutter,
    or the others: images (N, 1, 8, 8) in [-1, 1], and labels.
    """
    images, labels = _all_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    border = len(order) * 4 // 5
    part = order[:border] if training else order[border:]
    return 2 * images[part, None] - 1, labels[part]


# Studies of many networks ask for the digits twice for each, and scikit-learn reads a text file.
@cache
def _all_digits() -> tuple[Tensor, Tensor]:
    """Return all digits: images (N, 8, 8) in [0, 1], and labels."""
    data = load_digits()
    # scikit-learn's pixels are from 0 to 16.
    return torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
