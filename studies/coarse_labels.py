"""Finer classes learned from coarse labels,
with and without Grafit's losses (arXiv:2011.12982; thesis, Ch. 2).

    python studies/coarse_labels.py

Takes about 3 minutes on one CPU core.

What one should see (coarse_labels.png): whether the features of a network that was told only
whether a digit is even or odd tell the ten digits apart, compared with features of random weights.
In the thesis, on ImageNet and with 600 epochs, Grafit's are better at this than those of plain
training. The last lines that are printed say what 10 epochs show here.

How: with each seed a narrow ResNet-18 is trained on digits of 32 x 32 pixels, labelled even or odd:
as a classifier (cross-entropy), and with Grafit's losses (instance loss and kNN loss, with a moving
average of the weights as the target), for the same number of views and at the same rate. Each
training is judged at its epoch that is best at even and odd, and Grafit's memory is recomputed with
the weights of that epoch. The digit of a validation image is then predicted from the training
images: by the 20 nearest (Eq. 2.6), by average precision where training images are ranked by the
cosine, and where they are ranked by the cosine and by how likely the image is even or odd (Eq.
2.5). Grafit has features of its trunk, and embeddings.

Two measures describe the space of the features, whatever the classes: the share of the variance in
the first principal components (Fig. 2.1), and the accuracy of a linear classifier on the training
images if each coarse class is split at random (Table 2.1).

Writes into results/:
coarse_labels.png             A accuracy by neighbours, B and C mean average precision by cosine and
                              conditional, D variance by principal components, E accuracy on random
                              labels, by features
coarse_labels_neighbours.png  images, and the training images nearest to them by plain training and
                              by Grafit's embedding: framed green if they show the same digit,
                              orange if only even or odd is the same (Fig. 2.6)
coarse_labels.zarr            all measures by (training, features, image or component or split):
                              xarray.open_zarr
coarse_labels_runs            the folder of each training

It ends by checking that each training learned even from odd.

On your own images: ``tcnn-finetune --recipe grafit --coarse-labels FILE``; docs/representation.md
has neighbours and average precision.
"""

import argparse
import sys
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import timm
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

import tcnn_probe
from common.figures import STYLE, add_letters
from common.folder import spread
from common.option_table import SEED_OPTION, device_option, small_option
from common.options import Option, from_least, parse_options, positive_number
from common.output import RunOutput, ended, finish, seeds_of
from common.verdicts import compared, learned
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tcnn_model.training.grafit import Grafit
from tcnn_model.training.sources import open_sources

SHAPE = {
    "layers": [1, 1, 1, 1],
    "channels": [8, 16, 32, 64],
    "stem_type": "deep",
    "stem_width": 8,
}
DIM, SIDE = 32, 32
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grafit": {"objective": "grafit", "embedding_dim": DIM, "repeated_augmentation": 4},
}
FEATURES = ("random weights", "plain", "Grafit's trunk", "Grafit's embedding")
MEASURES = {
    "knn": "accuracy by 20 neighbours",
    "precision": "mean average precision, by cosine",
    "conditional": "mean average precision, conditional",
}
SPLITS = 5
"""Random splits of the coarse classes; the thesis has 10."""
RETRIEVED = 8
FRAMES = {"fine": "#009E73", "coarse": "#E69F00", "none": "0.6"}
"""Colours of frames: the same digit, another digit of the same parity, and all others."""
OVER = ("training", "image")


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "coarse_labels")
    trainings = [score_seed(args, output, seed) for seed in seeds_of(args)]
    scores = xr.concat(trainings, "training")
    output.save(scores)
    neighbours = draw_neighbours(scores.nearest.isel(training=0), args.limit)
    neighbours.savefig(output.beside("_neighbours.png"), dpi=120)
    output.show(draw(scores), table(scores))
    return finish(check(scores), args)


