"""Entropy and distance of uniform attention: the scale on which to read the recorded ones."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from tcnn_model import Axis, GatedAttention
from tcnn_model.gpsa.precision import widest_dtype
from tcnn_probe.attention.call import AttentionCall
from tcnn_probe.attention.layout import Tokens

__all__ = ["uniform_distance", "uniform_gated_attention", "uniform_softmax_attention"]


def uniform_distance(from_y: np.ndarray, to_y: np.ndarray, from_x: np.ndarray, to_x: np.ndarray) -> float:
    """Mean distance between all queries and all keys of two rectangular grids, in float64.

    Args:
        from_y, from_x: rows and columns of the queries, one-dimensional.
        to_y, to_x: rows and columns of the keys, one-dimensional.
    """
    (along_y, pairs_y), (along_x, pairs_x) = _offsets(from_y, to_y), _offsets(from_x, to_x)
    total = pairs_y @ np.hypot(along_y[:, None], along_x[None, :]) @ pairs_x
    return float(total / (pairs_y.sum() * pairs_x.sum()))


def uniform_gated_attention(attention: GatedAttention) -> dict[str, Tensor]:
    """``uniform_entropy`` and ``uniform_distance`` over real and padding pixels, for each image: shape (B,).

    ``uniform_content_entropy`` is over real pixels.
    """
    y, x, query = attention.y, attention.x, attention.query
    values = {"uniform_entropy": math.log(y.keys * x.keys), "uniform_content_entropy": math.log(y.length * x.length)}
    return _for_images(query, len(query), values, _distance_on_axes(y, x))


def uniform_softmax_attention(call: AttentionCall) -> dict[str, Tensor]:
    """``uniform_entropy`` over all keys and ``uniform_distance`` over the grid, for each image: shape (B,).

    Keys that a mask hides from a query count as keys. Where no grid is known there is no distance.
    """
    queries, keys = call.layout.queries, call.layout.keys
    distance = None if queries is None or keys is None else _distance_of_tokens(queries, keys)
    return _for_images(call.logits.source, call.images, {"uniform_entropy": math.log(call.keys)}, distance)


def _for_images(like: Tensor, images: int, values: dict[str, float], distance: float | None) -> dict[str, Tensor]:
    dtype = widest_dtype(like.device)
    values |= {} if distance is None else {"uniform_distance": distance}
    return {name: torch.full((images,), value, dtype=dtype, device=like.device) for name, value in values.items()}


def _offsets(one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distances along one axis, each once, and how many pairs have each: no N x N table for a grid of N."""
    distances, pairs = np.unique(np.abs(other[None, :] - one[:, None]), return_counts=True)
    return distances, pairs.astype(np.float64)


@lru_cache(maxsize=256)
def _distance_on_axes(y: Axis, x: Axis) -> float:
    like = torch.empty(0, dtype=torch.float64)
    places = [positions(like).numpy() for axis in (y, x) for positions in (axis.query_positions, axis.key_positions)]
    return uniform_distance(*places)


@lru_cache(maxsize=256)
def _distance_of_tokens(queries: Tokens, keys: Tokens) -> float:
    (from_y, from_x), (to_y, to_x) = _places(queries), _places(keys)
    return uniform_distance(from_y, to_y, from_x, to_x)


def _places(tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    (down, right), (top, left) = tokens.spacing, tokens.origin
    return np.arange(tokens.height) * down + top, np.arange(tokens.width) * right + left
