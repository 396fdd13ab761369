r"""Attention maps of the heads of GPSA layers, from one query pixel (T-CNN paper, Figs. 5 and 8).

    python studies/attention_maps.py

Takes about a minute on one CPU core. The weights of every epoch are kept, so that the maps of any
of them, for any query pixel and any images, can be drawn again in seconds, without training:

    python studies/attention_maps.py --resume --epoch 0 6 --query 20,40
    python studies/attention_maps.py --resume --image my_digit.png another.jpg

What one should see (attention_maps.png): at epoch 0 each head looks most at the pixel of its own
kernel tap, next to the query. At the end the heads of the first layer still do, with gates near 1.
The lower a gate is, the fainter is the tap, and the more evenly the head looks at the rest of the
image. The study prints how far maps differ between two images: after so short a training not at all
in the first layers, and by a small share of the attention in the last.

How: a small ResNet learns handwritten digits in cluttered scenes; its last stage is reparameterized
as gated positional self-attention (GPSA) and fine-tuned.

Writes into results/:
attention_maps.png              for each epoch and image that was asked for: the image with its
                                query pixel boxed, and a row of maps for each layer, one for each
                                head, sigma(lambda) above it
attention_maps.zarr             what is drawn: maps (epoch, image, layer, head, y, x), the share of
                                attention that falls on zero padding (``outside``; with it a map
                                sums to one), gates, and the query
attention_maps_recording.zarr   the recording of every epoch by tcnn_probe
attention_maps_checkpoints/     weights of every epoch, tcnn-0000.pt and so on, each as large as the
                                model

It ends by checking that every head peaks at its tap at epoch 0, and that at the end the maps of the
half of the heads with lower gates have fainter peaks than those of the other half.

On your own model and images, as the papers did on ImageNet with a GPU:

    python studies/attention_maps.py --model resnetrs50 --pretrained --data path/to/imagenet \
        --img-size 224 --epochs 50 --batch-size 1024 --drop-path 0.1 --device cuda --amp \
        --workers 16 --out results/imagenet
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import tcnn_probe
from common.data import probed_images
from common.digits import MEAN, STD, ClutteredDigits
from common.option_table import training_options
from common.options import Option, from_least, image_file, need_model, parse_options
from common.output import InputError, ended, finish
from common.training import Study, begin
from tcnn_model import GPSA, gpsa_layers, reparameterize
from tcnn_model.pictures import read_picture

COLUMNS = 13  # heads beside each other


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)

    # Load the CNN, the digits, and the images whose attention is drawn.
    study = begin("attention_maps", args, later=("epoch", "query", "image", "images"))
    images, names = open_or_pick_images(args, study)

    # Train the CNN, convert it and fine-tune it, unless that is done: the weights of every epoch
    # are kept.
    if not weights_file(study, args.epochs).exists():
        study.train_cnn()
        torch.manual_seed(args.seed)  # for the new queries and keys
        tcnn = reparameterize(study.model)
        study.record(
            tcnn,
            study.output.beside("_recording.zarr"),
            "tcnn",
            "the T-CNN",
            after_epoch=lambda result: save_weights(tcnn, weights_file(study, result.epoch)),
        )

    # Look through the heads of the epochs that are asked for; the check needs the first and the
    # last.
    tcnn = reparameterize(study.model).to(args.device)
    by_epoch = []
    for epoch in sorted({0, *args.epoch, args.epochs}):
        file = weights_file(study, epoch)
        weights = torch.load(file, map_location=args.device, weights_only=True)
        tcnn.load_state_dict(weights)
        by_epoch.append(maps_of(tcnn, images, args.query).expand_dims(epoch=[epoch]))
    maps = describe(xr.concat(by_epoch, "epoch"), args.query, names)

    study.output.save(maps)
    figure = draw(maps, images, args.query, args.epoch)
    study.output.show(figure, head_table(maps), dpi=150)
    return finish(check(maps), args)


def weights_file(study: Study, epoch: int) -> Path:
    """Return the file of the weights of an epoch."""
    return study.output.checkpoints / f"tcnn-{epoch:04d}.pt"


def save_weights(model: nn.Module, file: Path) -> None:
    """Write the weights atomically, unless their file exists."""
    if not file.exists():
        # A run may be killed while it writes.
        partial = file.with_suffix(".partial")
        torch.save(model.state_dict(), partial)
        os.replace(partial, file)


def open_or_pick_images(args: argparse.Namespace, study: Study) -> tuple[Tensor, list[str]]:
    """Return the images whose attention is drawn,
    and their names: the user's files, or validation images.
    """
    dataset = study.validation
    if args.image:
        names = [Path(file).name for file in args.image]
        return open_images(args.image, dataset, args.img_size), names
    probed = probed_images(dataset, args.images)
    names = [
        f"validation image {number}, class {probed.classes[int(label)]}"
        for number, label in zip(probed.numbers, probed.labels, strict=True)
    ]
    return probed.images, names


def describe(maps: xr.Dataset, query: tuple[int, int], names: list[str]) -> xr.Dataset:
    """Add units, descriptions and the names of the images."""
    about = {
        "attention": ("1", "A_ij of the query over the real keys (T-CNN Eq. 7)"),
        "outside": ("1", "attention on zero padding; with it a map sums to one"),
        "peak_y": (
            "pixel",
            "the key on the image with the most attention, relative to the query",
        ),
        "peak_x": (
            "pixel",
            "the key on the image with the most attention, relative to the query",
        ),
        "gate": ("1", "sigma(lambda), share of positional attention"),
        "center_y": (
            "pixel",
            "Delta_y of the positional attention, relative to the query",
        ),
        "center_x": (
            "pixel",
            "Delta_x of the positional attention, relative to the query",
        ),
        "query_y": ("pixel", "position of the query in the layer's map"),
        "query_x": ("pixel", "position of the query in the layer's map"),
    }
    for name, (units, description) in about.items():
        maps[name].attrs = {"units": units, "description": description}
    maps = maps.assign_coords(name=("image", np.array(names, dtype=object)))
    return maps.assign_attrs(query_y=query[0], query_x=query[1], query="of the images, in pixels")


def draw(maps: xr.Dataset, images: Tensor, query: tuple[int, int], epochs: list[int]) -> Figure:
    """Draw one grid of maps for each epoch and image."""
    blocks = [(epoch, image) for epoch in epochs for image in range(len(images))]
    # Layers with many heads take several lines.
    lines = -(-maps.sizes["head"] // COLUMNS)
    rows = maps.sizes["layer"] * lines
    columns = -(-maps.sizes["head"] // lines)
    figure = Figure(
        figsize=(1.1 * columns + 3.2, (1.3 * max(rows, 2) + 0.8) * len(blocks)),
        layout="constrained",
    )
    parts = np.atleast_1d(figure.subfigures(len(blocks)))
    for part, (epoch, image) in zip(parts, blocks, strict=True):
        shown = maps.sel(epoch=epoch).isel(image=image)
        title = f"epoch {epoch}, {shown.name.item()}"
        values = shown.set_coords(["query_y", "query_x"]).attention
        options = {
            "query": query,
            "gate": shown.gate,
            "col_wrap": COLUMNS,
            "title": title,
            "figure": part,
        }
        tcnn_probe.plot.attention_grid(values, image=images[image], **options)
    return figure


def differences_between_images(maps: xr.Dataset) -> xr.DataArray:
    """Return the total variation distance of a head's maps of two images,
    mean over pairs of images, (layer, head).
    """
    last = maps.attention.isel(epoch=-1)
    pairs = [(i, j) for i in range(last.sizes["image"]) for j in range(i)]
    moved = [abs(last.isel(image=i) - last.isel(image=j)).sum(["y", "x"]) / 2 for i, j in pairs]
    return sum(moved) / len(pairs)


def peaks(maps: xr.Dataset) -> xr.DataArray:
    """Return the largest value of each head's map at the end, mean over images; (layer, head)."""
    return maps.attention.isel(epoch=-1).max(["y", "x"]).mean("image")


