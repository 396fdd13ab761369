"""Whether attention as it is rebuilt is what the model computed: one comparison for each layer."""

import torch
from torch import Tensor

__all__ = ["ReconstructionError", "Verification", "relative_difference", "tolerance"]

_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}  # their fused kernels round the attention too


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


def tolerance(dtype: torch.dtype) -> float:
    """The largest share of the output's largest value that rounding explains."""
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """The largest difference as a share of the largest expected value, shape () in float32, where that is finite."""
    broken = ~expected.isfinite()  # by what the model was given
    off, size = (x.masked_fill(broken, 0).abs().amax().float() for x in (rebuilt - expected, expected))
    return off / size.clamp_min(torch.finfo(torch.float32).tiny)


class Verification:
    """Comparisons of a forward, which are looked at when it has ended: reading one waits for the device."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._open: list[tuple[str, Tensor, float]] = []

    def begin(self) -> None:
        """Forget what was compared in a forward that did not end."""
        self._open = []

    def needed(self, layer: str) -> bool:
        """Whether no forward has shown yet that the layer is rebuilt rightly."""
        return layer not in self._passed

    def add(self, layer: str, off: Tensor, most: float) -> None:
        """A relative difference, and the largest that may be."""
        self._open.append((layer, off, most))

    def settle(self) -> None:
        """Look at all of them.

        Raises:
            ReconstructionError: some differ.
        """
        compared, self._open = self._open, []
        wrong = {layer: share for layer, off, most in compared if not (share := float(off)) <= most}
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._passed |= {layer for layer, _, _ in compared}
