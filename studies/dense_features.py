"""Strokes of the digit that a linear classifier of single places finds,
by layer and epoch (PatchConvNet, Table 3).

    python studies/dense_features.py

Takes about 2 minutes on one CPU core.

The paper fine-tunes its trunks within a segmentation network. Here the trunk stays as
classification left it, and a linear classifier of each place's features has to tell the strokes of
the whole digit from background and from the fragments of other digits around it
(``tcnn_probe.representation.dense_probe``).

What one should see (dense_features.png): while the ResNet learns from labels alone, its first
stages come to find more of the strokes. The blocks of the PatchConvNet, all on one grid, find most
of them before training. A coarse grid cannot follow strokes: the short line is what a grid allows,
found by a classifier that is told the share of strokes in each cell. So the last stage of the
T-CNN, on twice the grid, finds far more than that of the ResNet; most of this gain is also that of
the ResNet at stride 1, which has the T-CNN's grid and no attention.

How: a small ResNet and a small PatchConvNet learn handwritten digits in cluttered scenes. The last
stage of the ResNet becomes gated positional self-attention (GPSA), or is set to stride 1, and both
are fine-tuned with one recipe. At each epoch the probe is fitted to scenes of the training digits
and judged on validation scenes.

Writes into results/:
dense_features.png     intersection over union (IoU) of the strokes: A by epoch and stage of the
                       ResNet, and of the last stage of its two successors; B by block of the
                       PatchConvNet; C at the end
dense_features.zarr    the numbers behind it: xarray.open_zarr

It ends by checking that the T-CNN learned, that its stages before attention begin as the CNN's, and
that the last stage finds more of the strokes on twice the grid. It is for the digits, whose masks
are known; docs/representation.md shows the same with your own trunk and masks.
"""

import argparse
import copy
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor, nn

import tcnn_probe
from common.data import probed_images
from common.figures import STYLE, add_letters
from common.models import small_patchconvnet
from common.option_table import training_options
from common.options import Option, digits_alone, from_least, parse_options
from common.output import ended, finish
from common.training import Study, begin
from common.verdicts import learned, with_interval
from tcnn_model import reparameterize, unstride
from tcnn_probe import evaluation
from tcnn_probe.plot import OKABE_ITO

CNN, TCNN, UNSTRIDED, PATCH = "ResNet", "T-CNN", "ResNet at stride 1", "PatchConvNet"
STAGES = 4
# The PatchConvNet is trained from scratch, which takes a higher rate than fine-tuning.
PATCH_LR = 2e-3
SAME = 1e-3  # difference in IoU of features that are equal up to rounding
COLORS = {
    CNN: OKABE_ITO["black"],
    TCNN: OKABE_ITO["vermillion"],
    UNSTRIDED: OKABE_ITO["sky blue"],
}
COLORS[PATCH] = OKABE_ITO["green"]
Scenes = tuple[Tensor, np.ndarray]


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN and the digits, and scenes to fit the probe to and to judge it on.
    study = begin("dense_features", args)
    cnn, (train, validation) = study.model, study.loaders
    fit_digits = copy.copy(train.dataset)
    fit_digits.fixed = True  # the same scene for a digit at each epoch
    scenes = [scenes_of(digits, args.images) for digits in (fit_digits, validation.dataset)]

    # Probe the CNN at each epoch of its training.
    by_model = {CNN: probe_epochs(study, cnn, "cnn", CNN, scenes)}

    # Convert it, or set it to stride 1, fine-tune both and probe them; train and probe a
    # PatchConvNet from scratch.
    torch.manual_seed(args.seed)
    tcnn, unstrided = reparameterize(cnn), unstride(cnn)
    patchconvnet = small_patchconvnet()
    by_model[TCNN] = probe_epochs(study, tcnn, "tcnn", TCNN, scenes)
    by_model[UNSTRIDED] = probe_epochs(study, unstrided, "unstrided", UNSTRIDED, scenes)
    recipe = {"epochs": args.patch_epochs, "lr": PATCH_LR}
    by_model[PATCH] = probe_epochs(study, patchconvnet, "patchconvnet", PATCH, scenes, **recipe)

    names = xr.Variable("model", list(by_model))
    scores = xr.concat(list(by_model.values()), names, join="outer")
    scores["images"] = len(validation.dataset)
    study.output.save(scores)
    study.output.show(draw(scores), table(scores))
    return finish(check(scores, study.chance), args)


