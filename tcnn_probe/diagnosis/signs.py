"""Signs of illness in a recording: conditions on its variables,
with their limits and their sources.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

__all__ = ["SIGNS", "HealthLimits", "Sign", "entropy_quantile"]


@dataclass(frozen=True)
class HealthLimits:
    """Limits beyond which a number is a sign of illness.

    If the literature has no limit, a number is compared with the best value of the same head or
    layer at earlier marks of the same run.

    Args:
        max_logit: Largest attention logit. 100 is where Kimi K2 began to rescale queries and keys
            (arXiv 2507.20534).
        logit_jump: Growth of the largest logit over the largest of all earlier marks, from one mark
            to the next.
        logit_floor: Largest logit below which growth is ignored, because early in training logits
            grow tenfold from nearly 0. At 20 the smallest weight in a row can be e^-40 of the
            largest, beyond what float32 resolves.
        entropy: Entropy of a head, as a share of that of uniform attention. At 0.1 a head of 197
            keys attends to 1.7 of them on average.
        entropy_loss: Entropy of a head, as a share of its largest so far. Single heads that are
            one-hot from the start, as in a pretrained model, do not count as a collapse, but a
            whole layer of them does.
        collapsed: Share of a head's queries in the lowest bin of the histogram (below 0.05 of
            uniform entropy).
        silent: Norm of a head's output, as a share of the median of the layer's heads.
        diversity_loss: Diversity of queries, and rank of outputs above 1, as a share of their
            largest so far.
        diversity_floor: Diversity of queries, as a share of log keys, that a head must have had
            before its loss counts.
        rank_floor: Rank of outputs that a head must have had before its loss counts.
        head_similarity: Similarity to the other heads, after the head had been below
            ``head_difference``.
        head_difference: Similarity below which a head differs from the others.
        token_cosine: Cosine between patch tokens.
        token_cosine_rise: Growth of that cosine over its smallest so far.
        sink: Share of the attention that one key receives (Gu et al. 2024, arXiv 2410.10781, use
            0.3).
        token_outliers: Share of patch tokens with an outlying norm, which is about 0.02 in DINOv2
            (arXiv 2309.16588).
    """

    max_logit: float = 100.0
    logit_jump: float = 3.0
    logit_floor: float = 20.0
    entropy: float = 0.1
    entropy_loss: float = 0.5
    collapsed: float = 0.25
    silent: float = 0.01
    diversity_loss: float = 0.1
    diversity_floor: float = 0.02
    rank_floor: float = 1.2
    head_similarity: float = 0.98
    head_difference: float = 0.8
    token_cosine: float = 0.95
    token_cosine_rise: float = 0.3
    sink: float = 0.3
    token_outliers: float = 0.005


@dataclass(frozen=True)
class Sign:
    """A sign of illness.

    Args:
        name: Name in the table.
        variable: Variable that shows the sign.
        is_alarm: Whether it is an alarm rather than a notice, which is usual in some healthy
            models.
        condition: Function of a recording, whose marks are along "mark", and limits. It returns
            booleans that show where the sign is seen, (mark, layer, head) or (mark, layer).
        usual: Usual values, with the limits by name in braces.
        leads_to: Known consequences, causes or remedies.
        source: Papers that describe the sign, and then the source of its limit.
        needs: Further variables that the condition needs.
        worst: Worst values: "largest" or "smallest".
        measure: Name and function of the values that a finding reports; None for those of the
            variable.
    """

    name: str
    variable: str
    is_alarm: bool
    condition: Callable[[xr.Dataset, HealthLimits], xr.DataArray]
    usual: str
    leads_to: str
    source: str
    needs: Sequence[str] = ()
    worst: str = "largest"
    measure: tuple[str, Callable[[xr.Dataset], xr.DataArray]] | None = None

    def missing(self, ds: xr.Dataset) -> list[str]:
        """Return the variables that the sign needs but a recording lacks."""
        return [name for name in (self.variable, *self.needs) if name not in ds]


def entropy_quantile(ds: xr.Dataset, q: float) -> xr.DataArray:
    """Compute a quantile of the queries' entropies from their histogram,
    as a share of uniform attention's entropy.

    ::

        tcnn_probe.entropy_quantile(recorder.dataset, 0.05).plot.line(x="epoch")

    Queries are assumed to be spread evenly within their bin, so the error of the quantile is at
    most the width of a bin, 0.05 of the entropy of uniform attention.

    Args:
        ds: A recording with the probe "health".
        q: Share of the queries below the quantile, from 0 to 1.

    Returns:
        Quantiles, with the dims of ``ds.sink``; NaN where there is no histogram.

    Raises:
        ValueError: The recording has no histogram, or ``q`` is not between 0 and 1.
    """
    if not 0 <= q <= 1:
        raise ValueError(f"expected a share from 0 to 1 for q, got {q!r}")
    if "entropy_histogram" not in ds:
        raise ValueError(
            "the recording has no entropy_histogram: record(..., health=True) keeps it"
        )
    histogram = ds.entropy_histogram
    bins = histogram.sizes["entropy_bin"]
    below = histogram.cumsum("entropy_bin")
    # The first bin with queries that reaches q; rounding can leave the sum of all bins below 1.
    reached = (below >= q - 1e-9) & (histogram > 0)
    number = reached.argmax("entropy_bin")
    share = histogram.isel(entropy_bin=number)
    before = below.isel(entropy_bin=number) - share
    share_of_bin = ((q - before) / share.where(share > 0)).clip(0, 1).fillna(0)
    quantile = ((number + share_of_bin) / bins).where(share.notnull())
    return quantile.drop_vars("entropy_bin", errors="ignore").assign_attrs(
        units="1",
        long_name=f"{q:g} quantile of entropies / uniform entropy",
        description="Read from the histogram of entropies, with an error of at most 0.05.",
    )


def _so_far(values: xr.DataArray, best: np.ufunc) -> xr.DataArray:
    """Return the largest value at earlier marks (np.fmax),
    or the smallest (np.fmin); NaN is ignored.
    """
    # accumulate() takes the number of an axis instead of its name.
    by_mark = values.transpose("mark", ...)
    return by_mark.copy(data=best.accumulate(by_mark.values, axis=0)).shift(mark=1)


def _nonfinite(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return ds.nonfinite_images > 0


def _large_logits(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return ds.max_logit > limits.max_logit


def _logit_jump(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    has_jumped = ds.max_logit > limits.logit_jump * _so_far(ds.max_logit, np.fmax)
    return has_jumped & (ds.max_logit > limits.logit_floor)


def _entropy_collapse(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    share = _normalised_entropy(ds)
    has_fallen = share < limits.entropy_loss * _so_far(share, np.fmax)
    in_whole_layer = share.mean("head") < limits.entropy
    return (share < limits.entropy) & (has_fallen | in_whole_layer)


def _normalised_entropy(ds: xr.Dataset) -> xr.DataArray:
    """Return entropies as shares of those of uniform attention;
    for gated layers, those of the content part.
    """
    share = ds.entropy / ds.uniform_entropy
    if "content_entropy" in ds:
        content_share = ds.content_entropy / ds.uniform_content_entropy
        share = content_share.where(ds.content_entropy.notnull(), share)
    return share


def _one_hot_queries(ds: xr.Dataset) -> xr.DataArray:
    return ds.entropy_histogram.isel(entropy_bin=0)


def _collapsed_queries(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    # The lowest bin, from 0 to 0.05 of uniform entropy.
    share = _one_hot_queries(ds)
    has_grown = share > _so_far(share, np.fmin) + limits.collapsed
    in_whole_layer = share.mean("head") > limits.collapsed
    return (share > limits.collapsed) & (has_grown | in_whole_layer)


def _silent_head(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    # The reference is the median, which a few silent heads hardly change; if all heads of a layer
    # are silent, it is 0, too.
    limit = limits.silent * ds.output_norm.median("head")
    return (ds.output_norm < limit) | (ds.output_norm == 0)


def _queries_alike(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    # Diversity is in units of log keys, so that one floor applies to all image sizes.
    diversity = ds.query_diversity / ds.uniform_entropy
    best = _so_far(diversity, np.fmax)
    return (diversity < limits.diversity_loss * best) & (best > limits.diversity_floor)


def _rank_collapse(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    best = _so_far(ds.output_rank, np.fmax)
    # The smallest rank of an output is 1, so ranks are compared by their excess over 1.
    has_fallen = ds.output_rank - 1 < limits.diversity_loss * (best - 1)
    # A silent head, whose rank is 0, is a separate sign.
    return has_fallen & (best > limits.rank_floor) & (ds.output_rank > 0)


def _heads_alike(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    was_different = _so_far(ds.head_similarity, np.fmin) < limits.head_difference
    return was_different & (ds.head_similarity > limits.head_similarity)


def _tokens_alike(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    has_risen = ds.token_cosine > _so_far(ds.token_cosine, np.fmin) + limits.token_cosine_rise
    return has_risen & (ds.token_cosine > limits.token_cosine)


def _sink(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    # A single query, as in class attention, may attend to one key. Its diversity is NaN.
    return (ds.sink > limits.sink) & ds.query_diversity.notnull()


def _outlier_tokens(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return ds.token_outliers > limits.token_outliers


SIGNS: Mapping[str, Sign] = {
    sign.name: sign
    for sign in (
        Sign(
            "not finite",
            "nonfinite_images",
            True,
            _nonfinite,
            "none",
            "the loss is NaN or will become NaN; look for the first layer with this sign, and for "
            "large logits before",
            "arXiv 2303.06296; limit: none is usual",
        ),
        Sign(
            "large logits",
            "max_logit",
            True,
            _large_logits,
            "below {max_logit:g}",
            "one-hot attention, vanishing gradients of queries and keys, divergence; qk-norm or a "
            "lower learning rate",
            "arXiv 2302.05442, 2309.14322; limit: 2507.20534",
        ),
        Sign(
            "logits jump",
            "max_logit",
            True,
            _logit_jump,
            "up to {logit_jump:g} times the largest so far",
            "entropy collapse; too high a learning rate, or queries and keys that were scaled",
            "arXiv 2309.14322; limit: the head's earlier marks",
        ),
        Sign(
            "entropy collapse",
            "entropy",
            True,
            _entropy_collapse,
            "above {entropy:g} of log keys",
            "oscillating loss and divergence; warm-up, a lower learning rate, qk-norm or "
            "sigma-reparametrization",
            "arXiv 2303.06296; limit: ours, and the head's earlier marks",
            ("uniform_entropy",),
            "smallest",
            ("entropy / log keys", _normalised_entropy),
        ),
        Sign(
            "collapsed queries",
            "entropy_histogram",
            True,
            _collapsed_queries,
            "at most {collapsed:g}",
            "entropy collapse of the whole head",
            "arXiv 2303.06296; limit: ours, and the head's earlier marks",
            measure=("queries below 0.05 log keys", _one_hot_queries),
        ),
        Sign(
            "silent head",
            "output_norm",
            True,
            _silent_head,
            "above {silent:g} of the layer's median",
            "the head contributes nothing; models can do without many heads, but a bug or a mask "
            "may be the cause",
            "arXiv 1905.10650; limit: the layer's other heads",
            (),
            "smallest",
        ),
        Sign(
            "queries alike",
            "query_diversity",
            True,
            _queries_alike,
            "above {diversity_loss:g} of the head's best",
            "every query gets the same output, so attention only adds a constant",
            "arXiv 2103.03404; limit: the head's earlier marks",
            ("uniform_entropy",),
            "smallest",
        ),
        Sign(
            "rank collapse",
            "output_rank",
            True,
            _rank_collapse,
            "above 1 by {diversity_loss:g} of the head's best",
            "tokens become alike with depth, as in a model without residual connections",
            "arXiv 2103.03404; limit: the head's earlier marks",
            (),
            "smallest",
        ),
        Sign(
            "heads alike",
            "head_similarity",
            True,
            _heads_alike,
            "below {head_similarity:g} where heads were different",
            "the layer has only one head in effect",
            "arXiv 1810.10183; limit: ours, and the head's earlier marks",
        ),
        Sign(
            "tokens alike",
            "token_cosine",
            True,
            _tokens_alike,
            "below {token_cosine:g}",
            "over-smoothing: patches can hardly be told apart",
            "arXiv 2203.05962; limit: ours, and the layer's earlier marks",
        ),
        Sign(
            "sink",
            "sink",
            False,
            _sink,
            "below {sink:g}",
            "maps show only one token; registers can take over the sink",
            "arXiv 2309.16588, 2309.17453; limit: 2410.10781",
            ("query_diversity",),
        ),
        Sign(
            "outlier tokens",
            "token_outliers",
            False,
            _outlier_tokens,
            "below {token_outliers:g}",
            "these patches hold global information, which leaves holes in maps and dense features; "
            "registers",
            "arXiv 2309.16588; limit: ours, a quarter of DINOv2's share",
        ),
    )
}
"""Signs by name: alarms from the most to the least serious, then notices."""
