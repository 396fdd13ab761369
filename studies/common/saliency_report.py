"""Tables and figures of saliency: faithfulness by epoch, maps beside images, maps of classes, and
comparisons with Grad-CAM and of one head with several.
"""

import json
from collections.abc import Iterator

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import tcnn_probe
from common.data import Probed
from common.verdicts import side_of_zero, with_interval
from tcnn_probe import evaluation
from tcnn_probe.plot import OKABE_ITO

__all__ = ["draw_by_class", "draw_faithfulness", "draw_maps", "report", "several_heads"]

SINGLE = "PatchConvNet"


def report(tree: xr.DataTree, tolerance: float) -> str:
    """Return accuracy and every measure at the end,
    by model and method, with 95 % intervals over images.
    """
    columns = {
        "pointing_game": f"pointing ({tolerance:g} px)",
        "pointing_game_exact": "pointing (0 px)",
        "energy_inside": "energy inside",
        "deletion_auc": "deletion AUC",
        "insertion_auc": "insertion AUC",
    }
    lines = []
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        measures = [measure for measure in columns if measure in last]
        lines.append(f"\n{name}: accuracy {float(last.top1):.3f} after epoch {int(last.epoch)}")
        lines.append(f"{'':21}" + "".join(f"{columns[measure]:>20}" for measure in measures))
        for method in last.attribution.values:
            cells = []
            for measure in measures:
                values = last[measure].sel(attribution=method)
                low, high = evaluation.mean_interval(values).values
                cells.append(f"{float(values.mean()):.2f} [{low:.2f}, {high:.2f}]")
            lines.append(f"{method:21}" + "".join(f"{cell:>20}" for cell in cells))
    # All models explain the same images.
    count = next(iter(tree.children.values())).sizes["image"]
    lines.append(f"\nmeans over {count} images, 95 % intervals over them; one seed")
    # Without masks or boxes the place of the object is not known.
    if any("pointing_game" in node for node in tree.children.values()):
        lines.append(
            f"pointing: is the most salient pixel on the object, or within {tolerance:g} pixels of "
            "it"
        )
    for name, node in tree.children.items():
        last = node.dataset.isel(epoch=-1)
        if "pointing_game" in last and {"class_attention", "gradcam"} <= set(
            last.attribution.values
        ):
            for measure in ("pointing_game", "pointing_game_exact"):
                lines += [f"{columns[measure]}, {name}: {beside_gradcam(last[measure])}"]
    for name, node in tree.children.items():
        if name.startswith(SINGLE) and name.endswith("heads"):
            single = tree[SINGLE].dataset.isel(epoch=-1)
            lines += beside_one_head(single, node.dataset.isel(epoch=-1), name)
    return "\n".join(lines)


def several_heads(number: int) -> str:
    """Return the name of the PatchConvNet whose pooling has several heads."""
    return f"{SINGLE}, {number} heads"


def beside_one_head(single: xr.Dataset, multiple: xr.Dataset, name: str) -> list[str]:
    """Return sentences that compare the class attention
    of one head with that of several, image by image.

    Insertion depends on the model, so that each model's gain over a map of chance is compared.
    """
    lines = [f"\nclass attention of one head, minus that of {name}, by image:"]
    measures = {
        "pointing_game": "the most salient pixel is near the object",
        "energy_inside": "share of the map on the object",
        "insertion_auc": "insertion AUC, above that of chance",
    }
    for measure, words in measures.items():
        if measure not in single:
            continue
        values = []
        for scores in (single, multiple):
            of_attention = scores[measure].sel(attribution="class_attention")
            chance = scores[measure].sel(attribution="chance")
            # Pointing and energy depend on the map and the object alone, insertion also on the
            # scores of the model.
            values.append(of_attention - chance * (measure == "insertion_auc"))
        difference = values[0] - values[1]
        verdict = side_of_zero(
            evaluation.mean_interval(difference).values,
            "one head is better",
            "several heads are better",
            "not distinguishable",
        )
        lines.append(f"  {words}: {with_interval(difference, digits=2)}: {verdict}")
    return lines


