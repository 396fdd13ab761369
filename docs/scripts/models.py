"""Write ``models.md``, the table of the layers that are recorded in vision models.

    python docs/scripts/models.py                         # all, about four minutes on one core
    python docs/scripts/models.py --models vit_tiny swin  # only names that contain one of the words

Weights are random and nothing is downloaded. A forward shows which layers attend, and on which
grids their tokens lie. An experiment that does not know the grids tells whether maps show the image
as it is: it changes the pixels of a square.
"""

import argparse
import collections
import importlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import xarray as xr
from torch import Tensor, nn
from tqdm import tqdm

import tcnn_probe
from tcnn_probe.attention.attention import Attention
from tcnn_probe.attention.layout import Layout, Tokens
from tcnn_probe.attention.stream import AttentionStream

HEADER = """# Vision models

Is a model recorded, and [what of it is not](recording.md#what-cannot-be-recorded)? One forward says
so:

```python
import timm, torch, tcnn_probe

model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).eval()
with tcnn_probe.record(model) as recorder, torch.no_grad():
    model(torch.randn(1, 3, 64, 64))
    print(recorder.layers, recorder.unsupported, recorder.missing)
    recorder.discard()
```

Written by `python docs/scripts/models.py`
with {versions}, from random weights.

- *layers*: number of attention layers that are recorded.
- *grids*: rows x columns of keys; "+ n" stands for n additional class, register or other tokens. In
  layers with windows the grid is that of a window.
- *square*: layers whose maps change at the place where the image changes. Each of four images
  differs from a fifth in a square of a twelfth of the image's sides, and the maps are those of
  queries around the square. In this experiment attention layers output 0, so that tokens are not
  mixed. If one place of a map changes by a quarter more than any other, and the place is another
  one for each of the four images, these should be the places of the squares. Other layers are
  undecided, or have no maps because the image reaches them through attention only (levit). The maps
  of some do not change at all, because their queries are zero before training (GroupViT). In all
  others no place stands out; most of them are late in a trunk of convolutions or pools, where a
  cell sees much more of the image than a square.
- *notes*: layers without a grid of queries or keys, and layers that are not recorded, with the
  reasons.

| library | model | image | layers | grids | square | notes |
|---|---|---|---|---|---|---|"""

# Centres of the squares, as shares of the image's height and width: none lies on a diagonal or
# mirrors another, so that tokens in another order are noticed.
SQUARES = ((0.2, 0.4), (0.35, 0.85), (0.6, 0.15), (0.85, 0.7))
# Distances of the queries from the centre of each square, as shares of the image's sides. Queries
# lie around a square and not in it; in layers with windows, those nearby share the window of the
# square.
AROUND = (0.065, 0.09, 0.12, 0.16)


class Model(NamedTuple):
    """A model of a library, small where its options allow it, and an image that it takes."""

    library: str
    name: str
    height: int
    width: int
    options: Mapping[str, Any] = {}
    fits_norms: bool = False
    """Whether batch norms take their statistics from images first:
    with the initial ones all features vanish.
    """

    def build(self) -> nn.Module:
        """Return the model with random weights."""
        module = self.create()
        if self.fits_norms:
            for norm in module.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.train().momentum = 1.0
            with torch.no_grad():
                module(torch.randn(5, 3, self.height, self.width))
        return module.eval()

    def create(self) -> nn.Module:
        """Return the model as its library makes it."""
        if self.library == "timm":
            return timm.create_model(self.name, num_classes=5, **self.options)
        if self.library == "torchvision":
            return getattr(importlib.import_module("torchvision.models"), self.name)(**self.options)
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{self.name.removesuffix('Model')}Config")(**self.options)
        return getattr(transformers, self.name)(config)


_VIT = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 96,
}
_NARROW = {"embed_dim": 48, "num_heads": 3, "depth": 2}
_DETR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "num_queries": 24,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
}
_GROUPS = {"depths": [2, 1, 1], "num_hidden_layers": 4, "num_attention_heads": 3}

