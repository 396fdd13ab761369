"""Which keys a mask leaves visible, and which tokens of an attention are padding."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tcnn_model.precision import widest_dtype

if TYPE_CHECKING:
    from tcnn_probe.attention.softmax import SoftmaxAttention

__all__ = ["HIDDEN", "HIDDEN_BY_MASK", "Visibility", "find_visibility"]

# A mask, or a logit that contains it, hides a key with at most this number. Models hide keys with
# minus infinity, the smallest number of a dtype, -1e9 or -1e4. The -100 that Swin adds, with biases
# of positions, between regions of a window is far above it (its keys make no padding; see
# Windows.regions), and so are these biases and logits of trained models.
HIDDEN = -5000.0
# A mask alone, all of whose numbers are 0 or far below, hides a key with at most this number.
HIDDEN_BY_MASK = -80.0


@dataclass(frozen=True)
class Visibility:
    """Keys that the queries of a masked attention see. Padding does not count as a query.

    Padding is a token that is hidden from all queries, itself included, or that sees only itself
    and is seen only by itself. The last token of causal attention is neither.

    Args:
        queries: Whether each query counts, shape (B, windows, N_query).
        keys: Whether each key is seen by a query that counts, shape (B, windows, N_key).
        seen: Number of keys that each query sees, shape (B, windows, N_query).
        distance: Mean distance from each query to the keys on the grid that it sees, shape (B,
            windows, N_query); None if a grid is unknown.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor
    distance: Tensor | None

    @property
    def is_padded(self) -> bool:
        """True if there is padding. Reading this waits for a GPU."""
        return not bool(self.queries.all())

    def mean(self, values: Tensor, first: int = 0) -> Tensor:
        """Average over the queries of an image that count, in all windows.

        Args:
            values: Shape (rows, heads, queries).
            first: Index of the first of these queries.

        Returns:
            Shape (B, heads); NaN for images without such queries.
        """
        counted = self.queries[:, :, None, first:]
        by_image = values.unflatten(0, self.queries.shape[:2])
        total = by_image.where(counted, 0).sum((1, 3))
        return total / counted.sum((1, 3))

    def mean_over_windows(self, values: Tensor) -> Tensor:
        """Average (B, windows, ...) over the windows that have queries that count: (B, ...)."""
        counted = self.queries.any(-1)
        total = values.where(counted.view(*counted.shape, *[1] * (values.ndim - 2)), 0)
        return total.sum(1) / counted.sum(1).view(-1, *[1] * (values.ndim - 2))


@torch.no_grad()
def find_visibility(attention: "SoftmaxAttention") -> Visibility | None:
    """Find the padding of an attention; None without a mask."""
    logits, layout = attention.logits, attention.layout
    # Tokens that attend to each other. As many other queries, such as those of a pool, are no
    # padding.
    is_square = attention.queries == attention.keys and (
        layout.asking == "tokens" or (layout.asking == "words" and layout.keys is None)
    )
    step = max(1, attention.block // (attention.queries * attention.keys))
    parts: list[list[Tensor]] = []
    for start in range(0, attention.rows, step):
        visible = logits.visible(slice(start, start + step))
        if visible is None:
            return None
        visible = visible.expand(-1, attention.queries, -1)
        part = [visible.sum(-1), visible.any(-2)]
        if is_square:
            own = visible.diagonal(dim1=-2, dim2=-1)
            part += [own, own & (part[0] == 1) & (visible.sum(-2) == 1)]
        if layout.queries is not None and layout.keys is not None:
            part.append(_distance(attention, visible))
        parts.append(part)
        # A mask that is the same for all rows has one.
        if len(visible) < min(step, attention.rows - start):
            break
    seen, keys, *rest = (
        attention.by_image(torch.cat(column).expand(attention.rows, -1))
        for column in zip(*parts, strict=True)
    )
    distance = rest.pop() if len(rest) % 2 else None
    queries = torch.ones_like(seen, dtype=torch.bool)
    if is_square:
        own, alone = rest
        padding = ~keys | alone
        # The only real token of an image also sees only itself.
        is_all = padding.all(-1, keepdim=True).all(1, keepdim=True)
        keys = queries = ~(padding & ~(alone & is_all))
    return Visibility(queries, keys, seen, distance)


def _distance(attention: "SoftmaxAttention", visible: Tensor) -> Tensor:
    """Return the mean distance to visible keys on the grid,
    (rows, N_query, N_key) -> (rows, N_query).
    """
    layout, dtype = attention.layout, widest_dtype(attention.device)
    distances = layout.distances(slice(None), dtype, attention.device)
    on_grid = visible[..., layout.prefix :]
    total = (distances[:, layout.prefix :] * on_grid).sum(-1)
    return total / on_grid.sum(-1).clamp_min(1)
