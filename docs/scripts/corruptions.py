"""Draw every corruption at every severity as ``corruptions.png``,
and print the table of ``corruptions.md``.

python docs/scripts/corruptions.py                  # a few seconds; --size is the image's, --out
                                                    names another file
python docs/scripts/corruptions.py --milliseconds   # print the time of each corruption instead
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tcnn_probe.evaluation import CORRUPTIONS, corrupt

GAP, LEFT, TOP = 3, 22, 52  # pixels of the figure
SEVERITIES = (1, 2, 3, 4, 5)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=80, help="pixels along each side of the image")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "corruptions.png")
    parser.add_argument("--milliseconds", action="store_true")
    options = parser.parse_args(arguments)
    if options.milliseconds:
        print_milliseconds(photograph(options.size))
    else:
        draw(photograph(options.size)).save(options.out, optimize=True)
        print(table())


def table() -> str:
    """Return a Markdown table of names and parameters."""
    lines = ["| group | corruption | what it does | parameters at severities 1 to 5 | random |"]
    lines.append("|---|---|---|---|---|")
    for corruption in CORRUPTIONS.values():
        parameters = "; ".join(
            f"{name} {_values(values)}" for name, values in corruption.parameters.items()
        )
        cells = (
            corruption.group,
            f"`{corruption.name}`",
            corruption.description,
            parameters,
            corruption.random,
        )
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("``", "`"))
    return "\n".join(lines)


def _values(values: tuple[float, ...]) -> str:
    return (
        f"{values[0]:g}" if len(set(values)) == 1 else ", ".join(f"{value:g}" for value in values)
    )


def photograph(size: int) -> NDArray[Any]:
    """Return the middle of scikit-learn's sample image china.jpg, shape (size, size, 3)."""
    from sklearn.datasets import load_sample_image

    middle = Image.fromarray(load_sample_image("china.jpg")).crop((130, 0, 557, 427))
    return np.asarray(middle.resize((size, size), Image.Resampling.LANCZOS))


def draw(image: NDArray[Any]) -> Image.Image:
    """Draw a column for each corruption and a row for each severity; images are not resized."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size, step = len(image), len(image) + GAP
    width, height = LEFT + step * len(CORRUPTIONS), TOP + step * len(SEVERITIES)
    figure = Figure(figsize=(width / 100, height / 100), dpi=100, facecolor="white")
    groups: dict[str, list[int]] = {}
    for column, corruption in enumerate(CORRUPTIONS.values()):
        left = LEFT + column * step
        groups.setdefault(corruption.group, []).append(left)
        name = corruption.name.replace("_", "\n")
        figure.text(
            (left + size / 2) / width,
            1 - 33 / height,
            name,
            ha="center",
            va="center",
            fontsize=7.5,
        )
        for row, severity in enumerate(SEVERITIES):
            below = height - TOP - row * step - size
            figure.figimage(corrupt(image, corruption.name, severity), left, below, origin="upper")
    for name, lefts in groups.items():
        middle = (lefts[0] + lefts[-1] + size) / 2 / width
        figure.text(
            middle,
            1 - 9 / height,
            name,
            ha="center",
            va="center",
            fontsize=10,
            weight="bold",
        )
    for row, severity in enumerate(SEVERITIES):
        level = 1 - (TOP + row * step + size / 2) / height
        figure.text(
            LEFT / 2 / width,
            level,
            str(severity),
            ha="center",
            va="center",
            fontsize=10,
        )
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    return Image.fromarray(np.ascontiguousarray(pixels)).quantize(160, dither=Image.Dither.NONE)


def print_milliseconds(image: NDArray[Any]) -> None:
    """Print the mean time of each corruption over the severities."""
    for name in CORRUPTIONS:
        corrupt(image, name, 1)  # fills caches that later calls reuse
        start = time.perf_counter()
        for severity in SEVERITIES:
            corrupt(image, name, severity)
        print(f"{name:18} {(time.perf_counter() - start) / len(SEVERITIES) * 1e3:6.1f} ms")


if __name__ == "__main__":
    main()
