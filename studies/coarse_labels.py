"""Finer classes learned from coarse labels, with and without Grafit's losses (arXiv:2011.12982; thesis, Ch. 2).

    python studies/coarse_labels.py

Takes about 3 minutes on one CPU core.

What one should see (coarse_labels.png): whether features of a network that was told only whether a digit is even or
odd tell the ten digits apart, beside features of random weights. In the thesis, on ImageNet and with 600 epochs,
Grafit's are better at this than those of plain training. The last lines that are printed say what 10 epochs show here.

How: with each seed a narrow ResNet-18 is trained on digits of 32 x 32 pixels, labelled even or odd: as a classifier
(cross-entropy), and with Grafit's losses (instance loss and kNN loss, with a moving average of the weights as the
target), for as many views and at the same rate. Of each, the epoch is taken that is best at even and odd. Features of
the validation images are then asked for the digit: by their 20 nearest neighbours (Eq. 2.6) and by average precision
(Eq. 2.5), each image among the others. Grafit has features of its trunk, and embeddings.

Writes into results/:
coarse_labels.png    accuracy by neighbours, and mean average precision, by features
coarse_labels.zarr   both by (training, features, image): xarray.open_zarr
coarse_labels_runs   the folder of each training

It ends by checking that each training learned even from odd.

On your own images: ``tcnn-finetune --recipe grafit``, and docs/representation.md for neighbours and average precision.
"""

import argparse
import sys
from typing import Any

import matplotlib as mpl
import numpy as np
import timm
import torch
import xarray as xr
from matplotlib.figure import Figure
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

import tcnn_probe
from common.ending import ended, finish, learned
from common.figures import STYLE, add_letters
from common.options import (
    add_machine,
    add_output,
    fill_in,
    from_least,
    parsed,
    positive_number,
    study_parser,
)
from common.output import RunOutput
from tcnn_model.training.command import train
from tcnn_model.training.config import Config
from tcnn_model.training.grafit import Grafit
from tcnn_model.training.sources import open_sources
from tcnn_probe import evaluation

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
MEASURES = {"knn": "accuracy by 20 neighbours", "precision": "mean average precision"}
OVER = ("training", "image")


def main(arguments: list[str] | None = None) -> int:
    """Run the study; return 0 if it saw what it stands for, 3 if not."""
    args = parse(arguments)
    output = RunOutput.from_args(args, "coarse_labels")
    seeds = range(args.seed, args.seed + args.seeds)
    scores = xr.concat([score_seed(args, output, seed) for seed in seeds], "training")
    output.save(scores)
    draw(scores).savefig(output.figure, dpi=200)
    print(table(scores))
    output.print_files()
    return finish(check(scores), "digits")


def score_seed(args: argparse.Namespace, output: RunOutput, seed: int) -> xr.Dataset:
    """Train in both ways, and score each kind of features by neighbours and average precision."""
    images, digits = pictures()
    torch.manual_seed(seed)
    features, top1 = [pooled(network(), images)], []  # random weights first
    for arm in ARMS:
        best, weights = trained(args, output, arm, seed)
        top1.append(best)
        if arm == "plain":
            # The classifier's features are those before its last layer.
            features.append(pooled(loaded(network(), weights), images))
        else:
            model = loaded(
                Grafit(network(), 2, len(weights["labels"]), dim=DIM), weights
            )
            with torch.no_grad():
                # Grafit's instance loss is on embeddings, so the trunk may know what they have dropped.
                features += [model.trunk(images), model.embed(images)]
    knn = [tcnn_probe.representation.knn_correct(kind, digits) for kind in features]
    precision = [
        tcnn_probe.representation.average_precision(kind, digits) for kind in features
    ]
    dims = ("features", "image")
    return xr.Dataset(
        {
            "knn": (dims, np.array(knn, float)),
            "precision": (dims, np.array(precision, float)),
            "top1": ("arm", top1),
        },
        {"features": list(FEATURES), "arm": list(ARMS)},
    )


