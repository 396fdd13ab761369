"""Values of a forward: what probes have measured of its layers, before they are added up."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.patterns import Pattern
from tcnn_probe.probes import ForwardCall, Probe
from tcnn_probe.recording.forwards import ForwardCounter
from tcnn_probe.recording.options import Sampling

__all__ = ["ForwardValues", "Key", "Measured", "check_measured"]

_Value = TypeVar("_Value", bound=Tensor | Pattern)
Key = tuple[str, str]  # layer and kind of probe
MAPS_BY_CLASS = "attention_by_class"
"""Variable with maps of all classes when measured, and of the chosen ones when recorded."""
UNKNOWN_CELLS = "no grid is known that divides the model's input into squares"


@dataclass(frozen=True)
class Measured:
    """Measurements of a layer by a probe in a forward that has not ended yet.

    Args:
        values: Values by variable, of the images within ``max_images``.
        patterns: Sums over these images.
        batch: Number of images in the forward.
        before: Number of images of the epoch before this forward.
        rows: Numbers in the forward of the images whose maps are kept.
        maps: Maps of these images.
    """

    layer: str
    module: nn.Module
    probe: Probe
    values: Mapping[str, Tensor]
    patterns: Mapping[str, Pattern]
    batch: int = 0
    before: int = 0
    rows: Sequence[int] = ()
    maps: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Layer and kind of probe."""
        return self.layer, self.probe.kind

    @property
    def images(self) -> int:
        """Number of images within ``max_images``."""
        for value in self.values.values():
            return len(value)
        return max(pattern.batch for pattern in self.patterns.values())


class ForwardValues:
    """Values of a forward that has not ended yet.

    Args:
        forwards: Count of the forwards, with the images of this one.
        sampling: Images to measure, and those whose maps are kept.
        seen: Function that returns the number of images of a layer before this forward.
        note_missing: Function that notes why a layer lacks variables.
    """

    def __init__(
        self,
        forwards: ForwardCounter,
        sampling: Sampling,
        seen: Callable[[Key], int],
        note_missing: Callable[[str, Iterable[str], str], None],
    ) -> None:
        self._measured: list[Measured] = []
        self._forwards = forwards
        self._sampling = sampling
        self._seen = seen
        self._note_missing = note_missing
        self._images: Counter[Key] = Counter()
        self._mapped: dict[Key, set[int]] = {}
        self._cell_sides: dict[str, float | None] = {}

    def room(self, layer: str, probe: Probe) -> int | None:
        """Return how many further images ``max_images`` allows; None for any number."""
        limit = self._sampling.max_images
        return None if limit is None else max(0, limit - self._images_before((layer, probe.kind)))

    def _images_before(self, key: Key) -> int:
        """Return the number of images that the layer has seen earlier in the epoch."""
        return self._images[key] + self._seen(key)

    def note_cells(self, attention: Attention, embedded: Sequence[int] | None) -> None:
        """Note the side of a layer's cells in pixels of the input, if they are square.

        Args:
            attention: Attention of the layer.
            embedded: Size of the images that the model embeds; None if it is unknown.
        """
        # Images are (C, H, W), videos (T, C, H, W) or (C, T, H, W), here without the dimension of
        # the batch.
        shapes, cells = self._forwards.image_size, attention.cells
        size = embedded or next((shape for shape in shapes if len(shape) > 2), None)
        # A model that crops, pads or resizes images embeds others than it gets.
        is_input = not embedded or any(embedded in (shape[-2:], shape[:2]) for shape in shapes)
        side = None
        if size is not None and cells is not None and is_input:
            (height, width), (rows, columns) = size[-2:], cells
            side = height / rows if height * columns == width * rows else None
        self._cell_sides[attention.name] = side

    def keep(
        self, probe: Probe, measured: Mapping[str, Tensor | Pattern], call: Attention | ForwardCall
    ) -> None:
        """Keep what a probe has measured of a call, with the maps of chosen images."""
        if not measured:
            return
        layer, patterns, values, images = call.name, {}, {}, 0
        for name, value in measured.items():
            if isinstance(value, Pattern):
                patterns[name] = replace(value, size=self._forwards.image_size)
                images = images or value.batch
            else:
                # Images beyond max_images are numbered, but not added to the sums.
                values[name], images = value[: call.limit], len(value)
        if isinstance(call, Attention) and values and "cell_pixels" in probe.variables:
            side = self._cell_sides[layer]
            if side is None:
                self._note_missing(layer, ["cell_pixels"], UNKNOWN_CELLS)
            else:
                device = next(iter(values.values())).device
                values["cell_pixels"] = torch.full((images,), side, device=device)[: call.limit]
        key = layer, probe.kind
        # A layer may be called with other rows than the forward has images, as in a model of
        # windows.
        before, batch = self._images_before(key), images
        if self._forwards.batch:
            before, batch = self._forwards.before, self._forwards.batch
        self._images[key] += images
        rows: Sequence[int] = ()
        maps: Mapping[str, Tensor] = {}
        if probe.maps is not None:
            rows, maps = self._maps(probe, call, images, before, batch)
        self._measured.append(
            Measured(layer, call.module, probe, values, patterns, batch, before, rows, maps)
        )

    def _maps(
        self, probe: Probe, call: Attention | ForwardCall, images: int, before: int, batch: int
    ) -> tuple[Sequence[int], Mapping[str, Tensor]]:
        """Return the numbers in the forward of the chosen images, and their maps;
        note why there are none. The call has ``images`` images, and the forward ``batch``.
        """
        assert probe.maps is not None
        layer, without_maps = call.name, ""
        reason = call.layout.reason if isinstance(call, Attention) else ""
        numbers: Sequence[int] = range(images)
        if self._forwards.batch and isinstance(call, Attention):
            numbers, without_maps = call.image_numbers or (), call.without_maps
            # A layer without a grid has no maps of any image.
            if without_maps and call.layout.keys is None:
                without_maps = reason
        elif images != batch:
            numbers, without_maps = (), f"it has {images} rows for {batch} images"
        # The maps of a layer that is called twice in a forward are those of its first call.
        mapped = self._mapped.setdefault((layer, probe.kind), set())
        wanted = {number - before for number in self._sampling.images_of(probe)} - mapped
        rows = [row for row, number in enumerate(numbers[: call.limit]) if number in wanted]
        if not rows:
            if without_maps and wanted.intersection(range(batch)):
                self._note_missing(layer, probe.image_variables, without_maps)
            return (), {}
        maps = probe.maps(call, rows)
        if MAPS_BY_CLASS in maps:
            # The classifier may have been replaced since the first check.
            self._sampling.check_classes(maps[MAPS_BY_CLASS].shape[1])
        # Without a grid there are no maps. If maps of classes are missing, `_select_classes` gives
        # the reason.
        if reason:
            lacking = probe.image_variables - maps.keys()
            lacking -= probe.class_variables if maps else set()
            self._note_missing(layer, lacking, reason)
        numbers = [numbers[row] for row in rows]
        mapped.update(numbers)
        return numbers, maps

    def ended(self, layers: Collection[str], output: Any) -> list[Measured]:
        """Return the values of the layers, once the forward has ended.

        Args:
            layers: Names of the layers whose attention was multiplied with values: a softmax for
                which this did not happen is not attention.
            output: Output of the model, or of a part of it, from which the best classes follow.
        """
        output = output if self._forwards.whole_model else None
        ended = []
        for values in self._measured:
            if values.probe.attention is not None and values.layer not in layers:
                continue
            if MAPS_BY_CLASS in values.maps:
                maps, reason = _select_classes(values, self._sampling, output)
                values = replace(values, maps=maps)
                if reason:
                    self._note_missing(values.layer, values.probe.class_variables, reason)
            ended.append(values)
        return ended


