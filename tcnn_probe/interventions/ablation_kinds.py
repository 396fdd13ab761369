"""The kinds of ablation, one class each,
which define how attention of a layer and its gates are edited.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from tcnn_model.precision import without_autocast
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.gated import GATED_LAYERS
from tcnn_probe.attention.head_edit import HeadEdit
from tcnn_probe.attention.head_editor import LayerCall, name_of_gating
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.interventions.contributions import Terms
from tcnn_probe.interventions.references import (
    AttentionReference,
    ConvolutionReference,
    ReferenceStatistics,
    TermReference,
)
from tcnn_probe.interventions.salience import scale_keys
from tcnn_probe.interventions.token_places import GridFinder, TokenPlaces

__all__ = ["Ablated", "Heads", "Mode", "kind_of", "use_grids"]

Mode = Literal[
    "zero",
    "mean",
    "uniform",
    "convolutional",
    "static",
    "salient",
    "shuffled",
    "local",
    "distant",
    "positional",
    "content",
    "replaced",
]

Heads = tuple[int, ...] | slice
"""Heads of a layer: indices, or a slice of all its heads."""


@dataclass(eq=False)
class Ablated(AttentionListener):
    """Ablated heads of one layer: the base class of all kinds,
    which define their edit in :meth:`edit`.

    Args:
        pattern: Name or glob that selected the layer.
        layer: Name of the layer as it is recorded.
        module: The layer.
        number: Index of the attention in a call of the layer; None for all of them.
        heads: Heads that are ablated.
        mode: Mode of the ablation.
        strict: Whether the user's name or glob selected only this layer, so that an error is raised
            if it cannot be ablated.
        count: Number of heads of the layer, if it is known.
        source: Layer whose heads replace these, for mode "replaced".
        reference: Statistics over given images; None for kinds that need none.
        radius: Distance in patches, for modes "local" and "distant".
        grids: Places of the model's tokens, if only the queries of patches are ablated; else None.
        has_run: Whether the layer has run.
        has_attended: Whether it has computed the attention whose heads are ablated.
        reason: Reason why they were not ablated.
    """

    takes_images: ClassVar[bool] = False
    """Whether the kind needs given images, over which the result
    of :meth:`new_reference` collects statistics.
    """

    pattern: str
    layer: str
    module: nn.Module
    number: int | None
    heads: Heads
    mode: Mode
    strict: bool
    count: int | None = None
    source: nn.Module | None = None
    reference: ReferenceStatistics | None = None
    radius: float | None = None
    grids: GridFinder | None = None
    has_run: bool = False
    has_attended: bool = False
    reason: str = ""

    @classmethod
    def reason_against(cls, module: nn.Module, mode: Mode) -> str | None:
        """Return the reason why a layer cannot be ablated in this way, or None if it can."""
        return None

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit | None:
        """Return the edit of these heads, or None to leave them."""
        raise NotImplementedError

    def new_reference(self, seed: int | None) -> ReferenceStatistics:
        """Return empty statistics over given images, for kinds that need images."""
        raise NotImplementedError

    def fresh(self) -> Self:
        """Return a copy that has not run yet."""
        # A shallow copy shares the layer, and the statistics over given images.
        twin = copy.copy(self)
        twin.has_run = twin.has_attended = False
        return twin

    def among(self, count: int) -> tuple[int, ...]:
        """Return the indices of the heads in a layer with ``count`` heads.

        Raises:
            ValueError: The layer lacks one of the heads.
        """
        if isinstance(self.heads, slice):
            return tuple(range(count)[self.heads])
        missing = [head for head in self.heads if head >= count]
        if missing:
            raise ValueError(
                f"{self.layer!r} has {count} heads, from 0 to {count - 1}; got head {missing[0]}"
            )
        return self.heads

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the ablated heads; empty while the layer's number of heads is unknown."""
        return () if self.count is None else self.among(self.count)

    def expects(self, attention: Attention) -> bool:
        """Return whether an attention of the layer is the one whose heads are ablated,
        and can be ablated.
        """
        if self.number not in (None, attention.number):
            return False
        # Some layers do not state their number of heads, which is then known from their first
        # attention.
        self.among(attention.heads)
        self.count = attention.heads
        if self.grids is None:
            return True
        places = self.grids.places(self.layer, attention)
        if isinstance(places, TokenPlaces):
            return True
        self.reason = f"mode={self.mode!r} needs the grid of {self.layer!r}: {places}"
        if self.strict:
            raise ValueError(self.reason)
        return False

    def attends(self, attention: Attention) -> HeadEdit | None:
        """Return this kind's edit of an attention."""
        edit = self.edit(attention, self.indices)
        if edit is None or self.grids is None:
            return edit
        places = self.grids.places(self.layer, attention)
        assert isinstance(places, TokenPlaces)
        return replace(edit, queries=places.is_patch)

    def returned(self, call: LayerCall, output: Any) -> None:
        """Raise an error if the call that ends could not be edited,
        or computed no attention to edit.
        """
        # Only at the end of a call is it known whether its softmaxes weighted any values.
        if call.objection:
            raise RuntimeError(f"{self.layer!r} edited {call.objection}: choose other layers")
        has_attended = self in call.answered
        self.has_run = True
        self.has_attended |= has_attended
        if self.strict and not has_attended:
            of_number = f" of this number, only {call.attentions}" if self.number else ""
            raise RuntimeError(
                f"{self.layer!r} ran and computed no attention between tokens{of_number}"
            )


