"""Similarity of the tokens of an image."""

from typing import Any

import numpy as np

__all__ = ["mean_cosine", "token_cosine"]


def token_cosine(tokens: Any) -> Any:
    """Average the cosine over pairs of different tokens of an image.

    Touvron's thesis reports this cosine for the class and the distillation token in the layers of
    DeiT (Section 3.3: 0.06 in the first, 0.93 in the last). For all tokens it shows whether they
    become similar with depth.

    Args:
        tokens: N >= 2 tokens of C channels, shape (..., N, C): an array, which is converted to
            float64, or a tensor, which is converted to float32 at least.

    Returns:
        Mean cosines, shape (...,), from -1/(N - 1) to 1. A token of zeros, as after a ReLU, has the
        cosine 0 with all others.

    Raises:
        ValueError: There are fewer than two tokens.
    """
    # This recognises a tensor without importing torch. Squares in half precision would overflow.
    if hasattr(tokens, "element_size"):
        tokens = tokens.float() if tokens.element_size() < 4 else tokens
    else:
        tokens = np.asarray(tokens, dtype=np.float64)
    if tokens.ndim < 2 or tokens.shape[-2] < 2:
        raise ValueError(
            f"expected two tokens or more, shape (..., N, C), got the shape {tuple(tokens.shape)}"
        )
    return mean_cosine(tokens, (tokens * tokens).sum(-1) ** 0.5)


def mean_cosine(tokens: Any, norms: Any) -> Any:
    """Average the cosine over pairs of tokens (..., N, C) with the given norms (..., N)."""
    count = tokens.shape[-2]
    # The sum of unit vectors is one product, which stores none of them.
    total = ((1 / (norms + (norms == 0)))[..., None, :] @ tokens)[..., 0, :]
    # |sum of unit vectors|^2 = their number + the sum of cosines over ordered pairs
    return ((total * total).sum(-1) - (norms > 0).sum(-1)) / (count * (count - 1))
