"""Statistics of plain softmax attention:
their arguments and results, and the tensors on which the kernel runs.

The kernel itself is imported when it first runs, so that importing this file needs neither Triton
nor a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tcnn_model.kernels.ops import is_modern_gpu

__all__ = ["RowStatistics", "TokenGrid", "attention_statistics", "can_measure"]

# Largest size of a head's channels in bytes for which the tiles take less than 99 KB, the shared
# memory that every GPU since Ampere has.
_WIDEST_HEAD = 512


class TokenGrid(NamedTuple):
    """Sequence of class and register tokens, followed by a grid of tokens in raster order.

    Args:
        prefix: Number of class and register tokens before the grid.
        width: Number of columns of the grid.
        spacing: Distance from one row to the next, and from one column to the next.
        origin: Position of the first row and of the first column.
    """

    prefix: int
    width: int
    spacing: tuple[float, float] = (1.0, 1.0)
    origin: tuple[float, float] = (0.0, 0.0)

    def positions(
        self, count: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the row and column of ``count`` tokens;
        tokens before the grid have those of its first cell.
        """
        cell = torch.arange(-self.prefix, count - self.prefix, device=device)
        cell = cell.clamp(min=0)
        y = cell // self.width * self.spacing[0] + self.origin[0]
        x = cell % self.width * self.spacing[1] + self.origin[1]
        return y.to(dtype), x.to(dtype)


class RowStatistics(NamedTuple):
    """Statistics of softmax attention A with logits s, in float32, or float64 for float64.

    A query for which a mask hides all keys attends to nothing: its A is 0, as in torch's own
    attention.

    Args:
        largest: max_j s_ij, shape (rows, heads, N_query); minus infinity where all keys are hidden.
        log_sum_exp: log sum_j exp(s_ij - largest), of the same shape. It does not include the
            largest logit, because their sum would have a rounding error as large as that of the
            logit.
        expected_logit: sum_j A_ij (s_ij - largest), of the same shape.
        prefix: Sum of A_ij over the class and register tokens, of the same shape.
        distance: Mean distance to the keys on the grid, weighted by A, of the same shape; 0 if all
            of these keys are hidden. Rows are renormalised over the grid without a subtraction, so
            that the distance is precise even if nearly all attention goes to the prefix. None
            without grids.
        received: sum_i A_ij, shape (rows, heads, N_key); None unless requested.
    """

    largest: Tensor
    log_sum_exp: Tensor
    expected_logit: Tensor
    prefix: Tensor
    distance: Tensor | None
    received: Tensor | None

    @property
    def entropy(self) -> Tensor:
        """-sum_j A_ij log A_ij in nats, where log A_ij = s_ij - largest - log_sum_exp."""
        return self.log_sum_exp - self.expected_logit


def can_measure(q: Tensor, k: Tensor) -> bool:
    """Return whether the kernel can measure the attention of these queries and keys on their GPU.

    The kernel needs Triton, an NVIDIA GPU of compute capability 8.0 or later, the same dtype for
    queries and keys, and heads of at most 512 bytes: 256 channels in half precision, 128 in
    float32.
    """
    is_narrow = q.shape[-1] * q.dtype.itemsize <= _WIDEST_HEAD
    return q.dtype == k.dtype and is_narrow and is_modern_gpu(q.device)


def attention_statistics(
    q: Tensor,
    k: Tensor,
    scale: float,
    mask: Tensor | None = None,
    *,
    queries: TokenGrid | None = None,
    keys: TokenGrid | None = None,
    received: bool = False,
) -> RowStatistics:
    """Measure softmax attention with logits ``scale * q k^T + mask``, without an N x N tensor.

    On a GPU ``received`` is summed in no fixed order; everything else is reproducible bit by bit.

    Args:
        q: Queries, shape (rows, heads, N_query, d); a row is an image, or a window of an image.
        k: Keys, shape (rows, heads, N_key, d).
        scale: Factor of the products.
        mask: Numbers to add, or True where a query may attend to a key; broadcasts to (rows, heads,
            N_query, N_key).
        queries, keys: Positions of the tokens; None if they are not known. Distances need both.
        received: Whether to sum the attention that each key receives, too, which takes twice the
            products.
    """
    from tcnn_model.kernels import row_statistics

    with torch.cuda.device_of(q):
        return row_statistics.attention_statistics(
            q, k, scale, mask, queries=queries, keys=keys, received=received
        )
