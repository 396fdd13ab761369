"""Class attention before and after fine-tuning
for segmentation (after PatchConvNet, Fig. 1 and Table 3).

    pip install -e ".[huggingface]" && python studies/segmentation_attention.py

Takes about 2 minutes on one CPU core.

The paper shows where the class attention of a classifier looks, and fine-tunes the same trunk
within UperNet. Does that change where it looks? The loss of a segmenter no longer tells its trunk
which patches tell the class.

How: a small PatchConvNet learns handwritten digits in cluttered scenes of 32 x 32 pixels. From
there its trunk is fine-tuned in two ways: within UperNet, to name the digit of every pixel of its
strokes and to tell them from background and fragments of other digits; and, as the control, by
labels for as long. Pooling and classifier are frozen in both, so that only their inputs from the
trunk change. Class attention is then measured on validation scenes: the share of it that falls on
the digit's strokes, and how far each map is from that before (total variation, 0 to 1).

Writes into results/:
segmentation_attention.png     A share of class attention on the strokes, B change of the maps, C
                               accuracy of the classifier, a line or point for each seed; D scenes,
                               and maps before and after
segmentation_attention.zarr    the numbers behind it by (seed, training), and maps of the first
                               seed: xarray.open_zarr

It ends by checking that the classifiers learned, and that the segmenters find strokes: their
intersection over union is more than twice that of calling every pixel a stroke.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from functools import partial

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetHead

import tcnn_probe
from common.digits import ClutteredDigits, Scene, cluttered_digits
from common.figures import STYLE, add_letters
from common.models import small_patchconvnet
from common.option_table import SEED_OPTION, small_option
from common.options import Option, from_least, parse_options
from common.output import RunOutput, ended, finish
from common.saliency_scores import on_object
from common.stepwise import shuffled_rows, take_steps, warm_up_and_anneal
from common.verdicts import difference, difference_lines, learned
from tcnn_probe.plot import OKABE_ITO

SIZE, FRAGMENTS = 32, 3
BATCH, WEIGHT_DECAY = 16, 0.05
LR, FINE_LR = 2e-3, 1e-3
CLASSES = 10
BEFORE, SEGMENTED, LABELED = "before", "by segmentation", "by labels"
COLORS = {
    BEFORE: "0.4",
    SEGMENTED: OKABE_ITO["vermillion"],
    LABELED: OKABE_ITO["blue"],
}
SHOWN = 4
"""Half the number of scenes that are drawn."""

Loss = Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    # More threads speed up so small a model little, and slow it down tenfold on a shared machine.
    torch.set_num_threads(1)
    output = RunOutput.from_args(args, "segmentation_attention")
    results = output.by_seed(args, lambda seed: measure_seed(seed, args))
    output.save(results)
    output.show(draw(results), table(results))
    return finish(check(results), args)


def measure_seed(seed: int, args: argparse.Namespace) -> xr.Dataset:
    """Train a classifier and fine-tune its trunk in both ways;
    return the measurements of the three models.
    """
    train, validation = cluttered_digits(
        size=SIZE, limit=args.limit, seed=seed, fragments=FRAGMENTS
    )
    scenes = [validation.scene(index) for index in range(len(validation))]
    torch.manual_seed(seed)
    classifier = small_patchconvnet()
    fit(classifier, list(classifier.parameters()), train, args.epochs, LR, by_label)

    # Each fine-tuning has the same images in the same order.
    models = {BEFORE: classifier}
    for name in (SEGMENTED, LABELED):
        model = models[name] = copy.deepcopy(classifier)
        trunk = [*model.stem.parameters(), *model.blocks.parameters()]
        if name == SEGMENTED:
            torch.manual_seed(seed + 1000)
            segmenter = Segmenter(model)
            torch.manual_seed(seed + 2000)
            weights = [*trunk, *segmenter.head.parameters()]
            fit(segmenter, weights, train, args.fine_epochs, FINE_LR, by_pixel)
        else:
            torch.manual_seed(seed + 2000)
            fit(model, trunk, train, args.fine_epochs, FINE_LR, by_label)

    names = xr.Variable("training", np.array(list(models), object))
    measured = xr.concat([measure(m, scenes, validation.labels) for m in models.values()], names)
    maps = measured.attention.sel(training=BEFORE)
    measured["change"] = abs(measured.attention - maps).sum(["y", "x"]) / 2
    measured["iou"] = "image", stroke_iou(segmenter, scenes)
    measured["input"] = (
        ("image", "row", "column"),
        torch.stack([s.image[0] for s in scenes]).numpy(),
    )
    return measured.expand_dims(seed=[seed])


class Segmenter(nn.Module):
    """UperNet's head on the blocks of a PatchConvNet, whose trunk is trained with it.

    Args:
        classifier: PatchConvNet, without use of its pooling and classifier.
    """

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.trunk = classifier
        # The classes are the strokes of each digit, and all other pixels.
        config = UperNetConfig(num_labels=CLASSES + 1, hidden_size=32)
        widths = [info["num_chs"] for info in classifier.feature_info]
        self.head = UperNetHead(config, in_channels=widths)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores of classes at each pixel: (B, 1, H, W) -> (B, 11, H, W)."""
        maps = self.trunk.forward_intermediates(images, intermediates_only=True)
        size = images.shape[-2:]
        return F.interpolate(self.head(maps), size=size, mode="bilinear")