def check_measured(
    probe: Probe, measured: Mapping[str, _Value], *, by_image: bool
) -> Mapping[str, _Value]:
    """Return a probe's measurements once checked, with images as first axis if ``by_image``.

    Raises:
        TypeError: The measurements are not a mapping from variables to tensors.
        ValueError: A variable is unknown, or has other dimensions or another number of images.
    """
    expected = f"expected the probe {probe.kind!r} to return"
    if not isinstance(measured, Mapping):
        raise TypeError(f"{expected} {{variable: tensor}}, got {measured!r}")
    images = next((len(x) for x in measured.values() if isinstance(x, Tensor) and x.ndim), None)
    for name, value in measured.items():
        if name not in probe.variables:
            raise ValueError(f"{expected} {[*probe.variables]}, got {name!r}")
        if by_image and isinstance(value, Pattern):
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{expected} a tensor for {name!r}, got {value!r}")
        dims = (*["image"] * by_image, *probe.variables[name].dims[1:])
        if value.ndim != len(dims) or (by_image and len(value) != images):
            of_images = f" of {images} images" if by_image else ""
            raise ValueError(
                f"{expected} {name!r} with the dimensions {dims}{of_images}, got the shape "
                f"{tuple(value.shape)}"
            )
    return measured


def _select_classes(
    measured: Measured, sampling: Sampling, output: Any
) -> tuple[Mapping[str, Tensor], str]:
    """Keep the maps of the chosen classes only, and add the index and score of each of these.

    Args:
        measured: Measurements with the maps of n images; ``attention_by_class`` has those of all K
            classes, shape (n, K, height, width).
        output: Output of the model; None if only parts of the model were called.

    Returns:
        The maps of k classes, with ``class_index`` and ``class_score``, shape (n, k); and the
        reason if there are no maps of classes, else "".
    """
    maps = dict(measured.maps)
    all_maps = maps.pop(MAPS_BY_CLASS)
    if sampling.classes is None:
        return maps, ""
    images, count = all_maps.shape[:2]
    scores, expected = torch.full((images, count), torch.nan), (measured.batch, count)
    has_scores = isinstance(output, Tensor) and tuple(output.shape) == expected
    if has_scores:
        scores = output.detach()[list(measured.rows)]
    scores = scores.to(all_maps)
    if isinstance(sampling.classes, list):
        index = torch.tensor(sampling.classes, device=all_maps.device).expand(images, -1)
    elif has_scores:
        index = scores.topk(min(sampling.classes, count)).indices
    else:
        reason = f"its output does not have the shape {expected}"
        if output is None:
            reason = "the model was not called as a whole"
        advice = "classes=[...] keeps maps of the classes that it names"
        return maps, f"{reason}, so its best classes are unknown: {advice}"
    # Indices of shape (n, 1) and (n, k) select k classes for each image: (n, k, height, width).
    image = torch.arange(images, device=all_maps.device)[:, None]
    chosen = {MAPS_BY_CLASS: all_maps[image, index], "class_index": index}
    return maps | chosen | {"class_score": scores.gather(1, index)}, ""
