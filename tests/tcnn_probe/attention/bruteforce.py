"""Expected recordings by brute force: all N x N attention
of a copy in float64, and loops over its entries.

Nothing of tcnn_probe is used. The copy runs without fused attention. torch's softmax is replaced by
a function that hands on its results, and scaled_dot_product_attention by the textbook formula,
which does the same.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Position of a token in cells; None for class and register tokens.
Place = tuple[float, float] | None


@dataclass
class ReferenceAttention:
    """Attention of the copy: ``weights`` and ``logits`` as the model forms them,
    (..., N_query, N_key) in float64.
    """

    layer: str
    module: nn.Module
    weights: Tensor
    logits: Tensor


def grid(
    height: int,
    width: int,
    *,
    prefix: int = 0,
    spacing: Sequence[float] = (1, 1),
    origin: Sequence[float] = (0, 0),
) -> list[Place]:
    """Return the positions of tokens: ``prefix`` tokens without one, then a grid row by row."""
    cells = [
        (origin[0] + spacing[0] * y, origin[1] + spacing[1] * x)
        for y in range(height)
        for x in range(width)
    ]
    return [None] * prefix + cells


@contextmanager
def textbook(on_weights: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Replace softmax and fused attention by their formulas,
    and hand on the weights and logits of each call.
    """

    def softmax(x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        weights = original(x, dim)
        if x.ndim > 2 and dim in (-1, x.ndim - 1):
            on_weights(weights, x)
        return weights

    def attend(
        q,
        k,
        v,
        attn_mask=None,
        dropout_p=0.0,
        is_causal=False,
        scale=None,
        enable_gqa=False,
    ) -> Tensor:
        if enable_gqa:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
        logits = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            rows, columns = logits.shape[-2:]
            logits = logits.masked_fill(
                torch.arange(columns) > torch.arange(rows)[:, None], -torch.inf
            )
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            logits = logits + attn_mask
        # A query that sees no key has weights of zero.
        weights = torch.nan_to_num(original(logits, -1))
        on_weights(weights, logits)
        return weights @ v

    original = torch.softmax
    with ExitStack() as stack:
        # Models may call any of these three.
        for owner in (torch, F, Tensor):
            stack.enter_context(mock.patch.object(owner, "softmax", softmax))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", attend))
        yield


def attention_of(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[ReferenceAttention]:
    """Return all attention of one forward, in order;
    the second attention of a layer is named "name#1".
    """
    # The copy is in float64, so that no tolerance has to cover the reference's own rounding.
    twin = copy.deepcopy(model).double()
    running: list[str] = []
    references: list[ReferenceAttention] = []
    modules = dict(twin.named_modules())
    for name, module in modules.items():
        # A fused kernel does not call the softmax that is replaced.
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
        # An attention gets the name of the layer around these modules.
        if not isinstance(module, (nn.Softmax, nn.Dropout)):
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
            # A hook that returned the name would replace the output.
            module.register_forward_hook(lambda *_: running.pop() and None)

    def add(weights: Tensor, logits: Tensor) -> None:
        name = running[-1]
        before = sum(reference.layer.split("#")[0] == name for reference in references)
        references.append(
            ReferenceAttention(
                f"{name}#{before}" if before else name,
                modules[name],
                weights.detach(),
                logits.detach(),
            )
        )

    # If gradients are enabled, torch's multi-head attention does not use its fast path in one
    # kernel.
    with torch.enable_grad(), textbook(add):
        twin(
            *(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs),
            **kwargs,
        )
    return references


def entropy(weights: np.ndarray) -> np.ndarray:
    """Return the entropy over the last axis: -sum p log p, with 0 log 0 = 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # numpy warns about the branch that is not taken where a weight is 0.
        terms = np.where(weights > 0, weights * np.log(weights), 0.0)
    return -terms.sum(-1)


@dataclass
class Mask:
    """What a mask leaves, by loops over its entries.

    Args:
        queries: Whether a query counts, (B, windows, N_query).
        visible: Whether a query sees a key, (B, windows, N_query, N_key).
    """

    queries: np.ndarray
    visible: np.ndarray

    def mean(self, values: np.ndarray, queries: Any = slice(None)) -> np.ndarray:
        """Return the mean over images of the means over all queries
        that count of an image, (B, w, heads, n).
        """
        by_query = zip(values.swapaxes(2, 3), self.queries[:, :, queries], strict=True)
        return np.mean([image[counted].mean(0) for image, counted in by_query], axis=0)


def mask_of(logits: np.ndarray) -> Mask:
    """Return what the mask in logits, (B, windows, heads, N_query, N_key),
    leaves, if -5000 or less hides a key.
    """
    visible = (logits > -5000).any(2)
    counted = np.ones(visible.shape[:3], dtype=bool)
    if visible.shape[2] == visible.shape[3]:
        # Padding is seen by no token, or by itself alone and sees no other.
        sees_itself = visible.diagonal(axis1=2, axis2=3)
        alone = sees_itself & (visible.sum(2) == 1) & (visible.sum(3) == 1)
        counted = visible.any(2) & ~alone
        only_alone = ~counted.any((1, 2))
        counted[only_alone] = alone[only_alone]
    return Mask(counted, visible)


def no_mask(weights: np.ndarray) -> Mask:
    """Return what is left of attention (B, windows, heads, N_query, N_key) without a mask."""
    return mask_of(np.zeros(weights.shape))


def health(
    weights: np.ndarray, patches: Sequence[bool], mask: Mask | None = None
) -> dict[str, np.ndarray]:
    """Return the numbers of the probe "health" from (B, windows, heads, N_query, N_key).

    Heads are compared over the queries of patches, or over all queries if there are none.
    """
    compared = np.array(patches) if any(patches) else np.ones(len(patches), bool)
    images, _, heads, all_queries, keys = weights.shape
    mask = mask or no_mask(weights)
    by_image: dict[str, list[np.ndarray]] = {}
    for b in range(images):
        sinks, diversities = [], []
        cosines = np.zeros((heads, heads))
        histogram = np.zeros((heads, 20))
        for window, counted, visible in zip(
            weights[b], mask.queries[b], mask.visible[b], strict=True
        ):
            if not counted.any():
                continue
            rows = window[:, counted]  # (heads, queries, N_key)
            entropies = entropy(rows)
            sinks.append(rows.mean(1).max(-1))
            diversities.append(entropy(rows.mean(1)) - entropies.mean(1))
            directions = (rows / np.linalg.norm(rows, axis=-1, keepdims=True))[:, compared[counted]]
            cosines += np.einsum("gqk,hqk->gh", directions, directions)
            seen = visible[counted].sum(-1)
            shares = entropies[:, seen > 1] / np.log(seen[seen > 1])
            # The entropy of uniform attention is exactly log keys, and belongs to the last bin.
            bins = np.minimum(19, (20 * shares).astype(int))
            histogram += [np.bincount(of_head, minlength=20) for of_head in bins]
        others = cosines.sum(0) - cosines.diagonal()
        numbers = {
            "sink": np.mean(sinks, 0),
            "query_diversity": np.mean(diversities, 0),
            "head_similarity": others / mask.queries[b][:, compared].sum() / max(heads - 1, 1),
            "entropy_histogram": histogram / max(histogram[0].sum(), 1),
        }
        for name, values in numbers.items():
            by_image.setdefault(name, []).append(values)
    means = {name: np.mean(values, 0) for name, values in by_image.items()}
    if keys < 2:
        del means["entropy_histogram"]
    if all_queries < 2:
        del means["query_diversity"]
    if heads < 2:
        del means["head_similarity"]
    return means


def information(weights: np.ndarray, counted: np.ndarray | None = None) -> np.ndarray:
    """Return content information, (B, windows, heads, N_query, N_key) -> (heads,),
    with each position as a query.
    """
    if counted is None:
        counted = no_mask(weights).queries
    by_query = []
    for w in range(weights.shape[1]):
        for i in range(weights.shape[3]):
            rows = weights[counted[:, w, i], w, :, i]  # (images, heads, N_key)
            if len(rows) > 1:
                divergence = entropy(rows.mean(0)) - entropy(rows).mean(0)
                # The factor n / (n - 1) corrects for n images.
                by_query.append(divergence / (1 - 1 / len(rows)))
    return np.mean(by_query, axis=0)


def equivariance(pattern: np.ndarray, cells: Sequence[tuple[int, ...]]) -> float:
    """Return the share of the variance of a pattern (tokens, tokens)
    that the offsets between cells explain.
    """
    of_offset: dict[tuple[int, ...], list[float]] = {}
    for (i, query), (j, key) in product(enumerate(cells), repeat=2):
        offset = tuple(k - q for q, k in zip(query, key, strict=True))
        of_offset.setdefault(offset, []).append(pattern[i, j])
    within = sum(np.square(values - np.mean(values)).sum() for values in of_offset.values())
    return float(1 - within / (pattern.size - len(of_offset)) / np.var(pattern, ddof=1))


def distances(weights: np.ndarray, queries: Sequence[Any], keys: Sequence[Any]) -> np.ndarray:
    """Return the mean distance of each query on the grid, (..., N_query, N_key) -> (..., queries).

    Weights are renormalised over the keys on the grid.
    """
    rows, columns = (
        [i for i, place in enumerate(places) if place is not None] for places in (queries, keys)
    )
    far = np.array([[math.dist(queries[i], keys[j]) for j in columns] for i in rows])
    on_grid = weights[..., rows, :][..., columns]
    total = on_grid.sum(-1)
    return (on_grid * far).sum(-1) / np.where(total == 0, 1, total)


@dataclass
class Layout:
    """Positions of the tokens of an attention, written by hand.

    Args:
        queries, keys: Positions of the tokens; None if the tokens lie on no grid.
        class_query: Whether query 0 is a class token or the only latent.
        frames: Frames (f,) of the tokens of a video, the same for queries and keys; None for class
            tokens.
        arrange: Function of the model's weights and the number of images B that returns the weights
            with shape (B, windows, heads, N_query, N_key); None if the model's weights have shape
            (B * windows, heads, N_query, N_key).
    """

    queries: Sequence[Place] | None
    keys: Sequence[Place] | None
    class_query: bool = False
    arrange: Callable[[Tensor, int], Tensor] | None = None
    frames: Sequence[tuple[float] | None] | None = None

    @property
    def prefix(self) -> int:
        """Number of class and register tokens among the keys."""
        return 0 if self.keys is None else sum(place is None for place in self.keys)

    def patch_queries(self, queries: int) -> list[bool]:
        """Return which queries are no class or register tokens."""
        if self.queries is not None:
            return [place is not None for place in self.queries]
        return [not self.class_query] * queries

    def weights(self, reference: ReferenceAttention, images: int) -> np.ndarray:
        """Return the weights as (B, windows, heads, N_query, N_key)."""
        if self.arrange is not None:
            return self.arrange(reference.weights, images).numpy()
        return reference.weights.unflatten(0, (images, -1)).numpy()

    def expected(self, reference: ReferenceAttention, images: int) -> dict[str, np.ndarray]:
        """Return expected means over images and queries,
        for each head and for uniform attention.
        """
        weights = self.weights(reference, images)
        logits = self.weights(replace(reference, weights=reference.logits), images)
        mask = mask_of(logits)
        # The mask of -100 between the regions of Swin's shifted windows hides keys, too, but makes
        # no padding. In other layers logits may be as low by themselves.
        name = type(reference.module).__name__
        lowest = -50 if "Window" in name or "Swin" in name else -5000
        seen = (mask.visible & (logits > lowest).any(2))[:, :, None]
        values = {
            "entropy": mask.mean(entropy(weights)),
            "uniform_entropy": mask.mean(np.log(np.maximum(seen.sum(-1), 1))),
        }
        patches = self.patch_queries(weights.shape[-2])
        if len(weights) > 1 and any(patches):  # not recorded for a single image
            values["content_information"] = information(
                weights[..., patches, :], mask.queries[..., patches]
            )
        values |= health(weights, patches, mask)
        real = np.where(mask.queries[:, :, None, :, None], logits, -np.inf)
        values["max_logit"] = real.max((0, 1, 3, 4))
        if self.queries is not None and self.keys is not None:
            assert weights.shape[-2:] == (len(self.queries), len(self.keys)), (
                reference.layer,
                weights.shape,
            )
            patches = [place is not None for place in self.queries]
            for name, attention in (
                ("attention_distance", weights),
                ("uniform_distance", seen.astype(float)),
            ):
                far = distances(attention, self.queries, self.keys)
                values[name] = mask.mean(far, patches)
            if self.frames is not None:
                far = distances(weights, self.frames, self.frames)
                values["frame_distance"] = mask.mean(far, patches)
            if self.prefix:
                spent = weights[..., patches, : self.prefix].sum(-1)
                values["prefix_attention"] = mask.mean(spent, patches)
        if self.class_query:
            values["class_entropy"] = entropy(weights[..., 0, :]).mean((0, 1))
            if len(weights) > 1:
                values["class_content_information"] = information(weights[..., :1, :])
            if self.prefix:
                values["class_prefix_attention"] = (
                    weights[..., 0, : self.prefix].sum(-1).mean((0, 1))
                )
        return values