def by_label(model: nn.Module, images: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
    """Return the loss of a classifier, which does not depend on the masks."""
    return F.cross_entropy(model(images), labels)


def by_pixel(model: nn.Module, images: Tensor, labels: Tensor, masks: Tensor) -> Tensor:
    """Return the loss of a segmenter."""
    return F.cross_entropy(model(images), pixel_labels(labels, masks))


def pixel_labels(labels: Tensor, masks: Tensor) -> Tensor:
    """Return the class of each pixel, (B, H, W): the digit plus 1 on strokes, and 0 elsewhere."""
    return masks * (labels + 1)[:, None, None]


def fit(
    model: nn.Module,
    weights: list[nn.Parameter],
    digits: ClutteredDigits,
    epochs: int,
    lr: float,
    loss_of: Loss,
) -> None:
    """Train weights of a model in place, on scenes
    that are drawn anew at each visit, and leave it in eval mode.
    """
    # The fused optimizer makes one pass over all weights, instead of several for each tensor.
    optimizer = torch.optim.AdamW(weights, lr, weight_decay=WEIGHT_DECAY, fused=True)

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for rows in shuffled_rows(len(digits), BATCH, epochs):
            scenes = [digits.scene(int(index)) for index in rows]
            yield images_of(scenes), digits.labels[rows], masks_of(scenes)

    rate = warm_up_and_anneal(lr, epochs * (len(digits) // BATCH))
    take_steps(optimizer, batches(), partial(loss_of, model.train()), rate)
    model.eval()


def images_of(scenes: list[Scene]) -> Tensor:
    """Return the images of scenes, (B, 1, H, W)."""
    return torch.stack([scene.image for scene in scenes])


def masks_of(scenes: list[Scene]) -> Tensor:
    """Return the strokes of scenes, (B, H, W), bool."""
    return torch.stack([scene.mask for scene in scenes])


@torch.no_grad()
def measure(model: nn.Module, scenes: list[Scene], labels: Tensor) -> xr.Dataset:
    """Return class attention (image, y, x), its share on the strokes,
    that of uniform attention, and the accuracy.
    """
    images = images_of(scenes)
    tree = tcnn_probe.attention_maps(model, images, queries="class", progress=False)
    (node,) = tree.children.values()  # there is one pool
    maps = node.dataset.class_attention
    on_digit, even = on_object(maps, masks_of(scenes))
    maps, on_digit = (x.isel(layer=0, head=0, drop=True) for x in (maps, on_digit))
    decided = model.eval()(images).argmax(1)
    return xr.Dataset(
        {
            # Attention of the token to itself is left out.
            "attention": maps / maps.sum(["y", "x"]),
            "on_digit": on_digit,
            "even": even,
            "top1": float((decided == labels).float().mean()),
        }
    ).reset_coords(drop=True)


@torch.no_grad()
def stroke_iou(segmenter: nn.Module, scenes: list[Scene]) -> np.ndarray:
    """Return the intersection over union of predicted strokes,
    of any digit, with the strokes, by image.
    """
    named = segmenter(images_of(scenes)).argmax(1) > 0
    masks = masks_of(scenes)
    common, union = ((part).sum((1, 2)) for part in (named & masks, named | masks))
    return (common / union).numpy()


@mpl.rc_context(STYLE)
def draw(results: xr.Dataset) -> Figure:
    """Draw shares, changes and accuracies by seed, and maps of some scenes."""
    figure = Figure(figsize=(10, 3.2 + SHOWN * 0.9), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[3, SHOWN])
    panels = above.subplots(1, 3)
    trainings = list(results.training.values)
    shares = (results.on_digit / results.even).mean("image")
    panels[0].plot(trainings, shares.transpose("training", "seed"), "o-", color="0.4", alpha=0.6)
    panels[0].axhline(1, color="0.6", ls=":")
    panels[0].set(ylabel="attention on strokes,\nrelative to uniform attention")
    for panel, name, label in (
        (panels[1], "change", "change of class attention\n(total variation)"),
        (panels[2], "top1", "accuracy of the classifier"),
    ):
        values = results[name]
        values = values.mean("image") if "image" in values.dims else values
        for training in trainings[name == "change" :]:
            of_training = values.sel(training=training).values
            panel.plot(
                [training] * of_training.size,
                of_training,
                "o",
                color=COLORS[training],
                alpha=0.7,
            )
        panel.set(ylabel=label, xlim=(-0.5, None))
        panel.margins(x=0.3)
    add_letters(panels)
    draw_maps(
        below.subplots(1 + len(trainings), SHOWN * 2, squeeze=False),
        results.isel(seed=0),
    )
    return figure


def draw_maps(axes: np.ndarray, results: xr.Dataset) -> None:
    """Draw scenes in the first row, and below each its class attention before and after."""
    for column, ax in enumerate(axes[0]):
        ax.imshow(results.input.isel(image=column), cmap="gray")
    for row, training in enumerate(results.training.values, 1):
        for column, ax in enumerate(axes[row]):
            # The scale starts at 0, so that a uniform map does not look structured.
            ax.imshow(results.attention.sel(training=training).isel(image=column), vmin=0)
        label_row(axes[row, 0], str(training))
    label_row(axes[0, 0], "scene")
    axes[0, 0].set_title("D", loc="left", fontweight="bold")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])


def label_row(ax: Axes, words: str) -> None:
    """Write a title at the left of a row of pictures."""
    ax.set_ylabel(words, rotation=0, ha="right", va="center")


def differences(results: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the differences that the study asks about, by seed, as means over the scenes."""
    shares = (results.on_digit / results.even).mean("image")
    change = results.change.mean("image")
    pairs = {
        "on strokes, by segmentation less before": (shares, SEGMENTED, BEFORE),
        "on strokes, by labels less before": (shares, LABELED, BEFORE),
        "on strokes, by segmentation less by labels": (shares, SEGMENTED, LABELED),
        "change of maps, by segmentation less by labels": (change, SEGMENTED, LABELED),
        "accuracy, by segmentation less by labels": (results.top1, SEGMENTED, LABELED),
    }
    return {name: difference(*pair, "training") for name, pair in pairs.items()}


def table(results: xr.Dataset) -> str:
    """Return means of each training, and each difference
    with its interval over seeds and a verdict.
    """
    lines = [f"\n{'':18}accuracy  on strokes / even  change of maps"]
    shares = (results.on_digit / results.even).mean("image")
    for name in results.training.values:
        cells = [
            float(values.sel(training=name).mean())
            for values in (results.top1, shares, results.change)
        ]
        lines.append(f"{name:18}{cells[0]:8.3f}{cells[1]:19.2f}{cells[2]:16.3f}")
    iou = results.iou.mean("image")
    lines.append(f"IoU of the segmenters' strokes: {float(iou.mean()):.2f}")
    return "\n".join([*lines, *difference_lines(differences(results))])


def check(results: xr.Dataset) -> bool:
    """Return whether the classifiers learned, and segmenters find strokes."""
    worst = float(results.top1.sel(training=BEFORE).min())
    # Chance is that of ten classes of nearly equal size.
    has_learned = learned("a classifier", worst, results.sizes["image"], 0.11)
    iou, even = float(results.iou.mean("image").min()), float(results.even.mean())
    finds = iou > 2 * even
    verdict = "find" if finds else "do NOT find"
    print(
        f"check: the segmenters {verdict} strokes: IoU of at least {iou:.2f}; of all pixels they "
        f"are {even:.2f}"
    )
    return has_learned and finds


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of the classifier", from_least(1), 6, small=2),
        Option("--fine-epochs", "epochs of each fine-tuning", from_least(1), 3, small=1),
        Option("--seeds", "trainings of the whole chain", from_least(1), 3, small=1),
        Option(
            "--limit",
            "number of digits to use, a quarter of them for validation (default: all)",
            from_least(40),
            small=80,
        ),
        SEED_OPTION,
        small_option("1 seed, few digits and epochs"),
    ]
    return parse_options(__doc__, "segmentation_attention", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