MODELS = (
    Model("timm", "vit_tiny_patch16_224", 64, 96, {"img_size": (64, 96)}),
    Model("timm", "deit_tiny_distilled_patch16_224", 64, 96, {"img_size": (64, 96)}),
    Model("timm", "deit3_small_patch16_224", 64, 96, {"img_size": (64, 96)}),
    Model("timm", "vit_small_patch14_reg4_dinov2", 70, 98, {"img_size": (70, 98)}),
    Model("timm", "vit_base_patch16_siglip_224", 224, 224, _NARROW),
    Model("timm", "vit_relpos_small_patch16_224", 224, 224),
    Model("timm", "samvit_base_patch16_224", 224, 224, _NARROW),
    Model("timm", "cait_xxs24_224", 64, 96, {"img_size": (64, 96)}),
    Model("timm", "beit_base_patch16_224", 64, 96, {"img_size": (64, 96), **_NARROW}),
    Model("timm", "eva02_tiny_patch14_224", 70, 98, {"img_size": (70, 98)}),
    Model("timm", "convit_tiny", 224, 224),
    Model("timm", "swin_tiny_patch4_window7_224", 224, 224),
    Model("timm", "swinv2_tiny_window8_256", 256, 256),
    Model("timm", "swinv2_cr_tiny_224", 224, 224),
    Model("timm", "mvitv2_tiny", 224, 224),
    Model("timm", "pvt_v2_b0", 224, 224),
    Model("timm", "twins_svt_small", 224, 224),
    Model("timm", "twins_pcpvt_small", 224, 224),
    Model("timm", "levit_128s", 224, 224),
    Model("timm", "maxvit_tiny_tf_224", 224, 224),
    Model("timm", "coatnet_nano_cc_224", 224, 224),
    Model("timm", "coat_tiny", 224, 224),
    Model("timm", "botnet26t_256", 256, 256),
    Model("timm", "halonet26t", 256, 256),
    Model("timm", "mobilevit_s", 128, 192),
    Model("timm", "mobilevitv2_050", 128, 192),
    Model("timm", "efficientformer_l1", 224, 224),
    Model("timm", "efficientformerv2_s0", 224, 224),
    Model("timm", "efficientvit_m0", 224, 224, fits_norms=True),
    Model("timm", "efficientvit_b0", 224, 224),
    Model("timm", "nest_tiny", 224, 224),
    Model("timm", "volo_d1_224", 224, 224),
    Model("timm", "tnt_s_patch16_224", 224, 224),
    Model("timm", "davit_tiny", 224, 224),
    Model("timm", "gcvit_xxtiny", 224, 224),
    Model("timm", "hiera_tiny_224", 224, 224),
    Model("timm", "crossvit_9_240", 240, 240),
    Model("timm", "visformer_tiny", 224, 224),
    Model("timm", "xcit_nano_12_p16_224", 224, 224),
    Model("timm", "fastvit_sa12", 256, 256),
    Model("timm", "edgenext_xx_small", 256, 256),
    Model("timm", "caformer_s18", 224, 224),
    Model("timm", "mobilenetv4_hybrid_medium", 224, 224, fits_norms=True),
    Model("torchvision", "vit_b_32", 224, 224),
    Model("torchvision", "swin_t", 224, 224),
    Model("torchvision", "swin_v2_t", 224, 224),
    Model("torchvision", "maxvit_t", 224, 224),
    Model("transformers", "ViTModel", 64, 96, {**_VIT, "image_size": (64, 96)}),
    Model("transformers", "DeiTModel", 64, 96, {**_VIT, "image_size": (64, 96)}),
    Model("transformers", "BeitModel", 64, 64, {**_VIT, "image_size": 64}),
    Model(
        "transformers",
        "Dinov2WithRegistersModel",
        64,
        64,
        {**_VIT, "image_size": 64, "patch_size": 16},
    ),
    Model(
        "transformers",
        "DINOv3ViTModel",
        64,
        96,
        {**_VIT, "image_size": 64, "num_register_tokens": 4},
    ),
    Model(
        "transformers",
        "CLIPVisionModel",
        64,
        64,
        {**_VIT, "image_size": 64, "patch_size": 16},
    ),
    Model(
        "transformers",
        "SiglipVisionModel",
        64,
        64,
        {**_VIT, "image_size": 64, "patch_size": 16},
    ),
    Model("transformers", "IJepaModel", 64, 64, {**_VIT, "image_size": 64}),
    Model(
        "transformers",
        "YolosModel",
        64,
        96,
        {**_VIT, "image_size": [64, 96], "num_detection_tokens": 10},
    ),
    Model(
        "transformers",
        "DPTModel",
        64,
        64,
        {**_VIT, "image_size": 64, "backbone_out_indices": [0, 1]},
    ),
    Model(
        "transformers",
        "ViTMAEModel",
        64,
        64,
        {**_VIT, "image_size": 64, "mask_ratio": 0.0},
    ),
    Model(
        "transformers",
        "VitDetModel",
        224,
        224,
        {**_VIT, "window_block_indices": [1], "window_size": 7},
    ),
    Model("transformers", "SwinModel", 224, 224),
    Model("transformers", "Swinv2Model", 224, 224),
    Model("transformers", "SegformerModel", 128, 192),
    Model("transformers", "PvtModel", 224, 224),
    Model("transformers", "CvtModel", 224, 224),
    Model(
        "transformers",
        "HieraModel",
        64,
        64,
        {"embed_dim": 24, "image_size": [64, 64], "depths": [1, 1, 2, 1]},
    ),
    Model(
        "transformers",
        "GroupViTVisionModel",
        112,
        112,
        {**_VIT, **_GROUPS, "image_size": 112},
    ),
    Model("transformers", "DetrModel", 128, 192, _DETR),
)