def beside_gradcam(hits: xr.DataArray) -> str:
    """Return a sentence that compares the hits
    of class attention with those of Grad-CAM, image by image.
    """
    attention_hits, gradcam_hits = (
        hits.sel(attribution=method) for method in ("class_attention", "gradcam")
    )
    difference = attention_hits - gradcam_hits
    # If the interval contains zero, the images do not tell the methods apart.
    verdict = side_of_zero(
        evaluation.mean_interval(difference).values,
        "is ahead",
        "is behind",
        "and Grad-CAM are not distinguishable",
    )
    return (
        f"class attention {float(attention_hits.mean()):.2f}, Grad-CAM "
        f"{float(gradcam_hits.mean()):.2f}, difference {with_interval(difference, digits=2)}: "
        f"class attention {verdict}"
    )


COLORS = {
    "class_attention": OKABE_ITO["vermillion"],
    "rollout": OKABE_ITO["purple"],
    "gradcam": OKABE_ITO["blue"],
    "integrated_gradients": OKABE_ITO["green"],
    "input_x_gradient": OKABE_ITO["sky blue"],
    "occlusion": OKABE_ITO["orange"],
    "chance": "0.5",
}
MEASURES = {
    "pointing_game": "pointing game\n(hits within {} pixels;\nhigher is better)",
    "pointing_game_exact": "pointing game\n(hits; higher is better)",
    "energy_inside": "energy inside\n(share; higher is better)",
    "insertion_auc": "insertion AUC\n(higher is better)",
    "deletion_auc": "deletion AUC\n(lower is better)",
}


def in_words(method: str) -> str:
    """Return a method's name as readers know it."""
    return {"gradcam": "Grad-CAM", "input_x_gradient": "input x gradient"}.get(
        method, method.replace("_", " ")
    )


def draw_faithfulness(tree: xr.DataTree) -> Figure:
    """Draw a column for each model, a row for each measure:
    means over images by epoch with 95 % intervals.
    """
    runs = list(tree.children.items())
    measures = [name for name in MEASURES if name in runs[0][1]]
    size = max(6.4, 3.1 * len(runs) + 0.6), 2.1 * len(measures) + 1.1
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(measures), len(runs), squeeze=False, sharey="row", sharex="col")
    for column, (name, node) in enumerate(runs):
        scores = node.dataset
        for row, measure in enumerate(measures):
            panel = axes[row, column]
            panel.spines[["top", "right"]].set_visible(False)
            for place, method in enumerate(scores.attribution.values):
                # Chance, the last, has no bars.
                middle = (len(scores.attribution) - 2) / 2
                _line(
                    panel,
                    scores[measure].sel(attribution=method),
                    method,
                    place - middle,
                )
            # The panels of a row share their y axis.
            if column == 0:
                tolerance = json.loads(scores[measure].attrs.get("options", "{}")).get(
                    "tolerance", 0
                )
                panel.set_ylabel(MEASURES[measure].format(f"{tolerance:g}"))
        axes[0, column].set_title(f"{name}\naccuracy {float(scores.top1[-1]):.3f}", fontsize=10)
        axes[-1, column].set_xlabel("epoch")
        axes[-1, column].set_xticks(scores.epoch.values)
    methods = [m for m in COLORS if any(m in node.dataset["attribution"] for _, node in runs)]
    handles = [
        Line2D([], [], color=COLORS[m], ls="--" if m == "chance" else "-", lw=2) for m in methods
    ]
    title = f"means over {runs[0][1].sizes['image']} images; bars: 95 % intervals"
    labels = [in_words(method) for method in methods]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, title=title)
    return figure


def _line(panel: Axes, values: xr.DataArray, method: str, place: float) -> None:
    """Draw a method's measure by epoch; ``place`` is its distance
    from the middle method, in bars.
    """
    epochs = values.epoch.values
    mean = values.mean("image").values
    if method == "chance":
        # A line of one point cannot be seen.
        if len(epochs) > 1:
            panel.plot(epochs, mean, color=COLORS[method], ls="--", lw=1)
        else:
            panel.axhline(mean.item(), color=COLORS[method], ls="--", lw=1)
        return
    interval = evaluation.mean_interval(values).transpose(..., "epoch").values
    # Methods are drawn side by side, so that their bars do not hide each other: 0.06 epochs apart
    # if the axis spans up to four epochs, and in proportion if it spans more.
    aside = 0.06 * place * max(1, (epochs[-1] - epochs[0]) / 4)
    panel.errorbar(
        epochs + aside,
        mean,
        np.abs(interval - mean),
        color=COLORS.get(method, "k"),
        marker="o",
        ms=3,
        lw=1.8 if method == "class_attention" else 1,
        elinewidth=0.8,
    )


