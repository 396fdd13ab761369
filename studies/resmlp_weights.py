"""Convolutions among the layers between the patches
of a ResMLP (Touvron's thesis, Figs. 4.2 and 4.3).

    python studies/resmlp_weights.py

Takes about a minute on one CPU core.

What one should see (resmlp_weights.png): rows of the matrix between patches, drawn as images,
resemble shifted versions of each other (Fig. 4.2). Training makes the matrices depend on the offset
between two patches: translation equivariance, which is 0 on average for a random matrix, rises in
every block.

How: a small ResMLP (four blocks, 8 x 8 patches) learns handwritten digits, each somewhere in a
scene. Its matrices begin with a hundredth of timm's initial weights, because these random numbers
would otherwise hide the effect of so short a training. LayerScale begins at 1, so that the model
learns in this time.

Writes into results/:
resmlp_weights.png     A rows of the matrix of each block, of the 4 x 4 patches in the middle; by
                       epoch and block: B translation equivariance, C support radius; D by block,
                       the share of weights below 5 % of the largest, beside that of the layers on
                       channels (Fig. 4.3)
resmlp_weights.zarr    the numbers and matrices behind it: xarray.open_zarr

It ends by checking that the model learned, and that translation equivariance is within the range of
random matrices at the start and above it in every block at the end.

With timm's weights nothing is trained, and B and C are by block:

    python studies/resmlp_weights.py --model resmlp_24_224 --pretrained
"""

import argparse
import math
import sys
from functools import partial

import matplotlib as mpl
import numpy as np
import timm.models.mlp_mixer
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import tcnn_probe
from common.figures import STYLE, add_letters, ordered_colors, whole_ticks
from common.option_table import single_model_options
from common.options import check_single, parse_options
from common.output import ended, finish
from common.training import Study, begin_single
from tcnn_probe.heads import cross_patch

