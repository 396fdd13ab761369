"""The logits of flex_attention: products of queries and keys, changed by a function of the user's and masked."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tcnn_probe.hooks.modes import only_modes_from_here

__all__ = ["ScoreModification"]

# in_dims of nested vmaps over (score, image, head, query, key), the last axis first: 0 for the arguments that have the
# axis.
_AXES = (
    (0, None, None, None, 0),
    (0, None, None, 0, None),
    (0, None, 0, None, None),
    (0, 0, None, None, None),
)


@dataclass(frozen=True)
class ScoreModification:
    """Change that flex_attention makes to the scaled products of queries and keys, a block of them at a time.

    Torch's eager flex_attention maps both functions in the same way over all the products at once.

    Args:
        score_mod: Function (score, image, head, query, key, *buffers) -> score of scalar tensors.
        mask_mod: Function (image, head, query, key, *buffers) -> whether the query may see the key.
        score_buffers, mask_buffers: Tensors that the functions use.
        queries, keys: Indices that the functions are given for the queries and keys, shapes (N_query,) and (N_key,).
    """

    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    score_buffers: tuple[Any, ...]
    mask_buffers: tuple[Any, ...]
    queries: Tensor
    keys: Tensor

    def __call__(
        self, scores: Tensor, rows: slice, queries: slice, keys: slice
    ) -> Tensor:
        """Return the logits of a block, shape (rows, heads, queries, keys); minus infinity where a key is hidden.

        Args:
            scores: Scaled products of the block's queries and keys.
            rows, queries, keys: Place of the block.
        """
        first = rows.start or 0  # rows of flex_attention are images
        images = torch.arange(first, first + len(scores), device=scores.device)
        heads = torch.arange(scores.shape[1], device=scores.device)
        mapped = self._modify
        for axes in _AXES:
            mapped = torch.vmap(mapped, in_dims=axes)
        with ExitStack() as modes:
            modes.enter_context(only_modes_from_here())
            modes.enter_context(_indexing())
            return mapped(scores, images, heads, self.queries[queries], self.keys[keys])

    def _modify(self, score: Tensor, *place: Tensor) -> Tensor:
        modified = self.score_mod(score, *place, *self.score_buffers)
        visible = self.mask_mod(*place, *self.mask_buffers)
        return torch.where(visible, modified, -torch.inf)


def _indexing() -> Any:
    """Return torch's own mode in which ``bias[query, key]`` can be mapped over indices, as flex_attention enters it."""
    # Imported late: torch.compile's modules take a second to import, and are there once flex_attention has run.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
