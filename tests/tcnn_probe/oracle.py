"""Statistics of the probes, written out slowly in float64:
the tests' oracle, which uses nothing of tcnn_probe.
"""

import torch
from torch import Tensor

from tcnn_model import GPSA
from tests.tcnn_model.equations import gpsa_attention_reference

__all__ = [
    "gpsa_attention",
    "gpsa_statistics",
    "gpsa_statistics_of_qk",
    "over_images",
    "summarise",
]

Statistics = dict[str, Tensor]  # variable -> (B, heads), float64


def summarise(
    attention: Tensor,
    content: Tensor,
    positional: Tensor,
    distance: Tensor,
    positions: Tensor | None = None,
) -> Statistics:
    """Return means over queries of attention (B, heads, N_query, N_key),
    or (heads, N_query, N_key) for any image.

    Args:
        attention, content, positional: A, C and P.
        distance: Distance between query and key, shape (N_query, N_key), for the keys of
            ``attention``.
        positions: Row and column of each key of P, shape (N_key, 2); None to leave out the mean
            squared radius.
    """
    radius = {}
    if positions is not None:
        # Half of the mean squared distance between two keys that are drawn from P independently.
        squared = torch.cdist(positions.double(), positions.double()) ** 2
        spread = torch.einsum("hik,kl,hil->hi", positional, squared, positional) / 2
        radius["mean_squared_radius"] = spread.mean(-1).expand(attention.shape[:2])
    return radius | {
        "entropy": _entropy(attention),
        "content_entropy": _entropy(content),
        "positional_entropy": _entropy(positional).expand(attention.shape[:2]),
        "attention_distance": (attention * distance).sum(-1).mean(-1),
    }


def over_images(name: str, values: Tensor) -> Tensor:
    """Return the statistic of an epoch from those of its images, (B, heads)."""
    return values.amax(0) if name == "max_logit" else values.mean(0)


def gpsa_attention(layer: GPSA, x: Tensor) -> Tensor:
    """Return the attention of ``layer``, (B, heads, N_query, N_key), in float64;
    keys include the padding.
    """
    return gpsa_attention_reference(layer, _double(x), locality_strength=_alpha(layer)).detach()


def gpsa_statistics(layer: GPSA, x: Tensor) -> Statistics:
    """Return the statistics for the weights of ``layer``, entirely in float64."""
    x = _double(x)
    bases, pixels, real = _grid(layer, x)
    query = _project(x, bases, layer.query, layer.heads)
    key = _project(x, pixels[real], layer.key, layer.heads)
    logits = _logits(query, key)
    return summarise(
        gpsa_attention(layer, x),
        torch.softmax(logits, -1),
        _positional(layer, bases, pixels),
        _distance(bases, pixels),
        pixels,
    ) | {"max_logit": logits.amax((-2, -1))}


def gpsa_statistics_of_qk(layer: GPSA, x: Tensor, query: Tensor, key: Tensor) -> Statistics:
    """Return the statistics for given queries and keys (B, heads, N, d),
    as rounded by layers in low precision.
    """
    bases, pixels, real = _grid(layer, x)
    logits = _logits(_double(query), _double(key))
    content = torch.softmax(logits, -1)
    positional = _positional(layer, bases, pixels)
    gate = torch.sigmoid(_double(layer.gating))[:, None, None]
    # In Eq. (7) over the extended grid, the padding gets no content attention.
    attention = (gate * positional).expand(len(x), *positional.shape).clone()
    attention[..., real] += (1 - gate) * content
    means = summarise(attention, content, positional, _distance(bases, pixels), pixels)
    return means | {"max_logit": logits.amax((-2, -1))}


def _entropy(attention: Tensor) -> Tensor:
    # 0 log 0 = 0, so that the logarithm of 0 may be replaced by a finite number.
    terms = attention * attention.clamp_min(1e-300).log()
    return -terms.sum(-1).mean(-1)


def _grid(layer: GPSA, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return base pixels of queries (N_query, 2),
    pixels of keys (N_key, 2), and a mask of those in the image.
    """
    height, width = x.shape[-2:]
    py, px = layer.padding
    sy, sx = layer.stride
    dy, dx = layer.dilation
    ky, kx = layer.kernel_size
    # Windows of the convolution start at these pixels.
    tops = range(-py, height + py - dy * (ky - 1), sy)
    lefts = range(-px, width + px - dx * (kx - 1), sx)
    bases = torch.tensor([(top + py, left + px) for top in tops for left in lefts])
    pixels = torch.tensor([(j, i) for j in range(-py, height + py) for i in range(-px, width + px)])
    inside = [0 <= j < height and 0 <= i < width for j, i in pixels.tolist()]
    return bases, pixels, torch.tensor(inside)


def _project(x: Tensor, pixels: Tensor, weight: Tensor, heads: int) -> Tensor:
    """Multiply weight (heads * d, C) by the features at pixels,
    which are zero outside the image: (B, heads, N, d).
    """
    height, width = x.shape[-2:]
    features = [
        x[:, :, j, i] if j < height and i < width else torch.zeros_like(x[:, :, 0, 0])
        for j, i in pixels.tolist()
    ]
    projected = torch.stack(features, 1) @ _double(weight).T
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def _logits(query: Tensor, key: Tensor) -> Tensor:
    return torch.einsum("bhqd,bhkd->bhqk", query, key) / query.shape[-1] ** 0.5


def _positional(layer: GPSA, bases: Tensor, pixels: Tensor) -> Tensor:
    center = _double(layer.center)[:, None, None]
    offset = pixels[None, None] - bases[None, :, None] - center
    squared = offset.pow(2).sum(-1)
    return torch.softmax(-_alpha(layer)[:, None, None] * squared, -1)


def _distance(bases: Tensor, pixels: Tensor) -> Tensor:
    offset = (pixels[None] - bases[:, None]).double()
    return offset.pow(2).sum(-1).sqrt()


def _alpha(layer: GPSA) -> Tensor:
    # The softplus with beta = 5 is computed from its definition, and not by torch.
    return torch.log1p(torch.exp(5 * _double(layer.raw_locality))) / 5


def _double(x: Tensor) -> Tensor:
    return x.detach().double()
