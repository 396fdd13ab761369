"""Checks that attention, as it is rebuilt for measuring, is the attention that the model used."""

import torch
from torch import Tensor

__all__ = ["ReconstructionError", "Verification", "relative_difference", "tolerance"]

# In half precision fused kernels round the attention, too, before it weighs the values.
_TOLERANCE = {torch.float16: 0.05, torch.bfloat16: 0.1}


class ReconstructionError(RuntimeError):
    """Attention as it is rebuilt for measuring is not the attention that the model used."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest share of the output's largest value that rounding explains."""
    # Far above rounding in float32, fused or not: what is looked for is another scale, mask or order, not precision.
    return _TOLERANCE.get(dtype, 5e-3)


def relative_difference(rebuilt: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference as a share of the largest finite expected value, shape () in float32."""
    broken = ~expected.isfinite()  # by what the model was given
    difference, size = (
        x.masked_fill(broken, 0).abs().amax().float()
        for x in (rebuilt - expected, expected)
    )
    # An output of zeros, as of a projection that starts at zero, is not to divide by zero.
    return difference / size.clamp_min(torch.finfo(torch.float32).tiny)


class Verification:
    """Comparisons of a forward, which are looked at when it has ended: reading one waits for the device."""

    def __init__(self) -> None:
        self._passed: set[str] = set()
        self._open: list[tuple[str, Tensor, float]] = []

    def begin(self) -> None:
        """Forget the comparisons of a forward that did not end."""
        self._open = []

    def needed(self, layer: str) -> bool:
        """Return whether no forward has shown yet that the layer is rebuilt rightly."""
        return layer not in self._passed

    def add(self, layer: str, compared: tuple[Tensor, float] | None) -> None:
        """Add a relative difference and the largest that may be; None where nothing could be compared."""
        if compared is not None:
            self._open.append((layer, *compared))

    def settle(self) -> None:
        """Read all comparisons.

        Raises:
            ReconstructionError: One is larger than rounding explains.
        """
        # Forgotten first, as the error below ends the forward.
        compared, self._open = self._open, []
        shares = {layer: float(difference) for layer, difference, _ in compared}
        wrong = {
            layer: shares[layer]
            for layer, _, largest in compared
            # Not ">": NaN is wrong, too.
            if not shares[layer] <= largest
        }
        if wrong:
            raise ReconstructionError(
                f"attention rebuilt from what reached it differs from the model's own output, by these shares of its "
                f"largest value: {wrong}; record the other layers with layers=, or write a probe for this kind of layer"
            )
        self._passed |= shares.keys()
