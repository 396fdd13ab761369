r"""Evolution of gates, attention spans and entropies while a T-CNN is fine-tuned (T-CNN paper, Fig.
4).

    python studies/gating_evolution.py

Takes about 2 minutes on one CPU core.

What one should see (gating_evolution.png): all gates start at sigma(1) = 0.73. Those of the first
GPSA layer rise: it continues to convolve. Those of the last layer fall: it hardly uses position any
more, and after so short a training its content attention is still spread almost evenly over the
image (D; log 64 = 4.16 nat is uniform). The two layers between differ from seed to seed
(studies/pages/gating_evolution.md has the ranges).

How: a small ResNet learns handwritten digits in cluttered scenes. Its last stage is then
reparameterized as gated positional self-attention (GPSA) and fine-tuned, while the gate, the
attention span and the entropy of every head are recorded. As the control, a copy of the CNN is
fine-tuned for as long without attention. Attention is then confounded with the doubled grid of the
last stage: --unstrided adds a control that has this grid and no attention.

Writes into results/:
gating_evolution.png    A accuracy (dotted: of the T-CNN on its training batches, which are
                        augmented on photographs), B attention span 1 / alpha, C gate sigma(lambda),
                        D entropy of content and positional attention, each on a scale of its own;
                        thin lines are heads, thick ones their mean over the layer
gating_evolution.zarr   the recording: xarray.open_zarr

It ends by checking that the mean gates of the layers moved apart, and that the T-CNN learned
something.

On your own images, as the papers did on ImageNet with a GPU:

    python studies/gating_evolution.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import sys
from collections.abc import Mapping, Sequence

import matplotlib as mpl
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

import tcnn_probe
from common.controls import CONTROLS, control_options, finetune_controls
from common.figures import BY_GATE, STYLE, add_letters, ordered_colors
from common.option_table import training_options
from common.options import need_model, parse_options
from common.output import ended, finish
from common.training import begin
from common.verdicts import learned
from tcnn_model import EpochResult
from tcnn_probe.plot import OKABE_ITO

EpochResults = Sequence[EpochResult]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("gating_evolution", args)
    cnn_results = study.train_cnn()

    # The controls are trained first, so that the recording of the T-CNN can include their
    # accuracies.
    _, control_results = finetune_controls(study)

    # Convert the CNN's last stage to attention and fine-tune it, with every head recorded.
    _, dataset = study.record_tcnn(
        study.output.store, also=lambda result: accuracies(control_results, result.epoch)
    )

    # Type the heads, and draw their evolution.
    types = tcnn_probe.head_types(dataset.isel(epoch=-1), by="gate")
    study.output.show(
        draw(dataset, cnn_results),
        head_table(dataset),
        type_counts(types),
        offset_report(dataset),
        accuracy_report(dataset),
    )
    return finish(check(dataset, study.chance), args)


def accuracies(control_results: Mapping[str, EpochResults], epoch: int) -> dict[str, float]:
    """Return the accuracies of the controls after an epoch, by their names in the recording."""
    return {f"{name}_top1": results[epoch].top1 for name, results in control_results.items()}


@mpl.rc_context(STYLE)
def draw(dataset: xr.Dataset, cnn_results: EpochResults) -> Figure:
    """Draw Fig. 4 of the paper, with a panel for the entropies."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplot_mosaic("AB;AB;CD;CE")
    draw_accuracies(axes["A"], dataset, cnn_results)

    layers = dataset.layer.values.tolist()
    colors = ordered_colors(len(layers))
    panels = {
        "B": "attention_span",
        "C": "gate",
        "D": "content_entropy",
        "E": "positional_entropy",
    }
    for letter, variable in panels.items():
        tcnn_probe.plot.evolution(dataset[variable], axes[letter], colors=colors, legend=False)
        axes[letter].set_xlabel("epoch after reparameterization")
    axes["B"].set(
        ylabel=r"attention span $1/\alpha$ (pixel$^2$)",
        title="size of the receptive field",
    )
    axes["C"].set(
        ylabel=r"gate $\sigma(\lambda)$",
        title="attention paid to position",
        ylim=(0, 1),
    )
    # The entropies lie too far apart for one scale, so one panel is split in two: D has the title,
    # E the epochs.
    axes["D"].set(ylabel="content (nat)", title="entropy of content (above) and position (below)")
    axes["D"].set(xlabel="", xticklabels=[])
    axes["E"].set(ylabel="position (nat)", title="")

    handles = [mpl.lines.Line2D([], [], color=color, lw=2.5) for color in colors]
    figure.legend(handles, layers, loc="outside lower center", ncols=4)
    add_letters(axes[letter] for letter in "ABCD")  # E belongs to D
    return figure


