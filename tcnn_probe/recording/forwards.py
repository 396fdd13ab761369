"""The forwards of an epoch: which of them are measured, and which of its images each one has."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.images import batch_of, input_tensors
from tcnn_probe.models import unwrap
from tcnn_probe.recording.fingerprints import sample_images
from tcnn_probe.recording.options import Sampling

__all__ = ["ForwardCounter"]


class ForwardCounter:
    """Count of the forwards and images since the previous mark.

    Attributes:
        passed: Number of images of the forwards that have ended.
        samples: Sampled values of the images whose maps are kept, by number.
        training_forwards: Number of forwards that began in training mode.
        on_training: Function that is called before the first of these forwards.
        pauses: Number of active pauses, in which nothing is measured.
        called_parts: Names of the parts that were called from outside of the model.
        measured: Number of forwards that could be measured, of which ``every`` chooses some.
        before: Number of images of the epoch's forwards before this one.
        batch: Number of images of this forward; 0 as long as it has shown none.
        image_size: Shapes of this forward's inputs, without the axis of images.
        whole_model: Whether the model is called as a whole.

    Args:
        map_images: Numbers of the images whose maps are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Mapping[nn.Module, str],
        sampling: Sampling,
        map_images: Collection[int],
    ) -> None:
        # eval() of the model inside does not reach its wrapper, and timm's ModelEmaV3 calls it.
        self._model = unwrap(model)
        self._names = names
        self._sampling = sampling
        self._map_images = sorted(map_images)
        self._own_samples: dict[int, Tensor] = {}  # of this forward
        self.pauses = 0
        self.on_training: Callable[[], None] = lambda: None
        self.called_parts: dict[str, None] = {}
        self.before = self.batch = 0
        self.image_size: tuple[torch.Size, ...] = ()
        self.whole_model = False
        self._epoch = self._begun_in = 0
        self._is_counted = self._is_measured = False
        # Parts that were called in this forward.
        self._entries: set[nn.Module] = set()
        self.reset()

    @property
    def belongs_to_epoch(self) -> bool:
        """False for a forward that began before the last mark."""
        return self._begun_in == self._epoch

    def reset(self) -> None:
        """Start the next epoch. A forward that is still running belongs to no epoch."""
        self._epoch += 1
        self.training_forwards = self.measured = 0
        self.called_parts.clear()
        self.passed, self.samples = 0, dict[int, Tensor]()

    def end_call(self) -> None:
        """Count the images of a call that has ended, and keep samples of the chosen ones."""
        self.passed = self.before + self.batch
        self.samples |= self._own_samples

    def begin_forward(self, *, can_measure: bool, measuring: Set[nn.Module]) -> None:
        """Count a forward that begins, and decide whether it is measured.

        Args:
            can_measure: Whether there is anything left to measure in this epoch.
            measuring: Modules in which something is measured.
        """
        self._drop_idle_forward(measuring)
        # This is compared when a call ends, as another thread may mark the epoch before.
        self._begun_in = self._epoch
        self._is_counted = self._is_measured = False
        if self.pauses:
            return
        training = self._model.training
        if training and not self.training_forwards:
            self.on_training()
        self.training_forwards += training
        if can_measure and self._sampling.measures(training):
            self._is_counted = True
            self._is_measured = self.measured % self._sampling.every == 0
            self.measured += 1
            if self._is_measured:
                self.before, self.batch, self._own_samples = self.passed, 0, {}

    def _drop_idle_forward(self, measuring: Set[nn.Module]) -> None:
        """Uncount the previous forward if nothing is measured in its parts, as in an embedding."""
        entries, self._entries = self._entries, set()
        is_idle = all(
            self._names[entry] and measuring.isdisjoint(entry.modules()) for entry in entries
        )
        if is_idle and self._is_counted and self.belongs_to_epoch:
            self.measured -= 1
            if self._is_measured:
                self.passed = self.before

    def calls(self, entry: nn.Module, inputs: Sequence[Any], *, continues: bool) -> bool:
        """Return whether to measure a call from outside of the model, and note its images."""
        self._entries.add(entry)
        if self.pauses or not self._is_measured:
            return False
        # The first call with images shows those of the forward.
        batch = None if self.batch else batch_of(inputs)
        if batch is not None:
            self.batch = len(batch)
            places = {number: number - self.before for number in self._map_images}
            rows = {number: row for number, row in places.items() if 0 <= row < self.batch}
            self._own_samples = sample_images(batch, rows) if rows else {}
        # The name is empty for the model and for a wrapper around it.
        self.whole_model = self._names[entry] == ""
        if not self.whole_model:
            self.called_parts[self._names[entry]] = None
        shapes = tuple(x.shape[1:] for x in input_tensors(inputs))
        # Tokens that come without an image are those of the images before.
        has_images = self.whole_model or any(len(shape) > 2 for shape in shapes)
        if not continues and has_images:
            self.image_size = shapes
        return True
