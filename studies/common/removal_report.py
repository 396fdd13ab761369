"""Tables and figures of what removed heads cost, and of content information while heads learn."""

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common.figures import COLORS, PAIR, STYLE, whole_ticks
from common.head_removal import (
    CLEAN,
    DRAWN,
    MODES,
    NOTHING,
    WITHIN,
    beyond_these_trainings,
    beyond_zero,
    by_side,
    costs,
    differences,
    head_costs,
    interval_in_words,
)
from tcnn_probe import evaluation

__all__ = ["SHOWN", "draw", "draw_content", "gain", "sentence", "table"]


def table(tree: xr.DataTree) -> str:
    """Return accuracy, the cost of types and of random heads,
    and the difference with its interval, by condition.
    """
    right = tree["types"].right.load()
    heads = tree["heads"].dataset.load()
    types = tree["types"].head_type.load()
    lines = ["heads by type, of each training:"]
    for training in types.training.values:
        of_training = types.sel(training=training)
        counts = ", ".join(f"{kind} {int((of_training == kind).sum())}" for kind in COLORS)
        lines.append(f"  seed {training}: {counts}")
    for mode in right.mode.values:
        of_mode = right.sel(mode=mode, drop=True)
        for kind, difference in differences(of_mode).items():
            lines.append(f"\n{MODES[mode]} the {kind} heads: accuracy lost, with 95 % intervals")
            lines.append(
                f"  {'':<10}{'accuracy':>9}  "
                f"{'these heads':<25}{'as many at random':<25}{'difference':<25}"
            )
            columns = [
                costs(of_mode, kind),
                costs(of_mode, f"random for {kind}"),
                difference,
            ]
            accuracy = of_mode.sel(ablation=NOTHING)
            for condition in right.condition.values:
                cells = "".join(
                    f"{interval_in_words(column.sel(condition=condition)):<25}"
                    for column in columns
                )
                mean = float(accuracy.sel(condition=condition).mean())
                lines.append(f"  {condition:<10}{mean:>9.3f}  {cells}")
    # Single heads are too many for a row each.
    cost = head_costs(heads)
    lines.append(
        f"\n{MODES[str(right.mode.values[0])]} one head: accuracy lost, mean over the heads of a "
        "type"
    )
    lines.append(f"  {'':<10}" + "".join(f"{kind:<25}" for kind in PAIR))
    by_kind = [cost.where(heads.head_type == kind).mean(["layer", "head"]) for kind in PAIR]
    for condition in cost.condition.values:
        cells = "".join(
            f"{interval_in_words(mean.sel(condition=condition)):<25}" for mean in by_kind
        )
        lines.append(f"  {condition:<10}{cells}")
    return "\n".join(lines)


def sentence(tree: xr.DataTree) -> str:
    """Return a sentence for each mode on what the intervals support."""
    right = tree["types"].right.load()
    return "\n".join(
        _sentence(right.sel(mode=mode, drop=True), words)
        for mode, words in MODES.items()
        if mode in right.mode
    )


def _sentence(right: xr.DataArray, words: str) -> str:
    """Return the sentence on one mode, which ``words`` describe."""
    difference = differences(right)["content"]
    has_content = difference.notnull().any(["draw", "condition", "image"])
    # A sentence about heads that do not exist would be true and misleading.
    if not bool(has_content.any()):
        return f"\nNo training had content heads: nothing can be said of {words} them."
    # Content heads that cost more on corrupted images may cost as much more on clean ones.
    excess = (difference - difference.sel(condition=CLEAN)).drop_sel(condition=CLEAN)
    beside_random = by_side(difference, "more on", "less on", "not distinguishable on")
    beside_clean = by_side(excess, "larger on", "smaller on", "not distinguishable on")
    cost_beside_random, cost_beside_clean = (
        "; ".join(map(" ".join, sides)) for sides in (beside_random, beside_clean)
    )
    conditions = [str(name) for name in right.condition.values]
    # Only the spread between these trainings says something about other trainings; the images alone
    # say nothing.
    significant = [
        name
        for name in conditions
        if beyond_zero(beyond_these_trainings(difference.sel(condition=name)))
    ]
    count = int(has_content.sum())
    finding = (
        f"a difference on {', '.join(significant)}"
        if significant
        else "no difference on any condition"
    )
    verdict = f"t intervals support {finding}" if count > 1 else "one training gives no interval"
    trainings = f"In these {count} trainings" if count > 1 else "In one training"
    sizes = (
        f"sets of random heads ({right.sizes['draw']} in each) and {right.sizes['image']} images"
    )
    return (
        f"\n{trainings} of one CNN, {words} the content heads costs, compared with as many random "
        f"heads: {cost_beside_random}. Compared with clean images, that difference is: "
        f"{cost_beside_clean}. (95 % intervals over {sizes}, not corrected for looking at "
        f"{len(conditions)} conditions.) For other trainings, {verdict}."
    )


