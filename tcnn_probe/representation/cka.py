"""Linear CKA: how alike two layers, epochs or models represent the same images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.representation.arrays import as_features

__all__ = ["LinearCKA", "linear_cka"]


def linear_cka(features: ArrayLike, others: ArrayLike) -> float:
    """Debiased linear CKA of two representations of the same images.

    1 if one is the other rotated, scaled and shifted; 0 on average if they have nothing to do with each other, and so
    sometimes below. The usual estimate, without the correction, is near 1 for any two representations of few images
    with many channels.

    Args:
        features, others: shapes (n, ...) and (n, ...), n >= 4, of the same images.

    Returns:
        a number; NaN if one has no structure that n images could show.
    """
    cka = LinearCKA()
    cka.add({"": _in_few_channels(features)}, {"": _in_few_channels(others)})
    return float(cka.result().item())


def _in_few_channels(features: ArrayLike) -> np.ndarray:
    """The same up to a shift and a rotation, in as many channels as there are images if it has more."""
    x = as_features(features)
    x = x - x[0]
    return np.asarray(np.linalg.qr(x.T, mode="r")).T if x.shape[1] > len(x) else x


@dataclass
class _Sums:
    """Sums over images, for HSIC of features x and y: of x y^T, x, y, x |y|^2, y |x|^2 and |x|^2 |y|^2."""

    xy: Any = 0.0
    x: Any = 0.0
    y: Any = 0.0
    x_yy: Any = 0.0
    y_xx: Any = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xx_yy: float = 0.0

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        xx, yy = (x**2).sum(1), (y**2).sum(1)
        self.xy = self.xy + x.T @ y
        self.x, self.y = self.x + x.sum(0), self.y + y.sum(0)
        self.x_yy, self.y_xx = self.x_yy + yy @ x, self.y_xx + xx @ y
        self.xx, self.yy, self.xx_yy = self.xx + xx.sum(), self.yy + yy.sum(), self.xx_yy + xx @ yy

    def hsic(self, n: int) -> float:
        """The unbiased estimate, from the kernels K = x x^T and L = y y^T without their diagonals (Song et al. 2012).

        [tr(KL) + 1K1 1L1 / ((n - 1)(n - 2)) - 2 1KL1 / (n - 2)] / (n(n - 3))
        """
        trace = (self.xy**2).sum() - self.xx_yy
        means = (self.x @ self.x - self.xx) * (self.y @ self.y - self.yy)
        rows = self.x @ self.xy @ self.y - self.x @ self.x_yy - self.y @ self.y_xx + self.xx_yy
        return float((trace + means / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)) / (n * (n - 3)))


class LinearCKA:
    """Debiased linear CKA between layers, from batches.

    ::

        cka = LinearCKA()
        for images in loader:
            cka.add(features(cnn, images), features(tcnn, images))  # {layer: (B, ...)} each
        cka.result()  # (layer, other_layer)

    CKA(x, y) = HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019), with the unbiased estimate of HSIC
    (Song et al. 2012) that Nguyen et al. 2021 use for batches. They average HSIC over batches; here it is that of all
    images together, and how they are cut into batches does not matter. It keeps sums: C * C' * 8 bytes for each pair of
    layers of C and C' channels, whatever the number of images. So pool feature maps first.
    """

    def __init__(self) -> None:
        self._images = 0
        self._shift: dict[tuple[int, str], np.ndarray] = {}
        self._sums: dict[tuple[tuple[int, str], tuple[int, str]], _Sums] = {}
        self._names: list[list[str]] = []

    def add(self, features: Mapping[str, ArrayLike], others: Mapping[str, ArrayLike] | None = None) -> None:
        """Add a batch of images.

        Args:
            features: shape (B, ...) of each layer.
            others: of the same images, by other layers, such as those of another model; None: the same layers.

        Raises:
            ValueError: not as many images everywhere, or other layers or channels than in the batch before.
        """
        sides = [features] if others is None else [features, others]
        if self._names and self._names != [list(side) for side in sides]:
            raise ValueError(f"expected the layers {self._names}, as before, got {[list(side) for side in sides]}")
        x = {
            (at, name): as_features(value, f"features of {name!r}")
            for at, side in enumerate(sides)
            for name, value in side.items()
        }
        counts = {f"{name!r}": len(value) for (_, name), value in x.items()}
        if len({*counts.values()}) != 1:
            raise ValueError(f"expected features of as many images from all layers, got {counts or 'no layer'}")
        for key, value in x.items():
            if (channels := len(self._shift.get(key, value[0]))) != value.shape[1]:
                raise ValueError(f"expected {channels} numbers an image of {key[1]!r}, as before, got {value.shape[1]}")
        self._names = [list(side) for side in sides]
        self._images += next(iter(counts.values()))
        for key, value in x.items():
            # CKA does not depend on a shift. Without the first image's, a large mean costs no digits, and equal
            # features are exactly 0.
            x[key] = value - self._shift.setdefault(key, value[0].copy())
        for row, column in {*self._pairs(), *((key, key) for key in x)}:
            self._sums.setdefault((row, column), _Sums()).add(x[row], x[column])

    def result(self) -> xr.DataArray:
        """CKA of each layer with each other one, dims ("layer", "other_layer"), from -1 to about 1.

        Raises:
            ValueError: fewer than 4 images.
        """
        if self._images < 4:
            raise ValueError(f"expected 4 images or more, got {self._images}")
        hsic = {pair: sums.hsic(self._images) for pair, sums in self._sums.items()}
        found = np.array([_ratio(hsic[a, b], hsic[a, a] * hsic[b, b], hsic[a, a]) for a, b in self._pairs()])
        rows, columns = self._names[0], self._names[-1]
        about = {
            "units": "1",
            "long_name": "linear CKA",
            "description": "Debiased linear CKA (Kornblith et al. 2019) of the features of two layers.",
            "images": self._images,
        }
        coords = {"layer": rows, "other_layer": columns}
        return xr.DataArray(found.reshape(len(rows), -1), coords, ("layer", "other_layer"), "cka", about)

    def _pairs(self) -> list[tuple[tuple[int, str], tuple[int, str]]]:
        last = len(self._names) - 1
        return [((0, row), (last, column)) for row in self._names[0] for column in self._names[-1]]


def _ratio(both: float, product: float, one: float) -> float:
    return both / product**0.5 if one > 0 and product > 0 else float("nan")
