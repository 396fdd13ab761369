"""Weights of the layers between the patches of ResMLP and MLP-Mixer, as static attention.

The weight from key patch j to query patch i does not depend on the image. Each such layer is
therefore treated as a head with a content information of 0, which has a type like any head
(Touvron's thesis, Section 4.3.3, compares these layers with convolutions).
"""

import math
from typing import Any

import numpy as np
import xarray as xr
from torch import Tensor, nn

from tcnn_probe.architectures.timm_classes import MixerBlock, ResBlock
from tcnn_probe.extras import needed_for
from tcnn_probe.heads.anatomy import convolution_inside
from tcnn_probe.heads.static_pattern import (
    offsets_of_pairs,
    translation_equivariance,
)
from tcnn_probe.models import layer_names, unwrap

__all__ = ["NEAR_ZERO", "cross_patch"]

NEAR_ZERO = 0.05
"""Weights below this share of the largest are near zero (thesis, Fig. 4.3)."""
_ABOUT = {
    "weight": (
        "1",
        "weight of the key patch for the query patch; in MLP-Mixer the product of the two layers' "
        "matrices",
    ),
    "near_zero": (
        "1",
        f"share of weights below {NEAR_ZERO:.0%} of the largest, in absolute value (thesis, Fig. "
        "4.3)",
    ),
    "attention_distance": (
        "cell",
        "support radius: mean over queries of sum_j |A_ij| ||delta_ij|| / sum_j |A_ij|",
    ),
    "uniform_distance": ("cell", "attention_distance if all weights were equal"),
    "entropy": ("nat", "mean over queries of the entropy of |A_ij| / sum_j |A_ij|"),
    "uniform_entropy": ("nat", "log N, the entropy if all weights were equal"),
    "translation_equivariance": (
        "1",
        "share of the variance of A_ij that depends only on the offset from i to j",
    ),
    "selectivity": ("nat", "uniform_entropy - entropy: the sum of the four parts"),
    "offset_information": (
        "nat",
        "part of selectivity: information of the convolution that is nearest to |A_ij| / sum_j "
        "|A_ij|",
    ),
    "position_information": ("nat", "part of selectivity: the rest"),
    **dict.fromkeys(
        (
            "content_information",
            "key_content_information",
            "query_key_content_information",
        ),
        ("nat", "0, because the weights do not depend on the image"),
    ),
    "images": ("1", "infinite, because the weights are the same for all images"),
}


def cross_patch(model: nn.Module, grid: tuple[int, int] | None = None) -> xr.Dataset:
    """Read the layers between patches of a ResMLP or MLP-Mixer as static attention.

    ::

        layers = cross_patch(model)
        # A row of the matrix (thesis, Fig. 4.2).
        layers.weight.sel(layer="blocks.0", query_y=7, query_x=7).plot()
        tcnn_probe.head_types(layers)  # convolutional, positional, averaging or mixed

    Only ``translation_equivariance`` depends on the signs of the weights. MLP-Mixer has a GELU
    between its two layers; the product of their weights ignores it.

    Args:
        model: Model with blocks of timm's ResMLP or MLP-Mixer.
        grid: Rows and columns of patches; None for those of the model's patch embedding.

    Returns:
        ``weight`` (layer, query_y, query_x, y, x); ``near_zero``, ``uniform_...`` and ``images``
        (layer,); ``attention_distance``, ``entropy``, ``translation_equivariance``, ``selectivity``
        and its parts (layer, head), for a single head.

    Raises:
        ValueError: There is no such block, or the grid is not known or does not fit.
    """
    matrices = {}
    for module, name in layer_names(model).items():
        if isinstance(module, (ResBlock, MixerBlock)):
            matrices[name] = _matrix(module)
    if not matrices:
        raise ValueError(
            f"expected blocks of timm's ResMLP or MLP-Mixer, got {type(unwrap(model)).__name__}"
        )
    if grid is None:
        grid = getattr(getattr(unwrap(model), "stem", None), "grid_size", None)
    patches = len(next(iter(matrices.values())))
    if grid is None or math.prod(grid) != patches:
        raise ValueError(f"expected grid=(rows, columns) of {patches} patches, got {grid}")
    layers = [_measure(matrix, grid) for matrix in matrices.values()]
    ds = xr.concat(layers, xr.Variable("layer", list(matrices)))
    for name, (units, description) in _ABOUT.items():
        ds[name].attrs = {
            "units": units,
            "long_name": name.replace("_", " "),
            "description": description,
        }
    return ds


def _matrix(block: Any) -> np.ndarray:
    """Return the weights between patches, shape (queries, keys), in float64."""

    def weights(layer: nn.Module) -> np.ndarray:
        assert isinstance(layer.weight, Tensor)
        return layer.weight.detach().double().cpu().numpy()

    if isinstance(block, ResBlock):
        return weights(block.linear_tokens)
    # (queries, hidden) @ (hidden, keys).
    return weights(block.mlp_tokens.fc2) @ weights(block.mlp_tokens.fc1)


def _measure(matrix: np.ndarray, grid: tuple[int, int]) -> xr.Dataset:
    with needed_for("entropy"):
        from scipy.special import entr

    places = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1).reshape(-1, 2)
    distances = np.linalg.norm(places[:, None] - places, axis=-1)
    magnitudes = np.abs(matrix)
    # Unlike attention, weights have signs.
    total = magnitudes.sum(1, keepdims=True)
    # A query whose weights are all 0 has no distribution.
    shares = magnitudes / np.where(total > 0, total, np.nan)
    # entr(p) = -p log p, 0 at p = 0.
    entropy = entr(shares).sum(1).mean()
    log_keys = math.log(len(matrix))
    index, _ = offsets_of_pairs(places, places)
    count = index.max() + 1
    masses = np.bincount(index.ravel(), shares.ravel(), count).astype(np.float64)
    counts = [np.bincount(row, minlength=count) for row in index]
    pairs = np.stack(counts, 1).astype(np.float64)
    convolution = convolution_inside(masses[None], pairs, np.ones((1, len(matrix))))
    of_convolution = float(convolution.entropy[0])
    by_head = {
        "attention_distance": (shares * distances).sum(1).mean(),
        "entropy": entropy,
        "selectivity": log_keys - entropy,
        "offset_information": log_keys - of_convolution,
        "position_information": of_convolution - entropy,
        "key_content_information": 0.0,
        "query_key_content_information": 0.0,
        "translation_equivariance": translation_equivariance(matrix[None], places, places)[0],
        "content_information": 0.0,
    }
    by_layer = {
        "near_zero": (magnitudes < NEAR_ZERO * magnitudes.max()).mean(),
        "uniform_distance": distances.mean(),
        "uniform_entropy": log_keys,
        # The measures do not depend on images, so they pass every threshold on the number of
        # images.
        "images": math.inf,
    }
    weight = {"weight": (("query_y", "query_x", "y", "x"), matrix.reshape(*grid, *grid))}
    return xr.Dataset(
        weight | {name: ("head", [value]) for name, value in by_head.items()} | by_layer,
        {"head": [0]},
    )