def draw_accuracies(panel: Axes, dataset: xr.Dataset, cnn_results: EpochResults) -> None:
    """Draw the accuracies of the CNN, its controls and its T-CNN,
    at negative epochs before reparameterization.
    """
    if cnn_results:  # empty if the CNN came with weights
        last = cnn_results[-1].epoch
        panel.plot(
            [result.epoch - last for result in cnn_results],
            [result.top1 for result in cnn_results],
            color="0.6",
            label="CNN, training",
        )
    styles = {
        "control": ("0.25", "--"),
        "unstrided": (OKABE_ITO["blue"], "-."),
        "matched": (OKABE_ITO["green"], "-."),
    }
    for name, (color, style) in styles.items():
        if f"{name}_top1" in dataset:
            panel.plot(
                dataset.epoch,
                dataset[f"{name}_top1"],
                color=color,
                ls=style,
                label=f"{CONTROLS[name]} (control)",
            )
    panel.plot(
        dataset.epoch,
        dataset.top1,
        color=OKABE_ITO["vermillion"],
        lw=2,
        label="T-CNN, fine-tuned",
    )
    panel.plot(
        dataset.epoch,
        dataset.train_top1,
        color=OKABE_ITO["vermillion"],
        lw=1,
        ls=":",
        label="T-CNN, on its training batches",
    )
    panel.axvline(0, color="0.8", lw=1, zorder=0, label="reparameterized")
    panel.set(
        ylabel="accuracy",
        title="accuracy on validation images",
        xlabel="epoch after reparameterization",
    )
    panel.legend()


def head_table(dataset: xr.Dataset) -> str:
    """Return the gate of every head at the end, by layer, as a table."""
    last = dataset.isel(epoch=-1)
    width = max(len(str(name)) for name in last.layer.values)
    heads = " ".join(f"{head:>4}" for head in last["head"].values)
    lines = [
        f"\ngate of each head after epoch {int(last.epoch)} (1: by position alone, 0: by content "
        "alone)",
        f"{'layer':<{width}}  {heads}   mean  span  H(content)  H(position)",
    ]
    columns = ["gate", "attention_span", "content_entropy", "positional_entropy"]
    for layer in last.layer.values:
        row = last.sel(layer=layer)
        # NaN marks heads that this layer does not have
        gates = " ".join("    " if g != g else f"{g:4.2f}" for g in row.gate.values)
        gate, span, content, position = (float(row[name].mean()) for name in columns)
        lines.append(
            f"{layer:<{width}}  {gates}   {gate:4.2f} {span:5.2f}  {content:10.2f}  "
            f"{position:11.2f}"
        )
    return "\n".join(lines)


def type_counts(types: xr.DataArray) -> str:
    """Return a sentence on the number of heads of each type."""
    counts = [f"{int((types == kind).sum())} {words}" for kind, words in BY_GATE.items()]
    return f"heads by their gate: {', '.join(counts)}"


def offset_report(dataset: xr.Dataset) -> str:
    """Return a sentence on whether the gate tells how much
    of a head's selectivity is a convolution.
    """
    last = dataset.isel(epoch=-1)
    share = (last.offset_information / last.selectivity).where(last.selectivity > 0)
    exists = (share + last.gate).notnull().values
    rho = spearmanr(last.gate.values[exists], share.values[exists]).statistic
    return (
        f"the offset explains {float(share.min()):.2f} to {float(share.max()):.2f} of the heads' "
        f"selectivity, {float(share.mean()):.2f} on average; rank correlation with the gate "
        f"{rho:.2f}, over {exists.sum()} heads"
    )


def accuracy_report(dataset: xr.Dataset) -> str:
    """Return a sentence on which model ended ahead,
    and by how many standard errors of the validation set.
    """
    start, last = dataset.isel(epoch=0), dataset.isel(epoch=-1)
    tcnn, control = float(last.top1), float(last.control_top1)
    verdict = "T-CNN ahead" if tcnn > control else "CNN ahead"
    if tcnn == control:
        verdict = "equal"
    n = float(last.images.isel(layer=0))
    error = ((tcnn * (1 - tcnn) + control * (1 - control)) / n) ** 0.5
    further = "".join(
        f", {CONTROLS[name]} {float(last[f'{name}_top1']):.3f}"
        for name in ("unstrided", "matched")
        if f"{name}_top1" in last
    )
    return (
        f"\nvalidation accuracy: CNN {float(start.control_top1):.3f}; reparameterized "
        f"{float(start.top1):.3f}; after fine-tuning T-CNN {tcnn:.3f}, CNN {control:.3f}{further} "
        f"({verdict}: {tcnn - control:+.3f}, standard error about {error:.3f} on {n:.0f} images, "
        "one seed)"
    )


def check(dataset: xr.Dataset, chance: float) -> bool:
    """Return whether the mean gates of the layers moved apart and the T-CNN learned something."""
    means = dataset.gate.mean("head")
    spread = means.max("layer") - means.min("layer")
    start, end = float(spread[0]), float(spread[-1])
    # All gates start alike, so the spread starts at 0; less than 0.1 can hardly be seen in the
    # figure.
    moved = end > start + 0.1
    verdict = "moved apart" if moved else "did NOT move apart"
    print(
        f"check: mean gates of the layers {verdict}: from {start:.2f} to {end:.2f} between the "
        "furthest two"
    )
    last = dataset.isel(epoch=-1)
    images = int(last.images.max())
    return learned("the T-CNN", float(last.top1), images, chance) and moved


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    # Enough for gates to move apart in the small form too.
    enough = {"limit": (None, 280), "cnn_epochs": (15, 4), "epochs": (6, 4)}
    groups = {**training_options("4 epochs, 10 seconds", **enough), **control_options()}
    return parse_options(__doc__, "gating_evolution", arguments, groups, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
