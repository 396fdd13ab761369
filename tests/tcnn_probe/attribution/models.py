"""Models with known attributions, and slow computations to compare with."""

import numpy as np
import timm
import torch
from torch import Tensor, nn

import tcnn_model.models  # noqa: F401 (registers patchconvnet_* with timm)
from tests.tcnn_probe.attention.sharpen import sharpen

SIZE = (24, 40)  # 3 x 5 patches of 8 x 8
CONVOLVED = (48, 80)  # 3 x 5 patches of 16 x 16
SMALL = {
    "img_size": SIZE,
    "patch_size": 8,
    "embed_dim": 24,
    "num_heads": 3,
    "num_classes": 5,
}


class Linear(nn.Module):
    """Linear model score_k = sum w_k x + b_k of images (B, 2, 7, 11)."""

    def __init__(self, classes: int = 3, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(classes, 2, 7, 11, generator=generator, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(classes, generator=generator, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bcyx,kcyx->bk", x, self.weight) + self.bias


class OneBlock(nn.Module):
    """Model of (B, 2, 12, 20) that sees only rows 3 to 7,
    columns 10 to 16: class 1 if they are bright, else 0.
    """

    rows, columns = slice(3, 8), slice(10, 17)

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(2, 1, 1, bias=False)
        nn.init.constant_(self.features.weight, 0.5)
        # Like most ResNets, it works in place, and overwrites what a method may still need.
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        brightness = self.act(self.features(x))[:, 0, self.rows, self.columns].mean((1, 2))
        # Brightness is about 1 in :func:`bright`, so that class 1 scores 4 higher; in a black image
        # class 0 does.
        return torch.stack([torch.zeros_like(brightness), 8 * brightness - 4], 1)

    def mask(self, images: int) -> Tensor:
        mask = torch.zeros(images, 12, 20, dtype=torch.bool)
        mask[:, self.rows, self.columns] = True
        return mask


def bright(images: int = 3) -> Tensor:
    """Return images for :class:`OneBlock` that are bright everywhere."""
    return 1 + 0.1 * torch.rand(images, 2, 12, 20, generator=torch.Generator().manual_seed(2))


def transformer(name: str, depth: int = 2, **options: object) -> nn.Module:
    return sharpen(timm.create_model(name, **{**SMALL, "depth": depth, **options}))


def patchconvnet(kind: str = "", classes: int = 5, gain: float = 1.7) -> nn.Module:
    return sharpen(
        timm.create_model(
            f"patchconvnet_s20{kind}",
            depth=1,
            embed_dim=16,
            num_classes=classes,
            init_values=1.0,
        ),
        gain,
    )


def bilinear(maps: np.ndarray, height: int, width: int, first: float | None = None) -> np.ndarray:
    """Interpolate (B, h, w) to (B, H, W) by a loop over pixels,
    with the border's values beyond the outermost cells.

    Cells divide the image evenly, unless ``first`` gives the pixel (first, first) of the first
    cell.
    """
    rows, columns = maps.shape[1:]
    images = np.empty((len(maps), height, width))
    for i in range(height):
        for j in range(width):
            y = _cell(i, height / rows, rows, first)
            x = _cell(j, width / columns, columns, first)
            top, left = int(y), int(x)
            bottom = min(top + 1, rows - 1)
            right = min(left + 1, columns - 1)
            dy, dx = y - top, x - left
            above = (1 - dx) * maps[:, top, left] + dx * maps[:, top, right]
            below = (1 - dx) * maps[:, bottom, left] + dx * maps[:, bottom, right]
            images[:, i, j] = (1 - dy) * above + dy * below
    return images


def nearest(maps: np.ndarray, height: int, width: int, first: float) -> np.ndarray:
    """Interpolate like :func:`bilinear`, with the value of the nearest cell."""
    rows, columns = maps.shape[1:]
    at_y = [int(_cell(i, height / rows, rows, first) + 0.5) for i in range(height)]
    at_x = [int(_cell(j, width / columns, columns, first) + 0.5) for j in range(width)]
    return maps[:, at_y][:, :, at_x]


def _cell(pixel: int, spacing: float, cells: int, first: float | None) -> float:
    # By default, the first cell is centred on its pixels.
    first = (spacing - 1) / 2 if first is None else first
    return min(max((pixel - first) / spacing, 0), cells - 1)
