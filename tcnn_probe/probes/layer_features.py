"""Features of selected images in each layer, for :mod:`tcnn_probe.representation`."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.precision import at_least_float32
from tcnn_probe.models import image_numbers, whole_number
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.representation.token_similarity import token_cosine
from tcnn_probe.schema import Variable

__all__ = ["FEATURES", "features"]

# Names that torchvision, timm and transformers give to stages and blocks; "s1" is a stage of timm's
# RegNet.
_STAGE = re.compile(r"(.+[._])?(layers?|stages|blocks|features)[._]?\d+|(.+\.)?s\d+")


@dataclass(frozen=True)
class FeatureProbe(Probe):
    """Features of layers that are selected by name, for the probe's own images.

    Args:
        images: Indices of the images whose features are kept.
        patterns: Names and globs of the layers; None for stages and blocks.
    """

    images: tuple[int, ...] | None = None
    patterns: Sequence[str] | None = None

    def choose_layers(self, names: Iterable[str]) -> Collection[str]:
        """Return the names that the patterns match;
        raise ValueError for a pattern without a match.
        """
        names = list(names)
        if self.patterns is None:
            return {name for name in names if _STAGE.fullmatch(name)}
        layers: set[str] = set()
        for pattern in self.patterns:
            matching = {name for name in names if name == pattern or fnmatchcase(name, pattern)}
            if not matching:
                raise ValueError(
                    f"no layers match {pattern!r}: the model has {names[:4]} and {len(names) - 4} "
                    "others"
                )
            layers |= matching
        return layers


def features(
    layers: str | Collection[str] | None = None,
    images: int | Collection[int] = 256,
    *,
    tokens: Sequence[int] = (),
    prefix_tokens: int = 0,
    channel_axis: int | None = None,
    max_bytes: int = 2**24,
) -> Probe:
    """Record the features of selected images:
    the mean over the positions of a layer's output, and single tokens.

    ::

        probes = [*tcnn_probe.DEFAULT, tcnn_probe.features(["layer3", "layer4"], images=100)]
        with tcnn_probe.record(model, "run.zarr", probes=probes) as recorder:
            ...
        features = recorder.tree["features"].feature
        features.sel(layer="layer4", token="mean")  # (epoch, image, channel)

    The group "features" has ``feature`` (epoch, layer, image, token, channel), with NaN beyond a
    layer's own channels; and ``token_cosine`` (epoch, layer), the mean over all images of
    :func:`tcnn_probe.representation.token_cosine` of the positions of the output. Features are
    stored as float16: a number between 6e-5 and 65504 has a relative error of at most 5e-4, a
    smaller number an absolute error of at most 3e-8; a larger number becomes infinite. Each epoch
    takes images * (1 + tokens) * channels * 2 bytes for each layer in memory, and at most as much
    on disk, where NaN are compressed. When features are read, each layer takes as much memory as
    the layer with the most channels.

    Args:
        layers: Names or globs of modules that return feature maps or tokens; None for stages and
            blocks, by their names (layer4, stages.3, blocks.11, encoder_layer_11).
        images: Images whose features are kept: the first n of each epoch, or a list of indices,
            counted from 0.
        tokens: Indices of single tokens to keep in addition to the mean: 0 is the class token of a
            ViT; in a feature map, an index counts positions row by row.
        prefix_tokens: Number of leading class and register tokens, which the mean and the cosine
            leave out.
        channel_axis: Axis of the channels; None for axis 1 of (B, C, H, W) and the last axis of (B,
            N, C). Swin's (B, H, W, C) needs -1; without it, H = W raises an error.
        max_bytes: Largest size for each layer and epoch; the first forward raises an error if more
            is needed.

    Returns:
        A probe, for ``record(probes=)``.

    Raises:
        TypeError: Numbers of images are not integers.
        ValueError: There are no images or no layers; in ``record``, the model lacks a name; in a
            forward, an output has another shape, fewer tokens, or needs more than ``max_bytes``.
    """
    numbers = image_numbers(images)
    if not numbers:
        raise ValueError(f"expected a number of images, or a list of their numbers, got {images!r}")
    prefix_tokens = whole_number(prefix_tokens, "prefix_tokens")
    tokens = [index(token) for token in tokens]
    facts = {
        "tokens": tokens,
        "prefix_tokens": prefix_tokens,
        "channel_axis": channel_axis,
    }
    if isinstance(layers, str):
        layers = [layers]
    patterns = None if layers is None else list(layers)

    def places(call: ForwardCall) -> Tensor:
        x = _places(call, channel_axis)
        # Each value takes two bytes (float16).
        needed = len(numbers) * (1 + len(tokens)) * x.shape[-1] * 2
        if needed > max_bytes:
            raise ValueError(
                f"{len(numbers)} images of {x.shape[-1]} channels need {needed} bytes for "
                f"{call.name!r}, more than max_bytes={max_bytes}: give fewer images or tokens, or "
                "a larger max_bytes"
            )
        if max(prefix_tokens, *tokens, 0) >= x.shape[1]:
            raise ValueError(
                f"expected tokens and prefix_tokens below {x.shape[1]}, the places of "
                f"{call.name!r}, got {tokens} and {prefix_tokens}"
            )
        return x.to(at_least_float32(x.dtype))

    def measure(call: ForwardCall) -> dict[str, Tensor]:
        x = places(call)[:, prefix_tokens:]
        return {"token_cosine": token_cosine(x) if x.shape[1] > 1 else x.new_ones(len(x))}

    def maps(call: ForwardCall, rows: Sequence[int]) -> dict[str, Tensor]:
        x = places(call)
        if len(rows) < len(x):
            # Indexing with a list copies, so it is used only if some rows are left out.
            x = x[rows]
        mean = x[:, prefix_tokens:].mean(1, keepdim=True)
        return {"feature": torch.cat([mean, x[:, tokens]], 1)}

    return FeatureProbe(
        "features",
        _VARIABLES,
        nn.Module,
        # These facts are in the layer table, so that features of other tokens are not written into
        # the same store.
        facts=lambda _: facts,
        measure=measure,
        maps=maps,
        coords={"token": ["mean", *map(str, tokens)]},
        images=numbers,
        patterns=patterns,
    )


def _places(call: ForwardCall, channel_axis: int | None) -> Tensor:
    """Return the output at all positions, shape (B, N, C)."""
    x = call.output
    if not isinstance(x, Tensor) or x.ndim < 3:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"expected layers that return (B, C, H, W) or (B, N, C), got {got} from {call.name!r}"
        )
    if channel_axis is None:
        # Equal axes 1 and 2 are probably H = W, with channels last; but a narrow convnet on oblong
        # images may have as many channels as rows.
        looks_last = x.ndim == 4 and x.shape[1] == x.shape[2] != x.shape[3]
        if looks_last and not any(
            isinstance(module, nn.Conv2d) for module in call.module.modules()
        ):
            finding = f"{call.name!r} returns {tuple(x.shape)}, which looks like (B, H, W, C)"
            raise ValueError(f"{finding}: give channel_axis=-1, or 1 if it is (B, C, H, W)")
        channel_axis = 1 if x.ndim > 3 else -1
    return x.movedim(channel_axis, -1).flatten(1, -2)


_VARIABLES: dict[str, Any] = {
    "feature": Variable(
        ("layer", "image", "token", "channel"),
        "1",
        "feature",
        "Output of the layer for an image: the mean over its places, or a single token; float16.",
        dtype="float16",
    ),
    "token_cosine": Variable(
        ("layer",),
        "1",
        "cosine between tokens",
        "Mean cosine between different places of the layer's output (Touvron's thesis, Section "
        "3.3, of two tokens); 1 for a single place. Mean over the images seen since the previous "
        "mark.",
    ),
}
FEATURES = features()