def head_table(maps: xr.Dataset) -> str:
    """Return gates at the end, peaks of the maps and,
    with several images, how far maps differ, as a table.
    """
    last = maps.isel(epoch=-1)
    parts = {"gate": last.gate, "peak": peaks(maps)}
    # One image has no other image to differ from.
    if maps.sizes["image"] > 1:
        parts["differs"] = differences_between_images(maps)
    width = max(len(str(name)) for name in last.layer.values)
    lines = [
        f"\nafter epoch {int(last.epoch)}: gates, peaks of the maps, and how far maps differ "
        "between images (0 to 1)"
    ]
    for layer in last.layer.values:
        for name, values in parts.items():
            heads = " ".join(
                f"{value:5.3f}" for value in values.sel(layer=layer).values if value == value
            )
            lines.append(f"{layer:<{width}}  {name:8} {heads}")
    return "\n".join(lines)


def check(maps: xr.Dataset) -> bool:
    """Return whether heads start at their taps,
    and those with lower gates end with fainter peaks.
    """
    start = maps.isel(epoch=0)
    far = np.fmax(abs(start.peak_y - start.center_y), abs(start.peak_x - start.center_x))
    # Taps lie on whole pixels, so a peak more than half a pixel away is not at the head's tap. Taps
    # on zero padding are not in the maps.
    count = int(((far > 0.5) & tap_on_image(start)).any("image").sum())
    heads = int(start.gate.notnull().sum())
    verdict = (
        "every head looks most at its tap"
        if count == 0
        else f"{count} of {heads} heads do NOT look at their tap"
    )
    print(f"check: at epoch 0 {verdict}")
    gate, peak = (part.values.ravel() for part in (maps.gate.isel(epoch=-1), peaks(maps)))
    # Layers with fewer heads have NaN.
    exists = np.isfinite(gate)
    order = gate[exists].argsort()
    # Halves are compared, not types, since so short a training leaves few gates low enough for a
    # content head.
    low, high = (peak[exists][half].mean() for half in np.array_split(order, 2))
    fainter = low < high
    verdict = "have fainter peaks" if fainter else "do NOT have fainter peaks"
    print(
        f"check: maps of the half of the heads with lower gates {verdict}: "
        f"{low:.3f} on average, those of the other half {high:.3f}"
    )
    return bool(count == 0 and fainter)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; the digits and the user's own images have different defaults."""
    maps = [
        Option(
            "--epoch",
            "epochs to draw; 0 is before fine-tuning (default: the last)",
            from_least(0),
            lambda args: [args.epochs],
            nargs="+",
        ),
        Option(
            "--query",
            "pixel of the images whose attention is drawn (default: the middle)",
            pixel,
            lambda args: (args.img_size // 2,) * 2,
        ),
        Option(
            "--image",
            "your own images (default: some validation images)",
            image_file,
            nargs="+",
        ),
        Option("--images", "number of validation images", from_least(1), 2),
    ]
    groups = {
        **training_options("2 epochs, 10 seconds"),
        "maps; these may change with --resume": maps,
    }
    args = parse_options(__doc__, "attention_maps", arguments, groups, need_model)
    if wrong := [epoch for epoch in args.epoch if not 0 <= epoch <= args.epochs]:
        raise InputError(
            f"--epoch: expected 0 to {args.epochs}, the epochs of fine-tuning, got {wrong[0]}"
        )
    if not all(0 <= at < args.img_size for at in args.query):
        raise InputError(
            f"--query: expected a pixel inside {args.img_size} x {args.img_size}, got {args.query}"
        )
    return args


def pixel(text: str) -> tuple[int, int]:
    """Parse two integers, as Y,X."""
    y, x = text.split(",")
    return int(y), int(x)


def maps_of(model: nn.Module, images: Tensor, query: tuple[int, int]) -> xr.Dataset:
    """Return the attention of every head of every GPSA layer for the query at a pixel of the input.

    Pixel y of H lies in row ``y * rows // H`` of a layer's queries. Keys on zero padding are not in
    the maps. Where layers differ in heads or in size, missing entries are NaN.

    Args:
        model: Model.
        images: Images of shape (B, C, H, W), as the model takes them.
        query: Pixel (y, x) of the images.

    Returns:
        ``attention`` (image, layer, head, y, x); ``outside`` (image, layer, head), the attention on
        padding; ``peak_y`` and ``peak_x`` (image, layer, head), the position relative to the query
        of the key on the image with the most attention; ``gate``, ``center_y`` and ``center_x``
        (layer, head); ``query_y`` and ``query_x`` (layer), the position of the query in the map.
    """
    layers = gpsa_layers(model)
    tree = tcnn_probe.attention_maps(model, images, progress=False)
    by_layer = {
        name: of_layer(layers[name], grid.dataset.sel(layer=name), query, images.shape[2:])
        for grid in tree.children.values()
        for name in grid.layer.values
    }
    names = xr.Variable("layer", np.array(list(layers), dtype=object))
    maps = xr.concat([by_layer[name] for name in layers], names, join="outer")
    return maps.transpose("image", "layer", "head", "y", "x")


def of_layer(
    layer: GPSA, maps: xr.Dataset, query: tuple[int, int], size: Sequence[int]
) -> xr.Dataset:
    """Return the dataset of :func:`maps_of` for one layer.

    Args:
        layer: Layer.
        maps: Its ``attention`` (image, head, query_y, query_x, y, x) and ``gate``.
        query: Pixel (y, x) of the images.
        size: Height and width of the images.
    """
    axes = dict(zip("yx", layer.axes(maps.sizes["y"], maps.sizes["x"]), strict=True))
    # Row and column of the query whose cell of the image contains the pixel.
    cells = {
        f"query_{name}": pixel * axes[name].queries // length
        for name, pixel, length in zip("yx", query, size, strict=True)
    }
    attention = maps.attention.isel(cells).astype(float)
    peak = attention.argmax(["y", "x"])
    center = dict(zip("yx", layer.center.detach().cpu().double().T.numpy(), strict=True))
    parts = {"attention": attention, "outside": 1 - attention.sum(["y", "x"]), "gate": maps.gate}
    for name, axis in axes.items():
        # Position of the query among the keys, from which peaks and centres of heads are counted.
        place = axis.first_query + cells[f"query_{name}"] * axis.stride
        parts |= {f"query_{name}": place, f"center_{name}": ("head", center[name])}
        parts[f"peak_{name}"] = (peak[name] - place).astype(float)
    coords = {name: range(maps.sizes[name]) for name in ("image", "head", "y", "x")}
    return xr.Dataset(parts).reset_coords(drop=True).assign_coords(coords)


def tap_on_image(maps: xr.Dataset) -> xr.DataArray:
    """Return whether the centre of a head lies on the image, for this query; (layer, head)."""
    exists = maps.attention.isel(image=0).notnull()
    height, width = exists.any("x").sum("y"), exists.any("y").sum("x")
    tap_y, tap_x = maps.query_y + maps.center_y, maps.query_x + maps.center_x
    return (tap_y >= 0) & (tap_y < height) & (tap_x >= 0) & (tap_x < width)


def open_images(files: Sequence[str], dataset: Any, size: int) -> Tensor:
    """Return the images of files, (B, C, H, W),
    prepared in the same way as those of the validation set.

    Raises:
        OSError: A file is missing, or is not an image.
    """
    opened = [read_picture(file) for file in files]
    if not isinstance(dataset, ClutteredDigits):
        return torch.stack([dataset.transform(image) for image in opened])
    pixels = [
        np.asarray(
            image.convert("L").resize((size, size), Image.Resampling.BILINEAR),
            dtype=np.float32,
        )
        for image in opened
    ]
    return (torch.from_numpy(np.stack(pixels))[:, None] / 255 - MEAN) / STD


if __name__ == "__main__":
    sys.exit(ended(main))