BARS = {
    "convolutional": 1.0,
    "random for convolutional": 0.35,
    "content": 1.0,
    "random for content": 0.35,
}
"""Sets of heads in the order of their bars, with their opacity: random heads are paler."""


def draw(tree: xr.DataTree) -> Figure:
    """Draw the costs of types by condition,
    a row for each mode; and the cost of each head by its gate.
    """
    right = tree["types"].right.load()
    modes = [str(mode) for mode in right.mode.values]
    figure = Figure(figsize=(11, 1.6 + 3 * len(modes)), layout="constrained")
    # Heads are removed one by one in the first mode alone, so their panel spans all rows.
    axes = figure.subplot_mosaic([[mode, mode, "heads"] for mode in modes])
    for mode in modes:
        panel = axes[mode]
        for place, name in enumerate(BARS):
            _draw_bars(panel, costs(right.sel(mode=mode), name), place, name)
        panel.set_xticks(range(right.sizes["condition"]), right.condition.values)
        panel.axhline(0, color="0.3", lw=0.8)
        panel.set_ylabel("accuracy lost (share of images)")
    figure.legend(
        *axes[modes[0]].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        frameon=False,
    )
    _draw_heads(axes["heads"], tree["heads"].dataset.load())
    # Six letters are enough for five modes and the heads; zip is not strict, since there may be
    # fewer modes.
    for letter, (name, panel) in zip("ABCDEF", axes.items(), strict=False):
        title = f"{name}; lines: 95 % intervals"
        if name == "heads":
            title = f"{modes[0]}, one head"
        panel.set_title(f"{letter}  {title}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_bars(panel: Axes, cost: xr.DataArray, place: int, name: str) -> None:
    """Draw a set of heads as a bar for each condition."""
    means = cost.mean(["training", *DRAWN]).values
    bounds = evaluation.mean_interval(cost.mean("training"), DRAWN).values
    # The four bars are a fifth of the distance of ticks apart, and centred on the condition's tick.
    x = np.arange(len(means)) + 0.2 * (place - 1.5)
    kind = name.removeprefix("random for ")
    label = f"{kind} heads" if name in PAIR else f"as many as {kind}, at random"
    color = mpl.colors.to_rgba(COLORS[kind], BARS[name])
    panel.bar(x, means, 0.19, color=color, label=label)
    panel.errorbar(x, means, np.abs(bounds.T - means), fmt="none", ecolor="0.2", elinewidth=0.9)


def _draw_heads(panel: Axes, heads: xr.Dataset) -> None:
    """Draw the cost of each head, mean over the conditions, by its gate."""
    # Otherwise contrast would count twice, by itself and in its group.
    cost = head_costs(heads).drop_sel(condition=WITHIN, errors="ignore")
    cost = cost.mean(["draw", "condition", "image"]).transpose(*heads.gate.dims)
    for kind, color in COLORS.items():
        of_kind = (heads.head_type == kind).values
        panel.scatter(
            heads.gate.values[of_kind],
            cost.values[of_kind],
            s=14,
            color=color,
            label=f"{kind} ({of_kind.sum()})",
        )
    panel.axhline(0, color="0.3", lw=0.8)
    panel.set(xlabel=r"gate $\sigma(\lambda)$", ylabel="accuracy lost, mean of conditions")
    panel.legend(frameon=False, fontsize=8)


SHOWN = {"gate": "gate", "content_information": "content information (nat)"}
"""Variables of a recording that are drawn, and their labels."""


@mpl.rc_context(STYLE)
def draw_content(models: dict[str, xr.Dataset]) -> Figure:
    """Draw a row of panels for each variable of each model,
    and in it a panel for each layer; a line is a head.

    Args:
        models: Datasets by name of the model: gates and content information (epoch, layer, head),
            and the types of heads (layer, head). A model without gates has no row for them.
    """
    rows = [
        (f"{name}\n{words}", ds, v)
        for name, ds in models.items()
        for v, words in SHOWN.items()
        if v in ds
    ]
    columns = max(ds.sizes["layer"] for ds in models.values())
    figure = Figure(figsize=(2.2 * columns + 0.8, 2 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), columns, squeeze=False, sharey="row")
    for panels, (title, ds, variable) in zip(axes, rows, strict=True):
        for panel, layer in zip(panels, ds.layer.values, strict=False):
            heads = ds.sel(layer=layer)
            for values, kind in zip(
                heads[variable].transpose("head", "epoch"),
                heads.head_type.values,
                strict=True,
            ):
                # Heads without a type are grey.
                panel.plot(heads.epoch, values, color=COLORS.get(kind, "0.7"), lw=1.2)
            panel.set_title(layer, fontsize=9)
            whole_ticks(panel)
        # A model with fewer layers has no panels for the rest.
        for panel in panels[ds.sizes["layer"] :]:
            panel.remove()
        # Gates are shares; information has no upper bound.
        panels[0].set(ylabel=title, ylim=(0, 1 if variable == "gate" else None))
    for panel in axes[-1]:
        panel.set_xlabel("epoch")
    handles = [mpl.lines.Line2D([], [], color=color, lw=2.5) for color in COLORS.values()]
    figure.legend(
        handles,
        [f"{kind} at the end" for kind in COLORS],
        loc="outside lower center",
        ncols=4,
    )
    return figure


def gain(content: xr.Dataset, shuffled: xr.Dataset | None) -> str:
    """Return a text that compares content information
    with that of untrained heads, and of shuffled labels.

    Args:
        content: Dataset as for :func:`draw_content`, with the dimension training.
        shuffled: Dataset of trainings on shuffled labels; None if there are none.
    """
    information = content.content_information
    end, controls = information.isel(epoch=-1), {"untrained": information.isel(epoch=0)}
    if shuffled is not None:
        controls["on shuffled labels"] = shuffled.content_information.isel(epoch=-1)
    lines = ["content information, mean over all heads, in nat, with 95 % intervals over heads:"]
    trainings = {"trained": end, **controls}
    for training in content.training.values:
        words = [
            f"{name} {_interval(values.sel(training=training))}"
            for name, values in trainings.items()
        ]
        lines.append(f"  seed {training}: " + ", ".join(words))
    for name, values in controls.items():
        difference = end - values
        interval = "one training gives no t interval"
        if difference.sizes["training"] > 1:
            means = difference.mean(["layer", "head"])
            low, high = evaluation.mean_interval(means, "training").values
            interval = f"t interval over trainings [{low:+.3f}, {high:+.3f}]"
        lines.append(f"  trained less {name}: {float(difference.mean()):+.3f}, {interval}")
    largest = {name: values.max(["layer", "head"]).values for name, values in trainings.items()}
    words = [
        f"{name} {', '.join(f'{value:.2f}' for value in values)}"
        for name, values in largest.items()
    ]
    lines.append(f"  the largest of all heads, by seed: {'; '.join(words)}")
    return "\n".join(lines)


def _interval(values: xr.DataArray) -> str:
    """Return the mean and its interval over heads as text."""
    # Layers with fewer heads have NaN.
    heads = values.stack(heads=("layer", "head")).dropna("heads")
    low, high = evaluation.mean_interval(heads, "heads").values
    return f"{float(heads.mean()):.3f} [{low:.3f}, {high:.3f}]"