class Zeroed(Ablated):
    """Heads whose output is zero."""

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit:
        """Return an edit that sets the heads to zero."""
        return HeadEdit(heads)


class AveragedOverQueries(Ablated):
    """Heads whose output is replaced by its mean over the queries."""

    def expects(self, attention: Attention) -> bool:
        """Return whether there are several queries;
        raise an error if the user named a layer with a single one.
        """
        if not super().expects(attention):
            return False
        if attention.queries == 1 and self.strict:
            raise ValueError(
                f"{self.layer!r} has a single query, whose mean is itself; give images= to take "
                "means over"
            )
        return attention.queries > 1

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit:
        """Return an edit to the mean over queries."""
        return HeadEdit(heads, "mean")


class GatesForced(Ablated):
    """Heads whose gates are 1 ("positional") or 0 ("content"),
    of GPSA layers and of timm's ConViT.
    """

    GATES: ClassVar[Mapping[str, float]] = {"positional": 1.0, "content": 0.0}

    @classmethod
    def reason_against(cls, module: nn.Module, mode: Mode) -> str | None:
        """Return the reason why the gates of a layer cannot be forced, or None if they can."""
        if not isinstance(module, GATED_LAYERS):
            return f"mode={mode!r} needs gates (tcnn_model.GPSA, or timm's ConViT)"
        name = name_of_gating(module)
        # A parametrized lambda is a new tensor in each forward, which cannot be recognised.
        return None if name in module._parameters else f"its {name!r} is parametrized"

    def gates(self) -> dict[int, float]:
        """Return the gates of the heads."""
        count = len(getattr(self.module, name_of_gating(self.module)))
        return dict.fromkeys(self.among(count), self.GATES[self.mode])

    def edit(self, attention: Attention, heads: Sequence[int]) -> None:
        """Return None, because only gates are edited."""


class GivenAttention(Ablated):
    """Heads with the mean attention over given images ("static")
    or the attention of another image ("shuffled").
    """

    takes_images = True
    reference: AttentionReference

    def new_reference(self, seed: int | None) -> AttentionReference:
        """Return a reference that keeps the mean attention,
        or the attention of each image for another image.
        """
        return AttentionReference(shuffled=self.mode == "shuffled", seed=seed)

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit | None:
        """Return an edit with the attention of the given images;
        collect it while they pass through the model.
        """
        weights = self.reference.attention_for(attention, heads, self.layer)
        return None if weights is None else HeadEdit(heads, attention=weights)


