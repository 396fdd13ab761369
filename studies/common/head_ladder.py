"""Heads replaced rung by rung: orders of heads,
changes of the output, and correlations of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn
from tqdm.auto import tqdm

import tcnn_probe
from common.pretrained import Network
from common.stepwise import take_steps
from tcnn_model import convolve, parameter_groups
from tcnn_probe import Attention

__all__ = [
    "RUNGS",
    "attention_deviation",
    "correlation",
    "curves",
    "lost_shares",
    "trained_convolutions",
    "within_blocks",
]

RUNGS = ("uniform", "convolutional", "static", "salient", "zero")
ORDERS = ("shares", "deviation", "random", "same layers")
SEEDS = 2
"""Number of random orders."""

BATCH = 8
Values = NDArray[np.float64]


def lost_shares(recording: xr.Dataset) -> xr.Dataset:
    """Return the parts of each head in nat,
    and the share of selectivity that each rung loses, ``lost``.
    """
    # Parts may come out slightly negative.
    selectivity, offset, position, key, query_key = (
        recording[name].clip(min=0)
        for name in (
            "selectivity",
            "offset_information",
            "position_information",
            "key_content_information",
            "query_key_content_information",
        )
    )
    by_rung = {
        "uniform": selectivity / recording.uniform_entropy,
        "convolutional": (position + key + query_key) / selectivity,
        "static": (key + query_key) / selectivity,
        "salient": query_key / selectivity,
    }
    # The heads that "static" replaces are set to zero.
    by_rung["zero"] = by_rung["static"]
    return xr.Dataset(
        {
            "selectivity": selectivity,
            "offset": offset,
            "position": position,
            "key_content": key,
            "query_key_content": query_key,
            "lost": xr.concat(list(by_rung.values()), "mode").assign_coords(mode=list(by_rung)),
        }
    ).drop_attrs()


@torch.no_grad()
def attention_deviation(model: nn.Module, images: Tensor) -> xr.DataArray:
    """Return the standard deviation over images of each attention weight,
    as a mean over pairs: (layer, head).

    DWConv_VFM (2605.22132) chooses the heads to replace by this statistic.
    """
    sums: dict[str, list[Tensor]] = {}

    def add(attention: Attention) -> None:
        weights = attention.weights().double()
        moments = [weights.sum((0, 1)), weights.square().sum((0, 1))]
        before = sums.get(attention.name, [torch.zeros(())] * 2)
        sums[attention.name] = [a + b for a, b in zip(before, moments, strict=True)]

    with tcnn_probe.attention_stream(model, add):
        for batch in images.split(BATCH):
            model(batch)
    count = len(images)
    deviations = [
        (squares / count - (total / count).square()).clamp_min(0).sqrt().mean((1, 2))
        for total, squares in sums.values()
    ]
    values = torch.stack(deviations).numpy()
    coords = {"layer": list(sums), "head": range(values.shape[1])}
    return xr.DataArray(values, coords, ("layer", "head"), name="deviation")


def curves(
    network: Network,
    heads: xr.Dataset,
    fit: Tensor,
    evaluated: Tensor,
    fractions: Sequence[float],
    *,
    seed: int,
) -> xr.Dataset:
    """Replace a growing number of heads at once, and measure how the last patch features change.

    Args:
        network: Network.
        heads: Result of :func:`lost_shares`, with ``deviation``.
        fit, evaluated: Images over which attention is averaged, and others.
        fractions: Shares of all heads to replace; the last is 1.
        seed: Seed of the random orders.

    Returns:
        ``change``, relative, and for networks with maps ``correlation`` and ``difference`` (mean
        absolute), dims (mode, order, seed, fraction, image). The one order of "shares" and
        "deviation" is at seed 0.
    """
    whole = _features_and_maps(network, evaluated)
    runs = [
        (mode, order, number, fraction)
        for mode in RUNGS
        for order in (ORDERS if mode != "zero" else ORDERS[:1])
        for number in range(SEEDS if order in ORDERS[2:] else 1)
        # All heads are the same heads in any order.
        for fraction in (fractions if order == "shares" else fractions[:-1])
    ]
    results: dict[str, xr.DataArray] = {}
    coords: dict[str, Any] = {
        "mode": list(RUNGS),
        "order": list(ORDERS),
        "seed": range(SEEDS),
        "fraction": list(fractions),
        "image": range(len(evaluated)),
    }
    shape = [len(values) for values in coords.values()]
    for mode, order, number, fraction in tqdm(runs, "curves", disable=None):
        selection = choose(heads, mode, order, fraction, seed + number)
        given = {} if mode in ("uniform", "zero") else {"images": list(fit.split(BATCH))}
        with tcnn_probe.ablate(network.features, selection, mode, **given):
            measured = _changes(_features_and_maps(network, evaluated), whole)
        for name, values in measured.items():
            table = results.setdefault(
                name, xr.DataArray(np.full(shape, np.nan), coords, list(coords))
            )
            table.loc[{"mode": mode, "order": order, "seed": number, "fraction": fraction}] = values
    return xr.Dataset(results)


def choose(heads: xr.Dataset, mode: str, order: str, fraction: float, seed: int) -> xr.DataArray:
    """Return the heads to replace, a boolean array (layer, head)."""
    draw = np.random.default_rng(seed)
    shares = heads.lost.sel(mode=mode, drop=True)
    score = shares
    if order == "deviation":
        score = heads.deviation
    elif order == "random":
        score = shares.copy(data=draw.random(shares.shape))
    count = round(fraction * int(score.notnull().sum()))
    ranks = rankdata(score.values, method="ordinal", nan_policy="omit")
    chosen = score.copy(data=ranks.reshape(score.shape) <= count)
    if order == "same layers":
        return tcnn_probe.random_heads(chosen, seed)
    return chosen


@torch.no_grad()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(batch) for batch in images.split(BATCH)])


@torch.no_grad()
def _features_and_maps(network: Network, images: Tensor) -> dict[str, Tensor]:
    outputs = {"features": _outputs(network.features, images)}
    if network.decode is not None:
        outputs["map"] = network.decode(outputs["features"])
    return outputs


def _changes(outputs: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return the change of each image's features,
    and the correlation and mean difference of its map.
    """
    changes = {"change": relative_change(outputs["features"], whole["features"])}
    if "map" in whole:
        maps = [x["map"].flatten(1).double() for x in (outputs, whole)]
        changes["difference"] = (maps[0] - maps[1]).abs().mean(1).numpy()
        centred = [x - x.mean(1, keepdim=True) for x in maps]
        product = (centred[0] * centred[1]).sum(1)
        norms = centred[0].norm(dim=1) * centred[1].norm(dim=1)
        changes["correlation"] = (product / norms).numpy()
    return changes


