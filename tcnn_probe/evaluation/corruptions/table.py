"""The fifteen corruptions by name, with their published parameters."""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tcnn_probe.evaluation.corruptions import blur, digital, noise, weather

__all__ = ["CORRUPTIONS", "Corruption", "named_corruption", "named_corruptions"]


@dataclass(frozen=True)
class Corruption:
    """A corruption of ImageNet-C.

    Attributes:
        function: Function that computes the corruption of an array (H, W, C).
        random: Description of the random draws for every image; "" if there are none.
        parameters: Values at severities 1 to 5 by name; lengths are in pixels of a 224 x 224 image.
    """

    function: Callable[..., NDArray[Any]]
    random: str
    parameters: Mapping[str, tuple[float, ...]]

    @property
    def name(self) -> str:
        """Published name."""
        return self.function.__name__

    @property
    def group(self) -> str:
        """Group: "noise", "blur", "weather" or "digital"."""
        return self.function.__module__.rpartition(".")[2]

    @property
    def description(self) -> str:
        """First sentence of the function's docstring."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split()).rstrip(".")

    def at(self, severity: int) -> dict[str, float]:
        """Return the parameters at a severity from 1 to 5."""
        return {name: values[severity - 1] for name, values in self.parameters.items()}


def _corruption(
    function: Callable[..., NDArray[Any]],
    random: str = "",
    **parameters: tuple[float, ...],
) -> Corruption:
    return Corruption(function, random, parameters)


_ALL = (
    _corruption(noise.gaussian_noise, "the noise", deviation=(0.08, 0.12, 0.18, 0.26, 0.38)),
    _corruption(noise.shot_noise, "the counts", photons=(60, 25, 12, 5, 3)),
    _corruption(
        noise.impulse_noise, "the values that are set, and to what",
        amount=(0.03, 0.06, 0.09, 0.17, 0.27),
    ),
    _corruption(blur.defocus_blur, radius=(3, 4, 6, 8, 10), smoothing=(0.1, 0.5, 0.5, 0.5, 0.5)),
    _corruption(
        blur.glass_blur, "the displacements",
        deviation=(0.7, 0.9, 1, 1.1, 1.5), reach=(1, 2, 2, 3, 4), rounds=(2, 1, 3, 2, 2),
    ),
    _corruption(
        blur.motion_blur, "the direction",
        radius=(10, 15, 15, 15, 20), deviation=(3, 5, 8, 12, 15),
    ),
    _corruption(
        blur.zoom_blur,
        until=(1.11, 1.16, 1.21, 1.26, 1.31), step=(0.01, 0.01, 0.02, 0.02, 0.03),
    ),
    _corruption(
        weather.snow, "the flakes and their direction",
        mean=(0.1, 0.2, 0.55, 0.55, 0.55), deviation=(0.3, 0.3, 0.3, 0.3, 0.3),
        size=(3, 2, 4, 4.5, 2.5),
        threshold=(0.5, 0.5, 0.9, 0.85, 0.85), radius=(10, 12, 12, 12, 12), streak=(4, 4, 8, 8, 12),
        kept=(0.8, 0.7, 0.7, 0.65, 0.55),
    ),
    _corruption(
        weather.frost, "the picture and the crop",
        kept=(1, 0.8, 0.7, 0.65, 0.6), added=(0.4, 0.6, 0.7, 0.7, 0.75),
    ),
    _corruption(
        weather.fog, "the fractal",
        added=(1.5, 2, 2.5, 2.5, 3), decay=(2, 2, 1.7, 1.5, 1.4),
    ),
    _corruption(weather.brightness, added=(0.1, 0.2, 0.3, 0.4, 0.5)),
    _corruption(digital.contrast, kept=(0.4, 0.3, 0.2, 0.1, 0.05)),
    _corruption(
        # These are multiples of 244 (by 2, 0.7, 0.1 and so on), because the published code has this
        # number, not 224.
        digital.elastic_transform, "the map and the displacements",
        amplitude=(488, 488, 12.2, 17.08, 29.28), deviation=(170.8, 19.52, 2.44, 2.44, 2.44),
        corners=(24.4, 48.8, 4.88, 4.88, 4.88),
    ),
    _corruption(digital.pixelate, kept=(0.6, 0.5, 0.4, 0.3, 0.25)),
    _corruption(digital.jpeg_compression, quality=(25, 18, 15, 10, 7)),
)  # fmt: skip

CORRUPTIONS: Mapping[str, Corruption] = {corruption.name: corruption for corruption in _ALL}


def named_corruption(name: str) -> Corruption:
    """Look up a corruption; raise a ValueError that suggests the nearest name."""
    if name not in CORRUPTIONS:
        similar = difflib.get_close_matches(str(name), CORRUPTIONS, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"expected one of {', '.join(CORRUPTIONS)}; got {name!r}{hint}")
    return CORRUPTIONS[name]


def named_corruptions(names: str | Collection[str] | None) -> tuple[str, ...]:
    """Return names in the published order, from names and groups; None for all."""
    if names is None:
        return tuple(CORRUPTIONS)
    selected = {names} if isinstance(names, str) else set(names)
    for name in selected.difference(corruption.group for corruption in CORRUPTIONS.values()):
        named_corruption(name)
    return tuple(
        name for name, corruption in CORRUPTIONS.items() if selected & {name, corruption.group}
    )