def draw_maps(tree: xr.DataTree, probed: Probed, count: int) -> Figure:
    """Draw images beside the saliency maps of the trained models,
    such as class attention and Grad-CAM (Fig. 1).
    """
    columns = list(_columns(tree))
    figure = Figure(figsize=(1.75 * (1 + len(columns)), 1.75 * count + 0.9), layout="constrained")
    axes = figure.subplots(count, 1 + len(columns), squeeze=False)
    for row in range(count):
        _image(axes[row, 0], probed.images[row])
        # Photographs with boxes have no labels but the model's.
        source = "truth" if probed.numbers else "model"
        axes[row, 0].set_ylabel(f"{source}: {_short(probed.classes[int(probed.labels[row])])}")
        for column, (title, maps) in enumerate(columns, 1):
            _map(axes[row, column], maps.isel(image=row), probed, row)
            if row == 0:
                axes[0, column].set_title(title, fontsize=9)
    axes[0, 0].set_title("image", fontsize=9)
    figure.supxlabel(_legend(probed), fontsize=9)
    return figure


def _columns(tree: xr.DataTree) -> Iterator[tuple[str, xr.DataArray]]:
    """Yield the title and the maps of each column; several models have two methods each at most."""
    for name, node in tree.children.items():
        last = node.dataset.saliency.isel(epoch=-1)
        methods = [m for m in last.attribution.values if m != "chance"]
        if len(tree.children) > 1:
            methods = [m for m in ("gradcam", "class_attention") if m in methods] or methods[:1]
        for method in methods:
            yield (
                "\n".join([*name.split(", "), in_words(method)]),
                last.sel(attribution=method),
            )


def draw_by_class(recording: xr.DataTree, scores: xr.Dataset, probed: Probed, count: int) -> Figure:
    """Draw images, and the attention of the class tokens
    of their three most probable classes (Fig. 2).
    """
    nodes = [node.dataset for node in recording.subtree if "attention_by_class" in node.dataset]
    last = nodes[0].isel(epoch=-1, layer=0).load()
    ranks = last.sizes["class"]
    figure = Figure(figsize=(1.75 * (1 + ranks) + 0.4, 1.95 * count + 0.6), layout="constrained")
    axes = figure.subplots(count, 1 + ranks, squeeze=False)
    for row in range(count):
        _image(axes[row, 0], probed.images[row])
        axes[row, 0].set_title(
            f"truth: {_short(probed.classes[int(probed.labels[row])])}", fontsize=9
        )
        for rank in range(ranks):
            number = int(last.class_index[row, rank])
            share = float(scores.probability.isel(epoch=-1, image=row)[number])
            name = probed.classes[number] if number < len(probed.classes) else str(number)
            _map(axes[row, 1 + rank], last.attention_by_class[row, rank], probed, row)
            axes[row, 1 + rank].set_title(f"{_short(name)} ({100 * share:.1f} %)", fontsize=9)
    figure.supxlabel(_legend(probed), fontsize=9)
    return figure


def _image(panel: Axes, image: Tensor) -> None:
    """Draw an image (C, H, W), scaled from its smallest value (black) to its largest (white)."""
    # Normalised pixels are not in [0, 1].
    pixels = ((image - image.min()) / (image.max() - image.min())).permute(1, 2, 0)
    panel.imshow(pixels.squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
    panel.set(xticks=[], yticks=[])


def _map(panel: Axes, values: xr.DataArray, probed: Probed, index: int) -> None:
    """Draw a map in place of the image, with the object's outline."""
    batch = slice(index, index + 1)
    masks = None if probed.masks is None else probed.masks[batch]
    # The map is opaque, because neither map nor image can be read if they are blended.
    tcnn_probe.plot.saliency_overlay(values, probed.images[batch], panel, masks=masks, alpha=1)


def _legend(probed: Probed) -> str:
    # The outline is explained on a line of its own, because a figure of few columns is narrow.
    outline = "\nwhite: outline of the object" if probed.masks is not None else ""
    return f"each map from its smallest (dark blue) to its largest value (yellow){outline}"


def _short(name: str) -> str:
    # A longer title would run into that of the next panel.
    return name if len(name) <= 18 else f"{name[:17]}…"
