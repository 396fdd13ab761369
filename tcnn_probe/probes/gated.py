"""What GPSA layers, ours and timm's ConViT's, have in common: gates, positions, and two kinds of attention."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tcnn_model import GatedAttention
from tcnn_model.gpsa.statistics import measure
from tcnn_probe.attention.statistics import gated_attention_statistics
from tcnn_probe.attention.uniform import uniform_gated_attention
from tcnn_probe.probes.variables import DISTANCE, ENTROPY, EVEN, HEAD, MAPS, MEAN
from tcnn_probe.schema import Variable

__all__ = ["VARIABLES", "maps_of", "numbers_of"]

VARIABLES: Mapping[str, Variable] = {
    "gate": Variable(HEAD, "1", "gate", "sigma(lambda), share of positional attention (T-CNN Eq. 7), as marked."),
    "locality_strength": Variable(
        HEAD, "pixel-2", "locality strength", "alpha of the positional attention (T-CNN Eq. 4), as marked."
    ),
    "attention_span": Variable(HEAD, "pixel2", "attention span", "1 / alpha (T-CNN Fig. 4B), as marked."),
    "center_y": Variable(
        HEAD, "pixel", "centre of attention, y", "Delta_y, relative to the query (T-CNN Eq. 4), as marked."
    ),
    "center_x": Variable(
        HEAD, "pixel", "centre of attention, x", "Delta_x, relative to the query (T-CNN Eq. 4), as marked."
    ),
    "entropy": ENTROPY,
    "content_entropy": Variable(
        HEAD, "nat", "entropy of content attention", f"Entropy of softmax(q k / sqrt(d)) over real pixels. {MEAN}"
    ),
    "positional_entropy": Variable(
        HEAD,
        "nat",
        "entropy of positional attention",
        f"Entropy of softmax(-alpha ||delta - Delta||^2) over real and padding pixels. {MEAN}",
    ),
    "attention_distance": DISTANCE,
    **EVEN,
    **MAPS,
}


def numbers_of(attention: GatedAttention) -> dict[str, Tensor]:
    """Of every image: (B, heads) each, (B,) of even attention."""
    return {**gated_attention_statistics(attention), **uniform_gated_attention(attention)}


def maps_of(attention: GatedAttention, which: Sequence[int]) -> dict[str, Tensor]:
    """Maps over the real pixels of some images: (images, 1, heads, H, W) each."""
    index = torch.as_tensor(which, device=attention.query.device)
    y, x = attention.y, attention.x
    some = GatedAttention(attention.query[index], attention.key[index], attention.position, attention.gate, y, x)
    received = measure(some).received / some.query.shape[2]
    rows, cols = some.factors_on_pixels()
    row, col = y.queries // 2, x.queries // 2
    content = torch.softmax(
        (some.query[:, :, row * x.queries + col] * some.scale).to(received).unsqueeze(2)
        @ some.key.to(received).transpose(2, 3),
        -1,
    )[:, :, 0]
    positional = (rows[:, row, :, None] * cols[:, col, None, :]).flatten(1).to(received)
    center = torch.lerp(content, positional.expand_as(content), some.gate.to(received)[:, None])
    maps = {"attention_received": received, "center_attention": center}
    return {name: value.unflatten(-1, (y.length, x.length)).unsqueeze(1) for name, value in maps.items()}