class Row(NamedTuple):
    """One line of the table."""

    library: str
    model: str
    image: str
    layers: str
    grids: str
    square: str
    notes: str


def describe(model: Model) -> Row:
    """Return the row of a model, after one forward pass and the experiment."""
    torch.manual_seed(0)
    options = dict(model.options)
    if model.name == "DetrModel":  # the backbone of DETR is a model, too
        sizes = {
            "embedding_size": 32,
            "hidden_sizes": [32, 48, 64, 96],
            "depths": [1, 1, 1, 1],
        }
        transformers = importlib.import_module("transformers")
        options["backbone_config"] = transformers.ResNetConfig(**sizes, out_features=["stage4"])
    module, image = (
        model._replace(options=options).build(),
        torch.randn(3, model.height, model.width),
    )
    stream, layouts = layouts_of(module, image)
    grids = [_grid(layout.keys) for layout in layouts.values() if layout.keys]
    notes = [
        *(layout.reason for layout in layouts.values() if layout.reason),
        *(f"not recorded: {reason}" for reason in stream.unsupported.values()),
    ]
    size = f"{model.height} x {model.width}"
    return Row(
        model.library,
        model.name,
        size,
        str(len(layouts)),
        counted(grids),
        squares_found(module, image, layouts),
        counted(notes, "; "),
    )


def layouts_of(module: nn.Module, image: Tensor) -> tuple[AttentionStream, Mapping[str, Layout]]:
    """Return the stream of a forward pass, and the grids on which the tokens of each layer lie."""
    layouts: dict[str, Layout] = {}

    def look(attention: Attention) -> None:
        layouts.setdefault(attention.name, attention.layout)

    with tcnn_probe.attention_stream(module, look) as stream, torch.no_grad():
        module(image[None])
    return stream, {name: layouts[name] for name in stream.layers}