def scenes_of(dataset: Any, count: int) -> Scenes:
    """Return ``count`` scenes, (N, 1, H, W), and the strokes of their digits, (N, H, W)."""
    probed = probed_images(dataset, count)
    assert probed.masks is not None
    return probed.images, probed.masks.numpy()


def probe_epochs(
    study: Study, model: nn.Module, file: str, title: str, scenes: list[Scenes], **recipe: Any
) -> xr.Dataset:
    """Train a model and probe it at each epoch; a resumed run keeps the scores that it has."""

    def iou_of(maps: Iterable[list[np.ndarray]]) -> xr.Dataset:
        return xr.Dataset({"iou": (("stage", "image"), strokes(*maps, scenes))})

    train = partial(study.finetune, model, file, title, **recipe)
    if model is study.model:
        train = partial(study.train_cnn, file, title)
    _, scores = study.measure_epochs(
        train, file, lambda: iou_of(features(model, images) for images, _ in scenes)
    )
    # A classifier that is told the share of strokes in each cell does as well as any can on this
    # grid.
    grid_shares = [
        [of_grid(masks, maps) for maps in features(model, images)] for images, masks in scenes
    ]
    return scores.assign(ceiling=iou_of(grid_shares).iou).assign_coords(stage=range(1, STAGES + 1))


@torch.no_grad()
def features(model: nn.Module, images: Tensor) -> list[np.ndarray]:
    """Return the outputs of the last four stages or blocks, (N, C, h, w) each."""
    device = next(model.parameters()).device
    # timm's backbones share this method.
    outputs = model.eval().forward_intermediates(
        images.to(device), indices=STAGES, intermediates_only=True
    )
    return [maps.cpu().numpy() for maps in outputs]


