"""A trainer's metrics as the scalars of a mark."""

import re
from collections.abc import Mapping
from typing import Any

from tcnn_probe.schema import COORDINATES

__all__ = ["as_scalars"]


def as_scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are one number; ``val/acc`` becomes ``val_acc``, and what is called as a coordinate is left out."""
    numbers = {re.sub(r"\W", "_", name): value for name, value in metrics.items() if hasattr(value, "__float__")}
    return {name: float(value) for name, value in numbers.items() if name not in COORDINATES}
