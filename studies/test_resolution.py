r"""Accuracy and attention at test resolutions other than that of training (T-CNN paper, Fig. 7).

    python studies/test_resolution.py

Takes about 3 minutes on one CPU core.

What one should see (test_resolution.png): all models are best near the resolution that they were
trained at. Attention is over more positions at higher resolutions. The positional part keeps its
width in cells of the feature map, so it covers a smaller part of the image, as a convolution does;
the content part covers the whole image at every resolution.

How: a small ResNet learns handwritten digits in cluttered scenes. It is fine-tuned for as long in
two ways: as it is (the control), and with its last stage reparameterized as gated positional
self-attention (T-CNN). --unstrided adds a control with the T-CNN's finer grid and without its
attention, --matched-start a T-CNN that starts near this control, on the same grid. The models are
shown the same validation images at several resolutions, and every head is recorded along the
resolution. Nothing is adapted: the positional encodings are functions of the distance between two
pixels (Eq. 4).

Writes into results/:
test_resolution.png          A accuracy of the models, B entropy of the two parts of attention and
                             of uniform attention, C mean distance of attention as a share of that
                             of uniform attention; thin lines are heads
test_resolution.zarr         accuracies and heads by resolution: xarray.open_zarr
test_resolution_tcnn.zarr    the recording of tcnn_probe during fine-tuning

It ends by checking that the models learned, and are better at the resolution of training than at
the lowest.

On your own images, as the paper did on ImageNet with a GPU:

    python studies/test_resolution.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --sizes 160 224 256 320 384 416 --epochs 50 --batch-size 1024 \
        --drop-path 0.1 --device cuda --amp --workers 16 --out results/imagenet
"""

import argparse
import sys

import matplotlib as mpl
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import nn
from tqdm import tqdm

import tcnn_probe
from common.controls import CNN, CONTROLS, TCNN, control_options, finetuned_models
from common.data import at_resolution
from common.figures import STYLE, add_letters, ordered_colors
from common.option_table import training_options
from common.options import Option, from_least, need_model, parse_options
from common.output import InputError, ended, finish
from common.training import Study, begin
from common.verdicts import all_learned
from tcnn_probe.plot import OKABE_ITO

COLORS = {
    CNN: "0.6",
    CONTROLS["control"]: "0.25",
    CONTROLS["unstrided"]: OKABE_ITO["blue"],
}
COLORS |= {CONTROLS["matched"]: OKABE_ITO["green"], TCNN: OKABE_ITO["vermillion"]}
PARTS = {
    "content_entropy": OKABE_ITO["vermillion"],
    "positional_entropy": OKABE_ITO["blue"],
}


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits; train the CNN, its controls and its T-CNN.
    study = begin("test_resolution", args, later=("sizes",))
    models = finetuned_models(study, study.output.beside("_tcnn.zarr"))

    # Show all of them the validation images at each resolution, and record the heads along it.
    scores = record_resolutions(study, models)
    study.output.save(scores)
    study.output.show(draw(scores, args.img_size), table(scores))
    return finish(check(scores, args.img_size, study.chance), args)


