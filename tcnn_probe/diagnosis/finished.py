"""Signs of a finished network, which nobody trains any more:
what its heads and tokens are, without advice.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from tcnn_probe.diagnosis.signs import SIGNS, HealthLimits, Sign

__all__ = ["FINISHED", "IN_IMAGES", "NO_OP"]

IN_IMAGES = 0.5
"""Share of images in which a head must have a sink to count: most of them."""
NO_OP = 0.2
"""Norm of a sink's value, as a share of the other values' median, up to which the sink does
nothing. arXiv 2606.08105 compares projected values with their mean; the values here are those
before the output projection.
"""
AVERAGING = 0.05
"""Selectivity below which a head averages, as a share of log keys, as for its type."""


def _has_sink(ds: xr.Dataset) -> xr.DataArray:
    return ds.sink_images >= IN_IMAGES


def _no_op(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return _has_sink(ds) & (ds.sink_value_norm <= NO_OP)


def _broadcast(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return _has_sink(ds) & (ds.sink_value_norm > NO_OP)


def _sink_of_unknown_value(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return _has_sink(ds) & ds.sink_value_norm.isnull()


def _largest_cosine(ds: xr.Dataset) -> xr.DataArray:
    """Return the largest cosine with another head of the layer."""
    itself = xr.DataArray(
        np.eye(ds.sizes["head"], ds.sizes["other_head"]) > 0,
        dims=("head", "other_head"),
    )
    return ds.head_cosine.where(~itself).max("other_head")


def _duplicate(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    # Heads that attend nearly evenly are alike without being duplicates.
    is_even = ds.selectivity < AVERAGING * ds.uniform_entropy
    return (_largest_cosine(ds) > limits.head_similarity) & ~is_even


def _share_of_log_keys(ds: xr.Dataset) -> xr.DataArray:
    return ds.entropy / ds.uniform_entropy


def _one_hot(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return _share_of_log_keys(ds) < limits.entropy


def _tokens_alike(ds: xr.Dataset, limits: HealthLimits) -> xr.DataArray:
    return ds.token_cosine > limits.token_cosine


_IN_MOST = f"a sink in less than {IN_IMAGES:g} of the images"
_SINK = "at least 0.9 of the queries put at least half of their attention on one key"
_VALUE = ("norm of the sink's value / median", lambda ds: ds.sink_value_norm)
FINISHED: Mapping[str, Sign] = {
    sign.name: sign
    for sign in (
        Sign(
            "not finite",
            "nonfinite_images",
            True,
            SIGNS["not finite"].condition,
            "none",
            "numbers are means over the other images; the first such layer is the cause, often by "
            "half precision",
            "arXiv 2303.06296; limit: none is usual",
        ),
        Sign(
            "silent head",
            "output_norm",
            False,
            SIGNS["silent head"].condition,
            "above {silent:g} of the layer's median",
            "the head adds next to nothing to its layer",
            "arXiv 1905.10650; limit: the layer's other heads",
            (),
            "smallest",
        ),
        Sign(
            "no-op sink",
            "sink_images",
            False,
            _no_op,
            _IN_MOST,
            f"{_SINK}, whose value is small: the head adds little to most patches",
            f"arXiv 2606.08105; limit: {NO_OP:g} of the other values' median",
            ("sink_value_norm",),
            "smallest",
            _VALUE,
        ),
        Sign(
            "broadcast sink",
            "sink_images",
            False,
            _broadcast,
            _IN_MOST,
            f"{_SINK}, whose value is not small: the head gives most patches the same",
            f"arXiv 2606.08105; limit: {NO_OP:g} of the other values' median",
            ("sink_value_norm",),
            measure=_VALUE,
        ),
        Sign(
            "sink of unknown value",
            "sink_images",
            False,
            _sink_of_unknown_value,
            _IN_MOST,
            f"{_SINK}; the values are not seen, so that it is unknown what it does",
            "arXiv 2606.08105",
            ("sink_value_norm",),
        ),
        Sign(
            "duplicate heads",
            "head_cosine",
            False,
            _duplicate,
            "below {head_similarity:g}",
            "another head of the layer attends to the same",
            "arXiv 1810.10183; limit: ours, of heads that do not average",
            ("selectivity", "uniform_entropy"),
            measure=("cosine with another head", _largest_cosine),
        ),
        Sign(
            "one-hot heads",
            "entropy",
            False,
            _one_hot,
            "above {entropy:g} of log keys",
            "most queries attend to one or two keys",
            "limit: ours",
            ("uniform_entropy",),
            "smallest",
            ("entropy / log keys", _share_of_log_keys),
        ),
        Sign(
            "large logits",
            "max_logit",
            False,
            SIGNS["large logits"].condition,
            "below {max_logit:g}",
            "attention of some queries is one-hot, and half precision may overflow",
            "arXiv 2302.05442; limit: 2507.20534",
        ),
        Sign(
            "high-norm tokens",
            "token_outliers",
            False,
            SIGNS["outlier tokens"].condition,
            "below {token_outliers:g}",
            "a few patches hold information on the whole image, which leaves holes in maps and "
            "dense features",
            "arXiv 2309.16588; limit: ours, a quarter of DINOv2's share",
        ),
        Sign(
            "tokens alike",
            "token_cosine",
            False,
            _tokens_alike,
            "below {token_cosine:g}",
            "patches can hardly be told apart",
            "arXiv 2203.05962; limit: ours",
        ),
    )
}
"""Signs by name, for recordings with the attribute "finished",
as :func:`tcnn_probe.look` makes them.
"""
