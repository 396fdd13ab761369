"""Places of tokens on the grids of attentions,
which edits that depend on them need before the layers run.
"""

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.attention.patterns import places_on_grid
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.stream import attention_stream
from tcnn_probe.heads.static_pattern import offsets_of_pairs
from tcnn_probe.hooks.calls import Call
from tcnn_probe.hooks.modes import hidden_from_recorders, without_gradients
from tcnn_probe.images import input_tensors
from tcnn_probe.interventions.contributions import frozen_copy
from tcnn_probe.models import module_name

__all__ = ["GridFinder", "TokenPlaces"]

_SPECIAL_QUERIES = "its only queries are class tokens or latents, which keep their attention"


@dataclass(frozen=True)
class TokenPlaces:
    """Places of the tokens of an attention, in the model's order.

    Args:
        queries, keys: Row and column of each query and key, (N_query, 2) and (N_key, 2); NaN for
            class and register tokens. Those of a window are places in the window.
        windows: Number of windows of an image.
        regions: Region of each token of each window, (windows, N_key): tokens in different regions
            are hidden from each other by a shifted window's mask. None without such a mask.
    """

    queries: np.ndarray
    keys: np.ndarray
    windows: int
    regions: Tensor | None

    @classmethod
    def of(cls, attention: Attention) -> "TokenPlaces | str":
        """Return the places of an attention, or the reason why they are unknown."""
        layout = attention.layout
        if layout.queries is None or layout.keys is None:
            is_special = attention.first_patch_query is None
            return _SPECIAL_QUERIES if is_special else layout.reason
        queries, keys = (places_on_grid(x) for x in (layout.queries, layout.keys))
        if attention.order is not None:
            queries, keys = (
                places[order.argsort().cpu().numpy()]
                for places, order in zip((queries, keys), attention.order, strict=True)
            )
        cut = attention.cut
        is_shifted = cut is not None and any(cut.shift)
        regions = cut.regions() if cut is not None and is_shifted else None
        return cls(queries, keys, attention.windows, regions)

    @cached_property
    def is_patch(self) -> Tensor:
        """Whether each query is a patch, shape (N_query,)."""
        return torch.from_numpy(np.isfinite(self.queries[:, 0]))

    @property
    def offsets(self) -> np.ndarray:
        """Index of the offset of each pair of query and key;
        each key off the grid is an offset of its own.
        """
        return offsets_of_pairs(self.queries, self.keys)[0]

    def within(self, radius: float) -> Tensor:
        """Return whether the distance of each pair is at most a radius;
        NaN if one is off the grid.
        """
        difference = self.keys - self.queries[:, None]
        return torch.from_numpy(np.hypot(*np.moveaxis(difference, -1, 0)) <= radius)

    def by_window(self, rows: Tensor) -> Tensor:
        """Return (rows, ...) as (images, windows, ...)."""
        return rows.unflatten(0, (-1, self.windows))

    def visible(self, attention: Attention) -> Tensor:
        """Return whether no mask hides a key: (images or 1, windows, N_query, N_key)."""
        if self.regions is None:
            shape = 1, self.windows, attention.queries, attention.keys
            seen = torch.ones(shape, dtype=torch.bool, device=attention.device)
        else:
            regions = self.regions.to(attention.device)
            seen = (regions[:, :, None] == regions[:, None])[None]
        if not isinstance(attention, SoftmaxAttention):
            return seen
        logits, rows = attention.logits, torch.arange(attention.rows)
        if logits.visible(slice(1)) is None:
            return seen
        queries = torch.arange(attention.queries).expand(attention.rows, -1)
        return self.by_window(logits.hidden(rows, queries).logical_not()) & seen


class GridFinder:
    """Finds the places of all tokens of a model,
    for each size of its inputs, by running a copy of the model.

    Args:
        model: The model, whose copy shares its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[Any, dict[str, TokenPlaces | str]] = {}
        self._running = threading.local()

    @without_gradients
    def look(self, call: Call) -> None:
        """Find the places in a call of the model that begins,
        unless inputs of its size were seen before.
        """
        tensors = input_tensors(call.inputs)
        size: Any = tuple(tuple(x.shape[1:]) for x in tensors)
        if not any(x.ndim == 4 for x in tensors):
            # The grid of patches that are given in place of images is known from their positions.
            positions = [x for x in tensors if x.ndim in (2, 3) and x.shape[-1] <= 4]
            size = size, tuple(tuple(x.flatten().tolist()) for x in positions)
        if size not in self._found:
            places: dict[str, TokenPlaces | str] = {}

            def note(attention: Attention) -> HeadEdit | None:
                places[attention.name] = TokenPlaces.of(attention)
                return None

            twin = frozen_copy(self._model)
            # The copy is not the user's model, whose recorders must not see it run.
            with hidden_from_recorders(), attention_stream(twin, note) as stream:
                args = _first_images(call.args) if len(tensors) == 1 else call.args
                twin(*args, **call.kwargs)
            self._found[size] = {**stream.unsupported, **places}
        self._running.size = size

    def places(self, layer: str, attention: Attention) -> TokenPlaces | str:
        """Return the places of an attention's tokens, or the reason why they are on no known grid.

        Raises:
            RuntimeError: The layer has not run in a forward of the model on such inputs.
        """
        name = module_name(layer) + (f"#{attention.number}" if attention.number else "")
        # A layer that is checkpointed, or called by itself, runs outside of a forward of the model.
        size = getattr(self._running, "size", None)
        found = [self._found.get(size, {}), *reversed(self._found.values())]
        reason = ""
        for places in (by_layer[name] for by_layer in found if name in by_layer):
            if isinstance(places, str):
                reason = places
            elif len(places.queries) == attention.queries:
                return places
        if reason:
            return reason
        raise RuntimeError(
            f"the grid of {layer!r} with {attention.queries} queries is unknown: call the model "
            "itself, which shows it, before parts of it"
        )


def _first_images(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first images of a batch that is the only input by position."""
    is_batch = len(args) == 1 and isinstance(args[0], Tensor) and args[0].ndim > 2
    return (args[0][:2],) if is_batch else args
