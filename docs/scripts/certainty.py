r"""Print how well types of heads from few photographs agree with those from all (docs/heads.md).

    python docs/scripts/certainty.py imagenette2-160/val --weights FILE.safetensors

This takes five minutes on one core. The model and its weights are those of ``anatomy.py``. The
photographs of a sample are drawn at random from all, without replacement.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import anatomy
import numpy as np
import torch
import xarray as xr
from torch import nn

import tcnn_probe

SAMPLES = {8: 20, 16: 8, 32: 8, 64: 4}  # numbers of photographs, and of samples
PARTS = ["offset", "position", "key_content", "query_key_content"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("photographs", type=Path, help="folder, searched below as well")
    parser.add_argument("--model", default=anatomy.MODEL, help="timm's name")
    parser.add_argument("--weights", type=Path, help="file of weights (safetensors)")
    parser.add_argument("--images", type=int, default=160)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = anatomy.pretrained(options.model, options.weights)
    paths = anatomy.evenly(options.photographs, options.images)
    all_types, all_shares = types_and_shares(model, paths)
    generator = np.random.default_rng(0)
    for count, samples in SAMPLES.items():
        agreement, difference, uncertain = [], [], []
        for _ in range(samples):
            rows = np.sort(generator.permutation(len(paths))[:count])
            types, shares = types_and_shares(model, [paths[row] for row in rows])
            agreement.append(float((types == all_types).mean()))
            difference.append(float(abs(shares - all_shares).mean()))
            uncertain.append(float(types.uncertain.mean()))
        print(
            f"{count} photographs, {samples} samples: {np.mean(agreement):.3f} of the types agree "
            f"({min(agreement):.3f} to {max(agreement):.3f}), shares differ by "
            f"{np.mean(difference):.3f}, {np.mean(uncertain):.3f} are uncertain",
            flush=True,
        )


def types_and_shares(model: nn.Module, paths: Sequence[Path]) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the types of the heads, and the parts as shares of their selectivity."""
    heads = anatomy.record(model, paths, None)["heads"].dataset.isel(epoch=0)
    parts = heads[[f"{part}_information" for part in PARTS]].to_dataarray()
    return tcnn_probe.head_types(heads), parts / heads.selectivity


if __name__ == "__main__":
    main()
