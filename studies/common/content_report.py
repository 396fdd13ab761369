"""Results of the comparison of content and mixing: a table, verdicts, and a figure."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy import stats

from common.content_arms import ARMS
from common.content_runs import RECORDED
from common.verdicts import (
    Effect,
    crossed_effect,
    holm,
    seeds_to_decide,
    verdict,
)
from tcnn_probe import evaluation

__all__ = [
    "COLORS",
    "MARGIN",
    "check",
    "difference_by_seed",
    "draw",
    "report",
    "stacked",
    "tree_of",
]

# The protocol fixed this margin before any run was seen.
MARGIN = 0.01
"""Margin of equivalence: smaller differences in accuracy are of no interest."""

# Grey for the CNN, so that colours are left for arms with attention.
COLORS = {
    "A": "0.4",
    "B": "tab:brown",
    "C": "tab:red",
    "D": "tab:blue",
    "E": "tab:green",
    "F": "tab:orange",
    "T": "tab:cyan",
    "U": "tab:purple",
}
GROUPS = sorted({corruption.group for corruption in evaluation.CORRUPTIONS.values()})


def tree_of(folder: Path) -> xr.DataTree:
    """Return all finished runs as a tree: a node for each table (blocks, batch norm),
    with a child for each run.
    """
    nodes: dict[str, xr.Dataset] = {}
    # Names of runs begin with the number of blocks.
    for file in sorted(folder.glob("[0-9]_*.npz")):
        blocks, batch_norm, arm, start, seed = file.stem.split("_")
        with np.load(file) as arrays:
            dataset = _dataset(arrays)
        dataset.attrs = {
            "arm": arm,
            "start": float(start),
            "seed": int(seed),
            "title": ARMS[arm].title,
        }
        nodes[f"{blocks}_{batch_norm}/{arm}_{start}_{seed}"] = dataset
    # The tables differ in their layers, so that one dataset cannot hold them.
    return xr.DataTree.from_dict(nodes)


def report(tree: xr.DataTree) -> str:
    """Return tables of every endpoint and the verdicts."""
    parts = []
    for name, table in tree.children.items():
        runs = _runs(table)
        blocks, batch_norm = name.split("_")
        title = f"Last {blocks} block(s) converted, statistics of batch norm {batch_norm}"
        lines = [title, "=" * len(title)]
        lines += _accuracies(runs) + _endpoints(runs) + _heads(runs)
        parts.append("\n".join(lines))
    return "\n\n".join(parts) if parts else "no run is finished yet"


def check(tree: xr.DataTree) -> bool:
    """Check what holds by construction: static maps carry no content,
    and no gate of arm E moves.
    """
    passed = bool(tree.children)
    for run in itertools.chain(*map(_runs, tree.children.values())):
        arm = run.attrs["arm"]
        name = f"{arm}, start {run.attrs['start']:+g}, seed {run.attrs['seed']}"
        if ARMS[arm].static_map:
            # The maximum over heads is checked: no head at all may depend on the image.
            information = float(np.nanmax(run.content_part_information[-1]))
            changed = float((run.clean != run.clean_static).mean())
            # The limits allow for rounding: bfloat16 may change the answer on a few images in
            # thousands.
            if information > 1e-3 or changed > 0.002:
                print(
                    f"check: {name}: a static map has {information:.1e} nat of content "
                    f"information, and static attention changes {changed:.4f} of the answers: NO"
                )
                passed = False
        # Their lambda is 40; its sigmoid is 1 up to rounding in float32.
        if arm == "E" and float(abs(run.gate - 1).max()) > 1e-6:
            print(f"check: {name}: the gate moved: NO")
            passed = False
    print(
        "check: learned maps are static and fixed gates stay, in every finished run: "
        f"{'yes' if passed else 'NO'}"
    )
    return passed


def draw(tree: xr.DataTree) -> Figure:
    """Draw content information and gates by step,
    accuracy by arm, and the endpoints with their intervals.
    """
    figure = Figure(figsize=(9.5, 6.8), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    # Only the first table is drawn, in which the last block is converted: most runs belong to it.
    runs = _runs(next(iter(tree.children.values())))
    for variable, panel, label in (
        ("gate", panels[0], "gate, mean of heads"),
        ("content_information", panels[1], "content information, mean of heads (nat)"),
    ):
        for run in runs:
            arm = run.attrs["arm"]
            # Arm A has no gates, and those of E stay at 1.
            if arm in "BCDFTU":
                # Runs from the lower start are dashed here, and triangles in the panel of
                # accuracies.
                style = "-" if run.attrs["start"] > 0 else "--"
                panel.plot(
                    run.mark,
                    run[variable].mean(["layer", "head"]),
                    style,
                    color=COLORS[arm],
                    lw=1,
                )
        panel.set(xlabel="step", ylabel=label)
    _draw_accuracies(panels[2], runs)
    _draw_effects(panels[3], runs)
    lines = [Line2D([], [], color=COLORS[arm]) for arm in ARMS]
    titles = [f"{arm}: {ARMS[arm].title}" for arm in ARMS]
    figure.legend(lines, titles, loc="outside lower center", ncols=3, fontsize=8)
    for letter, panel in zip("ABCD", panels, strict=True):
        panel.set_title(letter, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def _runs(table: xr.DataTree) -> list[xr.Dataset]:
    """Return the runs of a table."""
    return [node.to_dataset() for node in table.children.values()]


def _dataset(arrays: Mapping[str, NDArray[Any]]) -> xr.Dataset:
    """Return the arrays of a run as a dataset with named dimensions."""
    dims = dict.fromkeys((*RECORDED, "head_type"), ("mark", "layer", "head"))
    dims |= {
        "clean": ("image",),
        "clean_static": ("image",),
        "clean_shuffled": ("image",),
        "clean_salient": ("image",),
        "clean_positional": ("image",),
        "held_out": ("mark",),
    }
    dims |= {
        "corrupted": ("corruption", "corrupted_image"),
        "corrupted_static": ("corruption", "corrupted_image"),
    }
    dims |= {
        "heads_static": ("layer", "head", "head_image"),
        "heads_rows": ("head_image",),
    }
    dims |= {"rate_sums": ("group",), "rate_stds": ("group",)}
    dataset = xr.Dataset({name: (dims[name], arrays[name]) for name in dims if name in arrays})
    labels = {"mark": arrays["marks"], "group": arrays["rate_groups"].astype(object)}
    # Images were corrupted in the order of CORRUPTIONS.
    labels["corruption"] = np.array(list(evaluation.CORRUPTIONS), object)
    if "layer" in arrays:
        labels["layer"] = arrays["layer"].astype(object)
        dataset["head_type"] = dataset.head_type.astype(object)
    return dataset.assign_coords(labels)


def stacked(
    runs: list[xr.Dataset], arm: str, start: float, variable: str
) -> dict[int, NDArray[np.floating]]:
    """Return whether each image is classified correctly,
    by seed: (image,), or (corruption, image) if corrupted.
    """
    by_seed = {}
    for run in runs:
        if (
            run.attrs["arm"] == arm
            # Arms without a choice of start have 0, and are compared with both starts.
            and (run.attrs["start"] in (start, 0.0))
            and variable in run
        ):
            by_seed[run.attrs["seed"]] = run[variable].values.astype(float)
    return by_seed


def difference_by_seed(
    first: dict[int, NDArray[np.floating]], second: dict[int, NDArray[np.floating]]
) -> NDArray[np.floating] | None:
    """Return first minus second for the seeds that both have,
    shape (seeds, ...); None if there are none.
    """
    seeds = sorted(first.keys() & second.keys())
    # Runs are paired by seed, since those of one seed share their images and initial weights.
    return np.stack([first[seed] - second[seed] for seed in seeds]) if seeds else None


def _accuracies(runs: list[xr.Dataset]) -> list[str]:
    """Return lines on the mean accuracy of every arm over its seeds,
    and on the sums of its learning rates.
    """
    lines = [
        "accuracy (mean over seeds)                 "
        "seeds  clean   corrupted  static     shuffled   salient    by position"
    ]
    for arm, start in sorted({(run.attrs["arm"], run.attrs["start"]) for run in runs}):
        of_arm = [run for run in runs if (run.attrs["arm"], run.attrs["start"]) == (arm, start)]
        # A start of 0 marks an arm without a choice of start, and is not a value of lambda.
        words = f"{arm} {ARMS[arm].title}" + (f", lambda = {start:+g}" if start else "")
        means = [
            float(np.mean([run[name].mean() for run in of_arm])) for name in ("clean", "corrupted")
        ]
        row = f"  {words:42s}{len(of_arm):4d}  {means[0]:.4f}  {means[1]:.4f}"
        for name in ("clean_static", "clean_shuffled", "clean_salient", "clean_positional"):
            having = [run[name].mean() for run in of_arm if name in run]
            row += f"     {float(np.mean(having)):.4f}" if having else " " * 11
        lines.append(row)
    lines.append(
        "sum of learning rates, and in units of the initial standard deviation (lambda's own unit "
        "for gates)"
    )
    for arm in sorted({run.attrs["arm"] for run in runs}):
        # Rates are the same for all runs of an arm.
        run = next(run for run in runs if run.attrs["arm"] == arm)
        sums = zip(run.group.values, run.rate_sums.values, run.rate_stds.values, strict=True)
        lines.append(
            f"  {arm}: "
            + "; ".join(f"{name} {total:.3g} ({total / std:.3g})" for name, total, std in sums)
        )
    return lines


def primary_effects(runs: list[xr.Dataset]) -> dict[tuple[str, float, str], Effect]:
    """Return endpoints 1, 2 and 3: the difference
    in accuracy by name, start, and kind of images.
    """
    effects = {}
    for start in sorted(
        {run.attrs["start"] for run in runs if run.attrs["arm"] in "CD"}, reverse=True
    ):
        for kind in ("clean", "corrupted"):
            c = stacked(runs, "C", start, kind)
            comparisons = {
                "C - D": stacked(runs, "D", start, kind),
                "C - C static": stacked(runs, "C", start, f"{kind}_static"),
                "C - A": stacked(runs, "A", 0.0, kind),
            }
            for name, comparison in comparisons.items():
                # The difference is None while no seed is finished in both arms.
                difference = difference_by_seed(c, comparison)
                if difference is not None:
                    # A corrupted image counts with its mean over corruptions.
                    by_image = difference if kind == "clean" else difference.mean(1)
                    effects[name, start, kind] = crossed_effect(by_image)
    return effects


def _endpoints(runs: list[xr.Dataset]) -> list[str]:
    """Return lines on differences with their intervals and verdicts,
    and on the families of corruptions.
    """
    effects = primary_effects(runs)
    lines = [
        f"endpoints: difference in accuracy [95 % interval over seeds and images]; margin {MARGIN}"
    ]
    for name in ("C - D", "C - C static", "C - A"):
        of_endpoint = {key: effect for key, effect in effects.items() if key[0] == name}
        # The protocol adjusts p-values within each endpoint, over its starts and over clean and
        # corrupted images.
        adjusted = holm([effect.p_value for effect in of_endpoint.values()])
        answers = []
        for (key, effect), p_value in zip(of_endpoint.items(), adjusted, strict=True):
            answers.append(verdict(effect, MARGIN, p_value))
            row = (
                f"  {name:13s}lambda = {key[1]:+g}, {key[2]:10s}{effect}"
                f"  p (Holm) {p_value:.3f}  {answers[-1]}"
            )
            # One seed gives no variance over seeds, from which to tell how many would decide.
            if effect.seeds == 1:
                row += "; one seed has no interval"
            elif answers[-1] == "undecided":
                seeds = seeds_to_decide(effect, MARGIN)
                row += (
                    f"; {seeds} seeds would decide" if seeds else "; seeds alone would not decide"
                )
            lines.append(f"{row}  ({effect.seeds} seeds, {effect.images} images)")
        if answers:
            lines.append(f"  {name}: {_together(answers)}")
    for start in sorted({key[1] for key in effects}, reverse=True):
        lines += _families(runs, start)
    return lines


def _together(answers: list[str]) -> str:
    """Return the verdict on several answers: YES if any is yes, NO if all are no."""
    # One clear effect answers the question; only all effects together can deny it, or bound it.
    for answer in ("yes", "undecided"):
        if answer in answers:
            return answer.upper()
    small = [answer for answer in answers if answer != "no"]
    return small[0].upper() if small else "NO"


def _families(runs: list[xr.Dataset], start: float) -> list[str]:
    """Return lines on C - D by family of corruptions."""
    difference = difference_by_seed(
        stacked(runs, "C", start, "corrupted"), stacked(runs, "D", start, "corrupted")
    )
    if difference is None:
        return []
    groups = np.array([corruption.group for corruption in evaluation.CORRUPTIONS.values()])
    effects = {
        # All corruptions of a family have the same weight.
        group: crossed_effect(difference[:, groups == group].mean(1))
        for group in GROUPS
    }
    adjusted = holm([effect.p_value for effect in effects.values()])
    rows = zip(effects.items(), adjusted, strict=True)
    return [
        f"  C - D        lambda = {start:+g}, {group:10s}{effect}"
        f"  p (Holm, {len(GROUPS)} families) {p_value:.3f}"
        for (group, effect), p_value in rows
    ]


def _heads(runs: list[xr.Dataset]) -> list[str]:
    """Return lines on single heads of C: the cost of their static attention,
    compared with recorded variables.
    """
    of_c = [run for run in runs if run.attrs["arm"] == "C" and "heads_static" in run]
    if not of_c:
        return []
    lines = [
        "heads of C, one at a time static: rank correlation of the cost with recorded variables, "
        "by run"
    ]
    for run in of_c:
        # Accuracy is that on the same images: single heads are ablated on a part of the test
        # images.
        accuracy = run.clean.values[run.heads_rows.values].mean()
        cost = accuracy - run.heads_static.mean("head_image").values
        last = run.isel(mark=-1)
        words = [f"costs {cost.min():+.4f} to {cost.max():+.4f}"]
        for name in ("gate", "content_information"):
            values = last[name].values.ravel()
            rank = (
                stats.spearmanr(cost.ravel(), values).statistic
                # Constants have no ranks to compare.
                if np.ptp(cost) and np.ptp(values)
                else np.nan
            )
            words.append(
                f"{name} {values.min():.3f} to {values.max():.3f}, rank correlation {rank:+.2f}"
            )
        # The protocol compares the cost with gate, content information and type.
        for kind in np.unique(last.head_type.values.astype(str)):
            of_kind = last.head_type.values == kind
            words.append(f"{of_kind.sum()} {kind or 'without a type'} {cost[of_kind].mean():+.4f}")
        lines.append(
            f"  lambda = {run.attrs['start']:+g}, seed {run.attrs['seed']}: {'; '.join(words)}"
        )
    return lines


def _draw_accuracies(panel: Any, runs: list[xr.Dataset]) -> None:
    places = {arm: place for place, arm in enumerate(ARMS)}
    for run in runs:
        # A triangle points down to the lower start.
        marker = "o" if run.attrs["start"] >= 0 else "v"
        arm = run.attrs["arm"]
        # The starts of an arm are drawn side by side.
        shift = 0.12 * np.sign(run.attrs["start"])
        panel.plot(
            places[arm] - shift,
            float(run.clean.mean()),
            marker,
            color=COLORS[arm],
            ms=5,
            mfc="none",
        )
        if "clean_static" in run and ARMS[arm].has_content:
            panel.plot(
                places[arm] - shift,
                float(run.clean_static.mean()),
                "x",
                color=COLORS[arm],
                ms=4,
            )
    panel.set_xticks(list(places.values()), list(places))
    panel.set(
        xlabel="arm (triangles: gates start at 0.27; crosses: static attention)",
        ylabel="accuracy, clean test images",
    )


def _draw_effects(panel: Any, runs: list[xr.Dataset]) -> None:
    effects = primary_effects(runs)
    labels = []
    for place, ((name, start, kind), effect) in enumerate(effects.items()):
        # The interval of one seed is unbounded.
        bounds = np.clip([effect.low, effect.high], -1, 1)
        panel.plot(bounds, [place, place], color="0.3", lw=1.5)
        panel.plot(effect.mean, place, "o" if kind == "clean" else "s", color=COLORS["C"], ms=4)
        labels.append(f"{name}, {start:+g}, {kind}")
    panel.set_yticks(range(len(labels)), labels, fontsize=7)
    panel.axvspan(-MARGIN, MARGIN, color="0.9", zorder=0)
    panel.axvline(0, color="0.3", lw=0.8)
    panel.set(xlabel="difference in accuracy (grey: margin)")
    limits = [abs(effect.mean) for effect in effects.values()]
    if limits:
        # The axis is centred on zero, and wide enough to show the margin and the largest effect.
        reach = 3 * max(MARGIN, *limits)
        panel.set_xlim(-reach, reach)