@torch.no_grad()
def record_resolutions(study: Study, models: dict[str, nn.Module]) -> xr.Dataset:
    """Return the accuracy of each model and the heads of the T-CNN, by resolution."""
    args, top1 = study.args, []
    for model in models.values():
        model.to(args.device).eval()
    with tcnn_probe.record(models[TCNN], along="resolution") as recorder:
        for size in tqdm(args.sizes, desc="test resolutions"):
            right, count = dict.fromkeys(models, 0), 0
            for images, labels in at_resolution(study.model, study.loaders[1], size):
                count += len(labels)
                for name, model in models.items():
                    answers = model(images.to(args.device)).argmax(1).cpu()
                    right[name] += int((answers == labels).sum())
            top1.append([number / count for number in right.values()])
            recorder.mark(resolution=size)
        heads = recorder.dataset.load()
    scores = heads.assign(top1=(("resolution", "model"), top1), images=count)
    # Distances are relative to uniform attention, since a larger map has larger distances.
    scores["reach"] = heads.attention_distance / heads.uniform_distance
    scores["reach"].attrs = {
        "long_name": "mean distance of attention, relative to uniform attention"
    }
    return scores.assign_coords(model=[*models])


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset, trained_at: int) -> Figure:
    """Draw accuracies, entropies of the parts, and reach."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    a, b, c = figure.subplots(1, 3)
    for name in scores.model.values:
        a.plot(
            scores.resolution,
            scores.top1.sel(model=name),
            color=COLORS[name],
            marker="o",
            ms=4,
            label=name,
        )
    a.set(ylabel="validation accuracy", ylim=(0, 1), title="accuracy")
    for variable, color in PARTS.items():
        heads = scores[variable].stack(heads=("layer", "head"))
        b.plot(scores.resolution, heads, color=color, lw=0.4, alpha=0.5)
        b.plot(
            scores.resolution,
            heads.mean("heads"),
            color=color,
            lw=2.2,
            label=variable.replace("_entropy", " part"),
        )
    uniform = scores.uniform_content_entropy.mean("layer")
    b.plot(
        scores.resolution,
        uniform,
        color="0.3",
        ls=":",
        label="content part, if it were uniform",
    )
    b.set(ylabel="entropy (nat)", ylim=(0, None), title="entropy of the two parts")
    colors = ordered_colors(scores.sizes["layer"])
    for row, layer in enumerate(scores.layer.values):
        reach = scores.reach.sel(layer=layer)
        c.plot(scores.resolution, reach, color=colors[row], lw=0.4, alpha=0.5)
        c.plot(
            scores.resolution,
            reach.mean("head"),
            color=colors[row],
            lw=2.2,
            label=layer,
        )
    c.set(
        ylabel="mean distance (of uniform attention's)",
        ylim=(0, 1.1),
        title="how far heads look",
    )
    for panel in (a, b, c):
        panel.axvline(trained_at, color="0.8", lw=1, zorder=0)
        panel.set_xlabel("test resolution (pixel)")
        panel.legend(fontsize=8)
    # The lines of the layers fill the last panel, so that its legend stands beside it.
    c.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    add_letters([a, b, c])
    return figure


def table(scores: xr.Dataset) -> str:
    """Return accuracy by model and resolution as a table."""
    lines = [f"\nvalidation accuracy on {int(scores.images)} images, by test resolution (one seed)"]
    lines.append(f"{'':<28}" + "".join(f"{size:>8}" for size in scores.resolution.values))
    for model, row in zip(scores.model.values, scores.top1.values.T, strict=True):
        cells = "".join(f"{top1:8.3f}" for top1 in row)
        lines.append(f"{model:<28}{cells}")
    return "\n".join(lines)


def check(scores: xr.Dataset, trained_at: int, chance: float) -> bool:
    """Return whether the models learned, and are better
    where they were trained than at the lowest resolution.
    """
    trained, lowest = scores.sel(resolution=trained_at), scores.isel(resolution=0)
    ends = zip(scores.model.values, trained.top1.values, strict=True)
    passed = [all_learned(ends, int(scores.images), chance)]
    for model in scores.model.values:
        high = float(trained.top1.sel(model=model))
        low = float(lowest.top1.sel(model=model))
        verdict = "more" if high > low else "NOT more"
        print(
            f"check: {model} {verdict} accurate at {trained_at} pixels than at "
            f"{int(lowest.resolution)}: ",
            end="",
        )
        print(f"{high:.3f}, {low:.3f}")
        passed.append(high > low)
    return all(passed)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    sizes = Option(
        "--sizes",
        "resolutions of the test images (default: 1/2 to 2 times that of training)",
        from_least(1),
        lambda args: [args.img_size * share // 4 for share in (2, 3, 4, 6, 8)],
        nargs="+",
    )
    groups = {
        **training_options("2 epochs, 15 seconds"),
        **control_options(),
        "resolutions": [sizes],
    }
    args = parse_options(__doc__, "test_resolution", arguments, groups, need_model)
    # The check compares with the resolution of training.
    args.sizes = sorted({*args.sizes, args.img_size})
    if len(args.sizes) < 2:
        raise InputError("--sizes: expected another resolution than --img-size")
    return args


if __name__ == "__main__":
    sys.exit(ended(main))
