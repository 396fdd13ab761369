"""A trainer's metrics as the scalars of a mark."""

import re
from collections.abc import Mapping
from typing import Any

from tcnn_probe.schema import COORDINATES

__all__ = ["float_metrics"]


def float_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers; ``val/acc`` becomes ``val_acc``, and names of coordinates are left out."""
    numbers = {
        re.sub(r"\W", "_", name): value
        for name, value in metrics.items()
        if hasattr(value, "__float__")
    }
    return {
        name: float(value) for name, value in numbers.items() if name not in COORDINATES
    }
