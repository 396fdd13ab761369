"""Draw docs/heads_on_photographs.png: where heads of a vision transformer look in two photographs.

    tcnn-finetune vit_tiny_r_s16_p8_224 --data imagenette2-160 --img-size 96 \
        --model-options patch_size=2 embed_dim=128 depth=4 num_heads=4 --drop-path 0 \
        --epochs 16 --warmup-epochs 2 --batch-size 64 --lr 1e-3 --out results/photographs
    python docs/scripts/heads_on_photographs.py results/photographs

The first command trains a small vision transformer on Imagenette (fast.ai's ten classes of
ImageNet) from random weights, and records its heads at every epoch; it takes an hour on one core.
The figure shows the attention of the class token in scikit-learn's two sample photographs, which
the model was not trained on, and the content information of the class token's attention over the
validation images, by epoch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from PIL import Image
from sklearn.datasets import load_sample_image
from what_heads_see import COLORS, draw_information

import tcnn_probe
from tcnn_model.training.config import Config, read_toml
from tcnn_model.training.weights import create_from_weights

ROOT = Path(__file__).parents[2]
PHOTOGRAPHS = ("china.jpg", "flower.jpg")
HEADS = [
    ("blocks.0.attn", 0),
    ("blocks.1.attn", 1),
    ("blocks.2.attn", 2),
    ("blocks.3.attn", 1),
]
"""A head of each layer, chosen for what it shows."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="--out of the training")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/heads_on_photographs.png")
    options = parser.parse_args(arguments)
    maps = class_attention(options.run)
    heads = tcnn_probe.open(options.run / "recording.zarr")["heads"].dataset

    figure = plt.figure(figsize=(11, 3.5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(7, 4))
    panels = left.subplots(len(PHOTOGRAPHS), 1 + len(HEADS))
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
    for row, photograph in zip(panels, maps.input, strict=True):
        row[0].imshow(as_picture(photograph))
    panels[0, 0].set_title("image")
    attention = next(iter(maps.children.values())).dataset.class_attention
    for column, (layer, head) in enumerate(HEADS, start=1):
        title = f"{layer.removesuffix('.attn')}\nhead {head}"
        panels[0, column].set_title(title, color=COLORS[column - 1])
        for image, panel in enumerate(panels[:, column]):
            head_map = attention.isel(image=image).sel(layer=layer, head=head)
            draw_attention(panel, maps.input[image], head_map)
    axes = right.subplots()
    draw_information(axes, heads, HEADS)
    axes.xaxis.get_major_locator().set_params(integer=True)
    # The title and label of the other figure are too long for this one.
    axes.set(title="dependence on the image, all heads", ylabel="content information (nat)")
    figure.savefig(options.out, dpi=100)


def class_attention(run: Path) -> xr.DataTree:
    """Return the attention of the class token in the photographs,
    with the best weights of a training.
    """
    config = Config(**read_toml(run / "config.toml"))
    model = create_from_weights(
        config.model,
        str(run / "best.pt"),
        None,
        img_size=config.img_size,
        **(config.model_options or {}),
    )
    pictures = [Image.fromarray(load_sample_image(name)) for name in PHOTOGRAPHS]
    return tcnn_probe.attention_maps(model.eval(), pictures, queries="class")


def as_picture(image: xr.DataArray) -> np.ndarray:
    """Return a normalised image, (C, H, W), as a picture with values from 0 to 1, (H, W, C)."""
    values = image.values.transpose(1, 2, 0)
    return (values - values.min()) / (values.max() - values.min())


def draw_attention(panel: Axes, image: xr.DataArray, attention: xr.DataArray) -> None:
    """Draw a map over the image in grey; the more attention, the more opaque."""
    height, width = image.shape[1:]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    panel.imshow(as_picture(image).mean(-1), cmap="gray", alpha=0.7, extent=extent)
    share = attention.values / attention.values.max()
    panel.imshow(share, cmap="inferno", vmin=0, alpha=0.25 + 0.7 * share, extent=extent)


if __name__ == "__main__":
    main()
