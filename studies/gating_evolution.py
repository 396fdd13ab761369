"""How gates, attention spans and entropies change while a T-CNN is fine-tuned (T-CNN paper, Fig. 4).

    python studies/gating_evolution.py

Takes about 2 minutes on one CPU core.

What one should see (gating_evolution.png): all gates start at sigma(1) = 0.73. Those of the first GPSA layer rise: it
goes on convolving. Those of the last layer fall: it hardly uses position any more, and after so short a training its
content attention is still spread almost evenly over the image (D; log 64 = 4.16 nat is even). The two layers between
differ from seed to seed (studies/pages/gating_evolution.md has the ranges).

How: a small ResNet learns handwritten digits in cluttered scenes. Its last stage is then reparameterized as gated
positional self-attention (GPSA) and fine-tuned, while the gate, the attention span and the entropy of every head are
recorded. As the control, a copy of the CNN is fine-tuned for as long without attention. Attention is then confounded
with the doubled grid of the last stage: --unstrided adds a control that has this grid and no attention.

Writes into results/:
gating_evolution.png    A accuracy, B attention span 1 / alpha, C gate sigma(lambda), D entropy of content and
                        positional attention, each on a scale of its own; thin lines are heads, thick ones their mean
                        over the layer
gating_evolution.zarr   the recording: xarray.open_zarr

It ends by checking that the mean gates of the layers moved apart, and that the T-CNN learned something.

On your own images, as the papers did on ImageNet with a GPU:

    python studies/gating_evolution.py --model resnetrs50 --pretrained --data path/to/imagenet --img-size 224 \
        --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import sys

import matplotlib as mpl
import xarray as xr
from matplotlib.figure import Figure

import tcnn_probe
from common.ending import ended, finish, learned
from common.options import add_output, parsed, study_parser
from common.training import (
    CONTROLS,
    add_controls,
    add_training,
    begin,
    count_controls,
    settle,
)
from tcnn_model import EpochResult
from tcnn_probe.plot import OKABE_ITO

Run = list[EpochResult]


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    study = begin("gating_evolution", args, stages=2 + count_controls(args))
    training = study.train_cnn()
    controls = study.controls()
    output = study.output
    _, dataset = study.tcnn(
        output.store,
        scalars=lambda result: {
            f"{name}_top1": run[result.epoch].top1
            for name, (_, run) in controls.items()
        },
    )

    draw(dataset, training).savefig(output.figure, dpi=200)
    print(head_table(dataset))
    print(accuracy_report(dataset))
    print(f"wrote {output.store} and {output.figure}")
    return finish(check(dataset, study.chance), args.data)


@mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
def draw(dataset: xr.Dataset, training: Run) -> Figure:
    """Fig. 4 of the paper, with a panel for the entropies."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplot_mosaic("AB;AB;CD;CE")
    count = len(dataset.layer)
    colors = list(
        mpl.colormaps["viridis"].resampled(count + 1)(range(count))
    )  # without its lightest

    a = axes["A"]
    if training:
        before = [r.epoch - training[-1].epoch for r in training]
        a.plot(before, [r.top1 for r in training], color="0.6", label="CNN, training")
    a.plot(
        dataset.epoch,
        dataset.control_top1,
        color="0.25",
        ls="--",
        label="CNN, fine-tuned (control)",
    )
    for name, color in (
        ("unstrided", OKABE_ITO["blue"]),
        ("matched", OKABE_ITO["green"]),
    ):
        if f"{name}_top1" in dataset:
            label = f"{CONTROLS[name]} (control)"
            a.plot(
                dataset.epoch,
                dataset[f"{name}_top1"],
                color=color,
                ls="-.",
                label=label,
            )
    a.plot(
        dataset.epoch,
        dataset.top1,
        color=OKABE_ITO["vermillion"],
        lw=2,
        label="T-CNN, fine-tuned",
    )
    a.axvline(0, color="0.8", lw=1, zorder=0, label="reparameterized")
    a.set(
        ylabel="validation accuracy",
        title="accuracy",
        xlabel="epoch after reparameterization",
    )
    a.legend(frameon=False)

    one = {"colors": colors, "legend": False}
    tcnn_probe.plot.evolution(dataset.attention_span, axes["B"], **one)
    axes["B"].set(
        ylabel=r"attention span $1/\alpha$ (pixel$^2$)",
        title="size of the receptive field",
    )
    tcnn_probe.plot.evolution(dataset.gate, axes["C"], **one)
    axes["C"].set(
        ylabel=r"gate $\sigma(\lambda)$",
        title="attention paid to position",
        ylim=(0, 1),
    )
    tcnn_probe.plot.evolution(dataset.content_entropy, axes["D"], **one)
    axes["D"].set(
        ylabel="content (nat)", title="entropy of content (above) and position (below)"
    )
    tcnn_probe.plot.evolution(dataset.positional_entropy, axes["E"], **one)
    axes["E"].set(ylabel="position (nat)", title="")
    axes["D"].set(xlabel="", xticklabels=[])
    for panel in "BCE":  # D and E are one panel
        axes[panel].set_xlabel("epoch after reparameterization")
    handles = [mpl.lines.Line2D([], [], color=color, lw=2.5) for color in colors]
    figure.legend(
        handles,
        dataset.layer.values.tolist(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    for name in "ABCD":
        axes[name].set_title(name, loc="left", fontweight="bold")
    return figure


def head_table(dataset: xr.Dataset) -> str:
    """The gate of every head at the end, by layer."""
    last = dataset.isel(epoch=-1)
    width = max(len(str(name)) for name in last.layer.values)
    heads = " ".join(f"{h:>4}" for h in last["head"].values)
    lines = [
        f"\ngate of each head after epoch {int(last.epoch)} (1: by position alone, 0: by content alone)"
    ]
    lines.append(f"{'layer':<{width}}  {heads}   mean  span  H(content)  H(position)")
    for layer in last.layer.values:
        row = last.sel(layer=layer)
        gates = " ".join(f"{g:4.2f}" if g == g else "    " for g in row.gate.values)
        means = [
            float(row[v].mean())
            for v in ("gate", "attention_span", "content_entropy", "positional_entropy")
        ]
        lines.append(
            f"{layer:<{width}}  {gates}   {means[0]:4.2f} {means[1]:5.2f}  {means[2]:10.2f}  {means[3]:11.2f}"
        )
    return "\n".join(lines)


def accuracy_report(dataset: xr.Dataset) -> str:
    """Which of the two ended ahead, and by how many standard errors of the validation set."""
    start, last = dataset.isel(epoch=0), dataset.isel(epoch=-1)
    tcnn, control = float(last.top1), float(last.control_top1)
    ahead = (
        "equal" if tcnn == control else "T-CNN ahead" if tcnn > control else "CNN ahead"
    )
    n = float(last.images.isel(layer=0))
    error = ((tcnn * (1 - tcnn) + control * (1 - control)) / n) ** 0.5
    others = [name for name in ("unstrided", "matched") if f"{name}_top1" in last]
    further = "".join(
        f", {CONTROLS[name]} {float(last[f'{name}_top1']):.3f}" for name in others
    )
    return (
        f"\nvalidation accuracy: CNN {float(start.control_top1):.3f}; reparameterized {float(start.top1):.3f}; "
        f"after fine-tuning T-CNN {tcnn:.3f}, CNN {control:.3f}{further} "
        f"({ahead}: {tcnn - control:+.3f}, standard error about {error:.3f} on {n:.0f} images, one seed)"
    )


def check(dataset: xr.Dataset, chance: float) -> bool:
    """Whether the mean gates of the layers moved apart and the T-CNN learned something."""
    means = dataset.gate.mean("head")
    spread = means.max("layer") - means.min("layer")
    start, end = float(spread[0]), float(spread[-1])
    seen = end > start + 0.1
    verdict = "moved apart" if seen else "did NOT move apart"
    print(
        f"check: mean gates of the layers {verdict}: from {start:.2f} to {end:.2f} between the furthest two"
    )
    last = dataset.isel(epoch=-1)
    return (
        learned("the T-CNN", float(last.top1), int(last.images.max()), chance) and seen
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; the digits and the user's own images have different defaults."""
    parser = study_parser(__doc__)
    add_training(parser, small="4 epochs, 10 seconds")
    add_controls(parser)
    add_output(parser)
    args = parsed(parser, arguments, "gating_evolution")
    settle(parser, args)
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
