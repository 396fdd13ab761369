r"""Knowledge and similarity of the stages of a CNN and of its T-CNN,
epoch by epoch (T-CNN paper, Sec. 4).

    python studies/representations.py

Takes about 2 minutes on one CPU core.

The paper asks how representations evolve when convolutions become attention, and shows gates, spans
and maps. Here are the representations themselves.

What one should see (representations.png): the stages before the converted one begin as the CNN's
own (CKA 1). The last stage does not: attention at the paper's start, on twice the grid, does not
compute what the convolutions computed. Its nearest neighbours know more of the digit after
fine-tuning than before. CKA shows how far it returns to what the CNN computed, compared with the
CNN that was trained for as long.

How: a small ResNet learns handwritten digits in cluttered scenes. Its last stage becomes gated
positional self-attention (GPSA), and both are fine-tuned with one recipe. At each epoch the mean
over places of each stage's output is recorded, for at most 256 validation images
(``tcnn_probe.features``).

Writes into results/:
representations.png             by epoch and stage: A CKA with the CNN before fine-tuning, B kNN
                                accuracy with 95 % intervals, C participation ratio; D CKA of all
                                pairs of stages at the end
representations.zarr            the numbers behind it: xarray.open_zarr
representations_tcnn.zarr       the recording of the T-CNN: tcnn_probe.open(...)["features"]
representations_control.zarr    that of the CNN that is trained further

It ends by checking that the T-CNN learned, that the stages before those with attention begin as the
CNN's, and that nearest neighbours by the last stage know more of the digit after fine-tuning than
before.

On your own images, as the papers did on ImageNet with a GPU:

    python studies/representations.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import tcnn_probe
from common.controls import TRAINING_TITLES
from common.data import labels_of
from common.figures import STYLE, add_letters, number_cells, ordered_colors, whole_ticks
from common.folder import spread
from common.option_table import training_options
from common.options import need_model, parse_options
from common.output import ended, finish
from common.training import begin
from common.verdicts import learned
from tcnn_probe import evaluation

IMAGES = 256
NEIGHBORS = 20
MODELS = {"T-CNN": "-", "CNN": ":"}
SAME = 0.999  # CKA of features that differ by their rounding to float16 only


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and train the CNN.
    study = begin("representations", args)
    study.train_cnn()
    dataset = study.validation
    features = tcnn_probe.features(images=spread(len(dataset), IMAGES))
    stores = {name: study.output.beside(f"_{name}.zarr") for name in ("tcnn", "control")}

    # Convert it and fine-tune it, with every head and the features of each stage recorded.
    study.record_tcnn(stores["tcnn"], probes=[*tcnn_probe.DEFAULT, features])

    # As the control, the CNN is trained further for as long; it has no heads to record.
    control, title = copy.deepcopy(study.model), TRAINING_TITLES["control"]
    study.record(control, stores["control"], "control", title, probes=features)

    scores = compare(list(stores.values()), labels_of(dataset))
    study.output.save(scores)
    study.output.show(draw(scores), table(scores))
    return finish(check(scores, study.chance), args)


def compare(stores: list[Path], labels: np.ndarray) -> xr.Dataset:
    """Return CKA, neighbours and participation ratio,
    (model, epoch, layer), for the images with recorded features.
    """
    trees = [tcnn_probe.open(store) for store in stores]
    features = [
        tree["features"].dataset.feature.sel(token="mean", drop=True).load().astype(float)
        for tree in trees
    ]
    start = features[1].isel(epoch=0, drop=True)  # the CNN before fine-tuning
    by_model = []
    for model_features, tree in zip(features, trees, strict=True):
        own_labels = labels[model_features["image"].values]
        scores = tcnn_probe.representation.layer_scores(
            model_features,
            own_labels,
            # A run on a user's own images may have only a few.
            neighbors=min(NEIGHBORS, len(own_labels) - 1),
        )
        cka = tcnn_probe.representation.layer_cka(model_features, start)
        by_model.append(
            scores.assign(cka=cka, top1=tree.dataset.top1, seen=tree["features"].dataset.images)
        )
    scores = xr.concat(by_model, xr.Variable("model", list(MODELS)), combine_attrs="drop_conflicts")
    attention = trees[0]["heads"].dataset.layer.values
    # A stage is converted if any layer with attention lies in it.
    converted = [
        any(name.startswith(f"{stage}.") for name in attention) for stage in scores.layer.values
    ]
    scores["converted"] = "layer", converted
    return scores.load()


def same_layer(scores: xr.Dataset) -> xr.DataArray:
    """Return the CKA of each stage with the same stage of the CNN, (model, epoch, layer)."""
    pairs = [
        scores.cka.sel(layer=name, other_layer=name, drop=True) for name in scores.layer.values
    ]
    return xr.concat(pairs, scores.layer).transpose("model", "epoch", "layer")


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw three panels by epoch, and the pairs of stages at the end."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplot_mosaic("ABD;ACE", width_ratios=[1, 1, 0.9])
    curves(axes["A"], same_layer(scores), "CKA with the CNN before fine-tuning")
    accuracy = scores.knn_correct
    curves(
        axes["B"],
        accuracy.mean("image"),
        "kNN accuracy",
        evaluation.mean_interval(accuracy),
    )
    curves(axes["C"], scores.participation_ratio, "participation ratio")
    for letter, model in zip("DE", MODELS, strict=True):
        end = scores.cka.sel(model=model).isel(epoch=-1).transpose("layer", "other_layer")
        axes[letter].imshow(end, vmin=0, vmax=1, cmap="viridis")
        # viridis is dark for small values.
        number_cells(axes[letter], end, lambda number: number < 0.6, fontsize=7)
        names = [str(name) for name in scores.layer.values]
        axes[letter].set_xticks(
            range(len(names)),
            names,
            fontsize=7,
            rotation=30,
            ha="right",
            rotation_mode="anchor",
        )
        axes[letter].set_yticks(range(len(names)), names, fontsize=7)
        axes[letter].set(
            title=f"{model}, at the end", xlabel="CNN before fine-tuning", ylabel=model
        )
    for model, ls in MODELS.items():
        # Empty lines put the two line styles into the legend.
        axes["A"].plot([], [], color="0.4", ls=ls, label=model)
    figure.legend(
        *axes["A"].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=9,
        fontsize=8,
    )
    add_letters(axes[letter] for letter in "ABCDE")
    return figure


def curves(axes: Axes, values: xr.DataArray, label: str, interval: Any = None) -> None:
    """Draw a line for each stage and model by epoch."""
    colors = ordered_colors(values.sizes["layer"])
    for model, ls in MODELS.items():
        for number, layer in enumerate(values.layer.values):
            curve = values.sel(model=model, layer=layer)
            name = layer if ls == "-" else None
            axes.plot(
                curve.epoch,
                curve,
                color=colors[number],
                ls=ls,
                marker="o",
                ms=3,
                label=name,
            )
            # Bands of all stages would hide each other; only the last stage is judged.
            if interval is not None and number == values.sizes["layer"] - 1:
                bounds = interval.sel(model=model, layer=layer).transpose("bound", "epoch")
                axes.fill_between(
                    curve.epoch, *bounds.values, color=colors[number], alpha=0.15, lw=0
                )
    axes.set(xlabel="epoch", ylabel=label)
    whole_ticks(axes)


def table(scores: xr.Dataset) -> str:
    """Return the first and the last epoch of each stage as a table."""
    lines = [f"\n{'':8}{'stage':12}{'CKA':>14}{'kNN accuracy':>18}{'participation':>18}"]
    columns = [
        same_layer(scores),
        scores.knn_correct.mean("image"),
        scores.participation_ratio,
    ]
    for model in MODELS:
        for layer in scores.layer.values:
            ends = [
                column.sel(model=model, layer=layer).isel(epoch=[0, -1]).values
                for column in columns
            ]
            cells = "".join(f"{f'{a:.2f} -> {b:.2f}':>16}" for a, b in ends)
            lines.append(f"{model:8}{layer:12}{cells}")
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNN learned, starts as the CNN before attention,
    and its last stage gains kNN accuracy.
    """
    tcnn = scores.sel(model="T-CNN")
    cka = same_layer(scores).sel(model="T-CNN").isel(epoch=0)
    has_learned = learned("the T-CNN", float(tcnn.top1[-1]), int(tcnn.seen.max()), chance)
    lowest = float(np.min(cka.values[: int(scores.converted.argmax("layer"))], initial=1))
    verdict = "are the CNN's" if lowest > SAME else "are NOT the CNN's"
    print(
        f"check: at the start the stages before those with attention {verdict}: CKA of at least "
        f"{lowest:.4f}"
    )
    correct = tcnn.knn_correct.isel(layer=-1)
    # The gain is taken image by image, since both epochs have the same images.
    gain = correct.isel(epoch=-1, drop=True) - correct.isel(epoch=0, drop=True)
    low, high = evaluation.mean_interval(gain).values
    verdict = "know more" if low > 0 else "do NOT clearly know more"
    print(
        f"check: neighbours by the last stage {verdict} of the class after fine-tuning: kNN "
        f"accuracy {float(gain.mean()):+.2f} [{low:.2f}, {high:.2f}]"
    )
    control = scores.knn_correct.isel(layer=-1, epoch=-1)
    # This is only printed: the study stands for the gain, whichever model leads.
    lead = control.sel(model="T-CNN") - control.sel(model="CNN")
    low, high = evaluation.mean_interval(lead).values
    print(
        f"beside the CNN that was trained for as long: {float(lead.mean()):+.2f} [{low:.2f}, "
        f"{high:.2f}]"
    )
    return has_learned and lowest > SAME and bool(evaluation.mean_interval(gain).values[0] > 0)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    groups = training_options("2 epochs, 10 seconds")
    return parse_options(__doc__, "representations", arguments, groups, need_model)


if __name__ == "__main__":
    sys.exit(ended(main))
