"""Forwards of a model whose heads are edited,
and those over given images in which statistics are collected.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from tcnn_probe.attention.head_editor import HeadEditor
from tcnn_probe.attention.listener import AttentionListener
from tcnn_probe.hooks.calls import Call, Calls
from tcnn_probe.hooks.modes import is_transformed
from tcnn_probe.interventions.ablation_kinds import Ablated
from tcnn_probe.interventions.references import ReferenceStatistics, fingerprints
from tcnn_probe.interventions.token_places import GridFinder
from tcnn_probe.models import untouched

__all__ = ["ModelCalls", "collect_references", "count_heads", "edited_model"]


class ModelCalls(Calls[Call]):
    """Forwards of the whole model, in which compiled parts run uncompiled,
    because compiled code ignores hooks.
    """

    has_run = False

    def __init__(
        self,
        model: nn.Module,
        reference: ReferenceStatistics | None,
        grids: GridFinder | None,
    ) -> None:
        super().__init__(model, Call)
        self._reference = reference
        self._grids = grids
        self._has_warned = False

    def enter_call(self, call: Call) -> None:
        """Check the size of images, find the places of tokens, and enter the mode."""
        if self._reference is not None:
            self._reference.check(call.inputs)
            self._warn_of_overlap(self._reference, call.inputs)
        if self._grids is not None:
            self._grids.look(call)
        # Compiled code would run without the hooks of the layers.
        call.scope.open(self.module)

    def _warn_of_overlap(self, reference: ReferenceStatistics, inputs: Sequence[Any]) -> None:
        """Warn once if evaluated images are among those over which attention was collected."""
        # Inputs with a single axis are labels or lengths.
        images = next((x for x in inputs if isinstance(x, Tensor) and x.ndim > 1), None)
        # While statistics are collected, the model runs on the given images themselves.
        if not reference.is_finished or self._has_warned or images is None:
            return
        # Function modes watch the operations of the model, to which reading the images does not
        # belong.
        with torch.DisableTorchFunction():
            reason = "" if is_transformed(inputs) else reference.overlap(images)
        if reason:
            self._has_warned = True
            warnings.warn(reason, RuntimeWarning, stacklevel=2)

    def edit_output(self, call: Call, output: Any) -> None:
        """Note that the model has run."""
        self.has_run = True


@contextmanager
def edited_model(
    model: nn.Module,
    ablated: Sequence[Ablated],
    listeners: Mapping[AttentionListener, nn.Module] | None = None,
) -> Iterator[ModelCalls]:
    """Edit the heads of a model inside the ``with``.

    Args:
        model: The model.
        ablated: Ablated heads, whose grids and statistics over images are used.
        listeners: Listeners with their layers, if not the ablated heads themselves edit them; then
            it is not checked whether images are among those of the statistics.
    """
    reference = ablated[0].reference if ablated and listeners is None else None
    if listeners is None:
        listeners = {entry: entry.module for entry in ablated}
    grids = (entry.grids for entry in ablated if entry.grids is not None)
    forwards = ModelCalls(model, reference, next(grids, None))
    try:
        with HeadEditor.listening(listeners):
            forwards.attach()
            yield forwards
    finally:
        try:
            forwards.detach()
        except KeyboardInterrupt:
            forwards.detach()  # Ctrl-C interrupted the first attempt
            raise


def collect_references(
    model: nn.Module,
    ablated: Sequence[Ablated],
    images: Iterable[Tensor],
    seed: int | None,
) -> None:
    """Run the model on the given images, and collect the statistics that each mode needs."""
    references = []
    for entry in ablated:
        entry.reference = entry.new_reference(seed)
        references.append(entry.reference)
    size = None
    with edited_model(model, ablated), untouched(model), torch.no_grad():
        # disable=None shows no bar if the output is not a terminal, for example in a log.
        for batch in tqdm(images, "ablate: images", leave=False, delay=3, disable=None):
            prints = fingerprints(batch)
            for reference in references:
                # The reference needs the number of images before the model runs.
                reference.begin(len(batch))
                reference.fingerprints += prints
            model(batch)
            size = batch.shape[1:]
    for reference in references:
        reference.finish(size)


def count_heads(model: nn.Module, ablated: Sequence[Ablated], images: Tensor) -> None:
    """Run the model on some images, in which layers show their numbers of heads."""
    with edited_model(model, ablated), untouched(model), torch.no_grad():
        model(images)
