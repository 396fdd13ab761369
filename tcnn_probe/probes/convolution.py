"""What convolutions put out: mean, spread and sign, of the whole layer and of each channel."""

import torch
from torch import Tensor, nn

from tcnn_model.gpsa.precision import at_least_float32
from tcnn_probe.probes.probe import ForwardCall, Probe
from tcnn_probe.schema import Variable

__all__ = ["CONVOLUTION"]

_AT_ONCE = 1 << 24
_MEAN = "Mean over the images seen since the previous mark."


def _measure(call: ForwardCall) -> dict[str, Tensor]:
    output, kernel = call.output, call.module.weight
    if output.ndim < kernel.ndim:  # one image, without a batch dimension
        output = output[None]
    images = max(1, _AT_ONCE // max(1, output[:1].numel()))
    # A copy of a few images at a time, in float32, if they come in less.
    parts = [_moments(some.to(at_least_float32(some.dtype))) for some in output.flatten(2).split(images)]
    mean, variance, negative = (torch.cat(part) for part in zip(*parts, strict=True))
    return {
        "output_mean": mean.mean(1),
        "output_std": (variance.mean(1) + mean.var(1, correction=0)).sqrt(),
        "output_nonpositive": negative.mean(1),
        "channel_mean": mean,
        "channel_rms": (variance + mean.square()).sqrt(),
        "channel_nonpositive": negative,
    }


def _moments(output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and share of values that are not positive, over pixels: (B, C, N) -> (B, C) each."""
    mean = output.mean(2)
    variance = (output - mean[..., None]).square_().mean(2)  # in two passes: exact, and much faster than torch.var_mean
    return mean, variance, 1 - (output > 0).to(output.dtype).mean(2)


_LAYER, _CHANNEL = ("layer",), ("layer", "channel")

CONVOLUTION = Probe(
    "convolution",
    {
        "output_mean": Variable(_LAYER, "1", "mean output", f"Mean over channels and pixels. {_MEAN}"),
        "output_std": Variable(
            _LAYER,
            "1",
            "standard deviation of the output",
            f"Over the channels and pixels of one image, about its own mean. {_MEAN}",
        ),
        "output_nonpositive": Variable(
            _LAYER,
            "1",
            "share of outputs not above 0",
            f"Share of channels and pixels that a ReLU right after the layer would set to 0. {_MEAN}",
        ),
        "channel_mean": Variable(_CHANNEL, "1", "mean output of the channel", f"Mean over pixels. {_MEAN}"),
        "channel_rms": Variable(
            _CHANNEL,
            "1",
            "root mean square of the channel",
            f"Root of the mean square over the pixels of one image. {_MEAN}",
        ),
        "channel_nonpositive": Variable(
            _CHANNEL,
            "1",
            "share of the channel's outputs not above 0",
            f"Share of pixels that a ReLU right after the layer would set to 0; 1 for a channel that is dead. {_MEAN}",
        ),
    },
    (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    measure=_measure,
)
