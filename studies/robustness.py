r"""Robustness of a T-CNN, beside a CNN trained for
as long (T-CNN paper, Figs. 1, 3; ICLR submission, Table 3).

    python studies/robustness.py

Takes about 2 minutes on one CPU core.

What one should see (robustness.png): corruptions and attacks hurt all three models, more so at
higher severities. The papers find the T-CNN ahead of the CNN that it came from, most on blurred and
faint images. The control shows how much of this the longer training explains: on digits, most or
all of it, and which of the two is ahead differs between seeds. The last lines that are printed say
what the intervals of this run support.

How: a small ResNet learns handwritten digits in cluttered scenes. It is then fine-tuned for as long
in two ways: as it is (the control that the papers have for accuracy, Table 1 and Fig. 7, and not
for robustness), and with its last stage reparameterized as gated positional self-attention (T-CNN).
--unstrided adds a control with the T-CNN's finer grid and without its attention. The models are
shown the same validation images: clean, with the 15 corruptions of ImageNet-C at 5 severities, and
after the adversarial attacks FGSM and PGD within 1/255 of each pixel.

Writes into results/:
robustness.png          accuracy of the three A clean and by group of corruptions and B under attack
                        (Fig. 1, Table 3); improvement over the CNN C by group and D by severity
                        (Fig. 3), with 95 % intervals over images
robustness.zarr         every answer of every model, and the accuracies: xarray.open_zarr
robustness_heads.zarr   what tcnn_probe recorded of the T-CNN's heads
robustness_imagenet_c   with --variant imagenet-c=FOLDER: .zarr, every answer on the published
                        images, and .png (Fig. 3)

It ends by checking that the models learned, and that damage grows with severity.

On your own images, here as the papers did on ImageNet with a GPU, with further test sets by their
folders. Images are corrupted at --img-size; the papers "keep a resolution of 224 at test time" for
corruptions, also of larger models:

    python studies/robustness.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --variant imagenet-a=path/to/imagenet-a \
        --variant imagenet-r=path/to/imagenet-r --out results/imagenet
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import xarray as xr
from matplotlib.figure import Figure
from torch import nn

import tcnn_probe
from common.controls import CNN, CONTROLS, TCNN, control_options, finetuned_models
from common.data import PixelBatches
from common.option_table import (
    CORRUPTIONS_OPTION,
    FEW_CORRUPTIONS,
    severities_option,
    training_options,
)
from common.options import Option, from_least, need_model, parse_options, positive_number
from common.output import InputError, ended, finish, write_whole
from common.training import Study, begin
from common.verdicts import learned, side_of_zero
from tcnn_probe import evaluation

CONTROL = CONTROLS["control"]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, or refuse test sets that do not fit it.
    variants: list[evaluation.Variant] = []
    study = begin(
        "robustness",
        args,
        later=("corruptions", "severities", "epsilon", "images", "variant"),
        before=lambda cnn: variants.extend(open_variants(cnn, args)),
    )

    # Train the CNN, its controls and its T-CNN, and show all the same images: clean, corrupted and
    # attacked.
    models = finetuned_models(study, study.output.beside("_heads.zarr"))
    images = PixelBatches(study.model, study.loaders[1], args.images)
    results = measure(models, images, variants, args)
    study.output.save(results)
    for folder in imagenet_c_folders(args):
        report_imagenet_c(study, models, images, folder)
    classes = study.model.num_classes
    study.output.show(draw(results, classes), table(results), verdicts(results, classes))
    return finish(check(results, study.chance), args)


def measure(
    models: dict[str, nn.Module],
    images: PixelBatches,
    variants: list[evaluation.Variant],
    args: argparse.Namespace,
) -> xr.Dataset:
    """Return the answers of the models to clean, corrupted and attacked images, and to variants."""
    return evaluation.robustness(
        models,
        images,
        corruptions=args.corruptions,
        severities=args.severities,
        normalization=images.normalization,
        attacks={
            "fgsm": {"epsilon": args.epsilon},
            "pgd": {"epsilon": args.epsilon, "step": args.epsilon / 2},
        },
        variants=variants,
        device=args.device,
    )


def report_imagenet_c(
    study: Study, models: dict[str, nn.Module], images: PixelBatches, folder: str
) -> None:
    """Show the models the published images of ImageNet-C, at their own size of 224 x 224;
    write and print the results.
    """
    args = study.args
    published = evaluation.imagenet_c(
        models,
        folder,
        corruptions=args.corruptions,
        severities=args.severities,
        normalization=images.normalization,
        batch_size=args.batch_size,
        workers=args.workers,
        device=args.device,
    )
    write_whole(published, study.output.beside("_imagenet_c.zarr"))
    figure = draw_imagenet_c(published, CNN)
    figure.savefig(study.output.beside("_imagenet_c.png"), dpi=200)
    print(imagenet_c_report(published))


def imagenet_c_folders(args: argparse.Namespace) -> list[str]:
    """Return the folder of ImageNet-C, if it was named."""
    return [folder for name, folder in args.variant if name == "imagenet-c"]


def draw_imagenet_c(results: xr.Dataset, baseline: str) -> Figure:
    """Draw the improvement over a baseline on the published images,
    by group and by severity (Fig. 3).
    """
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for panel, by in zip(figure.subplots(1, 2), ("group", "severity"), strict=True):
        tcnn_probe.plot.robustness(results, panel, baseline=baseline, by=by)
    return figure


def imagenet_c_report(results: xr.Dataset) -> str:
    """Return the accuracy on ImageNet-C and,
    if all of it was measured, the mCE relative to AlexNet's.
    """
    # A plain mean is right, as ImageNet-C has the same images in each corruption and severity.
    accuracy = results.accuracy.mean(["corruption", "severity", "seed"])
    names = {*results.corruption.values.tolist()}
    # The mCE is defined over all corruptions and severities: a mean over a part of them is not
    # comparable.
    complete = names == {*evaluation.CORRUPTIONS} and results.sizes["severity"] == 5
    lines = [f"\nImageNet-C, {results.sizes['image']} images from disk"]
    for model in results.model.values.tolist():
        line = f"{model:<28}{float(accuracy.sel(model=model)):>9.3f}"
        if complete:
            errors = evaluation.mean_corruption_error(results, evaluation.ALEXNET_ERRORS)
            mce = 100 * float(errors.mean_corruption_error.sel(model=model))
            line += f"   mCE {mce:.1f} (AlexNet: 100)"
        lines.append(line)
    return "\n".join(lines)


def open_variants(model: nn.Module, args: argparse.Namespace) -> list[evaluation.Variant]:
    """Return the further test sets except ImageNet-C,
    whose first folder is opened to check that it exists.
    """
    if args.variant and model.num_classes != 1000:
        raise InputError(
            f"--variant: needs a model with ImageNet's 1000 classes, this has {model.num_classes}"
        )
    if len(imagenet_c_folders(args)) > 1:
        raise InputError("--variant: expected one folder of ImageNet-C, got several")
    options = {"model": model, "batch_size": args.batch_size, "workers": args.workers}
    variants = []
    for name, folder in args.variant:
        if name == "imagenet-c":
            first = next(iter(args.corruptions or evaluation.CORRUPTIONS))
            evaluation.imagenet_variant(name, folder, corruption=first, severity=args.severities[0])
            continue
        variants.append(evaluation.imagenet_variant(name, folder, size=args.img_size, **options))
    return variants


def draw(results: xr.Dataset, classes: int) -> Figure:
    """Draw accuracies of all models, and the improvement over the CNN by group and by severity."""
    figure = Figure(figsize=(11, 6.8), layout="constrained")
    axes = figure.subplot_mosaic("AAAABB;CCCDDD", gridspec_kw={"height_ratios": [1, 1.1]})
    # Panel B leaves out the accuracies on clean images, which are in panel A.
    attacks = results.drop_vars("clean_correct")
    panels = [
        ("A", results, {}, "accuracy on clean and corrupted images"),
        ("B", attacks, {"by": "attack"}, "under attack"),
        ("C", results, {"baseline": CNN}, "relative improvement, by group"),
        (
            "D",
            results,
            {"baseline": CNN, "by": "severity"},
            "relative improvement, by severity",
        ),
    ]
    for name, measured, options, title in panels:
        panel = axes[name]
        tcnn_probe.plot.robustness(measured, panel, **options)
        legend = panel.get_legend()
        if not options.get("baseline"):
            panel.axhline(1 / classes, color="0.3", lw=1, ls=":", label="chance")
        # All panels share one legend, since their colours are the same.
        if name == "A":
            # Handles of lines come before those of bars.
            (chance, *bars), (_, *names) = panel.get_legend_handles_labels()
            figure.legend(
                [*bars, chance],
                [*names, "chance"],
                loc="outside upper center",
                ncols=4,
                frameon=False,
            )
        legend.remove()
        panel.set_title(f"{name}  {title}", loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    # With a shared axis the accuracies of both panels can be compared.
    axes["B"].sharey(axes["A"])
    axes["B"].set(ylabel="", xlabel="")
    return figure


def accuracies(results: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the accuracy of each model, by condition:
    clean, group of corruptions, attack, further test set.
    """
    by_group = results.accuracy.mean(["severity", "seed"]).groupby("group").mean()
    by_condition = {"clean": results.clean_accuracy}
    by_condition |= {
        group: by_group.sel(group=group) for group in dict.fromkeys(results.group.values.tolist())
    }
    by_condition |= {
        str(a): results.adversarial_accuracy.sel(attack=a).mean("seed")
        for a in results.attack.values
    }
    if "variant" in results.dims:
        by_condition |= {
            str(v): results.variant_accuracy.sel(variant=v) for v in results.variant.values
        }
    return by_condition


