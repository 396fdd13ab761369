r"""Draw docs/anatomy.png: what the attention
of a pretrained vision transformer is made of, and of one that learns.

    python docs/scripts/anatomy.py imagenette2-160/val --weights FILE.safetensors \
        --run results/photographs

This takes two minutes on one core. ``--weights`` is a file with the weights of the model, or of a
larger one that has it as ``backbone``; without it timm loads its own (``pretrained=True``).
``--run`` is the training that ``heads_on_photographs.py`` describes, here with ``--epochs 8
--warmup-epochs 1``: half an hour, to an accuracy of 0.70. With ``--keep`` the recording of the
pretrained model stays beside the figure, with the ending ``.zarr``.

Left: the kernel of the convolution inside each head, a row for each layer. Above, the information
in the attention of each of these heads, in parts that add up; below, the same of a small vision
transformer by epoch, a panel for each of its four layers, from random weights.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import timm
import torch
import xarray as xr
from PIL import Image, ImageOps
from safetensors.torch import load_file
from timm.data import create_transform
from timm.layers import resample_abs_pos_embed
from torch import nn

import tcnn_probe

ROOT = Path(__file__).parents[2]
MODEL = "vit_small_patch14_dinov2"
SIDE = 224
BATCH = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photographs", type=Path, help="folder, searched below as well")
    parser.add_argument("--model", default=MODEL, help="timm's name")
    parser.add_argument("--weights", type=Path, help="file of weights (safetensors)")
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--run", type=Path, help="--out of a training, for the right")
    parser.add_argument("--keep", action="store_true", help="keep the recording")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/anatomy.png")
    options = parser.parse_args(arguments)
    model = pretrained(options.model, options.weights)
    store = options.out.with_suffix(".zarr") if options.keep else None
    tree = record(model, evenly(options.photographs, options.images), store)
    draw(tree, options.run).savefig(options.out, dpi=130)


def evenly(folder: Path, count: int) -> list[Path]:
    """Return photographs evenly over a folder, so that every class has its share."""
    paths = sorted(path for path in folder.rglob("*.*") if path.is_file())
    chosen = np.linspace(0, len(paths) - 1, min(count, len(paths)))
    return [paths[number] for number in chosen.astype(int)]


def pretrained(name: str, weights: Path | None) -> nn.Module:
    """Return a model of timm with its own weights, or with those of a file."""
    options = {"num_classes": 0, "img_size": SIDE}
    if weights is None:
        return timm.create_model(name, pretrained=True, **options).eval()
    model = timm.create_model(name, **options).eval()
    values = {
        key.removeprefix("backbone."): value.float()
        for key, value in load_file(weights).items()
        if not key.startswith(("decoder.", "head."))
    }
    values["pos_embed"] = resample_abs_pos_embed(
        values["pos_embed"], model.patch_embed.grid_size, antialias=False
    )
    model.load_state_dict(values)
    return model


@torch.no_grad()
def record(model: nn.Module, paths: Sequence[Path], store: Path | None) -> xr.DataTree:
    """Record the model over photographs, whose longer side becomes that of the model's input."""
    config = timm.data.resolve_model_data_config(model)
    normalize = create_transform(
        (3, SIDE, SIDE), mean=config["mean"], std=config["std"], crop_pct=1
    )
    grey = (128, 128, 128)
    probes = [*tcnn_probe.DEFAULT, "offset-kernel"]
    with tcnn_probe.record(model, store, mode="w", probes=probes) as recorder:
        for start in range(0, len(paths), BATCH):
            pictures = [
                ImageOps.pad(Image.open(path).convert("RGB"), (SIDE, SIDE), color=grey)
                for path in paths[start : start + BATCH]
            ]
            model(torch.stack([normalize(picture) for picture in pictures]))
        recorder.mark(epoch=0)
    return recorder.tree.load()


def draw(tree: xr.DataTree, run: Path | None) -> plt.Figure:
    """Draw kernels and parts of the recorded heads,
    and the parts of a training's heads by epoch.
    """
    heads = tree["heads"].dataset.isel(epoch=-1)
    kernels = tree["offset-kernel"].dataset.offset_kernel.isel(epoch=-1)
    figure = plt.figure(figsize=(12, 9.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(4.2, 7.8))
    tcnn_probe.plot.offset_kernels(kernels, left.subplots())
    above, below = right.subfigures(2, 1, height_ratios=(5, 4.4))
    panel = above.subplots()
    count, images = int(heads.selectivity.count()), int(heads.images.max())
    panel.set_title(f"{count} pretrained heads, over {images} photographs", loc="left")
    tcnn_probe.plot.anatomy(heads, panel)
    if run is not None:
        training = tcnn_probe.open(run / "recording.zarr")["heads"].dataset
        panels = below.subplots(1, training.sizes["layer"], sharey=True)
        highest = float(training.selectivity.mean("head").max())
        for number, panel in enumerate(panels):
            layer = training.isel(layer=[number])
            title = layer.layer.item().removesuffix(".attn")
            panel.set_title(title, loc="left", fontsize="small")
            tcnn_probe.plot.anatomy(layer, panel, legend=False)
            panel.set_ylim(0, 1.05 * highest)
            panel.label_outer()
        title = "a small vision transformer that learns, mean over the heads of each layer"
        below.suptitle(title, fontsize="medium")
    return figure


if __name__ == "__main__":
    main()
