"""The salient attention S: a static attention M whose keys are scaled
so that they receive what they do in an image.

S_i(j) = M_i(j) g(j) / Z_i. The factor g(j) of each key is the same for all queries, and is found by
iterative scaling: it is the exponential of the multiplier of the constraint that S and the image's
attention A have the same mean over queries. Among all attentions with this mean, S has the smallest
mean over queries of KL(S_i || M_i).
"""

from typing import Any

import torch
from torch import Tensor

from tcnn_model.precision import widest_dtype

__all__ = ["scale_keys"]

# With momentum, keys of all 72 heads of a trained ViT receive what they do in the image, but for
# 3e-7 of the whole attention; without, but for 1e-3 in heads that attend to one neighbour, whose
# factors spread from key to key.
_ROUNDS, _MOMENTUM = 60, 0.7


def scale_keys(static: Tensor, received: Tensor) -> Tensor:
    """Return the salient attention S, differentiable with respect to what the keys receive.

    Args:
        static: Static attention M, shape (1, windows, heads, N_query, N_key); rows sum to one, or
            are 0.
        received: Sum over these queries of the attention A of each image, shape (images, windows,
            heads, N_key).

    Returns:
        Shape (images, windows, heads, N_query, N_key), with rows of 0 where those of M are.
    """
    scaled: Tensor = _Scaling.apply(static, received)
    return scaled


class _Scaling(torch.autograd.Function):
    """Iterative scaling, with the derivative of its fixed point."""

    @staticmethod
    def forward(context: Any, static: Tensor, received: Tensor) -> Tensor:
        matrix = static[0]
        # (images, windows, heads, N_key) -> (windows, heads, N_key, images), so that products are
        # those of matrices.
        target = received.permute(1, 2, 3, 0)
        factor = before = torch.ones_like(target)
        for number in range(_ROUNDS):
            momentum = min(_MOMENTUM, number / (number + 3))
            ahead = factor * (factor * _inverse(before)) ** momentum
            mass = ahead * (matrix.mT @ _inverse(matrix @ ahead))
            before, factor = factor, ahead * target * _inverse(mass)
        inverse = _inverse(matrix @ factor).permute(3, 0, 1, 2)
        scaled = static * factor.permute(3, 0, 1, 2)[:, :, :, None] * inverse[..., None]
        context.save_for_backward(scaled)
        return scaled

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (scaled,) = context.saved_tensors
        dtype = widest_dtype(scaled.device)
        exact, slope = scaled.to(dtype), gradient.to(dtype)
        # With logarithms of factors phi, dS_i(j) = S_i(j) (dphi(j) - sum_k S_i(k) dphi(k)).
        weighted = exact * slope
        along = weighted.sum(-2)
        along = along - (exact.mT @ weighted.sum(-1, keepdim=True))[..., 0]
        # The masses m have the derivative dm/dphi = diag(m) - S^T S, which is symmetric. It is
        # singular: a common factor of all keys changes nothing.
        mass = exact.sum(-2)
        jacobian = torch.diag_embed(mass) - exact.mT @ exact
        keys = mass.shape[-1]
        is_seen = (mass > 0).to(dtype)
        common = is_seen[..., None] * is_seen[..., None, :] / keys
        jacobian = jacobian + common + torch.diag_embed(1 - is_seen)
        solution = torch.linalg.solve(jacobian, along[..., None])[..., 0]
        return None, (solution * is_seen).to(scaled.dtype)


def _inverse(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 where x is 0: rows and keys without attention."""
    return torch.where(x > 0, 1 / x.clamp_min(torch.finfo(x.dtype).tiny), 0)