def relative_change(features: Tensor, whole: Tensor) -> Values:
    """Return the norm of the change of each image's features over the norm of these, (B,)."""
    size = whole.flatten(1).norm(dim=1)
    change: Values = ((features - whole).flatten(1).norm(dim=1) / size).numpy()
    return change


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over heads.

    Args:
        value: The correlation.
        low, high: Bounds of a bootstrap interval over images, 95 %.
        heads: Number of heads.
    """

    value: float
    low: float
    high: float
    heads: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}], {self.heads} heads"


def over_all(values: Values) -> Values:
    """Return the ranks of heads, (samples, layers, heads), among all; NaN where there is none."""
    flat = rankdata(values.reshape(len(values), -1), axis=1, nan_policy="omit")
    return flat.reshape(values.shape)


def within_blocks(values: Values) -> Values:
    """Return ranks among the heads of each layer, minus their mean."""
    ranks = rankdata(values, axis=2, nan_policy="omit")
    return ranks - np.nanmean(ranks, 2, keepdims=True)


def correlation(
    shares: xr.DataArray,
    upper: xr.DataArray,
    lower: xr.DataArray | None = None,
    *,
    ranks: Callable[[Values], Values] = over_all,
    resamples: int = 1000,
) -> Correlation:
    """Correlate numbers of the recording with costs, or with ratios of mean costs.

    Args:
        shares: Number of each head, (layer, head); NaN for heads that do not count.
        upper, lower: Costs, (layer, head, image), and those to divide by.
        ranks: Function that returns ranks, over all heads or within blocks.
        resamples: Number of bootstrap samples of images.
    """
    count = upper.sizes["image"]
    draw = np.random.default_rng(0)
    # The first sample has every image once.
    samples = [np.arange(count), *draw.integers(count, size=(resamples, count))]
    weights = np.array([np.bincount(sample, minlength=count) for sample in samples])

    def means(costs: xr.DataArray) -> Values:
        by_head = costs.transpose("layer", "head", "image").values
        mean: Values = np.moveaxis(by_head @ weights.T, -1, 0)
        return mean

    numbers = means(upper) / (1 if lower is None else means(lower))
    given = np.broadcast_to(shares.transpose("layer", "head").values, numbers.shape)
    unknown = np.isnan(given + numbers)
    first, second = (
        np.where(unknown, 0, ranks(np.where(unknown, np.nan, x))) for x in (given, numbers)
    )
    heads = (~unknown).sum((1, 2), keepdims=True)
    first, second = (
        np.where(unknown, 0, x - x.sum((1, 2), keepdims=True) / np.maximum(heads, 1))
        for x in (first, second)
    )
    product = (first * second).sum((1, 2))
    norms = np.sqrt((first**2).sum((1, 2)) * (second**2).sum((1, 2)))
    # Equal costs have no order.
    value = np.divide(product, norms, np.full_like(norms, np.nan), where=norms > 0)
    known = value[1:][np.isfinite(value[1:])]
    low, high = np.quantile(known, [0.025, 0.975]) if known.size else (np.nan, np.nan)
    return Correlation(float(value[0]), float(low), float(high), int(heads.flat[0]))


def trained_convolutions(
    network: Network,
    heads: xr.Dataset,
    fit: Tensor,
    evaluated: Tensor,
    training: Tensor,
    *,
    steps: int,
    lr: float = 1e-5,
    batch: int = 4,
) -> xr.Dataset:
    """Make half of the heads convolutions, by two choices,
    and train the model to give the features that it gave before.

    Args:
        network: Network, which stays as it is.
        heads: Result of ``lost_shares``, with ``deviation``.
        fit, evaluated, training: Images for the kernels, for the change of the features, and for
            the training, all different.
        steps: Number of steps of AdamW.
        lr, batch: Learning rate at the start, which falls to zero by a cosine, and batch size.

    Returns:
        ``change`` of the features of each evaluated image, dims (order, trained, image).
    """
    orders = ORDERS[:2]
    kernels = tcnn_probe.head_kernels(network.features, list(fit.split(BATCH)))
    whole = _outputs(network.features, evaluated)
    changes = []
    for order in orders:
        chosen = choose(heads, "convolutional", order, 1 / 2, 0)
        model = convolve(network.features, kernels.where(chosen)).eval()
        changes.append(relative_change(_outputs(model, evaluated), whole))
        _freeze_unused(model, training[:1])
        optimizer = torch.optim.AdamW(parameter_groups(model, lr=lr, weight_decay=0))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        generator = torch.Generator().manual_seed(0)
        batches = (
            (training[torch.randint(len(training), (batch,), generator=generator)],)
            for _ in tqdm(range(steps), f"training, {order}", disable=None)
        )

        def loss_of(images: Tensor, model: nn.Module = model) -> Tensor:
            return (model(images) - _outputs(network.features, images)).square().mean()

        take_steps(optimizer, batches, loss_of, after=lambda *_, by=schedule: by.step())
        changes.append(relative_change(_outputs(model, evaluated), whole))
    values = np.stack(changes).reshape(len(orders), 2, len(evaluated))
    coords = {"order": list(orders), "trained": [False, True]}
    return xr.Dataset({"change": (("order", "trained", "image"), values)}, coords)


def _freeze_unused(model: nn.Module, images: Tensor) -> None:
    """Freeze parameters that features of patches do not depend on,
    such as those of the class token's last queries.
    """
    model(images).square().mean().backward()
    for parameter in model.parameters():
        is_used = parameter.grad is not None and bool(parameter.grad.any())
        parameter.requires_grad_(is_used)
    model.zero_grad()
