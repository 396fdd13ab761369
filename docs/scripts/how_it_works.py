"""Draw how_it_works.png, the way from a forward to an epoch on disk:
``python docs/scripts/how_it_works.py``.
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

# Name, place of the centre (x, y), title, and the file in which to read on.
BOXES: dict[str, tuple[float, float, str, str]] = {
    "forward": (1.5, 3.0, "a forward of the model", "torch, timm, transformers, ..."),
    "follow": (5.1, 3.0, "which module runs,\nwhat it asks torch for", "hooks/"),
    "event": (8.9, 3.0, "Attention\nsoftmax, or gated", "attention/stream.py"),
    "records": (8.9, 5.2, "what is known of the layer", "architectures/"),
    "maps": (13.3, 4.6, "maps of this forward", "attention/attention_maps.py"),
    "sums": (13.3, 3.0, "probes measure,\nsums over images", "probes/, recording/"),
    "edits": (
        8.9,
        0.7,
        "HeadEdit\nzero, mean, other attention",
        "attention/head_edit.py",
    ),
    "epoch": (13.3, 0.7, "mark: an epoch on disk", "storage/marks.py"),
}
# Start, side of the start, end, side of the end, and label. Sides are (right, up) of the centre.
ARROWS = [
    ("forward", (1, 0), "follow", (-1, 0), ""),
    ("follow", (1, 0), "event", (-1, 0), ""),
    ("records", (0, -1), "event", (0, 1), ""),
    ("event", (1, 0.5), "maps", (-1, 0), ""),
    ("event", (1, 0), "sums", (-1, 0), "shown to\nlisteners"),
    ("event", (0, -1), "edits", (0, 1), "who may answer"),
    ("edits", (-1, 0), "forward", (0, -1), "stream, ablate()"),
    ("sums", (0, -1), "epoch", (0, 1), ""),
]
WIDTH, HEIGHT = 3.0, 1.05


def main() -> None:
    """Draw the picture, which takes a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "how_it_works.png")
    args = parser.parse_args()
    mpl.use("Agg")
    figure, axes = plt.subplots(figsize=(11, 4.6))
    axes.set(xlim=(-0.2, 15), ylim=(0, 5.9), aspect="equal")
    axes.axis("off")
    for start, leaves, end, reaches, label in ARROWS:
        draw_arrow(axes, side_of(start, leaves), side_of(end, reaches), label)
    for x, y, title, files in BOXES.values():
        draw_box(axes, x, y, title, files)
    figure.savefig(args.out, dpi=110, bbox_inches="tight")
    print(f"wrote {args.out}")


def draw_box(axes: Axes, x: float, y: float, title: str, files: str) -> None:
    """Draw a box with a title and the file to read."""
    corner = (x - WIDTH / 2, y - HEIGHT / 2)
    style = "round,pad=0.05,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch(
            corner,
            WIDTH,
            HEIGHT,
            boxstyle=style,
            facecolor="#eef3fa",
            edgecolor="#4a6a94",
        )
    )
    axes.text(x, y + 0.14, title, ha="center", va="center", fontsize=8.5)
    axes.text(
        x,
        y - 0.38,
        files,
        ha="center",
        va="center",
        fontsize=6.3,
        color="#555555",
        family="monospace",
    )


def side_of(name: str, side: tuple[float, float]) -> tuple[float, float]:
    """Return the middle of a side of a box."""
    x, y, *_ = BOXES[name]
    return x + side[0] * (WIDTH / 2 + 0.08), y + side[1] * (HEIGHT / 2 + 0.08)


def draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], label: str
) -> None:
    """Draw an arrow and its label."""
    is_bent = start[0] - end[0] > WIDTH  # back to the forward, around the boxes between
    style = "angle,angleA=180,angleB=90,rad=12" if is_bent else "arc3"
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=12,
            connectionstyle=style,
            color="#4a6a94",
        )
    )
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    if is_bent:
        axes.text(x, start[1] + 0.12, label, ha="center", fontsize=8, style="italic")
    elif start[0] == end[0]:
        axes.text(x + 0.12, y, label, va="center", fontsize=8, style="italic")
    else:
        axes.text(x, y - 0.1, label, ha="center", va="top", fontsize=8, style="italic")


if __name__ == "__main__":
    main()