class OnPatches(Ablated):
    """Heads in which the queries of patches get another attention;
    class and register tokens keep theirs.
    """

    grids: GridFinder

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit | None:
        """Return an edit of the queries of patches."""
        places = self.grids.places(self.layer, attention)
        assert isinstance(places, TokenPlaces)
        # These computations are no part of the model, which recorders watch.
        with torch.DisableTorchFunction(), without_autocast(attention.source):
            weights = self.weights(attention, heads, places)
        if weights is None:
            return None
        return HeadEdit(heads, attention=weights, whole=True)

    def weights(
        self, attention: Attention, heads: Sequence[int], places: TokenPlaces
    ) -> Tensor | None:
        """Return the new attention, (images or 1, windows, heads, N_query, N_key);
        None to change nothing.
        """
        raise NotImplementedError

    def own_weights(
        self, attention: Attention, heads: Sequence[int], places: TokenPlaces
    ) -> Tensor:
        """Return the heads' own attention, (images, windows, heads, N_query, N_key),
        differentiable.
        """
        return places.by_window(attention.weights().flatten(0, 1)[:, list(heads)])


class Uniform(OnPatches):
    """Heads that attend to all visible keys alike."""

    def weights(self, attention: Attention, heads: Sequence[int], places: TokenPlaces) -> Tensor:
        """Return attention 1 / K for K visible keys."""
        seen = places.visible(attention).to(attention.dtype)
        uniform = seen / seen.sum(-1, keepdim=True).clamp_min(1)
        return uniform[:, :, None].expand(-1, -1, len(heads), -1, -1)


class Local(OnPatches):
    """Heads that attend only to keys within a radius ("local")
    or only to those beyond it ("distant").
    """

    def weights(self, attention: Attention, heads: Sequence[int], places: TokenPlaces) -> Tensor:
        """Return the heads' own attention without the other keys; tokens off the grid stay."""
        assert self.radius is not None
        is_near = places.within(self.radius)
        off_grid = torch.from_numpy(np.isnan(places.keys[:, 0]))
        kept = is_near | off_grid if self.mode == "local" else ~is_near
        weights = self.own_weights(attention, heads, places)
        weights = weights * kept.to(weights)
        # A query without any other keys gives zero, like one from which all keys are hidden.
        smallest = torch.finfo(weights.dtype).tiny
        return weights / weights.sum(-1, keepdim=True).clamp_min(smallest)


class StaticOnPatches(OnPatches):
    """Heads with the mean over given images of what is collected of their attention."""

    takes_images = True
    reference: AttentionReference

    def new_reference(self, seed: int | None) -> AttentionReference:
        """Return a reference that keeps the mean attention."""
        return AttentionReference(shuffled=False, whole=True)

    def weights(
        self, attention: Attention, heads: Sequence[int], places: TokenPlaces
    ) -> Tensor | None:
        """Return the mean attention; collect it while the given images pass."""
        return self.reference.attention_for(attention, heads, self.layer)


class Convolutional(StaticOnPatches):
    """Heads with the convolution that is nearest to their mean attention over given images."""

    reference: ConvolutionReference

    def new_reference(self, seed: int | None) -> ConvolutionReference:
        """Return a reference that fits convolutions to the mean attention."""
        return ConvolutionReference()

    def weights(
        self, attention: Attention, heads: Sequence[int], places: TokenPlaces
    ) -> Tensor | None:
        """Return the convolution; collect attention, and what queries see, of the given images."""
        if self.reference.is_collecting:
            self.reference.see(attention, places, self.layer)
        return super().weights(attention, heads, places)


class Salient(StaticOnPatches):
    """Heads with their mean attention times a factor of each key,
    the same for all queries of an image.
    """

    def weights(
        self, attention: Attention, heads: Sequence[int], places: TokenPlaces
    ) -> Tensor | None:
        """Return the mean attention with keys that receive as much as in the image."""
        static = super().weights(attention, heads, places)
        if static is None:
            return None
        is_patch = places.is_patch.to(static.device)
        own = self.own_weights(attention, heads, places)
        received = own[..., is_patch, :].sum(-2)
        salient = static * is_patch[:, None]
        return scale_keys(salient.to(own.dtype), received)