def score_seed(args: argparse.Namespace, output: RunOutput, seed: int) -> xr.Dataset:
    """Train in both ways, and score each kind of features."""
    gallery, queries = (pictures(split, args.limit) for split in ("train", "validation"))
    torch.manual_seed(seed)
    model = network()  # random weights first
    features = [(pooled(model, gallery.images), pooled(model, queries.images))]
    # Random weights give no probabilities of even and odd.
    parities: list[Tensor | None] = [None]
    top1 = []
    for arm in ARMS:
        best, weights = trained(args, output, arm, seed)
        top1.append(best)
        if arm == "plain":
            # The classifier's features are those before its last layer.
            model = loaded(network(), weights)
            features.append((pooled(model, gallery.images), pooled(model, queries.images)))
            parities.append(outputs(model, queries.images).softmax(1))
        else:
            count = len(weights["labels"])
            model = loaded(Grafit(network(), 2, count, dim=DIM), weights)
            # The memory still averages over the weights of many epochs; the thesis recomputes it at
            # test time, too.
            digits = torch.from_numpy(gallery.digits)
            numbers = torch.tensor(spread(count, args.limit or count))
            model.refresh(numbers, digits % 2, gallery.images)
            # Grafit's instance loss is on embeddings, so the trunk may know details that they have
            # dropped.
            for part in (model.trunk, model.embed):
                features.append((outputs(part, gallery.images), outputs(part, queries.images)))
                parities.append(outputs(model, queries.images).exp())
    measured = [
        measure(known, queried, gallery.digits, queries.digits, parity, seed)
        for (known, queried), parity in zip(features, parities, strict=True)
    ]
    kinds = xr.Variable("features", np.array(FEATURES, object))
    return xr.concat(measured, kinds, join="outer").assign(top1=("arm", top1), arm=list(ARMS))


def measure(
    known: Tensor,
    queried: Tensor,
    known_digits: np.ndarray,
    digits: np.ndarray,
    parity: Tensor | None,
    seed: int,
) -> xr.Dataset:
    """Measure how well features tell the digits of images,
    from training images with known digits and parities.

    Args:
        known, queried: Features of the training images and of the validation images, shapes (m, C)
            and (n, C).
        known_digits, digits: Digits of these images, shapes (m,) and (n,).
        parity: Probabilities of even and odd for the validation images, shape (n, 2), by the
            network that made the features; None for a network without such outputs.
        seed: Seed of the random labels.
    """
    representation = tcnn_probe.representation
    ranking = (queried, digits, known, known_digits)
    conditional = np.full(len(digits), np.nan)
    if parity is not None:
        conditional = representation.average_precision(
            *ranking, coarse_probabilities=parity, gallery_coarse=known_digits % 2
        )
    nearest = (F.normalize(queried) @ F.normalize(known).T).topk(RETRIEVED)
    return xr.Dataset(
        {
            "knn": ("image", representation.knn_correct(*ranking).astype(float)),
            "precision": ("image", representation.average_precision(*ranking)),
            "conditional": ("image", conditional),
            "nearest": (("image", "rank"), nearest.indices.numpy()),
            "energy": ("component", representation.pca_energy(known)),
            "random_labels": ("split", random_labels(known, known_digits % 2, seed)),
        },
        {"component": range(1, 1 + min(known.shape))},
    )


