"""Draw docs/what_heads_see.png: where heads of a vision transformer look,
and how far the image decides it by epoch.

    python docs/scripts/what_heads_see.py

This takes ten seconds. All data are in the recording that ``tcnn_probe.load_example("vit")`` opens,
of a vision transformer that learned scikit-learn's digits: the attention of the class token in
three digits that it was not trained on, and the content information of its attention over all 360
validation digits, in all heads and at each recorded epoch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import xarray as xr
from matplotlib.axes import Axes
from sklearn.datasets import load_digits

import tcnn_probe
from tcnn_probe.plot import OKABE_ITO

ROOT = Path(__file__).parents[2]
HEADS = {
    "blocks.0.attn": (1, 3),
    "blocks.2.attn": (0, 2),
}
"""Two heads of the first layer, whose tokens are single patches, and two of a deeper one."""
SIDE = 8  # pixels of a digit
COLORS = [OKABE_ITO[name] for name in ("blue", "orange", "green", "purple")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/what_heads_see.png")
    options = parser.parse_args(arguments)
    example = tcnn_probe.load_example("vit")
    digits = load_digits().images[example.attrs["digits"]]
    maps = example["maps/4x4x4"].dataset.class_attention.isel(epoch=-1)
    heads = [(layer, head) for layer, numbers in HEADS.items() for head in numbers]
    figure = plt.figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(6.2, 4.8))
    panels = left.subplots(len(digits), 1 + len(heads))
    for row, digit in zip(panels, digits, strict=True):
        row[0].imshow(digit, cmap="gray_r")
    panels[0, 0].set_title("image")
    for column, (layer, head) in enumerate(heads, start=1):
        panels[0, column].set_title(f"{layer}\nhead {head}", color=COLORS[column - 1])
        for image, digit in enumerate(digits):
            draw_attention(panels[image, column], digit, maps.sel(layer=layer)[image, head])
    for panel in panels.flat:
        panel.set(xticks=[], yticks=[])
    draw_information(right.subplots(), example["heads"].dataset, heads)
    figure.savefig(options.out, dpi=130)


def draw_attention(panel: Axes, digit: object, attention: xr.DataArray) -> None:
    """Draw a 4 x 4 map, and over it the outline of the dark pixels of the digit."""
    extent = (-0.5, SIDE - 0.5, SIDE - 0.5, -0.5)  # the map covers the digit's pixels
    panel.imshow(attention, cmap="viridis", vmin=0, extent=extent)
    panel.contour(digit, levels=[6], colors="white", linewidths=1.2)


def draw_information(axes: Axes, heads: xr.Dataset, chosen: list[tuple[str, int]]) -> None:
    """Draw the class token's content information in all heads in grey,
    and in the chosen ones in colour.
    """
    information = heads.class_content_information
    for layer in heads.layer.values:
        axes.plot(heads.epoch, information.sel(layer=layer), color="0.85", lw=0.8)
    for (layer, head), color in zip(chosen, COLORS, strict=True):
        curve = information.sel(layer=layer, head=head)
        axes.plot(heads.epoch, curve, color=color, lw=2)
    axes.set_xlabel("epoch")
    axes.set_ylabel("content information of the class token (nat)")
    axes.set_title("how much the image decides where a head looks")


if __name__ == "__main__":
    main()
