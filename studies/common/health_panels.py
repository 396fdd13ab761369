"""Figures of the variables of training health:
a healthy training beside an ill one, with the limit and the alarm.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import tcnn_probe
from common.figures import STYLE, ordered_colors, whole_ticks
from tcnn_probe.diagnosis import Finding, HealthLimits

__all__ = ["PICTURES", "draw_pictures", "find_examples"]

ALARM = "#D55E00"
LIMITS = HealthLimits()

Limit = Callable[[xr.DataArray], xr.DataArray | float]
"""Function of the values of a layer, (epoch, head) or (epoch,),
that returns the limit: a number, or one by epoch.
"""


@dataclass(frozen=True)
class Picture:
    """Panels of a sign: a variable, its limit and its scale.

    Args:
        label: Name of the variable in the recording, for the y axis.
        values: Function of a recording that returns the values, (epoch, layer, head) or (epoch,
            layer).
        limit: Function of the values of a layer that returns the sign's limit.
        is_minimum: Whether values below the limit are the sign, and not those above it.
        scale: Scale of the y axis.
        scale_options: Options of ``matplotlib.axes.Axes.set_yscale``.
    """

    label: str
    values: Callable[[xr.Dataset], xr.DataArray]
    limit: Limit
    is_minimum: bool = False
    scale: str = "linear"
    scale_options: Mapping[str, Any] = field(default_factory=dict)


def best_so_far(values: xr.DataArray) -> xr.DataArray:
    """Return the largest value at earlier epochs, NaN at the first."""
    by_epoch = values.transpose("epoch", ...)
    # fmax ignores NaN, which maximum would carry through all later epochs.
    largest = np.fmax.accumulate(by_epoch.values, axis=0)
    # The maximum is shifted by an epoch, because an epoch is compared with those before it.
    return by_epoch.copy(data=largest).shift(epoch=1)


PICTURES: Mapping[str, Picture] = {
    "large logits": Picture(
        "max_logit",
        lambda ds: ds.max_logit,
        lambda _: LIMITS.max_logit,
        scale="log",
        # Logits of uniform attention can all be below zero.
        scale_options={"nonpositive": "mask"},
    ),
    "entropy collapse": Picture(
        "entropy / log keys",
        lambda ds: ds.entropy / ds.uniform_entropy,
        lambda _: LIMITS.entropy,
        is_minimum=True,
    ),
    "collapsed queries": Picture(
        "entropy_histogram\n(first bin)",
        lambda ds: ds.entropy_histogram.isel(entropy_bin=0),
        lambda _: LIMITS.collapsed,
    ),
    "silent head": Picture(
        "output_norm",
        lambda ds: ds.output_norm,
        lambda values: LIMITS.silent * values.median("head"),
        is_minimum=True,
        # A head that is cut off has a norm of zero, which a logarithmic axis cannot show.
        scale="symlog",
        scale_options={"linthresh": 0.01},
    ),
    "queries alike": Picture(
        "query_diversity (nat)",
        lambda ds: ds.query_diversity,
        lambda values: LIMITS.diversity_loss * best_so_far(values),
        is_minimum=True,
    ),
    "rank collapse": Picture(
        "output_rank",
        lambda ds: ds.output_rank,
        lambda values: 1 + LIMITS.diversity_loss * (best_so_far(values) - 1),
        is_minimum=True,
    ),
    "heads alike": Picture(
        "head_similarity",
        lambda ds: ds.head_similarity,
        lambda _: LIMITS.head_similarity,
    ),
    "tokens alike": Picture(
        "token_cosine", lambda ds: ds.token_cosine, lambda _: LIMITS.token_cosine
    ),
    "sink": Picture("sink", lambda ds: ds.sink, lambda _: LIMITS.sink),
    "outlier tokens": Picture(
        "token_outliers", lambda ds: ds.token_outliers, lambda _: LIMITS.token_outliers
    ),
}
"""Pictures by sign. "logits jump" has no picture,
because it is a sign of the same variable as "large logits".
"""


@dataclass(frozen=True)
class Example:
    """An ill training that shows a sign.

    Args:
        name: Name of the ill training.
        ill: Recording of the ill training.
        healthy: Recording of a healthy training of the same architecture.
        finding: Finding of the sign in the ill training.
        head: Head that shows it most clearly; None for a sign of the layer.
    """

    name: str
    ill: xr.Dataset
    healthy: xr.Dataset
    finding: Finding
    head: int | None


def find_examples(
    trainings: Iterable[tuple[str, xr.Dataset, xr.Dataset]],
) -> dict[str, Example]:
    """Return an example of each sign: its first finding in the first ill training that shows it.

    Args:
        trainings: Name and recording of each ill training, and the recording of a healthy one of
            its architecture.
    """
    examples: dict[str, Example] = {}
    for name, ill, healthy in trainings:
        # Findings are sorted, so that the example is the earliest finding of its sign.
        for finding in sorted(tcnn_probe.health(ill), key=lambda finding: finding.since):
            if finding.sign in PICTURES and finding.sign not in examples:
                head = clearest_head(ill, finding)
                examples[finding.sign] = Example(name, ill, healthy, finding, head)
    return {sign: examples[sign] for sign in PICTURES if sign in examples}


def clearest_head(ds: xr.Dataset, finding: Finding) -> int | None:
    """Return the head of a finding that is furthest beyond the limit at its first epoch;
    None without heads.
    """
    if not finding.heads:
        return None
    picture = PICTURES[finding.sign]
    of_layer = picture.values(ds).sel(layer=finding.layer)
    limits = picture.limit(of_layer)
    beyond = (of_layer - limits).sel(epoch=finding.since)
    heads = beyond.isel(head=list(finding.heads)).values
    position = heads.argmin() if picture.is_minimum else heads.argmax()
    return finding.heads[int(position)]


@mpl.rc_context(STYLE | {"font.size": 8, "legend.frameon": True})
def draw_pictures(examples: Mapping[str, Example]) -> Figure:
    """Draw two panels for each sign that has an example: the healthy training, and the ill one."""
    # Two signs a row, with two panels each.
    rows = max(1, -(-len(examples) // 2))
    figure = Figure(figsize=(9.5, 1.75 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, 4, sharex=True, squeeze=False)
    pairs = panels.reshape(-1, 2)
    for (left, right), (sign, example) in zip(pairs, examples.items(), strict=False):
        # Both panels have one scale; otherwise an ill training could look as level as a healthy
        # one.
        right.sharey(left)
        draw_training(left, example.healthy, example)
        draw_training(right, example.ill, example)
        since = example.finding.since
        right.axvline(since, color=ALARM, lw=0.8, zorder=0)
        picture = PICTURES[sign]
        value = series(picture.values(example.ill), example).sel(epoch=since)
        right.plot(since, value, "v", color=ALARM, zorder=3)
        left.set_title(f"{sign}: healthy", loc="left")
        right.set_title(example.name, loc="left", color=ALARM)
        left.set_ylabel(picture.label)
        right.tick_params(labelleft=False)
    for spare in pairs[len(examples) :].ravel():
        spare.set_axis_off()
    for panel in panels[-1]:
        panel.set_xlabel("epoch")
    # Dictionaries keep the order of the layers, which colours follow; sets do not.
    layers = {
        str(layer): None for example in examples.values() for layer in example.ill.layer.values
    }
    add_legend(figure, list(layers))
    return figure


def draw_training(panel: Axes, ds: xr.Dataset, example: Example) -> None:
    """Draw a line for each head or layer in the layer's colour,
    a thick one for the example, and its limit.
    """
    picture = PICTURES[example.finding.sign]
    values = picture.values(ds)
    colors = ordered_colors(ds.sizes["layer"])
    for layer, color in zip(ds.layer.values, colors, strict=True):
        of_layer = values.sel(layer=layer).transpose("epoch", ...)
        panel.plot(ds.epoch, of_layer, color=color, lw=0.7)
        if layer == example.finding.layer:
            panel.plot(ds.epoch, series(values, example), color=color, lw=2)
            limits = picture.limit(of_layer)
    if isinstance(limits, xr.DataArray):
        of_head = limits if "head" not in limits.dims else limits.isel(head=example.head)
        panel.plot(ds.epoch, of_head, color="k", ls="--", lw=1)
    else:
        panel.axhline(limits, color="k", ls="--", lw=1)
    panel.set_yscale(picture.scale, **picture.scale_options)
    whole_ticks(panel)


def series(values: xr.DataArray, example: Example) -> xr.DataArray:
    """Return the values of the example's head, or of its layer, by epoch."""
    of_layer = values.sel(layer=example.finding.layer)
    return of_layer if example.head is None else of_layer.isel(head=example.head)


def add_legend(figure: Figure, layers: list[str]) -> None:
    """Explain the colours, the limit and the alarm below the panels."""
    handles = [
        Line2D([], [], color=color, label=layer)
        for layer, color in zip(layers, ordered_colors(len(layers)), strict=True)
    ]
    handles.append(Line2D([], [], color="k", ls="--", label="limit"))
    handles.append(Line2D([], [], color=ALARM, marker="v", label="epoch of the finding"))
    figure.legend(handles=handles, ncols=len(handles), loc="outside lower center")