def table(results: xr.Dataset) -> str:
    """Return accuracy by model and condition as a table."""
    columns = accuracies(results)
    lines = [
        f"\naccuracy on {results.sizes['image']} validation images, corruptions averaged over "
        "severities"
    ]
    lines.append(f"{'':<28}" + "".join(f"{name:>9}" for name in columns))
    for model in results.model.values:
        cells = "".join(f"{float(values.sel(model=model)):>9.3f}" for values in columns.values())
        lines.append(f"{model:<28}{cells}")
    return "\n".join(lines)


def verdicts(results: xr.Dataset, classes: int) -> str:
    """Return lines on what the intervals say about the T-CNN against the CNN,
    and against each control.
    """
    lines, by_condition = [], accuracies(results)
    # The T-CNN is the last model.
    for baseline in results.model.values[:-1].tolist():
        lines.append(
            f"\nT-CNN against {baseline!r}, difference in accuracy with 95 % interval over images:"
        )
        for by in (None, "group", "attack"):
            differences = evaluation.improvement(results, baseline, by, relative=False).sel(
                model=TCNN
            )
            differences = (
                differences.expand_dims(at=["clean"])
                if by is None
                else differences.rename({by: "at"})
            )
            for label in differences["at"].values.tolist():
                difference = differences.sel(at=label)
                low, high = difference.interval.values
                verdict = side_of_zero(
                    (low, high), "T-CNN ahead", "T-CNN behind", "not distinguishable"
                )
                # Where both models guess, a difference between them says nothing about robustness.
                best = float(by_condition[label].sel(model=[baseline, TCNN]).max())
                verdict += " (both near chance)" if best < 1.5 / classes else ""
                lines.append(
                    f"  {label:<8} {float(difference.improvement):+.3f} [{low:+.3f}, {high:+.3f}]  "
                    f"{verdict}"
                )
    lines.append(
        "One training seed: the intervals are over images alone, and another training may differ "
        "by more."
    )
    return "\n".join(lines)


