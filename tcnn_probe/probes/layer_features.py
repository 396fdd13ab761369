"""Features of chosen images, layer by layer: what :mod:`tcnn_probe.representation` looks at."""

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from operator import index
from typing import Any

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.models import image_numbers, whole_number
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.representation.token_similarity import token_cosine
from tcnn_probe.schema import Variable

__all__ = ["FEATURES", "features"]

_STAGE = re.compile(r"(.+[._])?(layers?|stages|blocks|features)[._]?\d+|(.+\.)?s\d+")  # "s1": RegNet's


def features(
    layers: str | Collection[str] | None = None,
    images: int | Collection[int] = 256,
    *,
    tokens: Sequence[int] = (),
    prefix_tokens: int = 0,
    channel_axis: int | None = None,
    max_bytes: int = 2**24,
) -> Probe:
    """Record what layers make of chosen images: the mean over the places of their output, and single tokens.

    ::

        probes = [*tcnn_probe.DEFAULT, tcnn_probe.features(["layer3", "layer4"], images=100)]
        with tcnn_probe.record(model, "run.zarr", probes=probes) as recorder:
            ...
        recorder.tree["features"].feature.sel(layer="layer4", token="mean")  # (epoch, image, channel)

    In the group "features": ``feature`` (epoch, layer, image, token, channel), NaN beyond a layer's own channels; and
    ``token_cosine`` (epoch, layer), the mean over all images of :func:`tcnn_probe.representation.token_cosine` of the
    places of the output. Features are stored as float16: a number between 6e-5 and 65504 is off by 5e-4 of itself at
    most, a smaller one by 3e-8; a larger one becomes infinite. Each epoch takes images * (1 + tokens) * channels * 2
    bytes for each layer, in memory and at most on disk, where NaN are compressed. Once read, each layer takes as much
    as that of most channels.

    Args:
        layers: names or globs of modules that return feature maps or tokens; None: stages and blocks, by their names
            (layer4, stages.3, blocks.11, encoder_layer_11).
        images: how many, or the numbers of some, counted from 0 in each epoch.
        tokens: which single ones to keep beside the mean: 0 is the class token of a ViT; of a feature map the place.
        prefix_tokens: class and register tokens at the front, which the mean and the cosine leave out; from 0.
        channel_axis: of the output; None: 1 of (B, C, H, W), the last one of (B, N, C). Swin's (B, H, W, C) needs -1,
            and is refused without it where H = W.
        max_bytes: for each layer and epoch; more is refused in the first forward.

    Returns:
        a probe, for ``record(probes=)``.

    Raises:
        TypeError: numbers of images that are no integers.
        ValueError: no images or no layers; in ``record``, names that the model lacks; in a forward, an output of
            another shape, with fewer tokens, or more than ``max_bytes``.
    """
    if not (numbers := image_numbers(images)):
        raise ValueError(f"expected a number of images, or the numbers of some, got {images!r}")
    prefix_tokens = whole_number(prefix_tokens, "prefix_tokens")
    tokens = [index(token) for token in tokens]
    facts = {"tokens": tokens, "prefix_tokens": prefix_tokens, "channel_axis": channel_axis}
    patterns = None if layers is None else [layers] if isinstance(layers, str) else list(layers)

    def of(call: ForwardCall) -> Tensor:
        x = _places(call, channel_axis)
        needed = len(numbers) * (1 + len(tokens)) * x.shape[-1] * 2
        if needed > max_bytes:
            raise ValueError(
                f"{len(numbers)} images of {x.shape[-1]} channels need {needed} bytes for {call.name!r}, more than "
                f"max_bytes={max_bytes}: give fewer images or tokens, or a larger max_bytes"
            )
        if max(prefix_tokens, *tokens, 0) >= x.shape[1]:
            raise ValueError(
                f"expected tokens and prefix_tokens below {x.shape[1]}, the places of {call.name!r}, got {tokens} and "
                f"{prefix_tokens}"
            )
        return x.to(at_least_float32(x.dtype))

    def measure(call: ForwardCall) -> dict[str, Tensor]:
        x = of(call)[:, prefix_tokens:]
        return {"token_cosine": token_cosine(x) if x.shape[1] > 1 else x.new_ones(len(x))}

    def maps(call: ForwardCall, rows: Sequence[int]) -> dict[str, Tensor]:
        x = of(call)
        x = x[rows] if len(rows) < len(x) else x
        return {"feature": torch.cat([x[:, prefix_tokens:].mean(1, keepdim=True), x[:, tokens]], 1)}

    return Probe(
        "features",
        _VARIABLES,
        nn.Module,
        facts=lambda _: facts,  # so that other tokens are not written into the same store
        measure=measure,
        maps=maps,
        coords={"token": ["mean", *map(str, tokens)]},
        images=numbers,
        layers=partial(_chosen, patterns),
    )


def _places(call: ForwardCall, channel_axis: int | None) -> Tensor:
    """All places of the output, (B, N, C)."""
    x = call.output
    if not isinstance(x, Tensor) or x.ndim < 3:
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"expected layers that return (B, C, H, W) or (B, N, C), got {got} from {call.name!r}")
    if channel_axis is None:
        last = x.ndim == 4 and x.shape[1] == x.shape[2] != x.shape[3]  # or a narrow convnet on oblong images
        if last and not any(isinstance(part, nn.Conv2d) for part in call.module.modules()):
            why = f"{call.name!r} returns {tuple(x.shape)}, which looks like (B, H, W, C)"
            raise ValueError(f"{why}: give channel_axis=-1, or 1 if it is (B, C, H, W)")
        channel_axis = 1 if x.ndim > 3 else -1
    return x.movedim(channel_axis, -1).flatten(1, -2)


def _chosen(patterns: Sequence[str] | None, names: Iterable[str]) -> Collection[str]:
    """The names of the layers among those of all modules."""
    every = list(names)
    if patterns is None:
        return {name for name in every if _STAGE.fullmatch(name)}
    found = {one: [name for name in every if name == one or fnmatchcase(name, one)] for one in patterns}
    if lacking := [pattern for pattern, some in found.items() if not some]:
        raise ValueError(f"no layers match {lacking[0]!r}: the model has {every[:4]} and {len(every) - 4} others")
    return {name for some in found.values() for name in some}


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
        "Mean cosine between different places of the layer's output (Touvron's thesis, Section 3.3, of two tokens); "
        "1 of a single one. Mean over the images seen since the previous mark.",
    ),
}
FEATURES = features()
