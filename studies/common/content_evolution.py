"""Growth of content information while heads learn:
a figure, and a comparison with untrained heads.
"""

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from scipy.stats import t as student

from common.figures import STYLE, whole_ticks
from common.head_types import COLORS
from tcnn_probe import evaluation

__all__ = ["SHOWN", "draw_content", "gain"]

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
        frameon=False,
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
        interval = "t interval over trainings [{:+.3f}, {:+.3f}]".format(
            *_over_trainings(difference)
        )
        interval = (
            interval if difference.sizes["training"] > 1 else "one training gives no t interval"
        )
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


def _over_trainings(values: xr.DataArray) -> tuple[float, float]:
    """Return a t interval for the mean over trainings;
    NaN for one training, which has no spread.
    """
    means = values.mean(["layer", "head"])
    if means.size < 2:
        return np.nan, np.nan
    # The interval is Student's t, because two or three trainings are too few to resample.
    half = float(student.ppf(0.975, means.size - 1)) * float(means.std(ddof=1)) / means.size**0.5
    return float(means.mean()) - half, float(means.mean()) + half