class AveragedOverImages(Ablated):
    """Heads replaced by their mean contribution to the layer's output over the given images."""

    takes_images = True
    reference: TermReference
    is_additive = False
    """Whether the layer's output was verified to be a sum over heads."""

    def new_reference(self, seed: int | None) -> TermReference:
        """Return a reference that keeps the mean terms of the heads."""
        return TermReference()

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit | None:
        """Return an edit that sets the heads to zero."""
        return HeadEdit(heads) if self.reference.is_finished else None

    def add_terms(self, call: LayerCall, output: Tensor) -> Tensor:
        """Add the mean terms of the heads that are zero;
        a later ablation may edit some of the heads instead.
        """
        for number, heads in call.heads_of(self).items():
            places = [self.indices.index(head) for head in heads]
            output = self.reference.add_to(output, number, places)
        return output

    def returned(self, call: LayerCall, output: Any) -> None:
        """Collect the terms of the given images."""
        super().returned(call, output)
        if not self.reference.is_collecting or not self.indices:
            return
        numbers = range(call.attentions) if self.number is None else [self.number]
        for number in numbers:
            # Terms are computed with the gates that other ablations force.
            terms = Terms(call.module, self.layer, number, call.args, call.kwargs, call.gates)
            # The check takes four runs of the layer, so it is done once.
            if not self.is_additive:
                # One head is enough, because a subsequent norm over heads would show with any head.
                terms.check(self.indices[:1])
                self.is_additive = True
            self.reference.add(number, terms.of(*([head] for head in self.indices)))


class Replaced(Ablated):
    """Heads replaced by the same heads of another model's layer, computed on the same input."""

    is_additive = False
    """Whether the outputs of both layers were verified to be sums over heads."""

    def edit(self, attention: Attention, heads: Sequence[int]) -> HeadEdit:
        """Return an edit that sets the heads to zero."""
        return HeadEdit(heads)

    def add_terms(self, call: LayerCall, output: Tensor) -> Tensor:
        """Add the terms of the other layer for the heads that are zero."""
        assert self.source is not None
        for number, heads in call.heads_of(self).items():
            terms = Terms(self.source, self.layer, number, call.args, call.kwargs)
            if not self.is_additive:
                Terms(call.module, self.layer, number, call.args, call.kwargs).check(heads)
                terms.check(heads)
                self.is_additive = True
            output = output + terms.of(heads)[0].to(output.dtype)
        return output


def use_grids(
    model: nn.Module, ablated: Sequence[Ablated], queries: str | None, radius: float | None
) -> None:
    """Let kinds that depend on the grid find it,
    or all kinds if only ``queries="patches"`` are ablated.

    Raises:
        ValueError: ``queries`` has another value, a kind edits all queries at once, or a radius is
            missing.
    """
    if queries not in (None, "patches"):
        raise ValueError(f"expected queries='patches' or None, got {queries!r}")
    finder = GridFinder(model)
    for entry in ablated:
        if queries and isinstance(entry, GatesForced | AveragedOverImages | Replaced):
            raise ValueError(
                f"queries='patches' is not for mode={entry.mode!r}, which edits all queries at once"
            )
        if isinstance(entry, Local) and (radius is None or not radius >= 0):
            raise ValueError(
                f"mode={entry.mode!r} needs radius=, a distance of at least 0 patches; got "
                f"{radius!r}"
            )
        entry.radius = radius
        is_on_patches = queries is not None or isinstance(entry, OnPatches)
        entry.grids = finder if is_on_patches else None


def kind_of(mode: Mode, *, with_images: bool) -> type[Ablated]:
    """Return the kind of ablation for a mode, with or without given images."""
    if mode == "mean":
        return AveragedOverImages if with_images else AveragedOverQueries
    return _KINDS[mode]


_KINDS: Mapping[str, type[Ablated]] = {
    "zero": Zeroed,
    "uniform": Uniform,
    "convolutional": Convolutional,
    "static": GivenAttention,
    "salient": Salient,
    "shuffled": GivenAttention,
    "local": Local,
    "distant": Local,
    "positional": GatesForced,
    "content": GatesForced,
    "replaced": Replaced,
}
