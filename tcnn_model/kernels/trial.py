"""Use of the kernels where nobody asked for them: each is compared once for every shape.

``TCNN_PROBE_TRITON=1`` switches all of them on and ``0`` off; ``backend="triton"`` calls the kernel
of gated attention in any case.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tcnn_model.precision import at_least_float32

__all__ = ["enabled", "logit_bound", "tried"]

T = TypeVar("T")

# Whether the kernel agreed at its first call, by kernel and shape.
_AGREED: dict[Hashable, bool] = {}
# Rounding errors that are allowed, in units of eps times the terms. Both computations round each
# logit and each product a few times, and sums of thousands of terms stay below a few units.
_UNITS = 32
# A float32 product in TF32 has ten bits.
_TF32 = 2.0**-10


def enabled(*, default: bool = False) -> bool:
    """Return whether the user has switched the kernels on, by TCNN_PROBE_TRITON=1,
    or off, by 0; the default if neither.
    """
    return {"0": False, "1": True}.get(os.environ.get("TCNN_PROBE_TRITON", ""), default)


def logit_bound(query: Tensor, key: Tensor, scale: float) -> float:
    """Return a bound on the sums of the absolute terms of logits,
    scale ||q|| ||k||, of the largest query and key.
    """
    dtype = at_least_float32(query.dtype)
    largest = [x.detach().to(dtype).norm(dim=-1).amax() for x in (query, key)]
    return abs(scale) * float(largest[0] * largest[1])


def tried(
    name: str,
    shape: Hashable,
    kernel: Callable[[], T],
    reference: Callable[[], T],
    tensors: Callable[[T], Sequence[Tensor | None]],
    *,
    logits: Callable[[], float],
    dtype: torch.dtype,
) -> T:
    """Return the result of a kernel, or of its reference
    if they differed at the first call with this shape.

    The first call returns the reference's result. A difference, or an error of Triton's compiler,
    gives a warning.

    Args:
        name: Name of the kernel.
        shape: Sizes, dtypes and options with which the kernel is compiled.
        kernel, reference: Functions that compute the same.
        tensors: Function from a result to the tensors to compare.
        logits: Function that returns the :func:`logit_bound` of the attention.
        dtype: Dtype in which the results are rounded.
    """
    key = (name, shape, torch.backends.cuda.matmul.allow_tf32)
    if key in _AGREED:
        return kernel() if _AGREED[key] else reference()
    expected = reference()
    try:
        reason = _difference(tensors(kernel()), tensors(expected), _eps(dtype) * (1 + logits()))
    except torch.OutOfMemoryError:
        raise  # another size may fit
    except Exception as error:  # Triton and its compiler raise errors of many kinds
        reason = f"{type(error).__name__}: {error}"
    _AGREED[key] = not reason
    if reason:
        warnings.warn(
            f"the Triton kernel of {name} is not used for {shape}: {reason}. Please report this "
            "with the output of `tcnn-probe info`; with TCNN_PROBE_TRITON=0 no kernel is tried",
            RuntimeWarning,
            stacklevel=2,
        )
    return expected


def _eps(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    uses_tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return max(eps, _TF32) if uses_tf32 else eps


def _difference(
    actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], unit: float
) -> str:
    """Return how much tensors differ, "" if by rounding only:
    _UNITS * unit, relative to the largest value.
    """
    for number, (ours, exact) in enumerate(zip(actual, expected, strict=True)):
        if ours is None or exact is None:
            if ours is not exact:
                return f"result {number} is missing"
            continue
        ours, exact = ours.detach().double(), exact.detach().double()
        finite = exact[exact.isfinite()]
        # Values below 1, such as small entropies, are differences of logits.
        largest = max(1.0, float(finite.abs().amax())) if finite.numel() else 1.0
        limits: Any = {"rtol": 0.0, "atol": _UNITS * unit * largest}
        if not torch.allclose(ours, exact, **limits, equal_nan=True):
            worst = float((ours - exact).abs().nan_to_num(torch.inf).amax())
            return f"result {number} differs by {worst:.3g}, and rounding by {limits['atol']:.3g}"
    return ""
