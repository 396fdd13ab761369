"""Linear CKA: the similarity of two representations
of the same images, by layers, epochs or models.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from tcnn_probe.representation.arrays import feature_matrix

__all__ = ["LinearCKA", "linear_cka"]

# The side, 0 or 1, and the layer's name, because two models may have layers with the same name.
_Layer = tuple[int, str]


def linear_cka(features: ArrayLike, others: ArrayLike) -> float:
    """Compute the debiased linear CKA of two representations of the same images.

    It is 1 if they are equal up to a rotation, a scale and a shift; if they are unrelated it is 0
    on average, and can be negative. The usual estimate without debiasing is near 1 for any two
    representations of few images with many channels.

    Args:
        features, others: Features of the same images, shapes (n, ...) and (n, ...), n >= 4.

    Returns:
        The CKA; NaN if one of the two has no structure that n images could show.
    """
    cka = LinearCKA()
    cka.add({"": _reduce_channels(features)}, {"": _reduce_channels(others)})
    return float(cka.result().item())


def _reduce_channels(features: ArrayLike) -> np.ndarray:
    """Shift and rotate features into at most as many channels as images,
    which does not change the CKA.
    """
    x = feature_matrix(features)
    x = x - x[0]
    # x = R^T Q^T, where Q is a rotation, which does not change the products between images.
    return np.asarray(np.linalg.qr(x.T, mode="r")).T if x.shape[1] > len(x) else x


@dataclass
class _Sums:
    """Sums over images for HSIC of features x and y: of x y^T,
    x, y, x |y|^2, y |x|^2, |x|^2, |y|^2, |x|^2 |y|^2.
    """

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
        self.x = self.x + x.sum(0)
        self.y = self.y + y.sum(0)
        self.x_yy = self.x_yy + yy @ x
        self.y_xx = self.y_xx + xx @ y
        self.xx, self.yy, self.xx_yy = (
            self.xx + xx.sum(),
            self.yy + yy.sum(),
            self.xx_yy + xx @ yy,
        )

    def hsic(self, n: int) -> float:
        """Estimate HSIC without bias from K = x x^T
        and L = y y^T without their diagonals (Song et al. 2012).

        [tr(KL) + 1K1 1L1 / ((n - 1)(n - 2)) - 2 1KL1 / (n - 2)] / (n(n - 3))
        """
        # tr(KL) = |x^T y|^2 minus the diagonals, which are K_ii = |x_i|^2 and L_ii = |y_i|^2;
        # likewise below.
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

    CKA(x, y) = HSIC(x, y) / sqrt(HSIC(x, x) HSIC(y, y)) (Kornblith et al. 2019), with the unbiased
    estimate of HSIC (Song et al. 2012) that Nguyen et al. 2021 use for batches. They average HSIC
    over batches; here HSIC is computed over all images together, and the batch size does not
    matter. Only sums are stored: C * C' * 8 bytes for each pair of layers with C and C' channels,
    for any number of images. Feature maps should therefore be pooled first.
    """

    def __init__(self) -> None:
        self._images = 0
        self._shift: dict[_Layer, np.ndarray] = {}
        self._sums: dict[tuple[_Layer, _Layer], _Sums] = {}
        self._names: list[list[str]] = []

    def add(
        self,
        features: Mapping[str, ArrayLike],
        others: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Add a batch of images.

        Args:
            features: Features by layer, shape (B, ...).
            others: Features of the same images by the layers to compare with, for example of
                another model; None for the same layers.

        Raises:
            ValueError: Layers have different numbers of images, or layers or channels differ from
                previous batches.
        """
        sides = [features] if others is None else [features, others]
        names = [list(side) for side in sides]
        if self._names and self._names != names:
            raise ValueError(f"expected the layers {self._names}, as before, got {names}")
        batch: dict[_Layer, np.ndarray] = {}
        for number, side in enumerate(sides):
            for name, values in side.items():
                batch[number, name] = feature_matrix(values, f"features of {name!r}")
        counts = {f"{name!r}": len(values) for (_, name), values in batch.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(
                "expected features of the same number of images from all layers, got "
                f"{counts or 'no layer'}"
            )
        for layer, values in batch.items():
            first_image = self._shift.get(layer, values[0])
            if len(first_image) != len(values[0]):
                raise ValueError(
                    f"expected {len(first_image)} numbers per image of {layer[1]!r}, as before, "
                    f"got {len(values[0])}"
                )
        self._names = names
        self._images += next(iter(counts.values()))
        for layer, values in batch.items():
            # CKA does not depend on a shift. If the first image is subtracted, a large mean does
            # not cost precision, and equal features are exactly 0.
            batch[layer] = values - self._shift.setdefault(layer, values[0].copy())
        for row, column in {*self._pairs(), *((layer, layer) for layer in batch)}:
            self._sums.setdefault((row, column), _Sums()).add(batch[row], batch[column])

    def result(self) -> xr.DataArray:
        """Compute the CKA of all pairs of layers,
        dims ("layer", "other_layer"), from -1 to about 1.

        Raises:
            ValueError: There were fewer than 4 images.
        """
        if self._images < 4:
            raise ValueError(f"expected 4 images or more, got {self._images}")
        hsic = {pair: sums.hsic(self._images) for pair, sums in self._sums.items()}
        values = [_normalize(hsic[a, b], hsic[a, a], hsic[b, b]) for a, b in self._pairs()]
        rows, columns = self._names[0], self._names[-1]
        about = {
            "units": "1",
            "long_name": "linear CKA",
            "description": "Debiased linear CKA (Kornblith et al. 2019) of the features of two "
            "layers.",
            "images": self._images,
        }
        coords = {"layer": rows, "other_layer": columns}
        return xr.DataArray(
            np.reshape(values, (len(rows), -1)),
            coords,
            ("layer", "other_layer"),
            "cka",
            about,
        )

    def _pairs(self) -> list[tuple[_Layer, _Layer]]:
        last = len(self._names) - 1
        return [((0, row), (last, column)) for row in self._names[0] for column in self._names[-1]]


def _normalize(hsic: float, hsic_x: float, hsic_y: float) -> float:
    product = hsic_x * hsic_y
    # An unbiased estimate can be negative, even for a matrix with itself. Then the images show no
    # structure.
    return hsic / product**0.5 if hsic_x > 0 and product > 0 else float("nan")
