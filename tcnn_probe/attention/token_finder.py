"""Finding the tokens of each attention: where its images,
patches, words and class token are, in each forward.

What a forward shows only if its pixels are tracked is remembered, by layer and by kind of call.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.feature_maps import FeatureMaps
from tcnn_probe.attention.layout import (
    Arrangement,
    GivenTokens,
    Layout,
    Tokens,
    special_tokens,
)
from tcnn_probe.attention.place_rules import Places
from tcnn_probe.attention.receptive_fields import ReceptiveFields
from tcnn_probe.attention.reconstruction import BETWEEN_CHANNELS, NoTokenAttentionError
from tcnn_probe.attention.softmax import SoftmaxAttention
from tcnn_probe.attention.token_grid import find_layout
from tcnn_probe.attention.token_order import (
    LOST_IMAGES,
    OTHER_TOKENS,
    PlaceTracker,
    View,
    are_words,
    arrangement_of,
    images_of_views,
    objection_to_order,
)
from tcnn_probe.hooks.calls import without_nested
from tcnn_probe.hooks.compilation import never_compiled
from tcnn_probe.hooks.forwards import Running
from tcnn_probe.hooks.interception import SeenAttention
from tcnn_probe.images import batch_of, input_tensors

__all__ = ["TokenFinder"]

A = TypeVar("A", bound=Attention)


@dataclass
class _LayerFacts:
    """What tracked forwards have shown of a layer in one kind of call.

    Attributes:
        arrangement: Places of words and patches among the keys; None without words.
        queries_are_words: Whether the queries are words.
        are_channels: Whether queries and keys are channels, not tokens.
        objections: Reasons why the queries and the keys are not in the order of their grids; "" if
            they are.
        copies: Number of rows that an image has, if the model has multiplied its tokens.
        without_maps: Reason why the layer has no maps; None if it was not tracked.
        is_padded: Whether there is padding; None if this is unknown.
    """

    arrangement: Arrangement | None = None
    queries_are_words: bool = False
    are_channels: bool = False
    objections: tuple[str, str] = ("", "")
    copies: int = 1
    without_maps: str | None = None
    is_padded: bool | None = None


class TokenFinder:
    """Finds the tokens and the images of attentions
    in the forwards of a model, one forward at a time.

    Attributes:
        maps: Evidence of grids in the forward so far.

    Args:
        modules: Modules of the model.
        given: Facts that the user gives.
        fields: Receptive fields to fill in tracked forwards; None if they are not needed.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        given: GivenTokens,
        fields: ReceptiveFields | None = None,
    ) -> None:
        self.maps = FeatureMaps(special_tokens(modules, given))
        self._fields = fields
        # A call is identified by the part of the model that was called, its mode and the sizes of
        # its inputs. Places of tokens are tracked in one forward for each of these.
        self._call: tuple[Any, ...] = ()
        self._tracked: set[tuple[Any, ...]] = set()
        self._facts: defaultdict[tuple[Any, str], _LayerFacts]
        self._facts = defaultdict(_LayerFacts)
        # Entries in whose forwards images were seen to move.
        self._moved: set[nn.Module] = set()
        self._batch = 0
        self.forget_forward()

    def forget_forward(self) -> None:
        """Forget a forward that has ended, but not what is known of the layers."""
        self._places: PlaceTracker | None = None
        self._moves_images = self._adds_masks = False

    def begin_call(
        self,
        entry: nn.Module,
        inputs: Sequence[Any],
        *,
        whole_model: bool,
        continues: bool,
    ) -> None:
        """Begin a call of the model or of a part of it, which may continue a forward."""
        tensors, batch = input_tensors(inputs), batch_of(inputs)
        # If the images came with an earlier call of this forward, the inputs are tokens, maps or
        # masks.
        has_images = continues and self.maps.size is not None
        self.maps.enter(inputs, whole_model=whole_model, continues=continues)
        rows = 0 if batch is None else len(batch)
        if not continues or not self._batch:
            self._batch = rows
        # The number of images is left out, because the order of tokens does not depend on it; but a
        # single image shows nothing of the order of images, and calls of parts can have other rows
        # than the forward.
        shapes = [tuple(x.shape[1:]) for x in tensors]
        self._call = (entry, entry.training, rows == 1, rows == self._batch, *shapes)
        if self._call not in self._tracked:
            self._places = PlaceTracker(
                tensors,
                batch if batch is not None and rows == self._batch else (),
                self.maps.patches,
                numbers_pixels=not has_images,
                fields=self._fields,
            )

    def end_call(self) -> None:
        """Remember that calls of this kind need not be tracked any more,
        unless images move in them, or masks hide keys.
        """
        self._tracked.add(self._call)
        if self._moves_images or self._adds_masks:
            self._tracked.discard(self._call)
        self.forget_forward()

    @property
    def modes(self) -> list[PlaceTracker]:
        """Mode that tracks the places of tokens, in the first forward of each kind."""
        return [] if self._places is None else [self._places]

    @never_compiled
    def note_image(self, module: nn.Module, args: Sequence[Any]) -> None:
        """Note the image that enters the patch embedding, if a module that is called is this."""
        with torch.DisableTorchFunction():
            image = self.maps.called(module, without_nested(*args))
            if image is not None and self._places is not None:
                self._places.see(image)

    def queries_are_words(self, layer: str) -> bool:
        """Return whether the queries of the attention
        that torch is computing are known to be words.
        """
        facts = self._facts[self._call, layer]
        if self._places is not None:
            facts.arrangement = arrangement_of(self._places.keys)
            facts.queries_are_words = are_words(self._places.queries)
            facts.are_channels = self._places.are_channels
        return facts.queries_are_words

    def images_of(self, layer: str, running: Running, source: Tensor) -> int | None:
        """Return the number of images of a layer,
        of each of which it may get several copies; None if it is unknown.

        Args:
            layer: Name of the layer.
            running: Running modules and their inputs by position.
            source: Queries, or logits, of its attention.
        """
        images, facts = self.maps.images, self._facts[self._call, layer]
        # There can be more texts than images.
        if not images or facts.queries_are_words:
            return None
        tensors = [x for x in running[-1].inputs if isinstance(x, Tensor) and x.ndim]
        # transformers calls many layers by keyword. Queries with three axes can have merged heads.
        if not tensors and source.ndim == 4:
            tensors = [source]
        rows = len(tensors[0]) if tensors else 0
        if self._places is not None:
            is_copied = rows > images and self._places.shows_whole_images(tensors)
            facts.copies = rows // images if is_copied else 1
        return images * facts.copies

    def layout_of(
        self,
        layer: str,
        running: Running,
        not_on_grid: str,
        queries: int,
        keys: int,
        windows: int,
    ) -> Layout:
        """Return the layout of a softmax, see :func:`find_layout`,
        without grids that contradict the tracked places.

        Raises:
            NoTokenAttentionError: Queries and keys are channels.
        """
        facts = self._facts[self._call, layer]
        if facts.are_channels:
            raise NoTokenAttentionError(BETWEEN_CHANNELS)
        layout = find_layout(
            queries,
            keys,
            windows,
            running,
            self.maps,
            tracked=facts.arrangement,
            queries_are_words=facts.queries_are_words,
            not_on_grid=not_on_grid,
        )
        # Windows are not checked, as they are cut by known classes, after a roll.
        if self._places is not None and windows == 1:
            of_queries, of_keys = self._places.queries, self._places.keys
            orders = layout.order or (None, None)
            if of_keys is None and layout.queries == layout.keys:
                # Talking heads (CaiT) mix the logits, which loses the places of the keys.
                of_keys = of_queries
            facts.objections = (
                _objection(of_queries, layout.queries, orders[0]),
                _objection(of_keys, layout.keys, orders[1]),
            )
            if self._places.differ:
                facts.objections = OTHER_TOKENS, OTHER_TOKENS
        if self.maps.numbers_differ:
            facts.objections = OTHER_TOKENS, OTHER_TOKENS
        to_queries, to_keys = facts.objections
        if not to_queries and not to_keys:
            return layout
        # Distances need both grids, but maps of class tokens need only the grid of keys.
        return replace(
            layout,
            queries=None,
            keys=None if to_keys else layout.keys,
            reason=to_queries or to_keys,
            advice="",
            words=0 if to_keys else layout.words,
        )

    def with_mask(self, seen: SeenAttention, layout: Layout) -> SeenAttention:
        """Return the description of a softmax with the mask that was added to its logits, if it
        hides keys of whole images: of windows it is known which cells see each other.
        """
        hidden = None if self._places is None else self._places.hidden
        if hidden is None or layout.cut is not None:
            return seen
        # The mask of the next forward can be another one.
        self._adds_masks = True
        return replace(seen, mask=~hidden)

    def complete(
        self, attention: A, views_of: Callable[[PlaceTracker], Sequence[View]] | None
    ) -> A:
        """Return an attention with what the forward shows of its rows: whether there is padding
        among its tokens, and the numbers of its images in the batch, or the reason why it has no
        maps.

        Args:
            attention: Attention of a layer.
            views_of: Function that reads the views of its rows from the tracker; None if its
                queries are words.
        """
        facts = self._facts[self._call, attention.name]
        changes: dict[str, Any] = {}
        if isinstance(attention, SoftmaxAttention):
            # Reading this waits for a GPU, so it is done once.
            if facts.is_padded is None:
                visibility = attention.visibility
                facts.is_padded = visibility is not None and visibility.is_padded
            changes["is_padded"] = facts.is_padded
        if views_of is not None and self._batch:
            numbers, reason = self._number_images(attention, facts, views_of)
            changes["batch"] = self._batch
            changes["image_numbers"] = None if reason else numbers
            changes["without_maps"] = reason
        # Everything is changed at once, because attention has many fields.
        return replace(attention, **changes)

    def _number_images(
        self,
        attention: Attention,
        facts: _LayerFacts,
        views_of: Callable[[PlaceTracker], Sequence[View]],
    ) -> tuple[Sequence[int] | None, str]:
        """Return the numbers of images in the batch, and the reason if they are unknown."""
        batch = self._batch
        numbers: Sequence[int] | None = range(attention.images)
        if self._places is not None:
            numbers, reason = images_of_views(views_of(self._places), attention.images)
            if reason == LOST_IMAGES and self._places.failure:
                reason += f" ({self._places.failure})"
            facts.without_maps = reason
        elif facts.without_maps is not None:
            reason = facts.without_maps
        elif attention.images != batch or self._call[0] in self._moved:
            reason = LOST_IMAGES
            self._moves_images = True
        else:  # a layer that did not run before, in a model in which no image has moved
            reason = ""
        # Images that move in one forward move elsewhere in the next one, which therefore has to be
        # tracked, too.
        if not reason and list(numbers or ()) != list(range(batch)):
            self._moves_images = True
            self._moved.add(self._call[0])
            if self._places is None:
                reason = LOST_IMAGES
        return numbers, reason


def _objection(places: Places, tokens: Tokens | None, order: Tensor | None) -> str:
    """Return the reason why tokens are not on a grid
    in an order of their places; "" if they are.
    """
    if tokens is None:
        return ""
    if places is not None and order is not None and len(places) == len(order):
        places = places[order]
    return objection_to_order(places, tokens)
