"""Fingerprints of images and weights, by which a recording notices that others have come than before."""

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["WEIGHTS", "ImageHashes", "ResumedWeights", "weights_fingerprint"]

WEIGHTS = "weights"
"""Attribute of the recording that holds the fingerprint."""

# Values of each parameter that tell one state of a model from another. A step of an optimizer moves nearly all values,
# so a few would do; more cost no more.
_SAMPLED = 16


class ImageHashes:
    """Hashes of images that maps are kept of, by number in the epoch: of some values, which are copied as they pass.

    Args:
        numbers: Numbers of the images.
    """

    SAMPLES = 512
    """Number of values of each image: few enough to copy in each forward, and enough to tell images apart."""

    def __init__(self, numbers: Collection[int]) -> None:
        self._numbers = sorted(numbers)
        self.reset()

    def reset(self) -> None:
        """Start the next epoch."""
        self._passed = 0
        self._samples: dict[int, Tensor] = {}
        self._pending: tuple[int, dict[int, Tensor]] = (0, {})

    def begins(self, inputs: Sequence[Any]) -> None:
        """Copy values of the chosen images among the inputs of a forward that is measured."""
        # Images have more than two axes; masks and labels that come with them have not.
        batch = next((x for x in inputs if isinstance(x, Tensor) and x.ndim > 2), None)
        if batch is None:
            self._pending = (0, {})
            return
        samples = {}
        step = max(1, batch[0].numel() // self.SAMPLES)
        for number in self._numbers:
            row = number - self._passed
            if 0 <= row < len(batch):
                # A copy: a view would keep the whole batch.
                samples[number] = batch[row].detach().flatten()[::step].clone()
        self._pending = len(batch), samples

    def ends(self) -> None:
        """Count the images of the forward that began last."""
        count, samples = self._pending
        self._passed += count
        self._samples |= samples

    def read(self) -> dict[str, str]:
        """Return the hashes of the images that came, by number."""
        hashes = {}
        for number, sample in self._samples.items():
            # In float32, so that a later epoch under autocast has the same hash where its images are the same.
            values = sample.cpu().float().numpy()
            hashes[str(number)] = hashlib.sha256(values.tobytes()).hexdigest()[:16]
        return hashes


class ResumedWeights:
    """Fingerprints of a model's weights, by which a training that continues a recording is seen to be another's.

    Args:
        model: Model that is recorded.
        attrs: Attributes of the recording that is continued.
    """

    def __init__(self, model: nn.Module, attrs: Mapping[str, Any]) -> None:
        self._model = model
        self._marked = attrs.get(WEIGHTS, "")
        # Nothing is marked yet by this recorder.
        self._resumes = True
        self._swapped = False

    def trust(self) -> None:
        """Let the training go on from any weights."""
        self._marked = ""

    def mark(self) -> str:
        """Return the fingerprint to keep with a mark; "" if weights are others in validation than in training."""
        self._resumes = False
        self._marked = "" if self._swapped else weights_fingerprint(self._model)
        return self._marked

    def check(self) -> None:
        """Compare the weights before the first forward in training mode after a mark with those that were marked."""
        if not self._marked:
            return
        current = weights_fingerprint(self._model)
        shapes, _, _ = current.partition("-")
        # A model of other shapes was converted meanwhile.
        if current == self._marked or not self._marked.startswith(f"{shapes}-"):
            return
        if not self._resumes:
            # Validated with averaged weights, say, which are put in for the validation: they tell nothing.
            self._swapped = True
            return
        self._marked = ""
        warnings.warn(
            "the training continues from weights other than those of the recording's last mark: load the checkpoint of "
            "that mark, or replace the recording with mode='w'; if they are of a checkpoint after that mark, call "
            "recorder.trust_weights()",
            RuntimeWarning,
            stacklevel=2,
        )


def weights_fingerprint(model: nn.Module) -> str:
    """Return a hash of the parameters' names and shapes and one of a sample of their values, joined by a dash.

    "" where parameters are spread over processes, or of a kind whose values cannot be sampled, such as quantised ones.
    """
    # Both kinds of FSDP: wrappers, and fully_shard, which gives modules a class of such a name.
    names = [type(module).__name__ for module in model.modules()]
    sharded = any(name.startswith(("FSDP", "FullySharded")) for name in names)
    parameters = dict(model.named_parameters())
    types = {type(parameter) for parameter in parameters.values()}
    if sharded or types != {nn.Parameter}:
        return ""
    shapes = hashlib.sha256()
    values = hashlib.sha256()
    for name, parameter in parameters.items():
        shapes.update(f"{name} {tuple(parameter.shape)}\n".encode())
        flat = parameter.detach().reshape(-1)
        sample = flat[:: 1 + flat.numel() // _SAMPLED].to("cpu", torch.float32)
        values.update(sample.numpy().tobytes())
    return f"{shapes.hexdigest()[:16]}-{values.hexdigest()[:16]}"
