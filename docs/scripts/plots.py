"""Draw docs/plots.png, for the first lines of docs/plots.md.

    python docs/scripts/plots.py

Takes ten seconds. Both panels are of the recording that comes with the package: the gates of a
Transformed CNN by epoch, and where the nine heads of its last layer look in a photograph,
scikit-learn's ``china.jpg``, at the last epoch.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

import tcnn_probe

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs/plots.png")
    options = parser.parse_args(arguments)
    example = tcnn_probe.load_example()
    gate = example["heads"].gate
    figure = plt.figure(figsize=(7, 5.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1, 1))
    tcnn_probe.plot.evolution(gate, top.subplots())
    maps = example["maps/9x8x8"].dataset.isel(epoch=-1, image=0)
    tcnn_probe.plot.attention_grid(
        maps.center_attention,
        query=(4, 4),
        gate=gate.isel(epoch=-1),
        col_wrap=5,
        figure=bottom,
    )
    figure.savefig(options.out, dpi=60)


if __name__ == "__main__":
    main()
