"""Modes of ablation of all heads at once, with the statistics over images that they share."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from torch import nn

from tcnn_probe.interventions.ablation_kinds import Ablated, Mode, use_grids
from tcnn_probe.interventions.edited_forwards import collect_references, count_heads
from tcnn_probe.interventions.head_selection import HeadSelection, select_heads
from tcnn_probe.interventions.references import GivenImages, as_batches

__all__ = ["RUNGS", "Rungs"]

RUNGS: tuple[Mode, ...] = ("uniform", "convolutional", "static", "salient", "zero")
"""Modes of the ladder, and "zero"."""

_REFUSED = ("positional", "content", "replaced")
"""Modes that do not edit the outputs of heads one by one."""


@dataclass(frozen=True)
class Rungs:
    """Heads of a model with a choice of ablations for each of them.

    Args:
        model: The model.
        entries: Heads of each layer that can be ablated in a mode.
    """

    model: nn.Module
    entries: dict[Mode, list[Ablated]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        heads: HeadSelection,
        modes: Collection[Mode],
        reference: GivenImages | None,
        images: GivenImages,
        radius: float | None,
        seed: int,
        queries: str | None,
    ) -> "Rungs":
        """Select the heads, and collect statistics over ``reference``,
        or over ``images`` if it is None.

        Raises:
            ValueError: A mode is unknown or cannot be used, no layer can do it, or none computed
                attention.
        """
        entries: dict[Mode, list[Ablated]] = {}
        for mode in modes:
            if mode in _REFUSED:
                raise ValueError(f"expected modes such as {RUNGS}, got {mode!r}")
            entries[mode] = select_heads(model, heads, mode)
            for entry in entries[mode]:
                entry.strict = False
        rungs = cls(model, entries)
        use_grids(model, rungs.all, queries, radius)
        over_images = [entry for entry in rungs.all if entry.takes_images]
        if over_images:
            given = images if reference is None else reference
            collect_references(model, over_images, as_batches(given, model), seed)
        # Some layers do not state their number of heads.
        uncounted = [x for x in rungs.all if x.count is None and not x.takes_images]
        if uncounted:
            count_heads(model, uncounted, next(iter(as_batches(images, model)))[:1])
        layers = {entry.layer: entry.count for entry in rungs.all}
        if layers and not any(layers.values()):
            raise ValueError(
                f"expected layers that compute attention between tokens, got {[*layers]}, which "
                "computed none in a forward"
            )
        return rungs

    @property
    def all(self) -> list[Ablated]:
        """Heads of all layers and modes."""
        return [entry for group in self.entries.values() for entry in group]

    def table(self, images: int) -> xr.DataArray:
        """Return an array of NaN, (mode, layer, head, image),
        whose layers are in the order of the model.
        """
        layers = list(dict.fromkeys(entry.layer for entry in self.all))
        heads = sorted({head for entry in self.all for head in entry.indices})
        coords: dict[str, Any] = {
            "mode": list(self.entries),
            "layer": layers,
            "head": heads,
            "image": np.arange(images),
        }
        shape = [len(values) for values in coords.values()]
        return xr.DataArray(np.full(shape, np.nan), coords, list(coords))
