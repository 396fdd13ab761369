"""Small models with a token for each class, with their attention and scores by brute force."""

from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from tcnn_model.models.patchconvnet import PatchConvNet
from tests.tcnn_probe.attention.bruteforce import attention_of
from tests.tcnn_probe.attention.sharpen import sharpen

__all__ = ["CLASSES", "LAYER", "classes_of", "network", "pictures", "truth"]

CLASSES, LAYER = 11, "pool.block.attn"


def network(classes: int = CLASSES, seed: int = 0, **options: Any) -> PatchConvNet:
    """Return a model of 3 x 5 patches, with maps
    and scores that differ between classes and images.
    """
    model = PatchConvNet(24, 1, classes, **{"per_class": True, "init_values": 1.0} | options)
    # Initial queries give maps that are nearly uniform, and that would agree with those of any
    # class.
    return sharpen(model, gain=3.0, seed=seed)


# Images have 3 x 5 cells of 16 pixels, the last of which are incomplete.
def pictures(count: int = 7, size: tuple[int, int] = (41, 79)) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))


def truth(model: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Compute maps (B, K, N) of all classes and scores (B, K) by brute force in float64."""
    (reference,) = attention_of(model, x)
    with torch.no_grad():
        return reference.weights[:, 0].numpy(), model.double()(x.double()).numpy()


def classes_of(tree: xr.DataTree, shape: str = "3x5") -> xr.Dataset:
    return tree[f"maps/classes/{shape}"].to_dataset().sel(layer=LAYER)