def trained(
    args: argparse.Namespace, output: RunOutput, arm: str, seed: int
) -> tuple[float, dict[str, Tensor]]:
    """Train, or go on with it; return the best epoch's accuracy at even and odd, and its weights."""
    folder = output.beside("_runs") / f"{arm}_{seed}"
    config = Config(
        "resnet18",
        data="parity",
        img_size=SIDE,
        model_options=SHAPE,
        # A mirrored digit is no digit.
        hflip=0.0,
        crop="simple",
        opt="adamw",
        lr=args.lr,
        # The same recipe for both, so that losses alone differ.
        weight_decay=1e-4,
        epochs=args.epochs,
        warmup_epochs=1,
        batch_size=64,
        watcher="none",
        # Digits lie in memory, where loading processes only cost time.
        workers=0,
        device=args.device,
        seed=seed,
        out=str(folder),
        # The recipe's decay of the target network, 0.996, is for far more steps.
        **ARMS[arm] | ({"ema": args.ema} if arm == "grafit" else {}),
    )
    # By even and odd alone: the ten digits are not looked at before the end.
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


def pictures() -> tuple[Tensor, np.ndarray]:
    """Return the validation images as the networks take them, and which digit each shows."""
    source = open_sources("digits", "", ("train", "validation"))[1]
    # timm's own crop would cut off the border.
    uncropped = {"input_size": (3, SIDE, SIDE), "crop_pct": 1.0}
    transform = create_transform(**resolve_data_config(uncropped, model=network()))
    images, digits = zip(*(source.read(n) for n in range(len(source))), strict=True)
    return torch.stack([transform(image) for image in images]), np.array(digits)


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw a panel for each measure: bars by features, and a point for each training."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (name, words) in zip(panels, MEASURES.items(), strict=True):
        means = scores[name].mean("image")
        colors = [
            "0.7",
            *(
                tcnn_probe.plot.OKABE_ITO[name]
                for name in ("blue", "orange", "vermillion")
            ),
        ]
        panel.barh(range(means.sizes["features"]), means.mean("training"), color=colors)
        for values in means:
            panel.plot(values, range(means.sizes["features"]), "o", color="0.2", ms=3)
        panel.set_yticks(
            range(means.sizes["features"]),
            means.features.values if panel is panels[0] else [],
        )
        # The first kind on top, as in the table.
        panel.invert_yaxis()
        panel.set(xlabel=f"{words}; a dot a training", xlim=(0, 1))
    add_letters(panels)
    return figure


def table(scores: xr.Dataset) -> str:
    """Return each training's numbers, and what intervals over trainings and images say of Grafit."""
    lines = [
        f"\nwhich of ten digits, from networks that were told even or odd; {scores.sizes['image']} images"
    ]
    for name, words in MEASURES.items():
        lines.append(f"{words}, a column a training:")
        lines += [
            f"  {kind:20}"
            + "".join(
                f"{value:8.3f}"
                for value in scores[name].sel(features=kind).mean("image").values
            )
            for kind in scores.features.values
        ]
    for name, words in MEASURES.items():
        for kind in FEATURES[2:]:
            gain = scores[name].sel(features=kind) - scores[name].sel(features="plain")
            low, high = evaluation.mean_interval(gain, OVER).values
            verdict = (
                "better" if low > 0 else "WORSE" if high < 0 else "not clearly other"
            )
            mean = float(gain.mean())
            lines.append(
                f"{kind}: {verdict} than plain training's, {words} {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
            )
    return "\n".join(lines)


def check(scores: xr.Dataset) -> bool:
    """Return whether each training learned even from odd."""
    worst = scores.top1.min("training")
    have_learned = [
        learned(str(arm), float(worst.sel(arm=arm)), scores.sizes["image"], 0.5)
        for arm in scores.arm.values
    ]
    print(
        f"check: {sum(have_learned)} of {len(have_learned)} kinds of training learned even from odd"
    )
    return all(have_learned)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = study_parser(__doc__)
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--epochs", type=from_least(2), help="of each training (default: 10)")
    add(
        "--lr", type=positive_number, help="peak learning rate of both (default: 0.008)"
    )
    add(
        "--ema",
        type=positive_number,
        help="decay of Grafit's target network (default: 0.99)",
    )
    add(
        "--seeds",
        type=from_least(1),
        help="trainings of each kind, from --seed on (default: 3)",
    )
    add_machine(group, small="1 seed, 2 epochs, 10 seconds")
    add_output(parser)
    args = parsed(parser, arguments, "coarse_labels")
    if args.small:
        fill_in(args, {"seeds": 1, "epochs": 2, "ema": 0.9})
    fill_in(args, {"seeds": 3, "epochs": 10, "lr": 8e-3, "ema": 0.99})
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
