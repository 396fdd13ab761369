r"""Class attention of a CaiT, by layer and head,
and the likely classes (Touvron's thesis, Figs. 3.9, 3.10).

    python studies/cait_attention.py

Takes about a minute on one CPU core.

What one should see (cait_attention.png): in a CaiT the class token meets the patches only in the
two class-attention layers. The first looks at the digit, as in the thesis. In the thesis the second
looks at more of the image. The lines that are printed compare both with uniform attention and with
each other, image by image. studies/pages/cait_attention.md says what several seeds agree on.

How: a small CaiT (two blocks of self-attention, two of class attention, four heads) learns
handwritten digits, each somewhere in a scene. Its patches are embedded by the convolutions of
timm's XCiT in place of a single layer, so that it learns from few images, and LayerScale begins at
1.

Writes into results/:
cait_attention.png     for each image: the image; the heads of the first and of the second
                       class-attention layer, each from 0 to its largest weight (Fig. 3.9); the
                       image times the first layer's mean over heads, and the classes above 10 %
                       (Fig. 3.10)
cait_attention.zarr    the numbers behind the figure, for all images: xarray.open_zarr

It ends by checking that the model learned, and that the first class-attention layer looks at the
digit's strokes more than uniform attention would.

With timm's weights, on your own images, nothing is trained:

    python studies/cait_attention.py --model cait_xxs24_224 --pretrained \
        --image photograph.jpg another.jpg
"""

import argparse
import sys

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from timm.data import ImageNetInfo
from timm.models.cait import Cait, ClassAttn
from timm.models.xcit import ConvPatchEmbed
from torch import Tensor, nn

import tcnn_probe
from common.data import probed_images
from common.option_table import single_model_options
from common.options import Option, check_single, from_least, parse_options
from common.output import ended, finish
from common.saliency_scores import on_object
from common.training import Study, begin_single
from common.verdicts import with_interval
from tcnn_probe.evaluation import mean_interval

LIKELY = 0.1
"""Classes above this probability are named (thesis, Fig. 3.10)."""


def main(arguments: list[str] | None = None) -> int:
    """Run the study and return its exit code."""
    args = parse(arguments)
    study = begin_single("cait_attention", args, small_cait, before=only_cait)
    if args.model:
        maps = class_attention(study.model, study.images)
    else:
        *_, last = study.finetune(study.model, "cait", "a CaiT")
        probed = probed_images(study.validation, args.images)
        maps = class_attention(study.model, probed.images).assign(top1=last.top1)
        maps["on_digit"], maps["even"] = on_object(maps.class_attention, probed.masks)
    study.output.save(maps)
    study.output.show(draw(maps.isel(image=slice(args.show))))
    # There are no masks to check a pretrained model against.
    passed = args.model is not None or check(maps, study)
    return finish(passed, args)


def only_cait(model: nn.Module) -> None:
    """Refuse a model that is not a CaiT."""
    if not isinstance(model, Cait):
        raise ValueError(f"--model: expected a CaiT, got {type(model).__name__}")


class ConvolutionalPatches(ConvPatchEmbed):
    """Patch embedding by 3 x 3 convolutions of stride 2 that returns tokens alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, N, D)."""
        return super().forward(x)[0]


def small_cait(size: int) -> nn.Module:
    """Return two blocks of self-attention and two of class attention:
    width 48, four heads, 8 x 8 pixel patches.
    """
    shape = {
        "img_size": size,
        "patch_size": 8,
        "in_chans": 1,
        "num_classes": 10,
        "embed_dim": 48,
    }
    return Cait(
        # CaiT's own LayerScale begins near 0, too small for so short a training.
        **shape,
        depth=2,
        num_heads=4,
        init_values=1.0,
        patch_layer=ConvolutionalPatches,
    )


@torch.no_grad()
def class_attention(model: nn.Module, images: Tensor) -> xr.Dataset:
    """Return class attention on the patches,
    (image, layer, head, y, x), and the probabilities of all classes.
    """
    device = next(model.parameters()).device
    maps = tcnn_probe.attention_maps(
        model,
        images.to(device),
        # The layers before class attention have no class token.
        layers=lambda name, layer: isinstance(layer, ClassAttn),
        queries="class",
    )
    (node,) = maps.children.values()  # all layers have one grid
    probability = torch.cat(
        [model.eval()(batch.to(device)).softmax(1).cpu() for batch in images.split(32)]
    )
    return node.to_dataset()[["class_attention"]].assign(
        input=maps.input, probability=(("image", "class"), probability.numpy())
    )