def squares_found(module: nn.Module, image: Tensor, layers: Iterable[str]) -> str:
    """Return in how many layers maps change where the image does,
    and of how many decided layers; "" without maps.

    The module is modified: its attention layers return zeros afterwards.
    """
    for name in {layer.split("#")[0] for layer in layers}:
        module.get_submodule(name).register_forward_hook(
            lambda layer, inputs, output: _zero(output)
        )
    height, width = image.shape[1:]
    centres = [(int(y * height), int(x * width)) for y, x in SQUARES]
    images = image.repeat(1 + len(SQUARES), 1, 1, 1)
    for number, (y, x) in enumerate(centres):
        rows = slice(y - height // 24, y - height // 24 + height // 12)
        columns = slice(x - width // 24, x - width // 24 + width // 12)
        images[1 + number, :, rows, columns] += 3
    queries = [
        (
            min(height - 1, max(0, int(y + side * share * height))),
            min(width - 1, max(0, int(x + other * share * width))),
        )
        for y, x in centres
        for share in AROUND
        for side in (-1, 1)
        for other in (-1, 1)
    ]
    try:
        maps = tcnn_probe.attention_maps(module, images, queries=queries)
    except ValueError:
        return ""
    answers = []
    for node in maps.children.values():
        for layer in node.layer.values:
            ds = node.dataset.sel(layer=layer)
            # Maps of a class token, which may be zero before training, come first, and count only
            # without others.
            maps_of_layer = [
                values
                for values in ds.data_vars.values()
                if "y" in values.dims and values.notnull().all()
            ]
            answers += [
                _finds_squares(values, centres, (height, width)) for values in maps_of_layer[-1:]
            ]
    decided = [answer for answer in answers if answer is not None]
    undecided = len(answers) - len(decided)
    beside = f", {undecided} undecided" if undecided else ""
    return f"{sum(decided)} of {len(decided)}{beside}"


def _zero(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_zero, output))
    return torch.zeros_like(output) if isinstance(output, Tensor) else output


def _finds_squares(
    values: xr.DataArray,
    centres: Sequence[tuple[int, int]],
    size: tuple[int, int],
) -> bool | None:
    """Return whether attention changes most at each square; None if no place stands out."""
    others = [dim for dim in values.dims if dim not in ("image", "y", "x")]
    logarithms = np.log(values.where(values > 0))  # 0 outside of a window
    changes = (logarithms - logarithms.isel(image=0)).isel(image=slice(1, None))
    # The attention that all keys of a query lose to those in the square says nothing about their
    # own places.
    changes = abs(changes - changes.median(("y", "x"))).sum(others)
    pixels = values.pixel_y.values[:, None], values.pixel_x.values[None]
    # The reach of a square is its side plus the side of a cell.
    reach = [side / 12 + side / cells.size for side, cells in zip(size, pixels, strict=True)]
    is_there = True
    peaks = set()
    for change, centre in zip(changes.values, centres, strict=True):
        peak = np.unravel_index(change.argmax(), change.shape)
        at = [cells.flat[index] for cells, index in zip(pixels, peak, strict=True)]
        is_near = [
            abs(cells - place) <= length
            for cells, place, length in zip(pixels, at, reach, strict=True)
        ]
        elsewhere = change[~(is_near[0] & is_near[1])]
        if not elsewhere.size or change.max() <= 1.25 * elsewhere.max():
            return None
        peaks.add(peak)
        is_there &= all(
            abs(place - pixel) <= length - side / 24
            for place, pixel, length, side in zip(at, centre, reach, size, strict=True)
        )
    # A place that stands out wherever the square lies says nothing about the square.
    return is_there if len(peaks) == len(centres) else None


def _grid(tokens: Tokens) -> str:
    beside = f" + {tokens.prefix}" if tokens.prefix else ""
    return f"{tokens.height} x {tokens.width}{beside}"


def counted(texts: Iterable[str], between: str = ", ") -> str:
    """Return each text once, with its count if that is more than one."""
    counts = collections.Counter(texts)
    return between.join(
        f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()
    )


def rows_of(path: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of a document, by library and model; none if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    table = [line for line in lines if line.startswith("| ")][1:]
    rows = [Row(*re.split(r" \| ?", line[2:-2], maxsplit=6)) for line in table]
    return {(row.library, row.model): row for row in rows}


def page(rows: Sequence[Row]) -> str:
    """Return the document."""
    libraries = ("timm", "torchvision", "transformers")
    versions = ", ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in libraries
    )
    lines = [HEADER.format(versions=versions)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Write the table of vision models and what is recorded of them."
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=[""],
        help="use models whose names contain one of these words; default: all",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "models.md")
    options = parser.parse_args(arguments)
    chosen = [model for model in MODELS if any(word in model.name for word in options.models)]
    if not chosen:
        parser.error(
            f"expected words of names of models, got {options.models}; there are "
            f"{[m.name for m in MODELS]}"
        )
    warnings.simplefilter("ignore")  # models warn about their own arguments
    rows = rows_of(options.out)
    for model in tqdm(chosen):
        rows[model.library, model.name] = describe(model)
        order = [(model.library, model.name) for model in MODELS]
        # The document is written after each model, so that a run that is interrupted keeps its
        # rows.
        options.out.write_text(page([rows[name] for name in order if name in rows]))


if __name__ == "__main__":
    main()