def check(results: xr.Dataset, chance: float) -> bool:
    """Return whether the models learned, and the strongest corruptions hurt more than the
    weakest.
    """
    has_learned = learned(
        "a model", float(results.clean_accuracy.min()), results.sizes["image"], chance
    )
    by_severity = results.accuracy.mean(["model", "corruption", "seed"])
    first, last = float(by_severity[0]), float(by_severity[-1])
    # With one severity there is no weaker corruption to compare with.
    if results.sizes["severity"] == 1:
        first = float(results.clean_accuracy.mean())
    grows = last < first
    verdict = "grows" if grows else "does NOT grow"
    print(f"check: damage {verdict} with severity: accuracy from {first:.3f} to {last:.3f}")
    return has_learned and grows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    perturbations = [
        # Few scenes are used, since fifteen corruptions at five severities take minutes.
        Option(
            "--images",
            "validation images to perturb, spread evenly (default: 150; all of --data)",
            from_least(2),
            150,
            small=24,
            data=None,
        ),
        replace(CORRUPTIONS_OPTION, small=FEW_CORRUPTIONS),
        severities_option([1, 2, 3, 4, 5], small=[1, 5]),
        Option(
            "--epsilon",
            "size of the attacks' perturbations, for pixels in [0, 1] (default: 1/255)",
            positive_number,
            1 / 255,
        ),
        Option(
            "--variant",
            "a further test set of ImageNet: imagenet-a, -r, -v2, -real or -c (may be repeated)",
            variant,
            only="data",
            nargs="append",
        ),
    ]
    groups = {
        **training_options("2 epochs, 4 corruptions, 2 severities, 20 seconds"),
        **control_options(),
        "perturbations": perturbations,
    }
    args = parse_options(__doc__, "robustness", arguments, groups, need_model)
    # A test set that is named twice is measured once.
    args.variant = [*dict.fromkeys(map(tuple, args.variant))]
    return args


def variant(text: str) -> tuple[str, str]:
    """Parse the name and the folder of a test set, as NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not folder or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER with a folder, got {text}")
    return name, folder


if __name__ == "__main__":
    sys.exit(ended(main))
