"""Printed results of the study of removed heads:
a table of costs, and a sentence on what their intervals support.
"""

import xarray as xr

from common.head_removal import CLEAN, MODES, NOTHING
from common.head_types import COLORS, PAIR
from common.removal_costs import (
    beyond_these_trainings,
    beyond_zero,
    by_side,
    costs,
    differences,
    head_costs,
    interval_in_words,
)

__all__ = ["sentence", "table"]


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