def random_labels(features: Tensor, parity: np.ndarray, seed: int) -> np.ndarray:
    """Return a linear classifier's accuracy on the images it is fitted to,
    with classes split at random, (SPLITS,).
    """
    rng = np.random.default_rng(seed)
    accuracies = []
    for _ in range(SPLITS):
        labels = parity.copy()
        for label in (0, 1):
            rows = rng.permutation(np.flatnonzero(parity == label))
            labels[rows[: len(rows) // 2]] += 2
        accuracies.append(
            tcnn_probe.representation.linear_probe_correct(
                features, labels, features, labels
            ).mean()
        )
    return np.array(accuracies)


def trained(
    args: argparse.Namespace, output: RunOutput, arm: str, seed: int
) -> tuple[float, dict[str, Tensor]]:
    """Train, or resume the training; return the best epoch's accuracy at even and odd,
    and its weights.
    """
    folder = output.beside("_runs") / f"{arm}_{seed}"
    config = Config(
        "resnet18",
        data="parity",
        img_size=SIDE,
        model_options=SHAPE,
        # A mirrored digit is not a digit.
        hflip=0.0,
        crop="simple",
        opt="adamw",
        lr=args.lr,
        # Both trainings have one recipe, so that they differ in their losses alone.
        weight_decay=1e-4,
        epochs=args.epochs,
        limit=args.limit,
        warmup_epochs=1,
        batch_size=64,
        watcher="none",
        # Digits are in memory, where loading processes only cost time.
        workers=0,
        device=args.device,
        seed=seed,
        out=str(folder),
        # The recipe's decay of the target network, 0.996, is for far more steps.
        **ARMS[arm] | ({"ema": args.ema} if arm == "grafit" else {}),
    )
    # The epoch is chosen by even and odd alone: the ten digits are not used before the end.
    best = max(result.top1 for result in train(config, resume=folder.exists()))
    return best, torch.load(folder / "best.pt", weights_only=True)["state_dict"]


def network() -> nn.Module:
    """Return a narrow ResNet-18 for two classes."""
    return timm.create_model("resnet18", num_classes=2, **SHAPE)


def loaded(model: Any, weights: dict[str, Tensor]) -> Any:
    """Return the model with these weights, in eval mode."""
    model.load_state_dict(weights)
    return model.eval()


@torch.no_grad()
def pooled(model: Any, images: Tensor) -> Tensor:
    """Return features before the classifier, shape (B, C)."""
    model.eval()
    return model.forward_head(model.forward_features(images), pre_logits=True)


@torch.no_grad()
def outputs(model: Any, images: Tensor) -> Tensor:
    """Return the outputs of a model, or of a part of it, for images."""
    return model(images)


class Pictures(NamedTuple):
    """Images as the networks take them, shape (n, 3, SIDE, SIDE), and their digits, (n,)."""

    images: Tensor
    digits: np.ndarray


def read(split: str, limit: int | None) -> list[tuple[Image.Image, int]]:
    """Return the images of a split that the limit of the trainings leaves,
    and which digit each shows.
    """
    splits = ("train", "validation")
    source = open_sources("digits", "", splits)[splits.index(split)]
    return [source.read(number) for number in spread(len(source), limit or len(source))]


def pictures(split: str, limit: int | None) -> Pictures:
    """Return the images of a split, as the networks are validated on them, and their digits."""
    # timm's own crop would cut off the border.
    uncropped = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0}
    transform = create_transform(**resolve_data_config(uncropped, model=network()))
    images, digits = zip(*read(split, limit), strict=True)
    return Pictures(torch.stack([transform(image) for image in images]), np.array(digits))


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw bars of each measure by features,
    with a point for each training, and the principal components.
    """
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    axes = figure.subplot_mosaic("ABC;DDE")
    color_of = ("blue", "orange", "vermillion")
    colors = ["0.7", *(tcnn_probe.plot.OKABE_ITO[name] for name in color_of)]
    for letter, (name, words) in zip("ABC", MEASURES.items(), strict=True):
        draw_bars(axes[letter], scores[name].mean("image"), colors, named=letter == "A")
        axes[letter].set_xlabel(f"{words}; a dot per training", fontsize=8)
    draw_bars(axes["E"], scores.random_labels.mean("split"), colors, named=True)
    axes["E"].set_xlabel("accuracy on 4 random classes; a dot per training", fontsize=8)
    for kind, color in zip(FEATURES, colors, strict=True):
        curves = scores.energy.sel(features=kind).transpose("component", "training")
        axes["D"].plot(curves.component, curves, color=color, lw=0.6)
        axes["D"].plot(curves.component, curves.mean("training"), color=color, lw=2, label=kind)
    axes["D"].set(xlabel="principal components", ylabel="share of the variance", xscale="log")
    axes["D"].legend()
    add_letters(axes[letter] for letter in "ABCDE")
    return figure


def draw_bars(panel: Axes, means: xr.DataArray, colors: list[str], *, named: bool) -> None:
    """Draw a bar for each kind of features, and a point for each training."""
    rows = range(means.sizes["features"])
    panel.barh(rows, means.mean("training"), color=colors)
    for values in means:
        panel.plot(values, rows, "o", color="0.2", ms=3)
    panel.set_yticks(rows, means.features.values if named else [])
    # The first kind is on top, as in the table.
    panel.invert_yaxis()
    panel.set_xlim(0, 1)


@mpl.rc_context(STYLE)
def draw_neighbours(nearest: xr.DataArray, limit: int | None) -> Figure:
    """Draw images and the training images nearest to them,
    framed by what they share (thesis, Fig. 2.6).

    Args:
        nearest: Numbers of training images, (features, image, rank).
        limit: Number of images of the trainings; None for all.
    """
    gallery, queries = (read(split, limit) for split in ("train", "validation"))
    digits = np.array([digit for _, digit in queries])
    # The first image of every other digit.
    queried = [int(np.flatnonzero(digits == digit)[0]) for digit in range(0, 10, 2)]
    kinds = ("plain", "Grafit's embedding")
    figure = Figure(figsize=(1 + RETRIEVED * 0.8, 1.9 * len(queried)), layout="constrained")
    panels = figure.subplots(len(kinds) * len(queried), 1 + RETRIEVED)
    for panel in panels.ravel():
        panel.set(xticks=[], yticks=[])
    for row, (query, kind) in enumerate((query, kind) for query in queried for kind in kinds):
        image, digit = queries[query]
        panels[row, 0].imshow(image)
        panels[row, 0].set_ylabel(kind.removeprefix("Grafit's "), fontsize=7)
        for rank, number in enumerate(nearest.sel(features=kind)[query].values):
            neighbour, neighbour_digit = gallery[number]
            panels[row, 1 + rank].imshow(neighbour)
            match = "none"
            if neighbour_digit == digit:
                match = "fine"
            elif neighbour_digit % 2 == digit % 2:
                match = "coarse"
            for spine in panels[row, 1 + rank].spines.values():
                spine.set(visible=True, color=FRAMES[match], linewidth=3)
    return figure


def table(scores: xr.Dataset) -> str:
    """Return each training's numbers, and comparisons with intervals over trainings and images."""
    lines = [
        f"\nwhich of ten digits, from networks that were told even or odd; {scores.sizes['image']} "
        "images"
    ]
    rows = {name: (words, scores[name].mean("image")) for name, words in MEASURES.items()}
    rows["random_labels"] = (
        "accuracy on random labels",
        scores.random_labels.mean("split"),
    )
    half = (scores.energy < 0.9).sum("component") + 1
    rows["energy"] = "principal components with 0.9 of the variance", half
    for words, means in rows.values():
        lines.append(f"{words}, a column per training:")
        lines += [
            f"  {kind:20}" + "".join(f"{value:8.3f}" for value in means.sel(features=kind).values)
            for kind in scores.features.values
        ]
    for name, words in MEASURES.items():
        for kind in FEATURES[2:]:
            gain = scores[name].sel(features=kind) - scores[name].sel(features="plain")
            lines.append(comparison(gain, f"{kind}, less plain training's: {words}"))
    for kind in FEATURES[1:]:
        of_kind = scores.sel(features=kind)
        gain = of_kind.conditional - of_kind.precision
        lines.append(comparison(gain, f"{kind}: conditional ranking, less that by cosine"))
    return "\n".join(lines)


def comparison(gain: xr.DataArray, words: str) -> str:
    """Return a difference with its interval over trainings and images, and a verdict."""
    return f"{words} {compared(gain, OVER, 'better', 'WORSE')}"


def check(scores: xr.Dataset) -> bool:
    """Return whether each training learned even from odd."""
    worst = scores.top1.min("training")
    have_learned = [
        learned(arm, top1, scores.sizes["image"], 0.5)
        for arm, top1 in zip(worst.arm.values, worst.values.tolist(), strict=True)
    ]
    print(
        f"check: {sum(have_learned)} of {len(have_learned)} kinds of training learned even from odd"
    )
    return all(have_learned)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    options = [
        Option("--epochs", "epochs of each training", from_least(2), 10, small=2),
        Option("--lr", "peak learning rate of both", positive_number, 8e-3),
        Option("--ema", "decay of Grafit's target network", positive_number, 0.99, small=0.9),
        Option(
            "--limit",
            "number of images to train on, and as many to validate on (default: all)",
            # Fewer would not fill a batch.
            from_least(64),
            small=128,
        ),
        Option("--seeds", "trainings of each kind, from --seed on", from_least(1), 3, small=1),
        device_option(),
        SEED_OPTION,
        small_option("1 seed, 2 epochs, few digits"),
    ]
    return parse_options(__doc__, "coarse_labels", arguments, {"training": options})


if __name__ == "__main__":
    sys.exit(ended(main))