def of_grid(masks: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """Return the share of strokes in each cell of a grid,
    (N, 1, h, w), which is all that a grid can tell.
    """
    return F.adaptive_avg_pool2d(
        torch.tensor(masks, dtype=torch.float64)[:, None], maps.shape[-2:]
    ).numpy()


def strokes(fit: list[np.ndarray], judged: list[np.ndarray], scenes: list[Scenes]) -> np.ndarray:
    """Return the intersection over union of the strokes, (stage, image)."""
    (_, fit_masks), (_, masks) = scenes
    probe = tcnn_probe.representation.dense_probe
    scores = [
        probe(x, masks, y, fit_masks, by_image=True) for x, y in zip(judged, fit, strict=True)
    ]
    # Class 0 is the background.
    return np.stack(scores)[..., 1]


@mpl.rc_context(STYLE)
def draw(scores: xr.Dataset) -> Figure:
    """Draw IoU by epoch, the ResNet's fine-tuning after its training, and by stage at the end."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    a, b, c = figure.subplots(1, 3, sharey=True, width_ratios=[1.5, 1, 1.3])
    mean = scores.iou.mean("image")
    colors = mpl.colormaps["viridis"](np.linspace(0, 0.85, STAGES))
    # In the figure the epochs of fine-tuning follow those of the CNN.
    trained = int(mean.sel(model=CNN).dropna("epoch", how="all").epoch[-1])
    for axes, name, part in ((a, CNN, "stage"), (b, PATCH, "block")):
        for color, stage in zip(colors, mean.stage.values, strict=True):
            curve = mean.sel(model=name, stage=stage).dropna("epoch")
            axes.plot(curve.epoch, curve, color=color, marker=".", label=f"{part} {stage}")
        axes.set(xlabel="epoch", title=name)
    for name, ls in ((TCNN, "-"), (UNSTRIDED, ":")):
        curve = mean.sel(model=name).isel(stage=-1).dropna("epoch")
        a.plot(
            trained + curve.epoch,
            curve,
            color=COLORS[name],
            ls=ls,
            marker=".",
            label=f"stage {STAGES}, {name}",
        )
    a.set(title="ResNet, then fine-tuned", ylabel="IoU of the digit's strokes")
    ends, ceilings = at_end(scores.iou), scores.ceiling.mean("image")
    for number, name in enumerate(scores.model.values):
        # Each of the four bars is a fifth of the distance of ticks wide; the tick is in their
        # middle.
        places = np.arange(STAGES) + (number - 1.5) * 0.2
        values = ends.sel(model=name)
        reach = abs(
            evaluation.mean_interval(values).transpose("bound", "stage") - values.mean("image")
        )
        c.bar(
            places,
            values.mean("image"),
            0.2,
            color=COLORS[name],
            label=name,
            yerr=reach,
            error_kw={"elinewidth": 0.8},
        )
        # All lines share one entry in the legend.
        allowed = {} if number else {"label": "what the grid allows"}
        c.hlines(
            ceilings.sel(model=name),
            places - 0.1,
            places + 0.1,
            color="k",
            lw=1.2,
            **allowed,
        )
    c.set_xticks(range(STAGES), [f"stage {stage}" for stage in scores.stage.values])
    c.set(title="at the end", ylim=(0, 1.25 * float(ceilings.max())))
    add_letters([a, b, c])
    for panel in (a, b, c):
        panel.legend(fontsize=7, ncols=2, loc="upper center")
    return figure


def at_end(values: xr.DataArray) -> xr.DataArray:
    """Return values after each model's own last epoch."""
    ends = [
        values.sel(model=name).dropna("epoch", how="all").isel(epoch=-1, drop=True)
        for name in values.model.values
    ]
    return xr.concat(ends, values.model)


def table(scores: xr.Dataset) -> str:
    """Return IoU by stage at the start and at the end,
    with the IoU that the grid allows, and intervals of gains.
    """
    ends, starts = at_end(scores.iou), scores.iou.isel(epoch=0)
    lines = [f"\nIoU of the digit's strokes; {scores.sizes['image']} scenes"]
    lines.append(
        f"{'':20}"
        + "".join(f"{f'stage {stage}':>24}" for stage in scores.stage.values)
        + "   accuracy"
    )
    for name in scores.model.values:
        columns = [
            part.sel(model=name).mean("image").values for part in (starts, ends, scores.ceiling)
        ]
        cells = "".join(
            f"{f'{start:.2f} -> {end:.2f} of {ceiling:.2f}':>24}"
            for start, end, ceiling in zip(*columns, strict=True)
        )
        lines.append(f"{name:20}{cells}{float(at_end(scores.top1).sel(model=name)):11.3f}")
    gains, last = ends - starts, ends.isel(stage=-1)
    differences = {
        f"{CNN}, gain of stage {stage}": gains.sel(model=CNN, stage=stage)
        for stage in scores.stage.values
    }
    differences[f"{PATCH}, gain of the last block"] = gains.sel(model=PATCH).isel(stage=-1)
    differences |= {
        f"last stage, {TCNN} less {stage}": last.sel(model=TCNN) - last.sel(model=stage)
        for stage in (CNN, UNSTRIDED)
    }
    lines.append("\nwith 95 % interval over scenes; gains are those of training:")
    lines += [f"  {words:44}{with_interval(values)}" for words, values in differences.items()]
    return "\n".join(lines)


def check(scores: xr.Dataset, chance: float) -> bool:
    """Return whether the T-CNN learned, its stages before attention begin as the CNN's,
    and a finer grid shows more.
    """
    ends, starts = at_end(scores.iou), scores.iou.isel(epoch=0)
    has_learned = learned(
        "the T-CNN",
        float(at_end(scores.top1).sel(model=TCNN)),
        int(scores.images),
        chance,
    )
    # All stages but the last lie before attention.
    apart = float(abs(ends.sel(model=CNN) - starts.sel(model=TCNN)).isel(stage=slice(-1)).max())
    verdict = "as the CNN's" if apart < SAME else "NOT as the CNN's"
    print(f"check: the T-CNN's stages before attention begin {verdict}: IoU apart by {apart:.4f}")
    # The ResNet at stride 1 has no attention, so that the grid alone is judged.
    gain = (ends.sel(model=UNSTRIDED) - ends.sel(model=CNN)).isel(stage=-1)
    low = float(evaluation.mean_interval(gain)[0])
    verdict = "more" if low > 0 else "NOT clearly more"
    print(
        f"check: on twice the grid the ResNet's last stage finds {verdict} of the strokes: "
        f"{with_interval(gain)}"
    )
    return bool(has_learned and apart < SAME and low > 0)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    probe = [
        Option("--patch-epochs", "epochs of training the PatchConvNet", from_least(2), 10, small=2),
        Option(
            "--images",
            "scenes to fit the probe to, and as many to judge it on",
            from_least(10),
            80,
            small=10,
        ),
    ]
    easier = {"img_size": 48, "clutter": 3, "cnn_epochs": 12, "epochs": 4}
    groups = {**training_options("2 epochs, 10 seconds", **easier), "probe": probe}
    return parse_options(
        __doc__,
        "dense_features",
        arguments,
        groups,
        digits_alone("docs/representation.md has your own"),
    )


if __name__ == "__main__":
    sys.exit(ended(main))
