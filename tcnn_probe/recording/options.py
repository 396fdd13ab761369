"""What :func:`tcnn_probe.record` is told, checked before anything is attached."""

import operator
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from tcnn_model.conversion.selection import LayerFilter, select_layers
from tcnn_probe.models import layer_names
from tcnn_probe.recording.classes import Classes
from tcnn_probe.recording.collector import When
from tcnn_probe.schema import COORDINATES

__all__ = ["Options", "check_model"]


@dataclass(frozen=True)
class Options:
    """See :func:`tcnn_probe.record`.

    Raises:
        ValueError, TypeError: an option that cannot be.
    """

    layers: LayerFilter | None = None
    when: When = "eval"
    every: int = 1
    images: int | Collection[int] | None = None
    classes: int | Collection[int] | None = 3
    max_images: int | None = None
    along: str = "epoch"
    prefix_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.when not in ("eval", "train", "always"):
            raise ValueError(f"expected when='eval', 'train' or 'always', got {self.when!r}")
        for name, number, least in (
            ("every", self.every, 1),
            ("max_images", self.max_images, 1),
            ("prefix_tokens", self.prefix_tokens, 0),
        ):
            if number is not None and (not isinstance(number, int) or number < least):
                what = "a positive integer" if least else "an integer from 0"
                raise ValueError(f"expected {what} for {name}, got {number!r}")
        along = self.along
        if not isinstance(along, str) or not along.isidentifier() or along in (*COORDINATES, "if_marked"):
            raise ValueError(f"expected the name of a coordinate, such as 'epoch' or 'step', for along; got {along!r}")
        self.image_numbers()
        self.wanted_classes()

    def wanted_classes(self) -> Classes:
        """Of which classes maps are kept, where there is a token for each."""
        return Classes.asked(self.classes)

    def image_numbers(self) -> tuple[int, ...]:
        """The numbers of the images of which maps are kept, ascending."""
        numbers = range(self.images) if isinstance(self.images, int) else () if self.images is None else self.images
        try:
            chosen = tuple(sorted({operator.index(number) for number in numbers}))
        except TypeError as error:
            raise TypeError(f"expected a number of images, or the numbers of some, got {self.images!r}") from error
        if any(number < 0 for number in chosen) or (isinstance(self.images, int) and self.images < 0):
            raise ValueError(f"expected numbers of images from 0, got {self.images!r}")
        return chosen

    def layer_names(self, model: nn.Module) -> Collection[str] | None:
        """The names that ``layers`` chooses among all modules; None for all.

        Raises:
            ValueError: a name or glob that is none of the model's.
        """
        if self.layers is None:
            return None
        named = {name: module for module, name in layer_names(model).items()}
        return set(select_layers(named, self.layers, what="layers"))

    @property
    def mode(self) -> str:
        """Which forwards are measured, in words."""
        return {"eval": "eval mode", "train": "training mode", "always": "any mode"}[self.when]


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be followed.

    Raises:
        TypeError: no module, or a compiled one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"{f'the part {name!r} of the model' if name else 'the model'} is compiled, and hooks attached after "
                f"compilation are ignored: record the original model, or attach before torch.compile"
            )
