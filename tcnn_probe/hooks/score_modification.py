"""The logits of flex_attention: products of queries
and keys that are changed by the user's function and masked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tcnn_probe.hooks.modes import run_in_modes

__all__ = ["ScoreModification"]

# in_dims of nested vmaps over (score, image, head, query, key), last axis first: 0 for arguments
# that have the axis.
_AXES = (
    (0, None, None, None, 0),
    (0, None, None, 0, None),
    (0, None, 0, None, None),
    (0, 0, None, None, None),
)


@dataclass(frozen=True)
class ScoreModification:
    """The change that flex_attention makes to scaled products
    of queries and keys, computed for a block of them.

    Torch's eager flex_attention maps the two functions in the same way, but over all products at
    once.

    Args:
        score_mod: Function (score, image, head, query, key, *buffers) -> score, of scalar tensors.
        mask_mod: Function (image, head, query, key, *buffers) -> whether the query may attend to
            the key.
        score_buffers, mask_buffers: Tensors that are passed to the functions.
        queries, keys: Indices of queries and keys that are passed to the functions, shapes
            (N_query,) and (N_key,).
    """

    score_mod: Callable[..., Tensor]
    mask_mod: Callable[..., Tensor]
    score_buffers: tuple[Any, ...]
    mask_buffers: tuple[Any, ...]
    queries: Tensor
    keys: Tensor

    def __call__(self, scores: Tensor, rows: slice, queries: slice, keys: slice) -> Tensor:
        """Return the logits of a block, shape (rows, heads, queries, keys);
        minus infinity where a key is hidden.

        Args:
            scores: Scaled products of the block's queries and keys.
            rows, queries, keys: Position of the block.
        """
        first = rows.start or 0  # rows of flex_attention are images
        images = torch.arange(first, first + len(scores), device=scores.device)
        heads = torch.arange(scores.shape[1], device=scores.device)
        mapped = self._modify
        for axes in _AXES:
            mapped = torch.vmap(mapped, in_dims=axes)
        places = images, heads, self.queries[queries], self.keys[keys]
        return run_in_modes(lambda: mapped(scores, *places), _IndexByTensors())

    def _modify(self, score: Tensor, *place: Tensor) -> Tensor:
        modified = self.score_mod(score, *place, *self.score_buffers)
        visible = self.mask_mod(*place, *self.mask_buffers)
        return torch.where(visible, modified, -torch.inf)


class _IndexByTensors(TorchFunctionMode):
    """Mode in which vmap can map ``bias[query, key]``, as in torch's own eager flex_attention.

    Indexing by a tensor without axes otherwise reads its number, which vmap refuses.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(i, Tensor | int) for i in indices):
                tensors = [torch.as_tensor(i, device=x.device) for i in indices]
                return torch.ops.aten.index(x, tensors)
        return func(*args, **(kwargs or {}))
