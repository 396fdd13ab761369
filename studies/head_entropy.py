r"""Entropy and distance of the attention of convolutional
and low-gate heads (T-CNN paper, Figs. 4 and 5).

    python studies/head_entropy.py

Takes about 2 minutes on one CPU core.

What one should see (head_entropy.png): before fine-tuning every head is convolutional. Heads of the
first GPSA layer stay convolutional; in the last one gates fall, and low-gate heads appear. The
positional part of every head remains as narrow as that of a convolution, a pixel or two; the
content part of every head is spread over the whole image and, after so short a training, hardly
narrower than uniform attention. So the types differ in which of the two parts the gate lets
through, and much less in these parts themselves: a low-gate head here looks everywhere alike.

How: a small ResNet learns handwritten digits in cluttered scenes; its last stage is then
reparameterized as gated positional self-attention (GPSA) and fine-tuned. At each epoch every head
is typed (``tcnn_probe.head_types(..., by="gate")``; its type "content", a gate of at most 1/3, is
called "low-gate" here), and the positional and the content part of its attention (Eq. 7) are
measured separately: their entropy, and the mean distance from a query to the keys that it attends
to.

Writes into results/:
head_entropy.png              a column for each layer: A heads of each type, B entropy and C
                              distance of the two parts, means over the heads of each type; dotted:
                              uniform attention, padding included (content attends to real pixels
                              only: log 64 = 4.16 nat at most)
head_entropy.zarr             the numbers behind it, by head, with the types: xarray.open_zarr
head_entropy_recording.zarr   the recording of tcnn_probe, with the distances of the parts:
                              tcnn_probe.open

It ends by checking that all heads start convolutional and some end with a low gate, and that the
whole attention of these is more spread out and reaches further than that of convolutional heads.

On your own images, as the papers did on ImageNet with a GPU:

    python studies/head_entropy.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import sys

import matplotlib as mpl
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import tcnn_probe
from common.figures import BY_GATE, COLORS, PAIR, STYLE, add_letters, whole_ticks
from common.option_table import training_options
from common.options import need_model, parse_options
from common.output import ended, finish
from common.training import begin
from tcnn_model import GPSA, gpsa
from tcnn_probe.probes import ForwardCall

PARTS = {"positional": "-", "content": "--"}
SAVED = (
    "gate",
    "entropy",
    "attention_distance",
    "content_entropy",
    "positional_entropy",
)
UNIFORM = ("uniform_entropy", "uniform_distance")


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("head_entropy", args)
    study.train_cnn()

    # Convert it and fine-tune it, and record every head and the distances of the two parts of its
    # attention.
    store = study.output.beside("_recording.zarr")
    _, recording = study.record_tcnn(store, probes=[*tcnn_probe.DEFAULT, DISTANCES])
    distances = tcnn_probe.open(store)[DISTANCES.kind].dataset.load()

    # Type the heads at each epoch by their gates.
    types = tcnn_probe.head_types(recording, by="gate")
    heads = recording[[*SAVED, *UNIFORM, "top1"]].assign(head_type=types)
    for name in DISTANCES.variables:
        heads[name] = distances[name]

    study.output.save(heads)
    study.output.show(draw(heads), table(heads))
    return finish(check(heads), args)


def distances_of_parts(call: ForwardCall) -> dict[str, Tensor]:
    """Return the mean distance of attention with the gate at 1 and at 0, (B, heads) each."""
    attention = call.module.gated_attention(call.inputs[0])
    distances = {}
    # With a gate of 1 attention is its positional part alone, with 0 its content part.
    for part, gate in (
        ("positional", torch.ones_like(attention.gate)),
        ("content", torch.zeros_like(attention.gate)),
    ):
        values = attention.key[:, :1, :, :1]  # statistics do not depend on values
        statistics = gpsa(
            attention.query,
            attention.key,
            values,
            attention.position,
            gate,
            y=attention.y,
            x=attention.x,
            statistics=True,
        )[1]
        distances[f"{part}_distance"] = statistics.attention_distance.mean(-1)
    return distances


DISTANCES = tcnn_probe.Probe(
    kind="distances",
    module_type=GPSA,
    variables={
        f"{part}_distance": tcnn_probe.Variable(
            ("layer", "head"),
            "cell",
            f"distance of {part} attention",
            f"Mean distance from a query to the keys that the {part} part of its attention (T-CNN "
            "Eq. 7) attends to, over images and queries.",
        )
        for part in PARTS
    },
    measure=distances_of_parts,
)


@mpl.rc_context(STYLE)
def draw(heads: xr.Dataset) -> Figure:
    """Draw a column for each layer, with rows for counts of the types, entropies and distances."""
    columns = heads.sizes["layer"]
    figure = Figure(figsize=(max(6.4, 2.4 * columns + 0.6), 7), layout="constrained")
    axes = figure.subplots(3, columns, squeeze=False, sharex=True, sharey="row")
    for column, layer in enumerate(heads.layer.values):
        in_layer = heads.sel(layer=layer)
        counts(axes[0, column], in_layer)
        axes[0, column].set_title(layer, fontsize=9)
        parts(axes[1, column], in_layer, "entropy", in_layer.uniform_entropy)
        parts(axes[2, column], in_layer, "distance", in_layer.uniform_distance)
        axes[2, column].set_xlabel("epoch")
        whole_ticks(axes[2, column])
    labels = ("heads of each type", "entropy (nat)", "distance (pixel)")
    for panel, label in zip(axes[:, 0], labels, strict=True):
        panel.set(ylabel=label, ylim=(0, None))
    add_letters(axes[:, 0])
    handles = [Line2D([], [], color=COLORS[name], lw=2.5) for name in BY_GATE]
    handles += [Line2D([], [], color="0.3", ls=ls) for ls in (*PARTS.values(), ":")]
    names = [
        *(f"{words} heads" for words in BY_GATE.values()),
        *(f"{part} part" for part in PARTS),
        "uniform attention, padding included",
    ]
    figure.legend(handles, names, loc="outside lower center", ncols=3)
    return figure


def counts(axes: Axes, heads: xr.Dataset) -> None:
    """Draw the number of heads of each type, by epoch."""
    for name in BY_GATE:
        axes.plot(
            heads.epoch,
            (heads.head_type == name).sum("head"),
            color=COLORS[name],
            marker="o",
            ms=3,
            lw=1.8,
        )


def parts(axes: Axes, heads: xr.Dataset, measure: str, uniform: xr.DataArray) -> None:
    """Draw a line for each part and type, the mean over its heads;
    it has gaps where no head is of the type.
    """
    for part, ls in PARTS.items():
        for name in BY_GATE:
            mean = heads[f"{part}_{measure}"].where(heads.head_type == name).mean("head")
            axes.plot(heads.epoch, mean, color=COLORS[name], ls=ls, marker="o", ms=3, lw=1.5)
    axes.plot(heads.epoch, uniform, color="0.3", ls=":", lw=1)


def table(heads: xr.Dataset) -> str:
    """Return means by type at the end, over all layers."""
    last = heads.isel(epoch=-1)
    columns = {
        "entropy": "H(whole)",
        "positional_entropy": "H(position)",
        "content_entropy": "H(content)",
        "attention_distance": "d(whole)",
        "positional_distance": "d(position)",
        "content_distance": "d(content)",
    }
    lines = [
        f"\nmeans over the heads of each type after epoch {int(last.epoch)}; entropies in nat, "
        "distances in pixels"
    ]
    lines.append(f"{'type':14} heads" + "".join(f"{title:>13}" for title in columns.values()))
    for name, words in BY_GATE.items():
        is_type = last.head_type == name
        cells = "".join(
            f"{float(last[variable].where(is_type).mean()):13.2f}" for variable in columns
        )
        lines.append(f"{words:14} {int(is_type.sum()):5d}" + (cells if bool(is_type.any()) else ""))
    uniform = [float(last[name].mean()) for name in UNIFORM]
    lines.append(
        f"uniform attention, padding included: {uniform[0]:.2f} nat and {uniform[1]:.2f} pixels, "
        "mean over layers"
    )
    return "\n".join(lines)


def check(heads: xr.Dataset) -> bool:
    """Return whether all heads start convolutional,
    and low-gate heads end with larger entropy and distance.
    """
    first, last = heads.isel(epoch=0), heads.isel(epoch=-1)
    count = int(first.gate.notnull().sum())
    start = int((first.head_type == "convolutional").sum())
    print(
        f"check: {start} of {count} heads start "
        f"convolutional{'' if start == count else ', NOT all'}"
    )
    measures = {"entropy": "nat", "attention_distance": "pixels"}
    kinds = [last[list(measures)].where(last.head_type == name) for name in PAIR]
    ends = [int((last.head_type == name).sum()) for name in PAIR]
    print(
        f"check: at the end {ends[0]} are convolutional and {ends[1]} "
        f"low-gate{'' if all(ends) else ': NOT both kinds'}"
    )
    # Means over no heads cannot be compared.
    if not all(ends):
        return False
    passed = start == count
    for variable, unit in measures.items():
        low, high = (float(kind[variable].mean()) for kind in kinds)
        verdict = "larger" if high > low else "NOT larger"
        name = variable.replace("_", " ")
        print(
            f"check: {name} of low-gate heads {verdict}: {high:.2f} {unit}, convolutional {low:.2f}"
        )
        passed = passed and high > low
    return passed


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    groups = training_options("2 epochs, 10 seconds")
    return parse_options(__doc__, "head_entropy", arguments, groups, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