@mpl.rc_context({"font.size": 9})
def draw(maps: xr.Dataset) -> Figure:
    """Draw a row for each image."""
    layers, heads, rows = (maps.sizes[name] for name in ("layer", "head", "image"))
    columns = 3 + layers * heads
    figure = Figure(figsize=(1.05 * columns, 1.1 * rows + 0.5), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for row, axes in zip(range(rows), panels, strict=True):
        sample = maps.isel(image=row)
        picture = sample.input.mean("channel").values
        # Normalised pixels are not in [0, 1].
        picture = (picture - picture.min()) / np.ptp(picture)
        axes[0].imshow(picture, cmap="gray")
        for ax, values in zip(
            axes[1:-2],
            sample.class_attention.stack(map=("layer", "head")).T,
            strict=True,
        ):
            # The scale starts at 0, so that a uniform map does not look structured.
            ax.imshow(values.transpose("y", "x"), cmap="viridis", vmin=0)
        draw_in_the_light(axes[-2], picture, sample.class_attention.isel(layer=0).mean("head"))
        axes[-1].text(
            0,
            0.5,
            "\n".join(likely(sample.probability.values)),
            va="center",
            fontsize=8,
        )
    for ax in panels.flat:
        ax.set_axis_off()
    titles = [
        "image",
        *(
            f"layer {layer + 1}\nhead {head + 1}"
            for layer in range(layers)
            for head in range(heads)
        ),
    ]
    for ax, title in zip(panels[0], [*titles, "layer 1\nmean", f"above {LIKELY:.0%}"], strict=True):
        ax.set_title(title, fontsize=8)
    return figure


def draw_in_the_light(ax: Axes, picture: np.ndarray, attention: xr.DataArray) -> None:
    """Draw the gray image times the attention,
    which is enlarged and scaled from 0 to 1 (thesis, Section 3.7.2.5).
    """
    coarse = torch.from_numpy(attention.values.astype(float))[None, None]
    # The map has a value for each patch, the image one for each pixel.
    light = F.interpolate(coarse, size=picture.shape, mode="bilinear")[0, 0].numpy()
    ax.imshow(picture * (light - light.min()) / np.ptp(light), cmap="cividis")


def likely(probabilities: np.ndarray) -> list[str]:
    """Return names and probabilities of the classes above 10 %, the most probable first."""
    lines = []
    for label in (-probabilities).argsort().tolist():
        if probabilities[label] > LIKELY:
            name = str(label)
            if len(probabilities) == 1000:
                # ImageNet's descriptions are lists of synonyms.
                name = ImageNetInfo().index_to_description(label).partition(",")[0]
            lines.append(f"{name}: {probabilities[label]:.0%}")
    return lines


def check(maps: xr.Dataset, study: Study) -> bool:
    """Return whether the model learned, and its first class-attention layer prefers the digit;
    print both shares.
    """
    has_learned = study.learned("the CaiT", float(maps.top1))
    layers = maps.on_digit.mean("head").transpose("layer", "image")
    # Gains are taken image by image, since objects differ in size.
    gains = layers - maps.even
    low, high = mean_interval(gains[0]).values
    verdict = "more" if low > 0 else "NOT more"
    print(
        f"check: the first class-attention layer looks at the strokes {verdict} than even "
        f"attention: share {float(layers[0].mean()):.3f}, even {float(maps.even.mean()):.3f}, by "
        f"{low:+.3f} to {high:+.3f}"
    )
    difference = with_interval(layers[0] - layers[1])
    print(f"the second: {float(layers[1].mean()):.3f}; first less second {difference}")
    return bool(has_learned and low > 0)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    groups = {
        "maps": [
            Option("--images", "validation scenes to look at", from_least(2), 100),
            Option("--show", "images to draw", from_least(1), 4),
        ],
        **single_model_options("cait_xxs24_224", 3e-3, (15, 2), size=48),
    }
    return parse_options(__doc__, "cait_attention", arguments, groups, check_single)


if __name__ == "__main__":
    sys.exit(ended(main))
