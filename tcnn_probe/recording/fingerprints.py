"""Fingerprints of images and weights, which tell if a recording is continued with others."""

import hashlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_probe.images import channel_axis
from tcnn_probe.models import unwrap

__all__ = ["WEIGHTS", "ResumedWeights", "image_hash", "sample_images", "weights_fingerprint"]

WEIGHTS = "weights"
"""Attribute of the recording that holds the fingerprint of the weights."""

# About the number of values of each parameter in the fingerprint. A step of an optimizer changes
# nearly all values, so even fewer would do, but would not be faster.
_SAMPLED = 16
# Small enough to copy in each forward, and large enough to tell images apart.
_IMAGE_SAMPLE = 512


def sample_images(batch: Tensor | list[Tensor], rows: Mapping[int, int]) -> dict[int, Tensor]:
    """Copy a sample of the values of some images of a batch, (B, ...) or a list of (C, H, W).

    Args:
        rows: Index in the batch, by number of the image.
    """
    if isinstance(batch, Tensor) and batch.ndim == 4:
        # The hash does not depend on the place of the channels.
        batch = batch.movedim(channel_axis(batch), 1)
    step = max(1, batch[0].numel() // _IMAGE_SAMPLE)
    # The values are copied, because a view would keep the whole batch in memory.
    return {number: batch[row].detach().flatten()[::step].clone() for number, row in rows.items()}


def image_hash(sample: Tensor) -> str:
    """Return the hash of an image's sampled values."""
    # Values are hashed in float32, so that equal values have the same hash, whatever their dtype.
    return hashlib.sha256(sample.cpu().float().numpy().tobytes()).hexdigest()[:16]


class ResumedWeights:
    """Fingerprints of weights, which show if a recording is continued by another training.

    The arguments are the model and the attributes of the recording that is continued.
    """

    def __init__(self, model: nn.Module, attrs: Mapping[str, Any]) -> None:
        self._model = model
        self._marked = attrs.get(WEIGHTS, "")
        # True until this recorder has marked an epoch.
        self._resumes = True
        self._swapped = False

    def trust(self) -> None:
        """Accept any weights until the next mark."""
        self._marked = ""

    def mark(self) -> str:
        """Return the fingerprint for a mark; "" if validation uses other weights than training."""
        self._resumes = False
        self._marked = "" if self._swapped else weights_fingerprint(self._model)
        return self._marked

    def check(self) -> None:
        """Compare the weights at the first training forward after a mark with those of the mark.

        In a resumed recording, a warning is given if they differ. Later, a difference shows that
        validation uses other weights than training.
        """
        if not self._marked:
            return
        current = weights_fingerprint(self._model)
        shapes, _, _ = current.partition("-")
        # Other shapes show that the model was converted meanwhile.
        if current == self._marked or not self._marked.startswith(f"{shapes}-"):
            return
        if not self._resumes:
            # The validation used other weights, such as a moving average, so their fingerprint says
            # nothing.
            self._swapped = True
            return
        self._marked = ""
        warnings.warn(
            "the training continues from weights other than those of the recording's last mark: "
            "load the checkpoint of that mark, or replace the recording with mode='w'; if they are "
            "of a checkpoint after that mark, call recorder.trust_weights()",
            RuntimeWarning,
            stacklevel=2,
        )


def weights_fingerprint(model: nn.Module) -> str:
    """Return a hash of the parameters' names and shapes, a dash, and one of sampled values.

    The result is "" if values cannot be sampled: if parameters are sharded over processes, of a
    type other than ``nn.Parameter``, such as quantised ones, or on the meta device, as between the
    forwards of an offloaded model.
    """
    # These are the classes of FSDP's wrappers, and of modules that fully_shard has changed.
    names = [type(module).__name__ for module in model.modules()]
    sharded = any(name.startswith(("FSDP", "FullySharded")) for name in names)
    parameters = dict(unwrap(model).named_parameters())
    types = {type(parameter) for parameter in parameters.values()}
    offloaded = any(parameter.is_meta for parameter in parameters.values())
    if sharded or offloaded or types != {nn.Parameter}:
        return ""
    shapes = hashlib.sha256()
    values = hashlib.sha256()
    for name, parameter in parameters.items():
        shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().reshape(-1)
        sample = flat[:: 1 + flat.numel() // _SAMPLED].to("cpu", torch.float32)
        values.update(sample.numpy().tobytes())
    return f"{shapes.hexdigest()[:16]}-{values.hexdigest()[:16]}"
