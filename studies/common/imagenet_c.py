"""Published images of ImageNet-C from disk,
for the study of robustness: decisions, Fig. 3 of the T-CNN paper, mCE.
"""

import argparse
from collections.abc import Mapping

import xarray as xr
from matplotlib.figure import Figure
from torch import nn

import tcnn_probe
from tcnn_probe import evaluation

__all__ = [
    "draw_imagenet_c",
    "imagenet_c_folders",
    "imagenet_c_report",
    "measure_imagenet_c",
]


def imagenet_c_folders(args: argparse.Namespace) -> list[str]:
    """Return the folder of ImageNet-C, if it was named."""
    return [folder for name, folder in args.variant if name == "imagenet-c"]


def measure_imagenet_c(
    models: Mapping[str, nn.Module],
    folder: str,
    normalization: tuple[tuple[float, ...], tuple[float, ...]],
    args: argparse.Namespace,
) -> xr.Dataset:
    """Classify the published images of ImageNet-C, at their own size of 224 x 224."""
    return evaluation.imagenet_c(
        models,
        folder,
        corruptions=args.corruptions,
        severities=args.severities,
        normalization=normalization,
        batch_size=args.batch_size,
        workers=args.workers,
        device=args.device,
    )


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