SHARES = {
    "near_zero": "between patches",
    "fc1_sparsity": "on channels, 1st",
    "fc2_sparsity": "on channels, 2nd",
}
SHOWN = 4
"""Rows and columns of the patches in the middle whose weights are drawn."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    study = begin_single("resmlp_weights", args, small_resmlp, before=cross_patch)
    weights = read_weights(study.model).expand_dims(epoch=[0]) if args.model else read_epochs(study)
    study.output.save(weights)
    study.output.show(draw(weights), table(weights))
    return finish(check(weights, study), args)


@torch.no_grad()
def small_resmlp(size: int) -> nn.Module:
    """Return four blocks of width 48, on 8 x 8 patches."""
    mixer = timm.models.mlp_mixer
    model = mixer.MlpMixer(
        img_size=size,
        patch_size=size // 8,
        in_chans=1,
        num_classes=10,
        num_blocks=4,
        embed_dim=48,
        mlp_ratio=4,
        block_layer=partial(mixer.ResBlock, init_values=1.0),
        norm_layer=mixer.Affine,
    )
    for block in model.blocks:
        # Otherwise random weights hide the effect of so short a training.
        block.linear_tokens.weight.mul_(0.01)
    return model


def read_epochs(study: Study) -> xr.Dataset:
    """Train the model, and return its weights at each epoch."""
    train = partial(study.finetune, study.model, "resmlp", "a ResMLP")
    return study.measure_epochs(train, "resmlp", lambda: read_weights(study.model))[1]


def read_weights(model: nn.Module) -> xr.Dataset:
    """Return the matrices between patches, their measures,
    their types and the shares of small weights.
    """
    # The probe reads weights, so no image is shown.
    with tcnn_probe.record(model, probes="cross-patch") as recorder:
        recorder.mark(epoch=0)
    shares = recorder.tree["cross-patch"].dataset.isel(epoch=0, drop=True)
    matrices = cross_patch(model)
    matrices["head_type"] = tcnn_probe.head_types(matrices)
    matrices = matrices.isel(head=0, drop=True)  # a layer has one matrix
    return matrices.assign(shares[["fc1_sparsity", "fc2_sparsity"]].load().data_vars)


def limit(weights: xr.Dataset) -> float:
    """Return four standard deviations of the equivariance of random matrices, whose mean is 0.

    Equivariance is 1 - [W / (n - g)] / [T / (n - 1)] for n weights with g offsets. The sums of
    squares W and T are chi-squares of n - g and n - 1 degrees of freedom, and W is a part of T.
    """
    height, width = weights.weight.shape[-2:]
    size = (height * width) ** 2
    offsets = (2 * height - 1) * (2 * width - 1)
    return 4 * math.sqrt(2 * (offsets - 1) / ((size - offsets) * (size - 1)))


@mpl.rc_context(STYLE)
def draw(weights: xr.Dataset) -> Figure:
    """Draw rows of some blocks' matrices, and below them the measures by epoch,
    or by block for a trained model.
    """
    layers = weights.layer.values
    # There is room for six blocks side by side, which are spread evenly over the model.
    blocks = layers[np.unique(np.linspace(0, len(layers) - 1, 6).round().astype(int))]
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    above, below = figure.subfigures(2, 1)
    for axes, block in zip(above.subplots(1, len(blocks), squeeze=False)[0], blocks, strict=True):
        picture = rows_of_matrix(weights.weight.isel(epoch=-1).sel(layer=block))
        # The scale is symmetric, so that white is a weight of 0.
        largest = np.nanmax(abs(picture))
        axes.imshow(picture, cmap="RdBu_r", vmin=-largest, vmax=largest)
        axes.set_title(block)
        axes.set_axis_off()
    panels = below.subplots(1, 3)
    curves(panels[0], weights.translation_equivariance, "translation equivariance")
    panels[0].axhspan(-limit(weights), limit(weights), color="0.85", lw=0, label="random matrices")
    curves(panels[1], weights.attention_distance, "support radius (patches)")
    panels[1].axhline(
        float(weights.uniform_distance.isel(epoch=-1, layer=0)),
        color="0.6",
        ls=":",
        label="equal weights",
    )
    for name, words in SHARES.items():
        panels[2].plot(weights[name].isel(epoch=-1), marker="o", ms=3, lw=1.5, label=words)
    panels[2].set(xlabel="block", ylabel="share of weights near 0", ylim=(0, None))
    for panel in panels:
        whole_ticks(panel)
    add_letters(panels, "B")  # A is the row of matrices above
    panels[2].legend(fontsize=7)
    handles = [*panels[0].get_legend_handles_labels()[0], panels[1].lines[-1]]
    below.legend(handles=handles, loc="outside lower left", ncols=6, fontsize=8)
    above.suptitle("A", x=0.02, ha="left", fontweight="bold", fontsize=10)
    return figure


def rows_of_matrix(weight: xr.DataArray) -> np.ndarray:
    """Return the weights for each patch in the middle, side by side as images; NaN between them."""
    first = [max(0, (size - SHOWN) // 2) for size in weight.shape[:2]]
    # In the middle no patch misses a neighbour.
    middle = weight[tuple(slice(start, start + SHOWN) for start in first)].values
    return np.block(
        [[np.pad(picture, 1, constant_values=np.nan) for picture in row] for row in middle]
    )


def curves(axes: Axes, values: xr.DataArray, label: str) -> None:
    """Draw a line for each block by epoch, or a single line by block."""
    # A trained model has no epochs to show.
    if values.sizes["epoch"] == 1:
        axes.plot(values[0], color="k", marker="o", ms=3, lw=1.5)
        axes.set(xlabel="block", ylabel=label)
        return
    colors = ordered_colors(values.sizes["layer"])
    for number, layer in enumerate(values.layer.values):
        axes.plot(
            values.epoch,
            values.sel(layer=layer),
            color=colors[number],
            marker="o",
            ms=3,
            lw=1.5,
            label=layer,
        )
    axes.set(xlabel="epoch", ylabel=label)


def table(weights: xr.Dataset) -> str:
    """Return the last epoch, by block, as a table."""
    last = weights.isel(epoch=-1)
    lines = [
        f"\n{'block':12}{'equivariance':>14}{'radius':>9}{'even':>7}"
        f"{'near 0: A':>11}{'B':>7}{'C':>7}  type"
    ]
    for layer in last.layer.values:
        block = last.sel(layer=layer)
        names = (
            "translation_equivariance",
            "attention_distance",
            "uniform_distance",
            *SHARES,
        )
        text = "".join(
            f"{float(block[name]):{width}.2f}"
            for name, width in zip(names, (14, 9, 7, 11, 7, 7), strict=True)
        )
        lines.append(f"{layer:12}{text}  {block.head_type.item()}")
    return "\n".join(lines)


def check(weights: xr.Dataset, study: Study) -> bool:
    """Return whether the model learned, and every block's equivariance rose
    from the range of random matrices.
    """
    threshold, values = limit(weights), weights.translation_equivariance
    # A model that came with weights was not trained here.
    passed = study.learned("the ResMLP", float(weights.top1[-1])) if "top1" in weights else True
    if values.sizes["epoch"] > 1:
        start = float(abs(values[0]).max())
        passed &= start < threshold
        verdict = "" if start < threshold else "NOT "
        print(
            f"check: at the start equivariance is {verdict}that of random matrices: at most "
            f"{start:.3f} from 0, where four of their standard deviations are {threshold:.3f}"
        )
    above = bool((values[-1] > threshold).all())
    print(
        f"check: at the end {'all' if above else 'NOT all'} blocks are above: "
        f"{float(values[-1].min()):.3f} to {float(values[-1].max()):.3f}"
    )
    return passed and above


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    groups = single_model_options("resmlp_24_224", 4e-3, (15, 3), shown=False)
    return parse_options(__doc__, "resmlp_weights", arguments, groups, check_single)


if __name__ == "__main__":
    sys.exit(ended(main))
